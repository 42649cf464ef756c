"""Where the rows come from, how they are read, and what of them is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cookbook.errors import ConfigError


@dataclass(frozen=True)
class Columns:
    """The dataset's name of each column cookbook reads."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    chosen: str = "chosen"
    rejected: str = "rejected"
    text: str = "text"


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` group; ``conf/data/jsonl.yaml`` says what each key means.

    Raises:
        ConfigError: a number outside its bounds.
    """

    name: str | None = None
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    eval_name: str | None = None
    eval_path: str | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.0
    format: Literal["auto", "messages", "prompt_completion", "preference", "text", "prompt"] = "auto"
    columns: Columns = field(default_factory=Columns)
    chat: bool = False
    system: str | None = None
    limit: int | None = None
    shuffle: bool = True
    streaming: bool = False
    max_length: int | None = None
    on_long: Literal["fail", "skip", "truncate"] = "fail"
    on_empty: Literal["fail", "skip"] = "fail"
    on_bad_row: Literal["fail", "skip"] = "fail"
    train_on: Literal["assistant", "last_assistant", "each_assistant", "all"] = "assistant"

    def __post_init__(self) -> None:
        for key, least in {"limit": 1, "max_length": 2}.items():
            if (number := getattr(self, key)) is not None and number < least:
                raise ConfigError(f"data.{key} must be at least {least}, or null, got {number}")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"data.eval_fraction must be >= 0 and < 1, got {self.eval_fraction}")
