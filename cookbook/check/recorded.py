"""A datum that notes what is read of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cookbook.types import Datum, TensorData


class _Inputs(Mapping[str, TensorData]):
    """Notes the keys whose values are taken. Asking whether a key is there is not reading it."""

    def __init__(self, values: Mapping[str, TensorData], read: set[str]) -> None:
        self.values_unnoted = values
        self._read = read

    def __getitem__(self, key: str) -> TensorData:
        value = self.values_unnoted[key]
        self._read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self.values_unnoted

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_unnoted)

    def __len__(self) -> int:
        return len(self.values_unnoted)


class RecordedDatum(Datum):
    """``datum``, with the keys that are read of it, and of what :meth:`with_inputs` makes of it, added to ``read``."""

    def __init__(self, datum: Datum, read: set[str]) -> None:
        object.__setattr__(self, "model_input", datum.model_input)
        object.__setattr__(self, "loss_fn_inputs", _Inputs(datum.loss_fn_inputs, read))
        object.__setattr__(self, "read", read)

    def with_inputs(self, **inputs: Any) -> RecordedDatum:
        values = self.loss_fn_inputs.values_unnoted  # type: ignore[attr-defined]
        return RecordedDatum(Datum(self.model_input, {**values, **inputs}), self.read)  # type: ignore[attr-defined]
