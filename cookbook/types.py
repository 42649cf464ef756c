"""Types of the trainer API: small frozen classes of numpy arrays and numbers.

Cookbook accepts objects of the package ``tinker`` in their place. The functions ``as_...`` convert those, once, at the border
of a backend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cookbook.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Array = npt.NDArray[Any]
JsonObject: TypeAlias = Mapping[str, Any]
"""A JSON object, such as the entries of a checkpoint's manifest or the options of a loss."""
NOT_TEXT = "model_input: holds something other than text; this trainer reads tokens only"


class TokenSource(Protocol):
    """Tokens of cookbook's :class:`ModelInput` or of Tinker's."""

    def to_ints(self) -> list[int]: ...


Prompt: TypeAlias = TokenSource | Sequence[int]


@dataclass(frozen=True, eq=False)
class TensorData:
    """Array of a datum or of a result: numbers, element type, shape.

    ``data`` is the flat list of numbers, as in Tinker; :meth:`to_numpy` and :meth:`to_torch` share the memory. Lists of Python
    floats keep their double precision unless ``dtype`` is given.
    """

    array: Array

    def __init__(self, data: object, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
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
    def data(self) -> list[float]:
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
        """Return the same numbers in memory that no caller can change: this object if it is read-only, else a copy."""
        immutable = not self.array.flags.writeable and self.array.flags.owndata
        return self if immutable else TensorData(self.array.copy())


def _as_array(data: Any) -> Array:
    """Return the numbers of a list, a numpy array, a torch tensor, or an object with ``to_numpy`` (a Tinker ``TensorData``)."""
    if isinstance(data, np.ndarray):
        array = data
    elif hasattr(data, "to_numpy"):
        array = data.to_numpy()
    # A torch tensor. An import of torch for isinstance would be slow.
    elif hasattr(data, "detach"):
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
    """Consecutive token ids of a :class:`ModelInput`."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _token_ids(self.tokens))

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, init=False)
class ModelInput:
    """Input of the model: token ids, shape ``(T,)``, from ``tokens`` and then from Tinker's ``chunks``.

    Raises:
        DataError: the ids are not whole numbers, or a chunk holds something other than tokens.
    """

    tokens: tuple[int, ...]

    def __init__(self, tokens: Iterable[int] = (), *, chunks: Iterable[object] = ()) -> None:
        ids = _token_ids(tokens)
        for chunk in chunks:
            if not hasattr(chunk, "tokens"):
                raise DataError(f"{NOT_TEXT}, got {type(chunk).__name__}")
            ids += _token_ids(chunk.tokens)
        object.__setattr__(self, "tokens", ids)

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> ModelInput:
        """Raises DataError: the ids are not whole numbers."""
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

    def append(self, chunk: object) -> ModelInput:
        """Return this input with ``chunk`` after it."""
        return ModelInput(self.tokens, chunks=[chunk])

    def append_int(self, token: int) -> ModelInput:
        return ModelInput((*self.tokens, token))


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, tokens.tolist() if isinstance(tokens, np.ndarray) else tokens))
    except TypeError as error:
        raise DataError(f"model_input: expected token ids: {error}; encode the text first") from None


@dataclass(frozen=True, init=False)
class Datum:
    """One sequence, with every array that the loss reads.

    ``loss_fn_inputs`` holds arrays whose first axis is the token axis, length ``model_input.length``: position ``i`` belongs to
    ``target_tokens[i]``, the token that follows ``model_input[i]``. A scalar (an array without axes) belongs to the whole
    sequence. Any key is allowed.

    Raises:
        DataError: the length of an array differs from that of the input. No array is padded or cut to fit.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, object] | None = None) -> None:
        tensors = {key: _as_tensor(key, value) for key, value in (loss_fn_inputs or {}).items()}
        length = model_input.length
        for key, tensor in tensors.items():
            if tensor.shape and tensor.shape[0] != length:
                raise DataError(f"{key} has {tensor.shape[0]} values and model_input {length}; build both from the same tokens")
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", MappingProxyType(tensors))

    def with_inputs(self, **inputs: object) -> Datum:
        """Return the same sequence with more, or other, ``loss_fn_inputs``."""
        return Datum(self.model_input, {**self.loss_fn_inputs, **inputs})

    def detached(self) -> Datum:
        """Return the same datum in memory that no caller can change."""
        return Datum(self.model_input, {key: tensor.detached() for key, tensor in self.loss_fn_inputs.items()})

    def __reduce__(self) -> tuple[object, ...]:
        return Datum, (self.model_input, dict(self.loss_fn_inputs))


def _as_tensor(key: str, value: object) -> TensorData:
    if isinstance(value, TensorData):
        return value
    try:
        return TensorData(value)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None


def datum_from_tokens_weights(
    tokens: Sequence[int] | Array, weights: Sequence[float] | Array, max_length: int | None = None
) -> Datum:
    """Return a datum that trains ``tokens[i]`` with ``weights[i]``, for built-in and custom losses.

    Args:
        tokens: token ids, shape ``(T,)``.
        weights: 0.0 on prompt tokens, 1.0 on response tokens, any float in between; shape ``(T,)``. ``weights[0]`` is
            never used, because the first token is not predicted.
        max_length: longer sequences are cut at the end, tokens and weights together.

    Returns:
        A datum of length ``min(T, max_length) - 1`` with ``target_tokens`` and ``weights``, both shifted by one.

    Raises:
        DataError: the lengths differ, or there are fewer than two tokens.
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
    """Parameters of one optimizer step, as in ``torch.optim.AdamW``; ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_beta = name.startswith("beta")
            # Written so that NaN is refused too.
            if not 0 <= value < (1 if is_beta else float("inf")):
                raise ConfigError(f"optim: {name} must be >= 0 and {'< 1' if is_beta else 'finite'}, got {value}")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. ``stop`` None stops at the end-of-text token, ``[]`` never, else also at these strings or ids.

    ``top_k`` 0 or -1, ``top_p`` 1.0 and ``min_p`` 0.0 switch the filters off. Top-p filters the tokens that top-k has kept;
    min-p keeps tokens with at least that share of the most likely token's probability. A temperature of 0 is greedy.
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


def request_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of the ``number``-th sampling request without one at ``step``, the same on every backend."""
    return (seed * 1_000_003 + step) * 1_000_003 + number


@dataclass(frozen=True)
class Sample:
    """One sampled completion. ``logprobs[i]`` belongs to ``tokens[i]``, under the temperature of the draw.

    ``stop_reason`` is ``stop`` (the stop token or string is the end of ``tokens``) or ``length``. ``step`` is the version
    of the weights: their number of optimizer steps.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    step: int = 0


@dataclass(frozen=True)
class SampleResponse:
    """Result of one ``sample`` call: ``num_samples`` sequences, and the prompt's logprobs if requested.

    ``topk_prompt_logprobs``: for each prompt token, the most likely tokens at its position with their logprobs, most likely
    first; None for the first token.
    """

    sequences: list[Sample]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Result of a pass: per datum a dict of arrays (``logprobs``, shaped like ``target_tokens``), and metrics over all datums.

    ``metrics["loss"]`` is the loss as the loss function returned it (``loss:sum`` is the same number under Tinker's name).
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class OptimStepOutput:
    """``metrics``: ``optim/grad_norm`` before clipping, ``optim/lr``, ``optim/divisor``, and the counts for the divisor."""

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A saved model: ``kind`` is ``state`` (resumable), ``base`` (weights to sample from) or ``delta`` (their changes)."""

    path: str
    step: int
    kind: str = "state"


@dataclass(frozen=True)
class SupportedModel:
    """A model that can be trained and sampled from; ``max_context_length`` in tokens, None if unknown."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    """The models of a server; in this process the shipped model and those in use, although any other model can be loaded."""

    supported_models: list[SupportedModel]


def as_datum(datum: Any, index: int) -> Datum:
    """Return cookbook's :class:`Datum` for cookbook's or Tinker's.

    Raises:
        DataError: ``datum`` is not valid; the error names ``index``.
    """
    if isinstance(datum, Datum):
        return datum
    try:
        return Datum(as_model_input(datum.model_input), dict(datum.loss_fn_inputs))
    except DataError as error:
        raise DataError(f"datum {index}: {error}") from None
    except AttributeError:
        raise DataError(f"datum {index}: expected a Datum, got {type(datum).__name__}") from None


def as_model_input(value: Prompt) -> ModelInput:
    """Return cookbook's :class:`ModelInput` for cookbook's, Tinker's, or a plain list of token ids.

    Raises:
        DataError: ``value`` holds something other than token ids.
    """
    if isinstance(value, ModelInput):
        return value
    try:
        tokens = value.to_ints() if hasattr(value, "to_ints") else value
    # Tinker's input with an image in it.
    except ValueError:
        raise DataError(NOT_TEXT) from None
    return ModelInput.from_ints(tokens)


def as_adam(params: object) -> AdamParams:
    """Return cookbook's :class:`AdamParams` for cookbook's or Tinker's."""
    return _with_fields_of(AdamParams, params)


def as_sampling(params: object) -> SamplingParams:
    """Return cookbook's :class:`SamplingParams` for cookbook's or Tinker's."""
    return _with_fields_of(SamplingParams, params)


def _with_fields_of(kind: type[T], params: object) -> T:
    if isinstance(params, kind):
        return params
    return kind(**{name: getattr(params, name) for name in vars(kind)["__dataclass_fields__"] if hasattr(params, name)})
