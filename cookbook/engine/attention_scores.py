"""Attention score by score, in plain matrix products: for what no fused kernel of torch knows.

That is soft-capped logits and sinks, and tokens that are decoded side by side: there a fused kernel would read a prompt once
for every sample of it, and computes a third as fast as two products even where nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad


@dataclass(frozen=True)
class Rule:
    """What happens between the scores of a query and its weights. ``sinks``: one logit a head."""

    scale: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """``(N, heads, queries, keys)`` -> the same, summing to 1 over the keys, or to less beside a sink.

        ``mask``, true where a key is seen, is of a shape that fits.
        """
        keys = scores.shape[-1]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:  # not minus infinity: padding to the left of a prompt sees nothing, and must not become nan
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = self.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., :keys]


def attend_by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, rule: Rule) -> Tensor:
    """``(N, heads, queries, D)``, ``(N, key heads, keys, D)`` twice -> ``(N, heads, queries, D)``."""
    count, heads, queries, _ = query.shape
    grouped = query.reshape(count, key.shape[1], -1, queries, query.shape[-1])  # heads that read the same keys together
    scores = (grouped @ key.transpose(-1, -2)[:, :, None] * rule.scale).flatten(1, 2)
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = rule.weights(scores, mask).to(value.dtype)
    weights = drop(weights, rule.dropout) if rule.dropout else weights
    out: Tensor = weights.view(count, key.shape[1], -1, queries, key.shape[2]) @ value[:, :, None]
    return out.view(count, heads, queries, -1)


@dataclass(frozen=True)
class Prompts:
    """What rows of one new token each read before it: prompts, every one the beginning of several rows, and their own tokens.

    ``layers``: keys and values of the prompts, ``(prompts, key heads, columns, D)`` each, and of the rows' own tokens but the
    last ``written``, the new one among them. ``members``, shape (prompts * slots,): the rows of every prompt, filled up with
    any to the most that one has. ``places``, shape (rows,): where each row is among them. Both are None where the rows stand
    in that order already. ``mask``, shape (rows, 1, 1, columns of prompts and rows): true where a column holds a token of the
    row; None where all do.
    """

    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    written: int
    slots: int
    members: Tensor | None
    places: Tensor | None
    mask: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, rule: Rule) -> Tensor:
        """``(rows, heads, 1, D)`` -> ``(rows, heads, 1, D)``.

        ``key`` and ``value``: the rows' newest, ``(rows, key heads, columns, D)``, of which ``written`` hold a token, and the
        rest numbers. They are read nevertheless, and not scored: reading all is faster than reading with gaps.
        """
        prompt_keys, prompt_values, keys, values = self.layers[layer]
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1]) * rule.scale
        before = self._of_rows(self._of_prompts(grouped) @ prompt_keys.transpose(-1, -2))
        own, newest = grouped @ keys.transpose(-1, -2), grouped @ key.transpose(-1, -2)
        scores = torch.cat([before, own, newest[..., : self.written]], -1)
        weights = rule.weights(scores.flatten(1, 2).unsqueeze(2), self.mask).view_as(scores)
        sizes = [before.shape[-1], own.shape[-1], self.written]
        of_prompts, of_own, of_newest = torch.split(weights, sizes, -1)
        of_newest = pad(of_newest, (0, key.shape[2] - self.written))
        out: Tensor = self._of_rows(self._of_prompts(of_prompts) @ prompt_values) + of_own @ values + of_newest @ value
        return out.reshape(*query.shape[:3], value.shape[-1])

    def _of_prompts(self, x: Tensor) -> Tensor:
        """``(rows, key heads, queries, N)`` -> ``(prompts, key heads, slots * queries, N)``."""
        x = x if self.members is None else x.index_select(0, self.members)
        return x.view(-1, self.slots, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _of_rows(self, x: Tensor) -> Tensor:
        """The way back."""
        x = x.view(*x.shape[:2], self.slots, -1, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return x if self.places is None else x.index_select(0, self.places)
