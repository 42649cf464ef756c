"""The output head against log_softmax of all logits in float64: every mode, every option, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.engine.head.linear_logprobs import LowRank, linear_logprobs, linear_logprobs_with_gradient, operator
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LogitTransform
from cookbook.engine.head.linear_logprobs.operator import HeadGradients, Upstream, add_gradients
from cookbook.engine.head.linear_logprobs.scan import GATHERED_VALUES, TILE_BYTES, Projection, ScanSpec, Tiling, scan
from cookbook.errors import BackendError

MODES = ("recompute", "cached", "frozen", "tokenwise")
ROWS, VOCABULARY, HIDDEN = 37, 203, 16


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    """Tiles of 64 columns: several, and a last one that is narrower."""
    monkeypatch.setitem(TILE_BYTES, "cpu", 64 * 8 * ROWS)


@dataclass
class Case:
    """Operands in float64, and the slopes by logprob and entropy that a loss might send back."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    by_logprobs: Tensor
    by_entropy: Tensor
    bias: Tensor | None = None
    low_rank: LowRank | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: Tensor | None = None
    entropy_gradient: bool = False

    @property
    def layer(self) -> LinearLayer:
        return LinearLayer(self.weight, self.bias, self.low_rank, LogitTransform(self.scale, self.softcap))

    def trained(self) -> list[Tensor]:
        low = [] if self.low_rank is None else [self.low_rank.a, self.low_rank.b]
        return [one for one in (self.weight, self.bias, *low) if one is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """A copy whose operands are leaves of ``dtype`` that want gradients."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).clone().requires_grad_()

        low = self.low_rank and LowRank(leaf(self.low_rank.a), leaf(self.low_rank.b), self.low_rank.scaling)
        fields = vars(self) | {"hidden": leaf(self.hidden), "weight": leaf(self.weight), "bias": leaf(self.bias)}
        return Case(**fields | {"low_rank": low})


def case(several: int = 0, masked: bool = False, peak: float = 1.0, width: int = HIDDEN, **options: Any) -> Case:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, weight = normal(ROWS, width), normal(VOCABULARY, width) * peak
    targets = torch.randint(0, VOCABULARY, (ROWS, several) if several else (ROWS,), generator=draw)
    by_logprobs, by_entropy = normal(*targets.shape), normal(ROWS)
    if masked:
        by_logprobs[::3] = by_entropy[::3] = 0
    if options.pop("bias", False):
        options["bias"] = normal(VOCABULARY)
    if options.pop("low_rank", False):
        options["low_rank"] = LowRank(normal(4, HIDDEN), normal(VOCABULARY, 4), 0.5)
    if options.get("temperature") == "per row":
        options["temperature"] = torch.rand(ROWS, generator=draw, dtype=torch.float64) + 0.5
    elif "temperature" in options:
        options["temperature"] = torch.full((ROWS,), options["temperature"], dtype=torch.float64)
    return Case(hidden, weight, targets, by_logprobs, by_entropy, **options)


def plain(given: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and hit from all the logits, in the order Hugging Face models finish them."""
    weight = given.weight
    if given.low_rank is not None:
        weight = weight + given.low_rank.scaling * given.low_rank.b @ given.low_rank.a
    logits = given.scale * torch.nn.functional.linear(given.hidden, weight, given.bias)
    if given.softcap is not None:
        logits = given.softcap * torch.tanh(logits / given.softcap)
    logprobs = (logits if given.temperature is None else logits / given.temperature[:, None]).log_softmax(-1)
    first = given.targets if given.targets.ndim == 2 else given.targets[:, None]
    found = logprobs.gather(1, first).reshape(given.targets.shape)
    return found, -(logprobs.exp() * logprobs).sum(-1), logprobs.argmax(-1) == first[:, 0]


def ours(given: Case, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the head; afterwards the operands hold their gradients."""
    operands = (given.hidden, given.layer, given.targets)
    if mode == "tokenwise":
        found = linear_logprobs_with_gradient(
            *operands, lambda rows, _: given.by_logprobs[rows], given.temperature, entropy=True, hit=True, chunk_rows=10
        )
        found.surrogate.backward()
        return found.logprobs, found.entropy, found.hit
    if mode == "frozen":
        for parameter in given.trained():
            parameter.requires_grad_(False)
    gradient = given.entropy_gradient
    found = linear_logprobs(*operands, given.temperature, mode=mode, entropy=True, entropy_gradient=gradient, hit=True)
    loss = (found.logprobs * given.by_logprobs).sum()
    (loss + (found.entropy * given.by_entropy).sum() if gradient else loss).backward()
    return found.logprobs, found.entropy, found.hit


def expected(given: Case) -> tuple[Case, tuple[Tensor, Tensor, Tensor]]:
    """Result of the operands of ``given``, of any dtype, in float64."""
    exact = given.to(torch.float64)
    logprobs, entropy, hit = plain(exact)
    loss = (logprobs * given.by_logprobs).sum()
    (loss + (entropy * given.by_entropy).sum() if given.entropy_gradient else loss).backward()
    return exact, (logprobs, entropy, hit)


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


OPTIONS = {
    "plain": {},
    "masked rows": {"masked": True},
    "bias": {"bias": True},
    "scale and temperature": {"scale": 0.7, "temperature": 1.3},
    "temperature per row": {"temperature": "per row", "bias": True},
    "soft cap": {"softcap": 3.0, "scale": 0.5, "temperature": 0.8, "masked": True},
    "soft cap, all options": {"softcap": 3.0, "bias": True, "temperature": "per row", "low_rank": True},
    "low rank": {"low_rank": True, "masked": True},
    "several targets": {"several": 3, "masked": True},
    "several targets, all options": {"several": 3, "softcap": 3.0, "bias": True, "temperature": "per row"},
    "entropy": {"entropy_gradient": True, "masked": True},
    "entropy, all options": {
        "entropy_gradient": True, "softcap": 3.0, "bias": True, "temperature": "per row", "low_rank": True
    },
    "entropy, several targets": {"entropy_gradient": True, "several": 3},
    "far from the target": {"peak": 60.0},  # hundreds of nats: the first reference is too low, and the walk is repeated
    "far, entropy": {"peak": 60.0, "entropy_gradient": True},
}  # fmt: skip
POSSIBLE = [
    (mode, name) for mode in MODES for name, one in OPTIONS.items() if not (mode == "tokenwise" and "entropy_gradient" in one)
]


@pytest.mark.parametrize(("mode", "name"), POSSIBLE)
def test_float64_equals_the_logits_own_softmax(mode, name):
    given = case(**OPTIONS[name]).to(torch.float64)
    exact, wanted = expected(given)
    found = ours(given, mode)
    # Sums in another order: rounding of 203 terms, relative to the largest number of its kind.
    assert error(found[0], wanted[0]) < 1e-13
    assert error(found[1], wanted[1]) < 1e-12
    assert torch.equal(found[2], wanted[2])
    assert error(given.hidden.grad, exact.hidden.grad) < 1e-12
    for mine, theirs in zip(given.trained(), exact.trained(), strict=True):
        assert mode == "frozen" or error(mine.grad, theirs.grad) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_float32_keeps_its_promises(mode):
    # Logits of standard deviation 4, as a trained model's; half the tokens are what the model would say.
    given = case(width=32, peak=0.7)
    given.hidden[::2] = given.weight[given.targets[::2]]
    given = given.to(torch.float32)
    exact, wanted = expected(given)
    found = ours(given, mode)
    sure = wanted[0].exp() > 0.99
    assert 10 < sure.sum() < 27
    assert (found[0] - wanted[0]).abs().max() < 5e-6
    assert error(given.hidden.grad, exact.hidden.grad) < 1e-6
    assert mode == "frozen" or error(given.weight.grad, exact.weight.grad) < 1e-6
    # A sure token's gradient is small, and 1 - p taken from p in float32 would have lost most of its digits.
    for mine, theirs in zip(given.hidden.grad[sure], exact.hidden.grad[sure], strict=True):
        assert error(mine, theirs) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", [-400.0, 400.0])
def test_logits_far_from_zero_neither_underflow_nor_overflow(mode, shift):
    given = case(bias=True)
    given.bias += shift
    given = given.to(torch.float32)
    exact, wanted = expected(given)
    found = ours(given, mode)
    # float32 rounds 400 to 3e-5, in the logit and once more in the normalizer.
    assert (found[0] - wanted[0]).abs().max() < 2e-4
    assert error(given.hidden.grad, exact.hidden.grad) < 2e-4


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_rounds_no_logprob(mode):
    """The target's logit is exact and the normalizer averages the others' rounding: the mean error stays below 1e-3."""
    given = case(peak=0.25).to(torch.bfloat16)
    exact, wanted = expected(given)
    found = ours(given, mode)
    assert found[0].dtype == torch.float32
    assert (found[0] - wanted[0]).abs().mean() < 1e-3
    assert error(given.hidden.grad, exact.hidden.grad) < 1e-2  # 2^-8 is half a unit of bfloat16
    assert mode == "frozen" or error(given.weight.grad, exact.weight.grad) < 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_logits_that_matter_are_exact(mode):
    """Logits up to 26 are rounded by up to 0.06, which the few likely tokens of a row would carry into every logprob."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(128, 64, generator=draw) * 2 / 64**0.5
    weight = torch.randn(4000, 64, generator=draw)
    targets = torch.randint(0, 4000, (128,), generator=draw)
    hidden += torch.linspace(0, 20, 128)[:, None] * weight[targets] / 64  # from unlikely targets to sure ones
    given = Case(hidden, weight, targets, torch.ones(128), torch.zeros(128)).to(torch.bfloat16)
    exact, wanted = expected(given)
    rounded = (given.hidden @ given.weight.T).double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded - wanted[0]).abs().mean() > 4e-3
    assert (ours(given, mode)[0] - wanted[0]).abs().mean() < 3e-4
    assert (given.hidden.grad.double() - exact.hidden.grad).norm() < 4e-3 * exact.hidden.grad.norm()  # 2^-8, as it is stored


def test_gradcheck(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 1)
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (70, 4), (70,))
    )
    targets = torch.randint(0, 70, (5,), generator=draw)

    def both(*operands: Tensor) -> tuple[Tensor, Tensor | None]:
        layer = LinearLayer(*operands[1:], transform=LogitTransform(softcap=2.0))
        found = linear_logprobs(operands[0], layer, targets, entropy_gradient=True, mode="recompute")
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_tied_weights_receive_both_gradients():
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    tokens = torch.arange(20)
    linear_logprobs(weight[tokens], LinearLayer(weight), tokens, mode="recompute").logprobs.sum().backward()
    tied, weight.grad = weight.grad, None
    (weight[tokens] @ weight.T).log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
    assert error(tied, weight.grad) < 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("several", [0, 3])
def test_no_rows_at_all_keep_the_graph(mode, several):
    given = case(several=several, bias=True)
    given.hidden, given.targets, given.by_logprobs = given.hidden[:0], given.targets[:0], given.by_logprobs[:0]
    given = given.to(torch.float32)
    found = ours(given, mode)
    assert found[0].shape == given.targets.shape
    assert given.hidden.grad.shape == (0, HIDDEN)
    assert mode == "frozen" or not any(one.grad.any() for one in given.trained())


def test_a_graph_may_be_used_twice():
    given = case().to(torch.float64)
    found = linear_logprobs(given.hidden, given.layer, given.targets, mode="cached")
    found.logprobs.sum().backward(retain_graph=True)
    once = given.weight.grad.clone()
    found.logprobs.sum().backward()
    assert torch.equal(given.weight.grad, 2 * once)


@pytest.mark.parametrize("mode", ["recompute", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("cached", "frozen"))])
def test_the_operator_keeps_torchs_rules(mode):
    given = case(bias=True, temperature="per row").to(torch.float32)
    trained = mode != "frozen"
    arguments = (
        given.hidden,
        given.weight.requires_grad_(trained),
        given.targets[:, None],
        given.bias.requires_grad_(trained),
        None,
        None,
        given.temperature.float(),
        *(0.5, 2.0, mode, True, True, True),
    )
    torch.library.opcheck(operator.forward, arguments)


def test_the_compiler_sees_one_graph():
    given = case().to(torch.float32)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        found = linear_logprobs(hidden, LinearLayer(weight), given.targets, entropy_gradient=True, mode="recompute")
        return found.logprobs.exp().sum() + found.entropy.mean()

    wanted = torch.autograd.grad(loss(given.hidden, given.weight), [given.hidden, given.weight])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(given.hidden, given.weight), [given.hidden, given.weight])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Watch(TorchDispatchMode):
    """The largest tensor that is made, and the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = [one for one in args if isinstance(one, Tensor)][-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return result


def passes(given: Case, by_logprobs: Tensor, *, keep: bool) -> Watch:
    """Both passes, without the operator around them, which no mode can look into."""
    operands = Projection(((given.hidden, given.weight),), given.targets[:, None])
    tiling = Tiling.of(operands)
    into = HeadGradients([torch.zeros_like(given.hidden)], [torch.empty_like(given.weight)])
    with torch.no_grad(), Watch() as watch:
        scores = scan(operands, tiling, ScanSpec(keep=keep, entropy=True, hit=True))
        add_gradients(operands, tiling, scores, Upstream(by_logprobs[:, None]), into)
    return watch


def test_the_logits_are_never_in_memory(monkeypatch):
    """Logits of 600 x 5,000 would be 12 MB; the largest tensor is a tile of 150 kB."""
    monkeypatch.setitem(GATHERED_VALUES, "cpu", 1 << 12)
    monkeypatch.setitem(TILE_BYTES, "cpu", 1)
    given = case().to(torch.float32)
    given.hidden, given.weight = torch.randn(600, 4), torch.randn(5000, 4)
    given.targets = torch.randint(0, 5000, (600,))
    watch = passes(given, torch.ones(600), keep=False)
    assert watch.largest == 600 * 64 * 4


def test_entropy_after_a_repeated_walk():
    """One row has two far peaks among columns that no guess looks at: its first sums are useless."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((8, 32), (300, 32)))
    weight *= 0.05
    weight[7], weight[9] = (hidden[0] / hidden[0].norm() ** 2 * peak for peak in (90.0, 89.3))
    targets = torch.full((8,), 20)
    found = linear_logprobs(hidden.requires_grad_(), LinearLayer(weight), targets, mode="frozen", entropy=True)
    logprobs = (hidden @ weight.T).log_softmax(-1)
    assert error(found.entropy, -(logprobs.exp() * logprobs).sum(-1)) < 1e-12


@pytest.mark.parametrize(("keep", "products"), [(False, 3), (True, 2)])
def test_rows_without_a_gradient_cost_nothing_in_the_backward_pass(keep, products):
    """Ten of 37 rows matter: the forward pass computes all of them, the backward pass only those."""
    given, some = case().to(torch.float32), torch.zeros(ROWS)
    some[5:15] = 1.0
    work = passes(given, some, keep=keep).multiplications - passes(given, torch.zeros(ROWS), keep=keep).multiplications
    assert work == products * 10 * VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        (None, [(0, 10), (10, 20), (20, 30), (30, 37)]),
        ([4, 9, 12, 13, 30], [(0, 9), (9, 13), (13, 30), (30, 37)]),
        ([37], [(0, 37)]),
    ],
)
def test_chunks_end_where_the_caller_allows(boundaries, expected):
    given = case().to(torch.float64)
    seen = []

    def gradient_of(rows: slice, logprobs: Tensor) -> Tensor:
        seen.append((rows.start, rows.stop))
        return given.by_logprobs[rows] * logprobs.exp()

    found = linear_logprobs_with_gradient(
        given.hidden, given.layer, given.targets, gradient_of, chunk_rows=10, boundaries=boundaries
    )
    (3.0 * found.surrogate).backward()
    exact = given.to(torch.float64)
    (3.0 * given.by_logprobs * plain(exact)[0].exp()).sum().backward()
    assert seen == expected
    assert error(given.weight.grad, exact.weight.grad) < 1e-12
    assert error(given.hidden.grad, exact.hidden.grad) < 1e-12


def test_gradients_computed_in_the_forward_are_handed_over_once_and_uncopied():
    given = case().to(torch.float32)
    found = linear_logprobs_with_gradient(given.hidden, given.layer, given.targets, lambda rows, _: given.by_logprobs[rows])
    (held,) = [one for one in found.surrogate.grad_fn.gradients if one is not None and one.shape == given.weight.shape]
    place = held.data_ptr()
    del held
    found.surrogate.backward(retain_graph=True)
    assert given.weight.grad.data_ptr() == place
    with pytest.raises(BackendError, match="backward ran twice"):
        found.surrogate.backward()


def test_autocast_is_followed():
    given = case(peak=0.25).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logprobs(given.hidden, given.layer, given.targets)
    found.logprobs.sum().backward()
    narrow = given.to(torch.bfloat16)
    assert torch.equal(found.logprobs, linear_logprobs(narrow.hidden, narrow.layer, given.targets).logprobs)
    assert given.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(37, 5)}, "hidden must be (N, H) and weight (V, H), got (37, 5) and (203, 16)"),
        ({"hidden": torch.zeros(37, 16, dtype=torch.float16)}, "of one dtype: float32, float64 or bfloat16"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "targets must be (37,) or (37, K) int64, got (3,)"),
        ({"bias": torch.zeros(3)}, "bias must be (203,), got (3,)"),
        ({"temperature": torch.ones(3)}, "temperature must be (37,), got (3,)"),
        ({"softcap": -1.0}, "scale and softcap must be positive"),
        ({"mode": "fast"}, "mode must be one of auto, recompute, cached, frozen, got 'fast'"),
        ({"mode": "frozen"}, "needs a weight that requires no gradient"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    given = case().to(torch.float32)
    given = replace(given, **{name: value for name, value in change.items() if name != "mode"})
    with pytest.raises(BackendError) as caught:
        linear_logprobs(given.hidden, given.layer, given.targets, given.temperature, mode=change.get("mode", "auto"))
    assert message in str(caught.value)
