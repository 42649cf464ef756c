"""The nouns of the trainer API, with the field's names: small, frozen, made of numpy arrays.

The ``tinker`` package's objects are accepted wherever these are; :func:`as_datum` and friends convert them, once, at the
border of a backend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cookbook.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
NOT_TEXT = "model_input: holds something other than text; this trainer reads tokens only"


@dataclass(frozen=True, eq=False)
class TensorData:
    """An array that travels: numbers, element type, shape.

    ``data`` is what Tinker calls it, the flat list of numbers; :meth:`to_numpy` and :meth:`to_torch` share the memory.
    Lists of Python floats keep their double precision unless ``dtype`` says otherwise.
    """

    array: Array

    def __init__(self, data: Any, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
        array = _as_array(data)
        if dtype is not None:
            array = array.astype(np.dtype(dtype), copy=False)
        if shape is not None:
            array = array.reshape(tuple(shape))
        object.__setattr__(self, "array", array)

    @classmethod
    def from_numpy(cls, array: Array) -> TensorData:
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        return cls(tensor)

    @property
    def data(self) -> list[Any]:
        return list(self.array.ravel().tolist())

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def tolist(self) -> Any:
        return self.array.tolist()

    def to_numpy(self) -> Array:
        return self.array

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.array if self.array.flags.writeable else self.array.copy())

    def __len__(self) -> int:
        return len(self.array)

    def detached(self) -> TensorData:
        """The same numbers in memory that nobody can change from outside: this one's when it is read-only, else a copy."""
        immutable = not self.array.flags.writeable and self.array.flags.owndata
        return self if immutable else TensorData(self.array.copy())


def _as_array(data: Any) -> Array:
    """Numbers from a list, a numpy array, a torch tensor or anything with ``to_numpy`` (a Tinker ``TensorData``)."""
    if isinstance(data, np.ndarray):
        array = data
    elif hasattr(data, "to_numpy"):
        array = data.to_numpy()
    elif hasattr(data, "detach"):  # a torch tensor, without importing torch
        tensor = data.detach().cpu()
        array = (tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() < 4 else tensor).numpy()
    else:
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise DataError(f"not an array of numbers: {error}; give every row the same length") from None
    if array.dtype.kind not in "fiub":
        raise DataError(f"not an array of numbers: got elements of type {array.dtype}; give floats or integers")
    return array


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids inside a :class:`ModelInput`."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _token_ids(self.tokens))

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, init=False)
class ModelInput:
    """What the model reads: token ids, shape ``(T,)``; or made from ``chunks`` of them, as Tinker's is.

    Raises:
        DataError: not whole numbers, or chunks that hold something other than tokens.
    """

    tokens: tuple[int, ...]

    def __init__(self, tokens: Iterable[int] = (), *, chunks: Iterable[Any] = ()) -> None:
        ids = _token_ids(tokens)
        for chunk in chunks:
            ids += _token_ids(_chunk_tokens(chunk))
        object.__setattr__(self, "tokens", ids)

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> ModelInput:
        """Raises DataError when they are not whole numbers."""
        return cls(tokens)

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(())

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def chunks(self) -> list[EncodedTextChunk]:
        return [EncodedTextChunk(self.tokens)]

    def append(self, chunk: Any) -> ModelInput:
        """This input and ``chunk`` after it."""
        return ModelInput(self.tokens, chunks=[chunk])

    def append_int(self, token: int) -> ModelInput:
        return ModelInput((*self.tokens, token))


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, tokens.tolist() if isinstance(tokens, np.ndarray) else tokens))
    except TypeError as error:
        raise DataError(f"model_input: expected token ids: {error}; encode the text first") from None


def _chunk_tokens(chunk: Any) -> Iterable[int]:
    if not hasattr(chunk, "tokens"):
        raise DataError(f"{NOT_TEXT}, got {type(chunk).__name__}")
    return chunk.tokens  # type: ignore[no-any-return]


@dataclass(frozen=True, init=False)
class Datum:
    """One sequence and everything the loss reads about it.

    ``loss_fn_inputs`` holds arrays whose first axis is the token axis, length ``model_input.length``: position ``i``
    speaks of ``target_tokens[i]``, the token that follows ``model_input[i]``. A scalar (an array of no axis) speaks of the
    whole sequence. Any key is allowed.

    Raises:
        DataError: an array whose length is not the input's. Nothing is ever padded or cut to fit.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None) -> None:
        tensors = {key: _as_tensor(key, value) for key, value in (loss_fn_inputs or {}).items()}
        length = model_input.length
        for key, tensor in tensors.items():
            if tensor.shape and tensor.shape[0] != length:
                raise DataError(f"{key} has {tensor.shape[0]} values and model_input {length}; build both from the same tokens")
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", MappingProxyType(tensors))

    def with_inputs(self, **inputs: Any) -> Datum:
        """The same sequence with more, or other, ``loss_fn_inputs``."""
        return Datum(self.model_input, {**self.loss_fn_inputs, **inputs})

    def detached(self) -> Datum:
        """The same datum in memory that nobody can change from outside."""
        return Datum(self.model_input, {key: tensor.detached() for key, tensor in self.loss_fn_inputs.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return Datum, (self.model_input, dict(self.loss_fn_inputs))


def _as_tensor(key: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    try:
        return TensorData(value)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None


def datum_from_tokens_weights(
    tokens: Sequence[int] | Array, weights: Sequence[float] | Array, max_length: int | None = None
) -> Datum:
    """A datum that trains ``tokens[i]`` with ``weights[i]``, for built-in and custom losses alike.

    Args:
        tokens: token ids, shape ``(T,)``.
        weights: 0.0 on prompt tokens, 1.0 on response tokens, any float in between; shape ``(T,)``. ``weights[0]`` is
            never used: nothing predicts the first token.
        max_length: longer sequences are cut at the end, tokens and weights together.

    Returns:
        A datum of length ``min(T, max_length) - 1`` with ``target_tokens`` and ``weights``, both shifted by one.

    Raises:
        DataError: lengths that differ, or fewer than two tokens.
    """
    if len(tokens) != len(weights):
        raise DataError(f"weights has {len(weights)} values and tokens {len(tokens)}; give every token one weight")
    ids = np.asarray(tokens, dtype=np.int64)[:max_length]
    scale = _as_array(weights).astype(np.float32)[:max_length]
    if len(ids) < 2:
        raise DataError(f"a sequence needs at least 2 tokens to predict one, got {len(ids)}")
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": scale[1:]})


@dataclass(frozen=True)
class AdamParams:
    """What one optimizer step needs to know. Semantics of ``torch.optim.AdamW``; ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, None),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("eps", 0.0, None),
            ("weight_decay", 0.0, None),
            ("grad_clip_norm", 0.0, None),
        ):
            value = getattr(self, name)
            if not value >= low or value == float("inf") or (high is not None and value >= high):
                limit = f">= {low:g}" + (f" and < {high:g}" if high is not None else "")
                raise ConfigError(f"optim: {name} must be {limit}, got {value}")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``stop`` None stops at the end-of-text token, ``[]`` at nothing, else also at these strings or ids.

    ``top_k`` 0 or -1, ``top_p`` 1.0 and ``min_p`` 0.0 switch the filters off; top-p reads what top-k left, and min-p keeps what
    has at least that share of the likeliest token's probability. A temperature of 0 is greedy.
    ``max_tokens`` None fills the context.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"sampling: max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ConfigError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"sampling: min_p must be between 0 and 1, got {self.min_p}")


@dataclass(frozen=True)
class Sample:
    """One sampled completion. ``logprobs[i]`` belongs to ``tokens[i]``, under the temperature it was drawn with.

    ``stop_reason`` is ``stop`` (the stop token or string is the end of ``tokens``) or ``length``. ``step`` is the version
    of the weights: the number of optimizer steps they have seen.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    step: int = 0


@dataclass(frozen=True)
class SampleResponse:
    """The answer to one ``sample`` call: ``num_samples`` sequences, and the prompt's logprobs when they were asked for.

    ``topk_prompt_logprobs``: per prompt token the likeliest tokens in its place with their logprobs, best first; None for the
    first token.
    """

    sequences: list[Sample]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Per datum a dict of arrays (``logprobs``, shape as ``target_tokens``), and metrics over all of them.

    ``metrics["loss"]`` is the loss as the loss function returned it (``loss:sum`` is the same number under Tinker's name).
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class OptimStepOutput:
    """``metrics``: ``optim/grad_norm`` before clipping, ``optim/lr``, ``optim/divisor`` and the counts behind it."""

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A saved model: ``kind`` is ``state`` (resumable), ``base`` (weights to sample from) or ``delta`` (their changes)."""

    path: str
    step: int
    kind: str = "state"


@dataclass(frozen=True)
class SupportedModel:
    """A model that can be trained and sampled from; ``max_context_length`` in tokens, None where it is not known."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    """The models of a server; of a trainer in this process the shipped one and those in use, though it takes any other."""

    supported_models: list[SupportedModel]


def as_datum(datum: Any, index: int) -> Datum:
    """Our :class:`Datum` from ours or Tinker's.

    Raises:
        DataError: naming the datum by ``index``.
    """
    if isinstance(datum, Datum):
        return datum
    try:
        return Datum(as_model_input(datum.model_input), dict(datum.loss_fn_inputs))
    except DataError as error:
        raise DataError(f"datum {index}: {error}") from None
    except AttributeError:
        raise DataError(f"datum {index}: expected a Datum, got {type(datum).__name__}") from None


def as_model_input(value: Any) -> ModelInput:
    """Our :class:`ModelInput` from ours, Tinker's, or a plain list of token ids.

    Raises:
        DataError: it holds something else.
    """
    if isinstance(value, ModelInput):
        return value
    try:
        tokens = value.to_ints() if hasattr(value, "to_ints") else value
    except ValueError:  # Tinker's, with an image in it
        raise DataError(NOT_TEXT) from None
    return ModelInput.from_ints(tokens)


def as_adam(params: Any) -> AdamParams:
    """Our :class:`AdamParams` from ours or Tinker's."""
    if isinstance(params, AdamParams):
        return params
    return AdamParams(**{name: getattr(params, name) for name in AdamParams.__dataclass_fields__ if hasattr(params, name)})


def as_sampling(params: Any) -> SamplingParams:
    """Our :class:`SamplingParams` from ours or Tinker's."""
    if isinstance(params, SamplingParams):
        return params
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{name: getattr(params, name) for name in names if hasattr(params, name)})
