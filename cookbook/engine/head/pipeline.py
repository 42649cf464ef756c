"""Pipeline parallelism: any loss of log-probabilities with a schedule of ``torch.distributed.pipelining``.

The last stage returns hidden states. For cross entropy, pass :class:`LinearCrossEntropyLoss` to the schedule as ``loss_fn``;
this module is not needed. Any other loss needs two rounds, because a schedule calls ``loss_fn`` with one micro-batch at a time,
while the loss may compare datums of the whole batch. The first round computes all log-probabilities, the second round the
gradients::

    head = LinearCrossEntropyLoss(part.lm_head) if last else None
    pipeline = PipelineLoss(head, num_rows=8, num_tokens=128)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=pipeline, scale_grads=False)
    result = pipeline.forward_backward(schedule, data, loss)  # on every rank; the last stage's rank gets value and metrics
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cookbook.engine.head.fused_loss import LinearCrossEntropyLoss, hidden_states_of
from cookbook.engine.loss_gradient import LossFunction, LossGradient, accumulate, loss_gradient
from cookbook.errors import ConfigError, DataError
from cookbook.losses.base import Loss
from cookbook.types import Datum

__all__ = ["PipelineLoss"]


class PipelineSchedule(Protocol):
    """Methods of a ``torch.distributed.pipelining`` schedule that :class:`PipelineLoss` calls."""

    scale_grads: bool

    def step(self, *args: Tensor, target: Tensor, return_outputs: bool) -> object: ...

    def eval(self, *args: Tensor, target: Tensor, return_outputs: bool) -> object: ...


class PipelineLoss:
    """The ``loss_fn`` of a pipeline schedule, for any ``loss(data, logprobs) -> (scalar, metrics)``.

    ``head``: the output layer, on the rank of the last stage; None on the other ranks. Its layer must be part of the last
    stage's module. To use your own :class:`~cookbook.FusedOutputLoss`, pass it as ``impl`` of the head. ``device``: device of
    the first stage.

    All batches have one shape, ``(num_rows, num_tokens)``: one datum per row, padded at the end. There is no packing and no
    prefix sharing. Rows without a datum are computed and do not affect the result. The model must be causal, and must not have
    a loss that depends on padding, such as a router loss.

    Each micro-batch runs forward twice, once per round, and must give the same values, so the model must not use dropout.
    """

    def __init__(
        self, head: LinearCrossEntropyLoss | None, num_rows: int, num_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.head = head
        self.shape = (num_rows, num_tokens)
        self.device = device
        self._data: Sequence[Datum] = ()
        self._needs_entropy = False
        # Log-probabilities and entropies by datum, from the first round.
        self._scores: dict[int, tuple[Tensor, Tensor | None]] = {}
        # dL/dlogprob by datum, for the second round; None during the first round.
        self._gradient: LossGradient | None = None

    def forward(self, schedule: PipelineSchedule, data: Sequence[Datum]) -> list[Tensor] | None:
        """Return the log-probabilities of each datum's ``target_tokens``, in their shape; None except on the last stage's rank.

        Call this method on every rank with the same ``data``.

        Raises:
            DataError: more datums than rows, a datum longer than a row, or targets that do not match the datum's tokens.
            ConfigError: ``loss_fn`` of the schedule is another object.
        """
        self._first_round(schedule, data)
        return None if self.head is None else [self._scores[index][0] for index in range(len(data))]

    def forward_backward(
        self, schedule: PipelineSchedule, data: Sequence[Datum], loss: LossFunction
    ) -> tuple[float, Mapping[str, float]] | None:
        """Add the gradient of ``loss`` to every parameter's ``grad``.

        Call this method on every rank with the same ``data``. The loss runs once, on the last stage's rank, where its own
        parameters get their gradients. The caller applies ``loss.prepare``, and sums the gradients of tied embeddings over the
        stages.

        Returns:
            Value and metrics of the loss on the last stage's rank; None on the other ranks.

        Raises:
            ConfigError: the schedule divides gradients, or its ``loss_fn`` is another object.
            DataError: the conditions of :meth:`forward`, or an input of the loss is missing.
            BackendError: the loss returns no scalar, or has no gradient. Only the last stage's rank raises.
            NonFiniteError: the loss or its gradient is not finite. Only the last stage's rank raises.
        """
        if schedule.scale_grads:
            raise ConfigError(
                "schedule: scale_grads must be False, got True; pass scale_grads=False to the schedule: the loss covers the "
                "whole batch, and its gradient must not be divided by the number of micro-batches"
            )
        if isinstance(loss, Loss):
            loss.check_data(data)
        self._needs_entropy = isinstance(loss, Loss) and loss.needs_entropy
        tokens, row_indices = self._first_round(schedule, data)
        if self.head is not None:
            self._gradient = self._gradient_of(loss)
        gradient = self._gradient
        try:
            schedule.step(tokens, target=row_indices, return_outputs=False)
        finally:
            self._gradient, self._needs_entropy = None, False
        if gradient is None:
            return None
        accumulate(gradient.parameter_gradients)
        return float(gradient.value), gradient.metrics

    def __call__(self, hidden_states: object, target: Tensor) -> Tensor:
        """Called by the schedule with each micro-batch; ``target``: the rows of the batch that it holds, ``(B,)``.

        First round: store the scores and return 0. Second round: return ``sum(dL/dlogprob * logprob)``, whose gradient is that
        of the loss.
        """
        hidden = hidden_states_of(hidden_states)
        if self.head is None:
            raise ConfigError("head: must be a LinearCrossEntropyLoss on the rank of the last stage, got None; pass its layer")
        row_indices = target.tolist()
        # Datum i is in row i; rows beyond the last datum are empty.
        indices = [index for index in row_indices if index < len(self._data)]
        rows, targets, temperature = self._tokens(hidden, row_indices)
        if self._gradient is None:
            logprobs, entropy = self.head.scores(rows, targets, temperature, entropy=self._needs_entropy)
            entropies = [None for _ in indices] if entropy is None else self._by_datum(indices, entropy)
            self._scores.update(zip(indices, zip(self._by_datum(indices, logprobs), entropies, strict=True), strict=True))
            return hidden.new_zeros(())
        grads = torch.cat([hidden.new_empty(0), *(self._gradient.logprobs[index].reshape(-1) for index in indices)])
        if self._gradient.entropy is None:
            active = grads != 0
            active_temperature = None if temperature is None else temperature[active]
            return self.head.weighted_sum(rows[active], targets[active], grads[active], active_temperature)
        entropy_grads = torch.cat([hidden.new_empty(0), *(self._gradient.entropy[index] for index in indices)])
        logprobs, entropy = self.head.scores(rows, targets, temperature, entropy=True)
        assert entropy is not None
        return (grads * logprobs).sum() + (entropy_grads * entropy).sum()

    def _first_round(self, schedule: PipelineSchedule, data: Sequence[Datum]) -> tuple[Tensor, Tensor]:
        """Score all datums. Return the arguments of the schedule: tokens ``(num_rows, num_tokens)`` and row indices."""
        tokens, row_indices = self._padded(data).to(self.device), torch.arange(self.shape[0])
        self._data, self._scores = data, {}
        with torch.no_grad():
            schedule.eval(tokens, target=row_indices, return_outputs=False)
        if self.head is not None and len(self._scores) < len(data):
            raise ConfigError("schedule: loss_fn is another object; construct the schedule with loss_fn=this PipelineLoss")
        return tokens, row_indices

    def _gradient_of(self, loss: LossFunction) -> LossGradient:
        scores = [self._scores[index] for index in range(len(self._data))]
        logprobs = dict(enumerate(row for row, _ in scores))
        entropies = {index: entropy for index, (_, entropy) in enumerate(scores) if entropy is not None}
        return loss_gradient(loss, self._data, logprobs, entropies if self._needs_entropy else None)

    def _padded(self, data: Sequence[Datum]) -> Tensor:
        num_rows, num_tokens = self.shape
        if not 0 < len(data) <= num_rows:
            raise DataError(f"data: must hold 1 to num_rows={num_rows} datums, got {len(data)}; split or join batches")
        tokens = torch.zeros(self.shape, dtype=torch.long)
        for index, datum in enumerate(data):
            ids = torch.tensor(datum.model_input.to_ints())
            if len(ids) > num_tokens:
                raise DataError(f"datum {index}: must have at most num_tokens={num_tokens} tokens, got {len(ids)}; shorten it")
            targets = datum.loss_fn_inputs.get("target_tokens")
            if targets is None or len(targets) != len(ids):
                got = "nothing" if targets is None else f"{len(targets)}"
                raise DataError(
                    f"datum {index}: target_tokens must have {len(ids)} positions, got {got}; give one target per input token"
                )
            tokens[index, : len(ids)] = ids
        return tokens

    def _tokens(self, hidden: Tensor, row_indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states ``(N, H)``, targets ``(N,)`` and temperatures ``(N,)`` of a micro-batch's datums, in order."""
        rows, targets, temperatures = [hidden[0, :0]], [torch.empty(0, dtype=torch.long)], [torch.empty(0)]
        for row, index in zip(hidden, row_indices, strict=True):
            if index < len(self._data):
                inputs = self._data[index].loss_fn_inputs
                of_datum = inputs["target_tokens"].to_torch().long()
                # K targets at one position share its hidden state.
                rows.append(row[: len(of_datum)].repeat_interleave(of_datum[0].numel(), dim=0))
                targets.append(of_datum.reshape(-1))
                temperature = float(inputs["temperature"].array) if "temperature" in inputs else 1.0
                temperatures.append(torch.full((of_datum.numel(),), temperature))
        divisors = torch.cat(temperatures).to(hidden.device)
        return torch.cat(rows), torch.cat(targets).to(hidden.device), divisors if (divisors != 1).any() else None

    def _by_datum(self, indices: Sequence[int], values: Tensor) -> list[Tensor]:
        shapes = [torch.Size(self._data[index].loss_fn_inputs["target_tokens"].shape) for index in indices]
        parts = torch.split(values.detach(), [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
