"""Configuration of the server: ``conf/serve.yaml``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.errors import ConfigError
from cookbook.server.keys import KeyRing
from cookbook.utils import files

DURABILITY_LEVELS = ("synced", "written", "off")
# All other numbers must be above 0.
MAY_BE_ZERO = ("port", "samplers_gb", "graphs_gb", "adapters_gb")


@dataclass
class ServerConfig:
    """Options of the server. ``conf/serve.yaml`` documents each field."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: list[str] = field(default_factory=list)
    keys_file: str | None = None
    keys_env: str = "COOKBOOK_API_KEYS"
    tls_cert: str | None = None
    tls_key: str | None = None
    address_file: str | None = None
    idle_h: float | None = None
    idle_file: str | None = None
    failure_file: str | None = None
    one_client: bool = False
    max_request_mb: int = 256
    max_results_mb: int = 1024
    max_pending_mb: int = 1024
    upload_timeout_s: float = 300.0
    max_connections: int = 4096
    max_request_tokens: int = 33_554_432
    max_session_tokens: int = 134_217_728
    max_request_gb: float = 8.0
    max_attempts: int = 5
    max_runs: int = 256
    max_sessions: int = 256
    samplers_gb: float = 8.0
    graphs_gb: float = 4.0
    adapters_gb: float = 8.0
    share_passes: bool = False
    session_timeout_s: float = 600.0
    keep_silent_h: float = 168.0
    gap_timeout_s: float = 120.0
    drain_s: float = 30.0
    durability: str = "synced"
    checkpoint_s: float = 60.0
    log_mb: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"server.port: expected 0 to 65535, got {self.port}; 0 chooses a free port")
        for name, value in vars(self).items():
            if name in MAY_BE_ZERO and not value >= 0:
                raise ConfigError(f"server.{name}: expected 0 or more, got {value}")
            if name not in MAY_BE_ZERO and type(value) in (int, float) and not value > 0:
                raise ConfigError(f"server.{name}: expected a number above 0, got {value}")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise ConfigError(f"server.{missing}: not set; set server.tls_cert and server.tls_key, or neither")
        if self.durability not in DURABILITY_LEVELS:
            raise ConfigError(f"server.durability: expected one of {', '.join(DURABILITY_LEVELS)}, got {self.durability!r}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check_tls(self) -> None:
        """Raise ConfigError if the certificate or its key cannot be loaded."""
        if self.tls_cert is None or self.tls_key is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:
            raise ConfigError(
                f"server.tls_cert: cannot load {self.tls_cert!r} with the key {self.tls_key!r}: {error.strerror or error}; "
                "pass PEM files of a certificate and its private key without a password"
            ) from None

    def key_ring(self) -> KeyRing:
        """Return the API keys of the file and the environment; without any, requests are not authenticated.

        Raises:
            ConfigError: the file is invalid or cannot be read, or other machines can reach the server and there are no keys.
        """
        secrets = os.environ.get(self.keys_env, "").replace(",", " ").split()
        ring = KeyRing(None if self.keys_file is None else Path(self.keys_file), secrets)
        if not ring.keys and not self.is_local:
            raise ConfigError(
                f"server.host: {self.host} is reachable from other machines, and no API keys are set; set server.keys_file "
                f"or ${self.keys_env}, or use 127.0.0.1"
            )
        return ring


def record_failure(failure_file: str | None, message: str) -> None:
    """Write the error that ends a server to ``server.failure_file``. Of several ranks, the first one writes."""
    if failure_file is not None and not Path(failure_file).exists():
        # Without the file, the manager of the job starts the server again.
        with contextlib.suppress(OSError):
            files.write_text(Path(failure_file), f"{message}\n")
