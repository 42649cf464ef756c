"""Installation of the fused layers in a Hugging Face model, if they compute the same numbers as the model's own code.

The ``forward`` of individual module objects is replaced, in their ``__dict__``. Classes, parameters, state dict names, and
everything around a module (hooks, PEFT, checkpointing, copies) stay unchanged. A replacement is never chosen by name alone: the
module and its replacement both run on random input, forward and backward, and the replacement is used only if they agree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cookbook.engine import quantized
from cookbook.engine.fast_path import FastPathError, first_working, plain_logits, probe_tokens
from cookbook.engine.layers import fused
from cookbook.engine.layers.fused import ACTIVATIONS, LayerOutput, only_rows, rms_norm, rotary
from cookbook.engine.model import LanguageModel, layer_stack

# The function that attention modules of transformers call; each modeling file defines its own.
ROTARY = "apply_rotary_pos_emb"
# Relative to the largest value. The same operations in another order differ by less, other functions by much more. Most models
# compute norms in float32 for any dtype.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class PatchedForward(functools.partial):  # type: ignore[type-arg]
    """A replaced forward. The module is an argument of the partial, so that a deep copy refers to the copied module."""


def install(network: nn.Module) -> None:
    """Replace the forward of every module that has a verified fused equivalent. Idempotent."""
    # In training mode, dropout in an adapter would give two different results for the same input.
    network.eval()
    rotaries: dict[Rotary, Rotary] = {}
    for module in network.modules():
        # A forward in the module's __dict__ was set by cookbook or by another library.
        if "forward" not in vars(module):
            patched = _norm(module) or _mlp(module) or _attention(module, rotaries)
            if patched is not None:
                module.forward = patched


def uninstall(network: nn.Module) -> None:
    """Restore the original forward of every module."""
    for module in network.modules():
        if isinstance(vars(module).get("forward"), PatchedForward):
            del module.forward


def are_installed(network: nn.Module) -> bool:
    """Whether any module of the network has a replaced forward."""
    return any(isinstance(vars(module).get("forward"), PatchedForward) for module in network.modules())


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm(module: nn.Module) -> PatchedForward | None:
    """Return the fused forward if the module is an RMS norm over the last dimension; None for any other module."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = next((vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)), None)
    if weight is None or len(parameters) > 1 or weight.ndim != 1 or not isinstance(eps, float):
        return None
    # The input is small enough that a wrong eps changes the result.
    x, trial = _random((3, len(weight)), weight, scale=eps**0.5), _random((len(weight),), weight)

    def own(x: Tensor) -> Tensor:
        out: Tensor = functional_call(module, {"weight": trial}, (x,))
        return out

    for offset in (0.0, 1.0):
        if _computes_same(own, functools.partial(rms_norm, weight=trial, eps=eps, offset=offset), x, trial):
            return PatchedForward(fused.normalize, module, eps, offset)
    return None


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def _mlp(module: nn.Module) -> PatchedForward | None:
    """Return the fused forward if the module is a gated MLP. It calls the three projections, including their adapters."""
    children = dict(module.named_children())
    activation = _activation(getattr(module, "act_fn", None))
    if activation is None or not {"gate_proj", "up_proj", "down_proj"} <= set(children):
        return None
    gate, patched = children["gate_proj"], PatchedForward(fused.project, module, activation)
    weight = _weight(gate)
    # In an estimate, the weights are on the meta device and cannot be compared.
    if weight.is_meta:
        return patched
    return patched if _computes_same(module.forward, patched, _random((3, getattr(gate, "in_features", 1)), weight)) else None


def _activation(own: Callable[[Tensor], Tensor] | None) -> str | None:
    """Return the name of an activation in ``ACTIVATIONS``, or None."""
    # Compared in float32: in bfloat16 the exact GELU and its tanh approximation look the same.
    x = torch.linspace(-6, 6, 49, requires_grad=True)
    return next((name for name, known in ACTIVATIONS.items() if callable(own) and _computes_same(own, known, x)), None)


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def _attention(module: nn.Module, rotaries: dict[Rotary, Rotary]) -> PatchedForward | None:
    """Return the module's own forward with ``ROTARY`` replaced by the fused function; None if it does not call ``ROTARY``.

    The new forward has the same code, and a copy of the globals of its file in which ``ROTARY`` is replaced. So other users of
    the file are not affected.
    """
    forward = type(module).forward
    original = getattr(forward, "__globals__", {}).get(ROTARY)
    if original is None or ROTARY not in forward.__code__.co_names:
        return None
    if original not in rotaries:
        rotaries[original] = functools.partial(fused.rotate, original) if _is_half_rotation(original, module) else original
    if rotaries[original] is original:
        return None
    names = {**forward.__globals__, ROTARY: rotaries[original]}
    changed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return PatchedForward(changed, module)


def _is_half_rotation(original: Rotary, module: nn.Module) -> bool:
    """Whether ``original`` rotates the pairs ``(i, i + D/2)``, like :func:`rotary`."""
    like = _weight(module)
    q, k, cos, sin = (_random(shape, like) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8)))

    def joined(function: Rotary) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat(function(x, k, cos, sin), 1)

    return _computes_same(joined(original), joined(rotary), q)


# ---- the last layer -----------------------------------------------------------------------------------------------------

# Names in transformers of the MLP, of the attention, and of the attention's query and output projections.
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "mlp_block")
ATTENTIONS = ("self_attn", "attention", "attn")
PROJECTIONS = ("q_proj", "o_proj", "dense", "out_proj", "c_proj")
TRIAL_TOKENS, ROWS = 10, [2, 3, 6, 9]


def trimmable_parts(model: LanguageModel) -> list[nn.Module]:
    """Return the modules of the last layer that may skip tokens whose outputs are not used; empty if verification fails.

    After the last layer's attention, no token is read by another token. So a prompt token of weight 0 needs only its key and
    value in that layer. Its query, output projection and MLP can be skipped, forward and backward.
    """
    before = model.network.training
    candidates: list[tuple[str, Callable[[], list[nn.Module]]]] = [
        ("is trimmed", lambda: _verified_parts(model)),
        ("computes all tokens", list),
    ]
    try:
        return first_working(model, "last layer", candidates)
    finally:
        model.network.train(before)


def _verified_parts(model: LanguageModel) -> list[nn.Module]:
    parts = last_layer_parts(model)
    if not parts:
        raise FastPathError("no module of the layer has a known name")
    if not all(_is_exact(model, parts, training=training) for training in (False, True)):
        raise FastPathError("the trimmed layer computes other numbers")
    return parts


def last_layer_parts(model: LanguageModel) -> list[nn.Module]:
    """Return the modules of the last layer that have a known name, without verification."""
    if (stack := layer_stack(model.network)) is None:
        return []
    last: nn.Module = stack[-1]
    attentions = [child for name, child in last.named_children() if name in ATTENTIONS]
    projections = [child for attention in attentions for name, child in attention.named_children() if name in PROJECTIONS]
    return [child for name, child in last.named_children() if name in MLPS] + projections


@torch.no_grad()
def _is_exact(model: LanguageModel, parts: list[nn.Module], *, training: bool) -> bool:
    """Whether each part computes rows independently, and the model's logits at ``ROWS`` do not change if it is trimmed."""
    model.network.train(training)
    tokens = probe_tokens(model, 0, TRIAL_TOKENS)
    seen: dict[nn.Module, Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_hook(lambda part, args, _: seen.update({part: args[0]})))
        expected = plain_logits(model, tokens)[ROWS]
    if not all(_is_row_wise(part, seen[part]) for part in parts):
        return False
    with only_rows(parts, torch.tensor(ROWS, device=model.device)):
        trimmed = plain_logits(model, tokens)[ROWS]
    return bool((trimmed - expected).abs().max() <= TOLERANCE[trimmed.dtype] * expected.abs().max())


def _is_row_wise(part: nn.Module, x: Tensor) -> bool:
    """Whether the output at ``ROWS`` does not change if all other rows of the input change their sign."""
    changed = -x
    changed[:, ROWS] = x[:, ROWS]
    out, expected = (_first(part(values))[:, ROWS] for values in (changed, x))
    # Two units in the last place: in a mixture, experts get other numbers of rows, and their products round differently.
    return bool((out - expected).abs().max() <= 2 * torch.finfo(x.dtype).eps * expected.abs().max())


def _first(out: LayerOutput) -> Tensor:
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states


# ---- comparison ------------------------------------------------------------------------------------------------------


def _weight(module: nn.Module) -> Tensor:
    """Return one of the module's weights, for their dtype and device."""
    return next(itertools.chain(module.parameters(), (layer.weight for _, layer in quantized.layers(module))))


def _random(shape: Sequence[int], like: Tensor, scale: float = 1.0) -> Tensor:
    """Return random values that require a gradient, from a fixed seed, with dtype and device of ``like`` (meta: the CPU)."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale
    return values.to("cpu" if like.is_meta else like.device, like.dtype).requires_grad_()


@torch.enable_grad()
def _computes_same(own: Callable[[Tensor], Tensor], replacement: Callable[[Tensor], Tensor], *inputs: Tensor) -> bool:
    """Whether both functions return the same value for the first input, and the same gradients for all ``inputs``."""
    try:
        expected, actual = own(inputs[0]), replacement(inputs[0])
        upstream = _random(expected.shape, expected).detach()
        results = [(out, *torch.autograd.grad(out, inputs, upstream)) for out in (expected, actual)]
    except Exception:  # noqa: BLE001 - a module of an unknown architecture may take or return anything
        return False
    return all(_close(*pair) for pair in zip(*results, strict=True))


def _close(expected: Tensor, actual: Tensor) -> bool:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    allowed = TOLERANCE[expected.dtype] * float(expected.detach().abs().max())
    return bool((expected - actual).abs().max() <= allowed)
