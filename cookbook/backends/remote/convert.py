"""Conversion between cookbook's types and errors and those of the package ``tinker``. Tensors are sent as float32 or int64."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook.errors import BackendError, ConfigError, CookbookError, RolloutError
from cookbook.types import AdamParams, Array, Datum, ForwardBackwardOutput, JsonObject, SamplingParams, TensorData

if TYPE_CHECKING:
    import tinker

# Suffixes of metric names. They state how the client package combines the metrics of several requests.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "hash2", "unique")


# The package ``tinker`` is optional, so it is imported inside the functions. The connection has checked that it is installed.


def datum(datum: Datum, keys: Iterable[str] | None = None) -> tinker.Datum:
    """Convert a datum with the loss inputs ``keys``; None: all."""
    import tinker

    inputs = datum.loss_fn_inputs
    chosen = inputs.keys() if keys is None else [key for key in keys if key in inputs]
    tensors = {key: _tensor(inputs[key].array) for key in chosen}
    return tinker.Datum(model_input=prompt(datum.model_input.to_ints()), loss_fn_inputs=tensors)


def prompt(tokens: Sequence[int]) -> tinker.ModelInput:
    import tinker

    return tinker.ModelInput.from_ints(list(tokens))


def adam(params: AdamParams, extras: Mapping[str, str] | None = None) -> tinker.OptimParams:
    """Convert the optimizer's parameters. ``extras``: additional fields, which only ``cookbook serve`` supports."""
    import tinker
    from tinker.types.optimizer import OptimParamsBase

    if not extras:
        return tinker.AdamParams(**asdict(params))
    return OptimParamsBase(type="adamw", **asdict(params), **extras)


def sampling(params: SamplingParams, seed: int) -> tinker.SamplingParams:
    """Convert without validation, which would refuse a list that mixes strings and token ids; ``cookbook serve`` accepts it.

    Raises:
        RolloutError: ``min_p`` is set; the client package would drop it silently.
    """
    import tinker

    if params.min_p:
        raise RolloutError(f"sampling: min_p={params.min_p} is not in Tinker's protocol; set it to 0")
    stop = params.stop if params.stop is None or isinstance(params.stop, str) else list(params.stop)
    return tinker.SamplingParams.model_construct(**{**vars(params), "stop": stop, "seed": seed})


def _tensor(array: Array) -> tinker.TensorData:
    import tinker

    is_integer = array.dtype.kind in "iu"
    values = np.ascontiguousarray(array, dtype=np.int64 if is_integer else np.float32)
    return tinker.TensorData(data=values, dtype="int64" if is_integer else "float32", shape=list(array.shape))


def options(config: JsonObject) -> dict[str, float | str]:
    """Convert the options of a loss to numbers and strings, the only types that the protocol supports.

    Raises:
        ConfigError: an option has another type.
    """
    converted: dict[str, float | str] = {}
    for key, value in config.items():
        if value is None or isinstance(value, bool):
            converted[key] = json.dumps(value)
        elif isinstance(value, str):
            converted[key] = str(value)
        elif isinstance(value, int | float):
            converted[key] = float(value)
        else:
            raise ConfigError(
                f"loss_fn_config.{key}: a server supports numbers and strings only, got {value!r}; use backend=local"
            )
    return converted


def outputs(result: tinker.ForwardBackwardOutput) -> list[dict[str, TensorData]]:
    return [{key: TensorData(value.to_numpy()) for key, value in row.items()} for row in result.loss_fn_outputs]


def metrics(result: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under cookbook's names, without the reduction suffix. ``loss:sum`` is kept and copied to ``loss``."""
    named = {}
    for key, value in result.items():
        name, _, reduction = key.partition(":")
        named[key if key == "loss:sum" or reduction not in REDUCTIONS else name] = value
    return {"loss": named["loss:sum"], **named} if "loss:sum" in named else named


def pass_output(result: tinker.ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Convert the result of a forward or a forward_backward."""
    return ForwardBackwardOutput(outputs(result), metrics(result.metrics))


# The text that the client package puts around the server's message.
_WRAPPER = re.compile(r"^Request failed: (.*) for self\.request_id=.*$", re.DOTALL)
LOST_STATUSES = (404, 410)


@dataclass(frozen=True)
class ErrorTranslator:
    """Callable that translates errors of the package ``tinker``. ``key_name``: source of the API key, for error messages."""

    url: str
    key_name: str

    def __call__(self, error: BaseException, kind: type[CookbookError] = BackendError) -> BaseException:
        """Return ``error`` as a CookbookError, ``kind`` if the server refused the call; an unrelated error unchanged."""
        import tinker

        if isinstance(error, tinker.RequestFailedError):
            return kind(_unwrapped(str(error)))
        # If a result cannot be fetched, the package raises a ValueError whose cause is the HTTP error.
        for candidate in (error, error.__cause__):
            if isinstance(getattr(candidate, "status_code", None), int):
                return self._refused(candidate, kind)
        if isinstance(error, tinker.APIConnectionError):
            return self.unreachable()
        if type(error).__name__ == "RetryableException":
            return self._lost("the server was restarted, or the session has ended")
        if isinstance(error, tinker.TinkerError):
            return BackendError(f"backend.base_url: {self.url}: {_one_line(str(error))}")
        return error

    def unreachable(self, reason: str = "") -> BackendError:
        """Return the error for a server that does not respond."""
        why = f" ({reason})" if reason else ""
        return BackendError(
            f"backend.base_url: no answer from {self.url}{why}; start the server there (cookbook serve) or correct the "
            "address, then run the same command again: it resumes from the last checkpoint"
        )

    def wrong_key(self) -> BackendError:
        """Return the error for a server that refuses the API key."""
        return BackendError(f"backend.base_url: {self.url} refuses the API key; set {self.key_name} to a key of the server")

    def _lost(self, reason: str) -> BackendError:
        return BackendError(
            f"backend.base_url: this run no longer exists on {self.url} ({reason}); run the same command again: it resumes "
            "from the last checkpoint"
        )

    def _refused(self, error: Any, kind: type[CookbookError]) -> CookbookError:
        """Return the error for a response with an error status."""
        if error.status_code in (401, 403):
            return self.wrong_key()
        body = getattr(error, "body", None)
        stated = body.get("detail") if isinstance(body, dict) else None
        detail = _one_line(stated if isinstance(stated, str) else str(error))
        if error.status_code in LOST_STATUSES and "checkpoint" not in detail:
            return self._lost(detail)
        return kind(f"{self.url}: {detail}")


def _unwrapped(message: str) -> str:
    match = _WRAPPER.match(message)
    return _one_line(match[1] if match else message)


def _one_line(message: str) -> str:
    return " ".join(message.split())
