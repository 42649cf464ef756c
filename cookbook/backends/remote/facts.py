"""What a server of ours tells of itself, and whether the run that is to be trained there is one it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, ConfigError

PATH = "/api/v1/cookbook"
WIRE = 2  # changes when a cookbook of another version could misread what the other side says or does

# What our trainer adds to Tinker's messages for a server of ours; both are "true" or "false".
ALL_LOGPROBS = "all_logprobs"  # option of a forward_backward; false leaves out tokens that the loss ignores, as in this process
FAILURES_READ = "failures_read"  # field of an optim_step; whether the caller has read the errors of all calls before it

# Fields of the model that the server decides, so a run must not say otherwise: its numbers would be other ones.
DECIDED_THERE = ("random", "revision", "dtype", "lora_alpha", "lora_dropout", "router_aux_loss_coef")


@dataclass(frozen=True)
class Facts:
    """``losses`` it knows by name; ``model`` as its configuration has it; ``digests`` of weights and tokenizer."""

    version: str
    losses: frozenset[str]
    model: Mapping[str, Any]
    digests: Mapping[str, str]
    tokenizer: str
    max_length: int
    architecture: str
    num_parameters: int

    @classmethod
    def read(cls, answer: Mapping[str, Any], url: str) -> Facts:
        """Raises BackendError: it is a server of another version."""
        if answer.get("wire") != WIRE:
            raise BackendError(
                f"backend.base_url: the server at {url} is cookbook {answer.get('version')}, which speaks otherwise than this "
                "version; install the same version on both sides"
            )
        known = {name: answer[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "losses": frozenset(known["losses"])})

    def check(self, model: ModelConfig, url: str) -> None:
        """Raises ConfigError: the server computes otherwise than ``model`` says."""
        for name in DECIDED_THERE:
            here, there = getattr(model, name), self.model.get(name)
            needed = model.lora_rank or not name.startswith("lora_")
            if needed and here != there:
                raise ConfigError(
                    f"model.{name}: the server at {url} was started with {there!r}, got {here!r}; set it to that, or start "
                    f"the server with model.{name}={here}"
                )
