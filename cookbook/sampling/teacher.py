"""On-policy distillation: a teacher's logprobs of the tokens that the student has sampled, and the advantages from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cookbook.errors import RolloutError
from cookbook.futures import Future, done
from cookbook.protocols import Sampler
from cookbook.types import Array, Datum


@dataclass(frozen=True)
class Teacher:
    """A :class:`~cookbook.protocols.Reference` whose weights are those of a sampler: another model, perhaps on a server."""

    sampler: Sampler

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Array]]:
        """Compute a float32 array of shape ``(T,)`` per datum, at temperature 1.

        Raises:
            RolloutError: a sequence is longer than the teacher's context, or holds a token that the teacher lacks.
        """
        # All requests before the first result: they are computed together.
        rows = [[*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])] for datum in data]
        pending = [self.sampler.compute_logprobs(row) for row in rows]
        # Nothing predicts the first token.
        try:
            return done([np.asarray(future.result()[1:], dtype=np.float32) for future in pending])
        except RolloutError as error:
            raise RolloutError(f"recipe.teacher: {error}") from None


def reverse_kl(data: Sequence[Datum]) -> tuple[list[Datum], dict[str, float]]:
    """Return ``data`` with the advantages ``f - q``, and the metric ``kl/student_teacher_k1``.

    Args:
        data: datums with ``reference_logprobs``, the teacher's ``f``, and ``sampling_logprobs``, the student's ``q``. Tokens of
            weight 0 get the advantage 0.

    Returns:
        The datums, whose advantages have shape ``(T,)``, and the mean of ``q - f`` over all sampled tokens, in nats: an
        unbiased estimate of the reverse KL divergence per token, unless top-k, top-p or min-p filter the draws. Without data
        there are no metrics.

    Raises:
        RolloutError: the teacher gives a sampled token no finite logprob.
    """
    taught: list[Datum] = []
    total, count = 0.0, 0
    for datum in data:
        inputs = {
            name: datum.loss_fn_inputs[name].to_numpy() for name in ("reference_logprobs", "sampling_logprobs", "weights")
        }
        is_sampled = inputs["weights"] != 0
        advantages = np.where(is_sampled, inputs["reference_logprobs"] - inputs["sampling_logprobs"], 0.0)
        if not np.isfinite(advantages).all():
            token = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[~np.isfinite(advantages)][0])
            raise RolloutError(
                f"recipe.teacher: gives token {token}, which the model has sampled, no finite logprob; choose another teacher"
            )
        taught.append(datum.with_inputs(advantages=advantages))
        total, count = total - float(advantages.sum()), count + int(is_sampled.sum())
    return taught, {"kl/student_teacher_k1": total / count} if count else {}
