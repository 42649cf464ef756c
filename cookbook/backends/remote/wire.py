"""Between our nouns and those of the ``tinker`` package. The wire knows float32 and int64."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cookbook.errors import ConfigError, RolloutError
from cookbook.types import Array, Datum, ForwardBackwardOutput, SamplingParams, TensorData

REDUCTIONS = ("mean", "sum", "min", "max", "slack", "hash2", "unique")  # how metrics of several chunks were combined


class Wire:
    """Converts. ``tinker`` is the package."""

    def __init__(self, tinker: Any) -> None:
        self._tinker = tinker

    def datum(self, datum: Datum, keys: Iterable[str] | None = None) -> Any:
        """``keys``: only those of its inputs."""
        inputs = datum.loss_fn_inputs
        chosen = inputs.keys() if keys is None else [key for key in keys if key in inputs]
        tensors = {key: self._tensor(inputs[key].array) for key in chosen}
        return self._tinker.Datum(model_input=self.prompt(datum.model_input.to_ints()), loss_fn_inputs=tensors)

    def prompt(self, tokens: Sequence[int]) -> Any:
        return self._tinker.ModelInput.from_ints(list(tokens))

    def adam(self, fields: Mapping[str, float], extras: Mapping[str, str] | None = None) -> Any:
        """``extras``: what a server of ours takes beside Adam's own numbers."""
        if not extras:
            return self._tinker.AdamParams(**fields)
        optimizer = importlib.import_module("tinker.types.optimizer")
        return optimizer.OptimParamsBase(type="adamw", **fields, **extras)

    def sampling(self, params: SamplingParams, seed: int) -> Any:
        """Not validated there: it would refuse texts and token ids side by side, which a server of ours takes.

        Raises:
            RolloutError: ``min_p``, which Tinker's client would leave out without a word.
        """
        if params.min_p:
            raise RolloutError(f"sampling: min_p={params.min_p} is not in Tinker's protocol; set it to 0")
        stop = params.stop if params.stop is None or isinstance(params.stop, str) else list(params.stop)
        fields = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
        return self._tinker.SamplingParams.model_construct(**{**fields, "stop": stop, "seed": seed})

    def _tensor(self, array: Array) -> Any:
        whole = array.dtype.kind in "iu"
        values = np.ascontiguousarray(array, dtype=np.int64 if whole else np.float32)
        return self._tinker.TensorData(data=values, dtype="int64" if whole else "float32", shape=list(array.shape))


def options(config: Mapping[str, Any]) -> dict[str, float | str]:
    """A loss's options as the wire has them: numbers and texts.

    Raises:
        ConfigError: one is neither.
    """
    words = {True: "true", False: "false", None: "null"}
    found: dict[str, float | str] = {}
    for key, value in config.items():
        if value is None or isinstance(value, bool):
            found[key] = words[value]
        elif isinstance(value, str):
            found[key] = str(value)
        elif isinstance(value, int | float):
            found[key] = float(value)
        else:
            raise ConfigError(f"loss_fn_config.{key}: a server takes numbers and texts, got {value!r}; use backend=local")
    return found


def outputs(found: Any) -> list[dict[str, TensorData]]:
    return [{key: TensorData(value.to_numpy()) for key, value in row.items()} for row in found.loss_fn_outputs]


def metrics(found: Mapping[str, float]) -> dict[str, float]:
    """Under the names they have in this process. ``loss:sum`` is one there, too."""
    named = {}
    for key, value in found.items():
        name, _, reduction = key.partition(":")
        named[key if key == "loss:sum" or reduction not in REDUCTIONS else name] = value
    return {"loss": named["loss:sum"], **named} if "loss:sum" in named else named


def passed(found: Any) -> ForwardBackwardOutput:
    """What a pass found."""
    return ForwardBackwardOutput(outputs(found), metrics(found.metrics))
