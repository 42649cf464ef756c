"""Every loss with every kind of model and option on several ranks: a third of the cases of ``tools/rank_matrix.py``.

Each loss meets each option. One of the six groups runs in CI, another one each week; the rest run at night.
"""

from __future__ import annotations

import pytest
import rank_matrix
from marks import rotating
from rankcases import differs, save_models


@pytest.mark.parametrize(("count", "shard"), rotating(rank_matrix.GROUPS, 1))
def test_ranks_compute_every_loss_with_every_option(count, shard, tmp_path):
    models = save_models(tmp_path / "models")
    place = rank_matrix.GROUPS.index((count, shard))
    chosen = [
        one
        for number, (one, other) in enumerate(
            zip(*(rank_matrix.cases(shard, dtype) for dtype in rank_matrix.DTYPES), strict=True)
        )
        for one in ([one, other][(number // 3 + place) % 2],)
        if (number + place) % 3 == 0
    ]
    found = rank_matrix.results(count, chosen, models, tmp_path / "ranks")
    wrong = [f"{one['name']}: {found[one['name']]}" for one in chosen if differs(one, found[one["name"]], count)]
    assert not wrong, "\n".join(wrong)
