"""How a token is chosen: temperature, filters, and a draw that a given random number decides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cookbook.types import SamplingParams

BLOCK = 128  # tokens of the vocabulary that a draw first looks at together
FLAT = 1024  # a vocabulary up to this size is looked at token by token


class Chooser:
    """Chooses the next token of every row of a batch by the row's own rules.

    What no row asks for is found out once, here, so that no step pays for it.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        cold = [p.temperature == 0 for p in params]
        divisors = [p.temperature or 1.0 for p in params]
        filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
        self.greedy = torch.tensor(cold, device=device) if any(cold) else None
        self.draws = not all(cold)
        self.divisor = column(divisors) if set(divisors) != {1.0} else None
        self.filtered = torch.tensor(filtered, device=device) if self.draws and filtered else None
        self.top_k = [params[row].top_k for row in filtered]
        self.top_p = column([params[row].top_p for row in filtered])
        self.min_p = column([params[row].min_p for row in filtered])

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """``(rows, V)`` float32 and ``(rows,)`` float64 in [0, 1) -> tokens and logprobs, ``(rows,)`` each.

        Logprobs are those under the temperature; the filters do not renormalize them. Greedy rows are scored at temperature 1.
        """
        probabilities = (logits if self.divisor is None else logits / self.divisor).softmax(-1)
        tokens = draw(self._allowed(probabilities), uniform) if self.draws else logits.argmax(-1)
        if self.draws and self.greedy is not None:
            tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log()

    def _allowed(self, probabilities: Tensor) -> Tensor:
        """Probabilities, set to 0 where a filter of the row forbids the token."""
        if self.filtered is None:
            return probabilities
        if len(self.filtered) == len(probabilities):
            return self._filter(probabilities)
        return probabilities.index_copy(0, self.filtered, self._filter(probabilities[self.filtered]))

    def _filter(self, probabilities: Tensor) -> Tensor:
        """Keeps the top k, of these the top p, and of these what has at least min_p of the likeliest token's probability."""
        vocabulary = probabilities.shape[-1]
        limits = [k if 0 < k < vocabulary else vocabulary for k in self.top_k]
        if max(limits) < vocabulary:
            ordered, order = probabilities.topk(max(limits))
        elif bool((self.top_p < 1).any()) or min(limits) < vocabulary:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        else:
            return probabilities.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), 0.0)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= torch.tensor(limits, device=ordered.device)[:, None], 0.0)
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        outside = ((before >= self.top_p) & (self.top_p < 1)) | (ordered < self.min_p * ordered[:, :1])
        return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first place whose cumulated weight exceeds ``uniform`` of the total; never one of weight 0.

    A large vocabulary is searched by blocks, then inside one of them: sums of blocks are all that is computed of the rest.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= FLAT:
        return _search(weights, uniform)[0]
    whole = vocabulary - vocabulary % BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    block, rest = _search(sums, uniform)
    places = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill(places >= vocabulary, 0.0)
    return block * BLOCK + _search(inside, rest)[0]


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The place that ``uniform`` falls on, and how far into it, of 1: ``(rows,)`` each."""
    cumulated = weights.double().cumsum(-1)
    total = cumulated[:, -1]
    wanted = (uniform * total).clamp(min=0.0).minimum(torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulated, wanted[:, None], right=True).clamp(max=weights.shape[-1] - 1)  # nan is beyond all
    width = weights.gather(-1, place).double()
    rest = (wanted[:, None] - (cumulated.gather(-1, place) - width)) / width
    return place[:, 0], rest[:, 0].clamp(0.0, 1.0)
