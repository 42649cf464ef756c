"""The environment ``env=agent``: a program of the user that calls the model over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from cookbook.errors import ConfigError
from cookbook.sampling.environments.config import Contract, EnvironmentConfig
from cookbook.types import JsonObject

ROW = "{row}"
# Larger files of the command are programs, not scripts.
SCRIPT_BYTES = 1 << 20
# Linux limits the length of one argument.
MAX_ROW_BYTES = 120_000


@dataclass(frozen=True, kw_only=True)
class AgentEnvironment(EnvironmentConfig):
    """A program, started once per episode. ``conf/env/agent.yaml`` explains each field, and docs/guide/agents.md the program.

    Raises:
        ConfigError: the command cannot be read, or its program is not found.
    """

    command: str
    prints_reward: bool = True
    # The rounds of a step depend on the number of workers.
    workers: int = 16
    chat: bool = field(default=True, init=False, repr=False)
    ends_refused_episodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1:
            raise ConfigError("env.workers must be at least 1 with env=agent, got 0; every episode is a process")
        program = self.words[0]
        if shutil.which(program) is None:
            raise ConfigError(f"env.command: no program {program!r} is found; name an executable file or one of PATH")

    @cached_property
    def words(self) -> list[str]:
        """The words of the command. No shell reads them."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"env.command: cannot be split into words ({error}), got {self.command!r}; quote it") from None
        if not words:
            raise ConfigError("env.command: is empty; give the command of the program, for example 'python solve.py {row}'")
        return words

    def words_for(self, values: JsonObject) -> list[str]:
        """Return the command for a row.

        Raises:
            TypeError: the row has values without a JSON form.
            ValueError: the row is too long for a command.
        """
        row = json.dumps(values)
        if len(row) > MAX_ROW_BYTES:
            raise ValueError(f"the row has {len(row):,} characters, and an argument at most {MAX_ROW_BYTES:,}")
        return [word.replace(ROW, row) for word in self.words]

    @cached_property
    def contract(self) -> Contract:
        """A command with ``{row}`` reads the data; rows of another command are numbers."""
        return Contract([], frozenset(), frozenset(), takes_all=ROW in self.command)

    def fingerprint(self) -> str:
        """Text with the digests of the scripts that the command names."""
        files = [Path(word).expanduser() for word in self.words if os.sep in word or "." in word]
        scripts = [file for file in files if file.is_file() and file.stat().st_size <= SCRIPT_BYTES]
        return " ".join([repr(self), *(hashlib.sha256(file.read_bytes()).hexdigest() for file in scripts)])
