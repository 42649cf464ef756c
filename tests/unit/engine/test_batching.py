"""Plans of passes: every datum is in one pass, shared prefixes save tokens, and planning is fast and repeatable."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from cookbook.engine.attention import AttentionBlock, AttentionLayout
from cookbook.engine.batch import collate as collation
from cookbook.engine.batch import plan as planning
from cookbook.engine.batch.collate import collate
from cookbook.engine.batch.plan import MOST_COPIES, WORTH_SHARING, PackingSupport, PrefixGroup, plan, prefix_groups
from cookbook.types import Datum, ModelInput

CPU = torch.device("cpu")
PADDED = PackingSupport(packed=False, shared=False)
PACKED = PackingSupport(packed=True, shared=False)
SHARED = PackingSupport()
ALONE = PackingSupport(packed=False, shared=False, reason="rows change each other", padded=False)


def datum(tokens, targets=None):
    tokens = np.asarray(tokens)
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens if targets is None else targets})


def of_lengths(*lengths):
    """Datums that begin differently."""
    return [datum(np.arange(length) + 1000 * number) for number, length in enumerate(lengths)]


def families(*shapes, seed=0):
    """For every (prompt, completions) a prompt of its own and completions of these lengths; shuffled."""
    rng = np.random.default_rng(seed)
    data = []
    for number, (prompt, completions) in enumerate(shapes):
        prefix = [number, *rng.integers(0, 99, prompt - 1)]
        data += [datum([*prefix, 100 + place, *rng.integers(0, 99, rest - 1)]) for place, rest in enumerate(completions)]
    rng.shuffle(data)
    return data


def sequences(data):
    return {index: np.array(one.model_input.tokens) for index, one in enumerate(data)}


DATA = {
    "one": of_lengths(7),
    "ragged": of_lengths(3, 90, 31, 31, 4, 77, 12, 1),
    "groups": families((40, [9, 3, 12, 1]), (25, [10] * 3), (8, [30, 31]), (60, [5])),
    "twins": [*of_lengths(20, 20), *of_lengths(20, 20)],
    "one begins the other": [datum(range(30)), datum(range(40)), datum(range(3))],
    "two kinds": [*of_lengths(9, 4), *(datum(range(length), np.zeros((length, 2), int)) for length in (6, 8))],
}


@pytest.mark.parametrize("layouts", [PADDED, PACKED, SHARED, ALONE], ids=["padded", "packed", "shared", "alone"])
@pytest.mark.parametrize("budget", [1, 64, 100, 10_000])
@pytest.mark.parametrize("name", DATA)
def test_every_token_of_every_datum_stands_where_its_places_say(name, budget, layouts):
    data = DATA[name]
    batches = plan(data, budget, layouts).batches
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(data)))
    for batch in batches:
        inputs = collate(data, batch, CPU)
        assert inputs.input_ids.numel() == batch.num_tokens
        assert batch.num_tokens <= budget or len(batch.indices) == 1
        assert len({data[index].loss_fn_inputs["target_tokens"].array.ndim for index in batch.indices}) == 1
        expected = np.concatenate([data[index].model_input.tokens for index in batch.indices])
        assert np.array_equal(inputs.input_ids.flatten()[inputs.flat_indices], expected)
        if inputs.position_ids is not None:
            expected = np.concatenate([np.arange(data[index].model_input.length) for index in batch.indices])
            assert np.array_equal(inputs.position_ids.flatten()[inputs.flat_indices], expected)


@pytest.mark.parametrize("layouts", [PACKED, SHARED], ids=["packed", "shared"])
@pytest.mark.parametrize("name", DATA)
def test_every_token_reads_its_own_sequence_up_to_itself(name, layouts):
    """The layout as a table of the tokens that each token attends to, run by run, against the datums."""
    data = DATA[name]
    for batch in plan(data, 10_000, layouts).batches:
        inputs = collate(data, batch, CPU)
        seen = reads(inputs.layout, inputs.input_ids.numel())
        places = iter(torch.split(inputs.flat_indices, [data[index].model_input.length for index in batch.indices]))
        for own in places:
            for position, place in enumerate(own.tolist()):
                assert seen[place] == own[: position + 1].tolist()


def reads(layout, num_tokens):
    """By place, the places it sees."""
    index = torch.arange(num_tokens) if layout.key_index is None else layout.key_index
    queries, keys, seen = 0, 0, {}
    for block in layout.blocks:
        for _ in range(block.count):
            for query in range(block.queries):
                seen[queries + query] = index[keys : keys + block.keys - block.queries + query + 1].tolist()
            queries, keys = queries + block.queries, keys + block.keys
    assert (queries, keys) == (num_tokens, len(index))
    starts = [0, *np.cumsum([block.queries for block in layout.blocks for _ in range(block.count)])]
    key_starts = [0, *np.cumsum([block.keys for block in layout.blocks for _ in range(block.count)])]
    assert [one.tolist() for one in layout.offsets] == [starts, key_starts]  # the same, as the kernel for GPUs is told
    return seen


def test_offsets_of_a_single_block():
    queries, keys = AttentionLayout((AttentionBlock(3, 2, 5),), None, CPU).offsets
    assert queries.tolist() == [0, 2, 4, 6] and keys.tolist() == [0, 5, 10, 15]
    assert queries.dtype == keys.dtype == torch.int32


def test_sequences_of_one_length_are_attended_to_in_one_call():
    data = of_lengths(5, 8, 5, 8, 5)
    (batch,) = plan(data, 1000, PACKED).batches
    assert collate(data, batch, CPU).layout.blocks == (AttentionBlock(3, 5, 5), AttentionBlock(2, 8, 8))


def test_packed_passes_hold_no_padding_and_are_nearly_full():
    rng = np.random.default_rng(0)
    data = of_lengths(*rng.integers(10, 200, 300).tolist())
    total = sum(one.model_input.length for one in data)
    batches = plan(data, 1000, PACKED).batches
    assert sum(batch.num_tokens for batch in batches) == total
    assert len(batches) == -(-total // 1000)


def test_padded_rows_are_of_similar_length():
    rng = np.random.default_rng(0)
    data = of_lengths(*np.clip(rng.lognormal(5, 0.7, 200), 32, 512).astype(int).tolist())
    made = plan(data, 4096, PADDED)
    total = sum(one.model_input.length for one in data)
    assert made.layout == "padded"
    assert sum(batch.num_tokens for batch in made.batches) < 1.15 * total


# ---- shared prefixes ----------------------------------------------------------------------------------------------


def found(data, budget=10_000):
    """Groups as sets, the largest first."""
    return sorted(
        (sorted(group.members), group.prefix) for group in prefix_groups(sequences(data), budget) if len(group.members) > 1
    )


def test_completions_of_a_prompt_share_it_and_nothing_else():
    shared = [7] * 30  # a common first part, as in chats; sharing pays for the prompts only
    data = [datum([*shared, *one.model_input.tokens]) for one in families((40, [9, 3, 12, 1]), (25, [10] * 3))]
    sizes = sorted((len(members), prefix) for members, prefix in found(data))
    assert sizes == [(3, 55), (4, 70)]


def test_all_share_when_that_saves_most():
    data = [datum([*range(50), number, number, number]) for number in range(5)]
    assert found(data) == [([0, 1, 2, 3, 4], 50)]


SHAPES = [(512, 128, 2), (128, 512, 8), (100, 100, 2), (66, 100, 2), (64, 100, 3)]


@pytest.mark.parametrize(("prompt", "completion", "count"), SHAPES)
def test_a_prefix_is_shared_if_it_pays(prompt, completion, count):
    ratio = count * (prompt + completion) / (prompt + count * completion)
    assert bool(found(families((prompt, [completion] * count)))) == (ratio >= WORTH_SHARING)


def test_one_may_begin_the_other_and_twins_are_one():
    assert found([datum(range(30)), datum(range(40))]) == [([0, 1], 30)]
    assert found([datum([5, 6, 7])] * 3) == [([0, 1, 2], 3)]


def test_a_group_too_large_for_the_budget_is_parted_and_its_prompt_repeated():
    data = families((50, [20] * 10))
    parts = prefix_groups(sequences(data), budget=120)  # 50 + 3 * 20 = 110
    assert sorted(len(group.members) for group in parts) == [1, 3, 3, 3]
    assert prefix_groups(sequences(data), budget=60) == [
        PrefixGroup((group.members[0],), 70) for group in prefix_groups(sequences(data), 60)
    ]


@pytest.mark.parametrize("data", [[datum(range(100))] * 50, families(*[(90, [2] * 10)] * 8)], ids=["equal", "prompts"])
def test_a_pass_has_a_limited_number_of_copies(data):
    """The output head computes logits for the tokens of every datum, also where the layers compute a prefix once."""
    batches = plan(data, 120, SHARED).batches
    copies = [sum(data[index].model_input.length for index in batch.indices) for batch in batches]
    assert max(copies) <= MOST_COPIES * 120 and min(copies[:-1]) > MOST_COPIES * 120 * 0.7
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(data)))


def test_parts_too_small_to_pay_share_nothing():
    data = families((25, [60] * 10))
    assert found(data) != []
    assert found(data, budget=25 + 2 * 60) == []


def test_a_prefix_of_all_that_does_not_pay_leaves_the_prefix_of_a_pair_that_does():
    """A group of all would save 41 * 12 of 4,200 tokens: more than the pair's 90, but too small a part of 4,200."""
    data = [datum([*range(12), 1000 + number, *range(87)]) for number in range(40)]
    data += [datum([*range(90), number, *range(9)]) for number in (2000, 2001)]
    assert found(data) == [([40, 41], 90)]


def test_nested_prefixes_of_any_depth():
    """Every datum extends the one before, as turns of a conversation do: recursion would be as deep as the number of datums."""
    data = dict(enumerate(np.arange(length) for length in range(1, 1500)))
    parts = prefix_groups(data, 10**9)
    assert sorted(index for group in parts for index in group.members) == list(range(len(data)))
    computed = sum(group.num_tokens({index: len(one) for index, one in data.items()}) for group in parts)
    assert computed < 0.6 * sum(map(len, data.values()))


# Calls of functions that a plan of 512 datums may take; it takes half of them.
MOST_CALLS = 42_000

# ---- speed and sameness ------------------------------------------------------------------------------------------------


def test_a_plan_is_a_function_of_the_call():
    data = families((40, [9, 3, 12, 1]), (25, [10] * 3), (8, [30, 31]))
    assert plan(data, 100, SHARED) == plan(list(data), 100, SHARED)


def test_what_was_chosen_is_explained():
    assert plan(families((40, [5, 5])), 100, SHARED).layout == "shared"
    assert plan(of_lengths(40, 20), 100, SHARED).layout == "packed"
    refused = plan(of_lengths(40, 20), 100, PackingSupport(False, False, "Mamba has layers of linear_attention"))
    assert (refused.layout, refused.reason) == ("padded", "Mamba has layers of linear_attention; 33% padding in this call")
    alone = plan(of_lengths(40, 20), 100, ALONE)
    assert (alone.layout, alone.reason) == ("one per pass", "rows change each other")
    assert [len(batch.indices) for batch in alone.batches] == [1, 1]


def test_planning_takes_milliseconds():
    """512 datums of 512 tokens, 8 a prompt: 6 ms. The calls of functions are counted, which no load of the machine changes."""
    data = families(*[(384, [128] * 8)] * 64)
    calls = []
    sys.setprofile(lambda frame, event, function: calls.append(event) if event in ("call", "c_call") else None)
    try:
        plan(data, 8192, SHARED)
    finally:
        sys.setprofile(None)
    assert len(calls) < MOST_CALLS


def test_the_drawn_example_of_the_docstrings_is_what_the_code_does():
    """Rows of the drawing of plan, tokens computed, and the row that collate draws with its positions and indices."""
    data = [datum([ord(letter) for letter in text]) for text in ("PPPPaaa", "bbbbb", "PPPPcc", "ddd", "PPPPe")]
    layouts = [PackingSupport(False, False), PackingSupport(True, False), PackingSupport()]
    plans = [plan(data, 14, support).batches for support in layouts]
    assert [[batch.indices for batch in batches] for batches in plans] == [
        [[0, 2], [1, 4], [3]],
        [[0, 2], [1, 4, 3]],
        [[0, 2, 4, 3], [1]],
    ]
    assert [sum(batch.num_tokens for batch in batches) for batches in plans] == [27, 26, 18]
    assert planning.__doc__ is not None and collation.__doc__ is not None
    assert "computed 27 tokens (1 pad)   26 tokens                        18 tokens" in planning.__doc__
    drawn = [line.split()[1:] for line in collation.__doc__.splitlines() if line.startswith(("    row ", "    position_ids"))]
    inputs = collate(data, plans[2][0], torch.device("cpu"))
    assert inputs.position_ids is not None
    assert drawn == [[chr(token) for token in inputs.input_ids[0].tolist()], list(map(str, inputs.position_ids[0].tolist()))]
    places = inputs.flat_indices.tolist()
    for index, count in ((0, 7), (2, 6), (4, 5), (3, 3)):
        assert f"datum {index}: {' '.join(map(str, places[:count]))}" in collation.__doc__
        del places[:count]
