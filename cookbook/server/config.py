"""How the server listens, and what it keeps."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.errors import ConfigError
from cookbook.server.durability import LEVELS

LIMITS = (
    "max_request_mb",
    "max_results_mb",
    "max_pending_mb",
    "max_runs",
    "max_sessions",
    "session_timeout_s",
    "gap_timeout_s",
    "drain_s",
    "checkpoint_s",
    "log_mb",
)


@dataclass
class ServerConfig:
    """``conf/serve.yaml`` says what each field means."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: list[str] = field(default_factory=list)
    keys_file: str | None = None
    keys_env: str = "COOKBOOK_API_KEYS"
    max_request_mb: int = 256
    max_results_mb: int = 1024
    max_pending_mb: int = 1024
    max_runs: int = 256
    max_sessions: int = 256
    samplers_gb: float = 8.0
    graphs_gb: float = 4.0
    session_timeout_s: float = 600.0
    gap_timeout_s: float = 120.0
    drain_s: float = 30.0
    durability: str = "synced"
    checkpoint_s: float = 60.0
    log_mb: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"server.port: expected 0 to 65535, got {self.port}; 0 takes any that is free")
        for name in LIMITS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"server.{name} must be above 0, got {getattr(self, name)}")
        if self.durability not in LEVELS:
            raise ConfigError(f"server.durability: expected one of {', '.join(LEVELS)}, got {self.durability!r}")
        for name in ("graphs_gb", "samplers_gb"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"server.{name}: expected 0 or more, got {getattr(self, name)}")

    @property
    def graph_bytes(self) -> int:
        return int(self.graphs_gb * (1 << 30))

    @property
    def sampler_bytes(self) -> int:
        return int(self.samplers_gb * (1 << 30))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def api_keys(self) -> list[str]:
        """The keys that open the server, from the file and the environment; none: it is open.

        Raises:
            ConfigError: the file cannot be read, or there is no key and others than this machine could reach the server.
        """
        keys = os.environ.get(self.keys_env, "").replace(",", " ").split()
        if self.keys_file is not None:
            try:
                lines = Path(self.keys_file).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise ConfigError(f"server.keys_file: cannot read {self.keys_file!r}: {error.strerror}") from None
            keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not keys:
                raise ConfigError(f"server.keys_file: {self.keys_file} holds no key; write one a line")
        if not keys and not self.is_local:
            raise ConfigError(
                f"server.host: {self.host} can be reached from other machines, and there are no API keys; set server.keys_file "
                f"or ${self.keys_env}, or stay on 127.0.0.1"
            )
        return keys
