"""Capabilities of an architecture, verified on a few tokens, once for a model and its copies.

transformers guarantees few of them for all architectures, and a model that lacks one may silently compute wrong numbers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cookbook.engine import attention, layers
from cookbook.engine.batch.collate import collate
from cookbook.engine.batch.plan import MicroBatch, PackingSupport, PrefixGroup
from cookbook.engine.fast_path import FastPathError, first_working, plain_logits, probe_tokens, trial
from cookbook.engine.model import LanguageModel, Lineage
from cookbook.errors import BackendError, ConfigError
from cookbook.types import Datum, ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Nats. Far above rounding errors, and far below the effect of a wrong mask, position or cache on a trained model.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3}
# Relative to the change if sequences attend to each other. Far above rounding errors, and below the effect of one wrong layer.
ROW_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.2}
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def use_fast_layers(model: LanguageModel, *, fused: bool) -> None:
    """Use grouped matrix products for experts if they work and, if ``fused``, cookbook's fused layers."""
    use_working_experts(model)
    if fused:
        fuse_layers(model)
    else:
        layers.uninstall(model.network)


def use_working_experts(model: LanguageModel) -> None:
    """Use one matrix product per expert, if the grouped product of all experts fails.

    torch supports grouped products only for some dtypes and devices.
    """
    config = model.network.config
    if getattr(config, "_experts_implementation", None) in (None, "eager"):
        return
    loop = functools.partial(model.network.set_experts_implementation, "eager")
    candidates = [
        ("uses one grouped product for all experts", functools.partial(_try_forward, model)),
        ("uses one matrix product per expert", loop),
    ]
    first_working(model, "experts", candidates)


def copy_capabilities(network: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Configure a network without weights like ``reference``, a smaller network of the same architecture that was verified."""
    experts = getattr(reference.config, "_experts_implementation", None)
    if experts is not None and experts != network.config._experts_implementation:
        network.set_experts_implementation(experts)
    if layers.are_installed(reference):
        layers.install(network)
    if attention.is_installed(reference):
        attention.install(network)


def fuse_layers(model: LanguageModel) -> None:
    """Replace the model's norms, gated MLPs and rotary embeddings with cookbook's, if its forward pass works with them."""
    if not layers.are_installed(model.network):
        own_code = functools.partial(layers.uninstall, model.network)
        first_working(
            model,
            "fused layers",
            [("uses them", functools.partial(_try_fused_layers, model)), ("keeps its own code", own_code)],
        )


def _try_fused_layers(model: LanguageModel) -> None:
    # install() compares single layers. The forward pass verifies that they work with the arguments that the model passes.
    layers.install(model.network)
    _try_forward(model)


def _try_forward(model: LanguageModel) -> None:
    """Run a forward pass, to raise its errors."""
    with torch.enable_grad():
        plain_logits(model, probe_tokens(model, 0, 8))


# Verified packing support. Copies of a model have the same lineage, and so the same entry.
PACKING: weakref.WeakKeyDictionary[Lineage, PackingSupport] = weakref.WeakKeyDictionary()


def usable_packing(model: LanguageModel, packing: str, *, shared_prompts: bool) -> PackingSupport:
    """Return the layouts to use, from the option ``packing`` (auto, packed or padded) and the support of the architecture.

    Raises:
        ConfigError: ``packing`` is "packed", and packed rows give other numbers.
        BackendError: the model is not causal.
    """
    if packing == "padded":
        return padded_support(model, "")
    support = packing_support(model)
    if packing == "packed" and not support.packed:
        name = type(model.network).__name__
        raise ConfigError(f"backend.packing: {name} does not support packed rows: {support.reason}; set it to auto")
    return replace(support, shared=support.shared and shared_prompts)


def packing_support(model: LanguageModel) -> PackingSupport:
    """Return the layouts that this model supports. If packing is supported, cookbook's attention stays installed."""
    if model.lineage not in PACKING:
        PACKING[model.lineage] = _packing_support(model)
    return PACKING[model.lineage]


def _packing_support(model: LanguageModel) -> PackingSupport:
    configured, before = model.config.attn_implementation, getattr(model.network.config, "_attn_implementation", None)
    if configured not in ("auto", "sdpa"):
        return padded_support(model, f"model.attn_implementation={configured} does not support packing; auto and sdpa do")
    model.network.eval()
    try:
        with trial():
            return _try_packing(model)
    except FastPathError as error:
        if attention.is_installed(model.network):
            model.network.set_attn_implementation(before)
        return padded_support(model, f"{model.class_name}: {error}")


def padded_support(model: LanguageModel, reason: str) -> PackingSupport:
    """Return the support of a model that is not packed, for this ``reason``: padded rows, or one sequence per pass.

    Raises:
        BackendError: the model is not causal, so log-probabilities depend on the tokens that they predict.
    """
    model.network.eval()
    why = f"{model.class_name} computes other numbers in padded rows"
    try:
        with trial():
            sequences = _ProbeSequences(model)
            if not sequences.are_causal():
                raise BackendError(_not_causal(model))
            if sequences.are_padded_exactly():
                return PackingSupport(False, False, reason)
    except FastPathError as error:
        why += f" ({error})"
    return PackingSupport(False, False, f"{reason}; {why}" if reason else why, padded=False)


def _not_causal(model: LanguageModel) -> str:
    config = model.network.config
    remedy = "set is_decoder to true in its config.json, or " if getattr(config, "is_decoder", None) is False else ""
    return (
        f"model.name: {model.class_name} ({config.model_type}) is not causal: each prediction depends on later tokens, "
        f"got {model.config.name!r}; {remedy}choose a causal language model"
    )


def _try_packing(model: LanguageModel) -> PackingSupport:
    """Install cookbook's attention, and verify packed rows.

    Raises:
        FastPathError: packed rows give other numbers.
    """
    if unknown := set(getattr(model.network.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        raise FastPathError(f"it has layers of {', '.join(sorted(unknown))}")
    sequences = _ProbeSequences(model)
    attention.install(model.network)
    if not sequences.are_packed_exactly():
        raise FastPathError("sequences in one row would attend to each other")
    shared = sequences.are_shared_exactly()
    return PackingSupport(True, shared, "" if shared else f"{model.class_name} does not support prefix sharing")


_PACKED = MicroBatch([PrefixGroup((0,), 5), PrefixGroup((1,), 7), PrefixGroup((2,), 9)], None, 21)
_SHARED = MicroBatch([PrefixGroup((0,), 5), PrefixGroup((1, 2), 4)], None, 17)
_PADDED = MicroBatch(_PACKED.groups, 9, 27)


class _ProbeSequences:
    """Three short sequences, of which two have a common prefix, to verify the layouts.

    ``expected``: logprobs of plain forward passes, one per sequence. ``mixed``: logprobs of one plain pass over all sequences
    concatenated, in which they attend to each other.
    """

    def __init__(self, model: LanguageModel) -> None:
        single, prompt, chosen, rejected = (probe_tokens(model, *at) for at in ((0, 5), (5, 4), (20, 3), (30, 5)))
        rows = [single, prompt + chosen, prompt + rejected]
        self.model = model
        self.data = [Datum(ModelInput.from_ints(row)) for row in rows]
        self.expected = torch.cat([plain_logprobs(model, row) for row in rows])
        self.mixed = plain_logprobs(model, [token for row in rows for token in row])

    def are_causal(self) -> bool:
        """Whether the logprobs of the common prefix, four tokens, are the same in both sequences."""
        return not self._are_far(self.expected[5:9], self.expected[12:16], self.mixed[5:9])

    def are_padded_exactly(self) -> bool:
        """Whether each sequence has the same logprobs alone and in a padded batch."""
        logprobs, _ = self._logprobs(_PADDED)
        return not self._are_far(logprobs, self.expected, self.mixed)

    def are_packed_exactly(self) -> bool:
        """Whether each sequence has the same logprobs alone and in a packed row.

        The attention of each layer must also get the sliding window of the config: the probe is too short to need the window,
        so a missing window would not change its logprobs.
        """
        config = self.model.network.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        logprobs, windows = self._logprobs(_PACKED)
        correct = windows == [window if kind == "sliding_attention" else None for kind in kinds]
        return correct and self._are_near(logprobs, self.expected, self.mixed)

    def are_shared_exactly(self) -> bool:
        """Whether each sequence has the same logprobs alone and in a row that computes the common prefix once."""
        logprobs, _ = self._logprobs(_SHARED)
        return self._are_near(logprobs, self.expected, self.mixed)

    def _are_near(self, logprobs: Tensor, expected: Tensor, mixed: Tensor) -> bool:
        """Whether the error is much smaller than the change if the sequences attend to each other."""
        allowed = ROW_TOLERANCE[next(self.model.network.parameters()).dtype]
        return bool((logprobs - expected).norm() <= allowed * (mixed - expected).norm())

    def _are_far(self, logprobs: Tensor, expected: Tensor, mixed: Tensor) -> bool:
        """Whether the error exceeds rounding, also in an untrained model, in which attention has little effect."""
        allowed = TOLERANCE[next(self.model.network.parameters()).dtype]
        return not self._are_near(logprobs, expected, mixed) and bool((logprobs - expected).abs().max() > allowed)

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, list[int | None]]:
        """Return the logprobs of all three sequences, ``(tokens, V)``, and the window that each layer's attention got."""
        inputs = collate(self.data, batch, self.model.device)
        with attention.skip_masks(inputs.layout is not None):
            logits: Tensor = self.model.network(**inputs.arguments, use_cache=False).logits
        windows = inputs.layout.windows if inputs.layout else []
        return logits.flatten(0, 1)[inputs.flat_indices].float().log_softmax(-1), windows


@torch.no_grad()
def plain_logprobs(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Return the next-token logprobs at each of the ``tokens``, ``(T, V)``, from a forward pass of the model's own code."""
    return plain_logits(model, tokens).float().log_softmax(-1)


def are_close(model: LanguageModel, logprobs: Tensor, expected: Tensor) -> bool:
    """Whether logprobs differ by at most the tolerance for the model's dtype."""
    dtype = next(model.network.parameters()).dtype
    return bool((logprobs - expected).abs().max() <= TOLERANCE[dtype])
