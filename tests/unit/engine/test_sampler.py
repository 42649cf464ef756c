"""Samples are draws from the model's distribution, each a function of its own seed, from the weights they were asked of."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from concurrent import futures

import numpy as np
import pytest
import tiny
import torch
from waiting import WAIT_S

from cookbook.backends.local import sample_queue
from cookbook.backends.local.sample_queue import SampleQueue
from cookbook.backends.worker import Account, JobQueue, Lane, Worker
from cookbook.deployments.embedded import EmbeddedConfig
from cookbook.engine import capabilities
from cookbook.engine.decoding import decoder, kv_cache
from cookbook.engine.decoding.decoder import Decoder, SlicedSampling, prefill_parts, sample, stream
from cookbook.engine.decoding.kv_cache import InPlaceCache, PromptCache
from cookbook.engine.decoding.requests import SampleRequest, StopCondition, completing_tokens, draw, sample_states
from cookbook.engine.decoding.rows import METHODS
from cookbook.engine.fast_path import FastPathError
from cookbook.engine.model import LanguageModel, ModelConfig
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

ADAM = AdamParams(learning_rate=1e-2)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [1], [11, 12, 13]]
FREE = {"max_tokens": 8, "stop": []}


@pytest.fixture(scope="module")
def model(tiny_folder, request):
    from cookbook.engine.model import ModelConfig, load

    found = load(ModelConfig(str(tiny_folder)), torch.device("cpu"), 0)
    if getattr(request, "param", "shared") == "shared":
        # Asked as an engine does: the model has cookbook's attention from here on.
        assert capabilities.packing_support(found).shared
    return found


# Samples of a prompt read its keys and values together, or, where the model has kept its own attention, a copy each.
either_way = pytest.mark.parametrize("model", ["shared", "copied"], indirect=True, scope="module")


def test_a_version_that_is_sampled_from_keeps_its_count_of_seeds(monkeypatch):
    monkeypatch.setattr(sample_queue, "MAX_VERSIONS", 2)
    with contextlib.closing(Worker(1)) as worker:
        queue = SampleQueue(worker, 64)
        assert [queue.next_number(step) for step in (0, 1, 0, 2, 0)] == [1, 1, 2, 1, 3]


def test_a_callback_of_a_dropped_sample_may_ask_for_another():
    """The job is dropped while the queue sends it, after another thread has added a callback to the sample."""
    added = []

    class Dropping(Lane):
        def submit_steps(self, job, future=None):
            sample.add_done_callback(lambda _: added.append(queue.add(model, 0, [2])))
            gate = threading.Event()
            worker.submit(gate.wait)
            submitted = super().submit_steps(job, future)
            self.drop()
            gate.set()
            futures.wait([submitted])
            return submitted

    def model():
        pytest.fail("a dropped job was computed")

    with contextlib.closing(Worker(1)) as worker:
        queue = SampleQueue(Dropping(worker._schedule, worker.thread, JobQueue(Account())), 64)
        sample = queue.add(model, 0, [1])
        thread = threading.Thread(target=queue.flush, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert added and isinstance(sample.failure(), BackendError)


def ask(model, prompts, num_samples=1, seed=0, max_batch_tokens=100_000, **params):
    requests = [SampleRequest(prompt, num_samples, SamplingParams(**{**FREE, **params}), seed) for prompt in prompts]
    return sample(model, requests, 0, max_batch_tokens)


def logprobs_at(model, tokens):
    with torch.no_grad():
        return model.network(input_ids=torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1).numpy()


def scaled(logprobs, temperature):
    """The logprobs of the same logits divided by ``temperature``."""
    logits = logprobs / temperature
    return logits - np.log(np.exp(logits).sum())


# ---- the distribution ------------------------------------------------------------------------------------------------


@either_way
@pytest.mark.parametrize("max_batch_tokens", [1, 40, 100_000])
def test_greedy_is_what_generate_does(model, max_batch_tokens):
    found = ask(model, PROMPTS, num_samples=2, temperature=0.0, max_tokens=12, max_batch_tokens=max_batch_tokens)
    for prompt, samples in zip(PROMPTS, found, strict=True):
        expected = model.network.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert [one.tokens for one in samples] == [expected[0, len(prompt) :].tolist()] * 2


def frequencies(model, **params):
    """Return how often each token was drawn first in 4000 draws, and its logprob."""
    drawn = ask(model, [[5, 6, 7]], num_samples=4000, max_tokens=1, **params)[0]
    counts = np.bincount([one.tokens[0] for one in drawn], minlength=tiny.VOCABULARY)
    return counts, logprobs_at(model, [5, 6, 7])


def chi_square_per_degree(counts, probabilities):
    """About 1 when the counts are draws; tokens too rare to be judged alone are taken together."""
    expected = counts.sum() * probabilities
    often = expected >= 5
    found = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    return ((found - wanted) ** 2 / wanted).sum() / (len(found) - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(model, temperature):
    counts, logprobs = frequencies(model, temperature=temperature)
    at = {t: np.exp(scaled(logprobs, t)) for t in (temperature, 0.5)}
    # With k degrees of freedom the ratio is 1 +- sqrt(2 / k): here about 30 to 150, so 1.7 is beyond 3 sigma.
    assert chi_square_per_degree(counts, at[temperature]) < 1.7
    assert chi_square_per_degree(counts, at[0.5]) > 3  # the test can tell


def test_top_k_and_top_p_keep_what_they_should(model):
    probabilities = np.exp(logprobs_at(model, [5, 6, 7]))
    order = np.argsort(-probabilities)
    cumulated = np.cumsum(probabilities[order])
    nucleus = set(order[: int(np.searchsorted(cumulated, 0.6)) + 1].tolist())
    cases = {
        (3, 1.0): set(order[:3].tolist()),
        (-1, 0.6): nucleus,
        (0, 0.6): nucleus,
        (1, 1.0): {int(order[0])},
        (-1, 1e-6): {int(order[0])},
    }
    half = float(probabilities[order[:4]].sum()) / 2  # top-p reads what top-k left
    inside = int(np.searchsorted(np.cumsum(probabilities[order[:4]]), half)) + 1
    cases[(4, 0.5)] = set(order[:inside].tolist())
    for (top_k, top_p), allowed in cases.items():
        counts, _ = frequencies(model, top_k=top_k, top_p=top_p)
        assert set(np.flatnonzero(counts).tolist()) == allowed, (top_k, top_p)
        kept = np.where(np.isin(np.arange(tiny.VOCABULARY), list(allowed)), probabilities, 0)
        if len(allowed) > 1:
            assert chi_square_per_degree(counts, kept / kept.sum()) < 4  # few degrees: a looser bound


def test_min_p_keeps_what_is_likely_enough_relative_to_the_maximum(model):
    probabilities = np.exp(logprobs_at(model, [5, 6, 7]))
    order = np.argsort(-probabilities)
    share = float(probabilities[order[4]] / probabilities[order[0]]) * 0.999
    for others in ({}, {"top_k": 50}, {"top_p": 0.999}):
        counts, _ = frequencies(model, min_p=share, **others)
        assert set(np.flatnonzero(counts).tolist()) == set(order[:5].tolist()), others


def test_rows_of_a_batch_keep_their_own_filters(model):
    filters = [{}, {"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.3}, {"top_k": 5, "temperature": 0.5}, {"temperature": 0.0}]
    requests = [SampleRequest(PROMPTS[0], 2, SamplingParams(**{**FREE, **given}), seed=9) for given in filters]
    for given, found in zip(filters, sample(model, requests, 0, 100_000), strict=True):
        alone = ask(model, [PROMPTS[0]], num_samples=2, seed=9, **given)[0]
        assert [one.tokens for one in found] == [one.tokens for one in alone], given


def test_a_rollout_asks_for_what_its_config_says():
    given = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    assert RolloutConfig(**given, stop=["x"]).sampling([258]) == SamplingParams(**given, stop=[258, "x"])
    with pytest.raises(ConfigError, match="min_p must be between 0 and 1, got 2"):
        RolloutConfig(min_p=2)


@pytest.mark.parametrize("vocabulary", [7, 1024, 1025, 5000])
def test_a_draw_is_where_the_cumulated_weights_pass_the_random_number(vocabulary):
    """For vocabularies of any size, multiples of a block or not."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.1, size=(300, vocabulary)).astype(np.float32)
    weights[:, rng.random(vocabulary) < 0.3] = 0
    weights[:100, : vocabulary // 2] = 0  # whole blocks without weight
    weights[:, -2:] = 0
    weights[:, vocabulary // 2] = 0.1
    uniform = rng.random(300)
    uniform[::3] = 1.0  # where a random number falls in a block may round up to that
    uniform[1::9] = 0.0
    found = draw(torch.from_numpy(weights), torch.from_numpy(uniform)).numpy()
    cumulated = np.cumsum(weights, axis=1, dtype=np.float64)
    total, row = cumulated[:, -1], np.arange(300)
    assert (weights[row, found] > 0).all()
    rounding = 1e-6 * total  # float32 sums of blocks
    assert (cumulated[row, found] >= uniform * total - rounding).all()
    assert (cumulated[row, found] - weights[row, found] <= uniform * total + rounding).all()


def test_filters_do_not_change_the_logprobs(model):
    plain = ask(model, PROMPTS, temperature=0.8, top_k=1)
    for prompt, (one,) in zip(PROMPTS, plain, strict=True):
        assert one.logprobs[0] == pytest.approx(scaled(logprobs_at(model, prompt), 0.8).max(), abs=1e-5)


@either_way
@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.6])
def test_logprobs_are_those_of_a_forward_pass(model, make_engine, temperature):
    """At temperature 1 (and 0, which scores at 1) they are the trainer's own."""
    engine = make_engine()
    for prompt, samples in zip(PROMPTS, ask(model, PROMPTS, num_samples=3, temperature=temperature), strict=True):
        for one in samples:
            tokens = [*prompt, *one.tokens]
            if temperature == 0.6:
                places = range(len(prompt), len(tokens))
                expected = [scaled(logprobs_at(model, tokens[:place]), 0.6)[tokens[place]] for place in places]
            else:
                datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
                expected = engine.forward([datum]).loss_fn_outputs[0]["logprobs"].array[len(prompt) - 1 :]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "copied"])
def test_logprobs_in_bfloat16_are_near_those_of_a_forward_pass(make_engine, monkeypatch, shares):
    """Measured 0.036 at most, both ways: the two sides round at different places."""
    engine = make_engine(dtype="bfloat16")
    if not shares:
        monkeypatch.setattr(decoder, "_supports_shared_prompts", lambda *_: False)
    assert decoder.decoding_method(engine.model, 47).name == ("shared prompts" if shares else "prompt copies")
    for prompt, samples in zip(PROMPTS, ask(engine.model, PROMPTS, num_samples=3), strict=True):
        for one in samples:
            tokens = [*prompt, *one.tokens]
            datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            expected = engine.forward([datum]).loss_fn_outputs[0]["logprobs"].array[len(prompt) - 1 :]
            np.testing.assert_allclose(one.logprobs, expected, atol=0.05)


# ---- seeds -----------------------------------------------------------------------------------------------------------


@either_way
def test_what_else_is_in_the_batch_does_not_matter(model):
    params = SamplingParams(max_tokens=8, stop=[])
    alone = sample(model, [SampleRequest(PROMPTS[1], 2, params, seed=3)], 0, 100_000)[0]
    crowd = [SampleRequest(prompt, 3, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    for order in (crowd, crowd[::-1]):
        together = sample(model, [*order, SampleRequest(PROMPTS[1], 3, params, seed=3)], 0, 100_000)[-1]
        assert [one.tokens for one in together[:2]] == [one.tokens for one in alone]
        for one, other in zip(together, alone, strict=False):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_samples_of_a_prompt_differ_and_repeat(model):
    first, again = (ask(model, [PROMPTS[0]], num_samples=8, seed=1)[0] for _ in range(2))
    assert first == again
    assert len({tuple(one.tokens) for one in first}) == 8
    assert ask(model, [PROMPTS[0]], num_samples=8, seed=2)[0] != first
    assert ask(model, [PROMPTS[0]], seed=-1) and ask(model, [PROMPTS[0]], seed=2**70)


@either_way
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_how_many_tokens_a_round_has_changes_nothing(model, monkeypatch, tokens):
    expected = ask(model, PROMPTS, num_samples=3, max_tokens=20)
    monkeypatch.setattr(Decoder.__init__, "__defaults__", (tokens,))
    assert ask(model, PROMPTS, num_samples=3, max_tokens=20) == expected


def test_temperatures_mix_in_a_batch(model):
    cold, warm = SamplingParams(**FREE, temperature=0.0), SamplingParams(**FREE, temperature=1.5)
    mixed = sample(model, [SampleRequest(PROMPTS[0], 1, cold, 1), SampleRequest(PROMPTS[0], 1, warm, 1)], 0, 100_000)
    assert mixed[0][0].tokens == ask(model, [PROMPTS[0]], temperature=0.0)[0][0].tokens
    assert mixed[1][0].tokens == ask(model, [PROMPTS[0]], temperature=1.5, seed=1)[0][0].tokens


@either_way
@pytest.mark.parametrize("budget", [1, 30, 64])
def test_a_request_larger_than_the_budget_is_split_and_draws_the_same(model, budget):
    """One prompt of 3 tokens and 7 completions of at most 8 are 77 tokens."""
    whole = ask(model, [PROMPTS[0]], num_samples=7, seed=3)[0]
    sizes = []
    hook = model.network.register_forward_pre_hook(
        lambda _, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    try:
        split = ask(model, [PROMPTS[0]], num_samples=7, seed=3, max_batch_tokens=budget)[0]
    finally:
        hook.remove()
    assert max(sizes) == max(1, budget // 11)
    assert [one.tokens for one in split] == [one.tokens for one in whole]
    for one, other in zip(split, whole, strict=True):  # another number of rows rounds otherwise
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


# ---- what is decoded together -----------------------------------------------------------------------------------------


@pytest.fixture
def passes(model):
    """The ``(rows, columns)`` of every forward pass, without those that choose the method."""
    ask(model, PROMPTS[:1], num_samples=1)
    shapes = []
    hook = model.network.register_forward_pre_hook(
        lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()


def test_a_prompt_is_read_once_for_all_that_begin_with_it(model, passes):
    expected = ask(model, [PROMPTS[1]], num_samples=1, seed=3)[0]
    passes.clear()
    again = [SampleRequest(PROMPTS[1], 1, SamplingParams(**FREE), seed=3 + i) for i in range(5)]
    found = sample(model, [*again, SampleRequest(PROMPTS[2], 2, SamplingParams(**FREE), seed=0)], 0, 100_000)
    assert passes == [(2, 7)] + [(7, 1)] * 7
    assert found[0][0].tokens == expected[0].tokens
    assert len({tuple(one.tokens) for one, *_ in found}) == 6


def test_a_prompt_waits_until_all_its_samples_fit(model, passes):
    """Rows of 11 tokens, three at a time: two of the first prompt, then two of the second."""
    ask(model, [[5, 6, 7], [9, 8, 7]], num_samples=2, max_batch_tokens=33)
    assert passes == ([(1, 3)] + [(2, 1)] * 7) * 2


@either_way
def test_a_round_is_over_when_many_rows_have_ended(model, passes):
    params = [SamplingParams(max_tokens=1 if i < 4 else 9, stop=[]) for i in range(6)]
    sample(model, [SampleRequest([i, i], 1, given, seed=0) for i, given in enumerate(params)], 0, 100_000)
    assert passes == [(6, 2)] + [(2, 1)] * 8


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([100] * 400, [163, 163, 74]),
        ([1024] * 17, [16, 1]),
        ([4096] * 3, [1, 1, 1]),  # 16 times the pairs of 1,024 tokens
        ([2048] * 5, [4, 1]),
        ([60_000, 10], [1, 1]),
        ([10, 10, 2048, 2048, 10], [4, 1]),  # every prompt is padded to the longest
        ([], []),
    ],
)
def test_prompts_enter_in_parts_of_a_limited_cost(lengths, parts):
    different = [[number, *[1] * (length - 1)] for number, length in enumerate(lengths)]
    found = list(prefill_parts(different))
    assert [part.stop - part.start for part in found] == parts
    assert [prompt for part in found for prompt in different[part]] == different


def test_equal_prompts_of_a_part_count_once():
    assert list(prefill_parts([[1] * 4096] * 100)) == [slice(0, 100)]


@either_way
def test_parts_of_prompts_draw_the_same(model, passes, monkeypatch):
    whole = ask(model, PROMPTS, num_samples=3, max_tokens=20)
    passes.clear()
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 1)
    split = ask(model, PROMPTS, num_samples=3, max_tokens=20)
    assert [shape for shape in passes if shape[1] > 1] == [(1, length) for length in sorted(map(len, PROMPTS)) if length > 1]
    assert [[one.tokens for one in samples] for samples in split] == [[one.tokens for one in samples] for samples in whole]
    for one, other in zip(itertools.chain(*split), itertools.chain(*whole), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_prompts_enter_together_if_rows_cannot_enter_later(model, monkeypatch, method):
    requests = [SampleRequest(prompt, 2, SamplingParams(**FREE), seed=3) for prompt in PROMPTS]

    def drawn():
        states = [sample_states(model, index, request) for index, request in enumerate(requests)]
        return [[one.tokens for one in samples] for samples in decoder.decode(model, states, 0, 100_000, method)]

    try:
        whole = drawn()
    except FastPathError:
        pytest.skip(f"{model.class_name} has no {method.name}")
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 1)
    assert drawn() == whole


def test_a_slice_of_several_steps_ends_after_a_prefill(model, passes, monkeypatch):
    """Several ranks agree about slices of 16 steps."""
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 1)
    requests = [SampleRequest([number, 5, 6], 2, SamplingParams(**FREE), seed=number) for number in range(3)]
    sampling, counts = SlicedSampling(model, requests, 0, 100_000), []
    # Without the passes of the trial that chooses the method.
    passes.clear()
    while sampling.advance(16):
        counts.append(len(passes))
        passes.clear()
    assert counts == [1, 1, 1] and passes == [(6, 1)] * 7


@pytest.mark.parametrize("dropped", [[1], [0, 1], [1, 2], [0, 1, 2]])
def test_a_request_that_is_dropped_between_two_parts_does_not_enter(model, passes, monkeypatch, dropped):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 1)
    requests = [SampleRequest([number, 5, 6], 2, SamplingParams(**FREE), seed=number) for number in range(4)]
    expected = sample(model, requests, 0, 100_000)
    passes.clear()
    sampling = SlicedSampling(model, requests, 0, 100_000)
    passes.clear()
    assert sampling.advance(1) and passes == [(1, 3)]
    sampling.drop(dropped)
    while sampling.advance(1):
        pass
    assert passes.count((1, 3)) == 4 - len(set(dropped) - {0})
    found = sampling.samples()
    for number in {0, 1, 2, 3} - set(dropped):
        assert [one.tokens for one in found[number]] == [one.tokens for one in expected[number]]
    for number in set(dropped) - {0}:
        assert not any(one.tokens for one in found[number])


def prefilled(rows, width):
    """Cache after reading ``rows`` prompts of ``width`` tokens."""
    from transformers import DynamicCache

    states = DynamicCache()
    states.update(torch.randn(rows, 2, width, 4), torch.randn(rows, 2, width, 4), 0)
    return states, torch.ones(rows, width, dtype=torch.long)


def test_the_cache_gives_every_row_what_it_wrote(dirty_memory):
    """A row that enters beside longer ones; columns that a mask hides are numbers."""
    torch.manual_seed(0)
    (first, mask), (second, short) = prefilled(2, 5), prefilled(1, 3)
    cache = InPlaceCache()
    cache.enter(first, mask, [1, 0, 1])
    new = torch.randn(2, 3, 2, 1, 4)
    cache.arguments(torch.ones(3, 1))["past_key_values"].update(*new, 0)
    cache.keep([0, 2])
    cache.enter(second, short, [0, 0])
    last = torch.randn(2, 4, 2, 1, 4)
    given = cache.arguments(torch.ones(4, 1))
    found = given["past_key_values"].update(*last, 0)
    assert given["attention_mask"].tolist() == [[1] * 7] * 2 + [[0, 0, 0, 1, 1, 1, 1]] * 2
    for states, one, other, step, end in zip(
        found, *((c.layers[0].keys, c.layers[0].values) for c in (first, second)), new, last, strict=True
    ):
        assert states.shape == (4, 2, 7, 4) and states.isfinite().all()
        assert torch.equal(states[:2], torch.cat([one[[1, 1]], step[[0, 2]], end[:2]], -2))
        assert torch.equal(states[2:, :, 3:], torch.cat([other[[0, 0]], end[2:]], -2))


def test_the_cache_keeps_a_prompt_once_as_long_as_a_row_continues_it():
    """Of three prompts the first leaves with its rows; a longer one enters, and all is where the mask says."""
    torch.manual_seed(0)
    (first, mask), (second, long) = prefilled(3, 4), prefilled(1, 5)
    mask[2, :2] = 0
    cache = PromptCache()
    cache.enter(first, mask, [0, 0, 1, 2, 2])
    new = torch.randn(2, 5, 2, 1, 4)
    cache.arguments(torch.ones(5, 1))["past_key_values"].update(*new, 0)
    cache.keep([4, 3, 2])
    cache.enter(second, long, [0, 0])
    given = cache.arguments(torch.ones(5, 1))
    prompts = given["prompts"]
    last = torch.randn(2, 5, 2, 1, 4)
    own = given["past_key_values"].update(*last, 0)
    assert given["attention_mask"] is None
    assert prompts.row_of_slot.view(3, 2).tolist() == [[2, 2], [0, 1], [3, 4]] and prompts.slot_of_row.tolist() == [
        2,
        3,
        0,
        4,
        5,
    ]
    expected = [[0, 0, 0, 1, 1, 1, 1]] * 2 + [[0, 1, 1, 1, 1, 1, 1]] + [[1, 1, 1, 1, 1, 0, 1]] * 2
    assert prompts.mask[:, 0, 0, :7].int().tolist() == expected and prompts.filled == 2
    assert prompts.mask.shape[-1] == 5 + own[0].shape[2]
    for place in (0, 1):
        of_prompts = prompts.layers[0][place]
        one, other = (getattr(c.layers[0], ("keys", "values")[place]) for c in (first, second))
        assert torch.equal(of_prompts[:2, :, 1:], one[[1, 2]]) and torch.equal(of_prompts[2], other[0])
        assert torch.equal(own[place][:3, :, :1], new[place][[4, 3, 2]]) and not own[place][3:, :, :1].any()
        assert torch.equal(own[place][:, :, 1:2], last[place]) and not own[place][:, :, 2:].any()


@pytest.fixture
def dirty_memory(monkeypatch):
    """Fill new memory with NaN, which a mask cannot hide."""
    clean = torch.Tensor.new_empty

    def dirty(tensor, *shape):
        return tensor.new_full(shape, float("nan")) if tensor.is_floating_point() else clean(tensor, *shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)


@either_way
def test_waiting_prompts_enter_while_others_continue(model, passes, monkeypatch, dirty_memory):
    """Limits of 4 and 40 tokens in turn: the budget takes 3 rows of at most 47, and every short one makes room for the next."""
    monkeypatch.setattr(Decoder.__init__, "__defaults__", (4,))
    monkeypatch.setattr(kv_cache, "NEW_COLUMNS", 5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(1, 8)).tolist() for _ in range(12)]
    params = [SamplingParams(max_tokens=40 if i % 3 == 0 else 4, stop=[]) for i in range(12)]
    requests = [SampleRequest(prompt, 1, given, seed=i) for i, (prompt, given) in enumerate(zip(prompts, params, strict=True))]
    alone = [sample(model, [request], 0, 10_000)[0][0] for request in requests]
    passes.clear()
    states = [one for i, request in enumerate(requests) for one in sample_states(model, i, request)]
    crowd = Decoder(model, states, 3 * 47, method=decoder.decoding_method(model, 47))
    crowd.waiting = deque(sorted(crowd.waiting, key=lambda lane: lane.request))  # as they come: long and short ones mixed
    lanes = {lane.request: lane for round in crowd.rounds() for lane in round}
    for number, one in enumerate(alone):
        assert lanes[number].tokens == one.tokens
        np.testing.assert_allclose(lanes[number].logprobs, one.logprobs, atol=1e-5)
    assert max(rows for rows, _ in passes) == 3
    assert sum(rows for rows, columns in passes if columns == 1) <= 1.3 * sum(len(one.tokens) for one in alone)
    assert len(passes) < 110  # in fixed groups of three, of which each has a long one, it would be 4 * 40


@pytest.mark.parametrize("window", [3, 6, 64])
def test_sliding_windows_slide_in_place(window, monkeypatch, dirty_memory):
    """Rows enter and leave, and the buffers move, while layers with and without a window see what they should."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    monkeypatch.setattr(Decoder.__init__, "__defaults__", (3,))
    monkeypatch.setattr(kv_cache, "NEW_COLUMNS", 2)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Gemma2Config(
        vocab_size=tiny.VOCABULARY, num_hidden_layers=4, sliding_window=window, initializer_range=0.3, **shape
    )
    torch.manual_seed(0)
    model = LanguageModel(Gemma2ForCausalLM(config).eval(), tiny.tokenizer(), ModelConfig("gemma2"), torch.device("cpu"))
    prompts = [list(range(length, 3 * length)) for length in (1, 9, 2, 5, 12)]
    model.network.generation_config.eos_token_id = None
    params = [SamplingParams(max_tokens=n, temperature=0.0, stop=[]) for n in (4, 12, 20, 5, 7)]
    requests = [SampleRequest(prompt, 1, given, seed=0) for prompt, given in zip(prompts, params, strict=True)]
    for request, (one,) in zip(requests, sample(model, requests, 0, 75), strict=True):
        given = {"max_new_tokens": request.params.max_tokens, "do_sample": False, "pad_token_id": 0}
        expected = model.network.generate(torch.tensor([request.prompt]), **given)
        assert one.tokens == expected[0, len(request.prompt) :].tolist()


def test_states_of_other_kinds_are_kept_by_transformers_own_cache():
    """Some layers carry a state: the longest prompt's row leaves first, and the next ones enter when all have left."""
    import transformers

    numbers = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    sizes = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Qwen3_5TextConfig(vocab_size=tiny.VOCABULARY, num_hidden_layers=4, **numbers, **sizes, **shape)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model = LanguageModel(network, tiny.tokenizer(), ModelConfig("hybrid"), torch.device("cpu"))
    requests = [
        SampleRequest(list(range(length)), 1, SamplingParams(max_tokens=limit, stop=[]), seed=length)
        for length, limit in ((20, 2), (3, 20), (4, 18), (19, 4))
    ]
    for request, (one,) in zip(requests, sample(model, requests, 0, 3 * 24), strict=True):
        (alone,) = sample(model, [request], 0, 1000)[0]
        assert one.tokens == alone.tokens
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", ["GPT2", "OPT"])
def test_a_row_that_filled_the_context_waits_for_the_others_inside_it(family):
    """Learned positions end with the context; one model counts them from the mask."""
    import transformers

    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 48, "word_embed_proj_dim": 32}
    config = getattr(transformers, f"{family}Config")(vocab_size=tiny.VOCABULARY, max_position_embeddings=tiny.CONTEXT, **shape)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = LanguageModel(network, tiny.tokenizer(), ModelConfig(family), torch.device("cpu"))
    prompts = [list(range(93)), *([n] for n in range(7))]  # few enough end that they stay till the round is over
    lengths = [len(one.tokens) for (one,) in ask(model, prompts, max_tokens=None)]
    assert lengths == [3, *[95] * 7]


@either_way
def test_pieces_as_they_come_are_the_samples(model):
    request = SampleRequest(PROMPTS[0], 3, SamplingParams(max_tokens=30), seed=2)
    whole = sample(model, [request], 0, 10_000)[0]
    tokens, ends = [[], [], []], [None, None, None]
    for piece in stream(model, request, 10_000):
        assert 0 < len(piece.tokens) == len(piece.logprobs) <= 4
        assert ends[piece.number] is None
        tokens[piece.number] += piece.tokens
        ends[piece.number] = piece.stop_reason
    assert tokens == [one.tokens for one in whole]
    assert ends == [one.stop_reason for one in whole]


# ---- where it ends ---------------------------------------------------------------------------------------------------


def test_it_ends_with_the_stop_token_once(model):
    free = ask(model, [PROMPTS[0]], num_samples=6)[0]
    stop = free[0].tokens[3]
    stopped = ask(model, [PROMPTS[0]], num_samples=6, stop=[stop])[0]
    eos = model.tokenizer.eos_token_id
    for one, whole in zip(stopped, free, strict=True):
        ends = [place for place, token in enumerate(whole.tokens) if token in (stop, eos)]
        length = ends[0] + 1 if ends else 8
        assert one.tokens == whole.tokens[:length]
        assert len(one.logprobs) == length
        assert one.stop_reason == ("stop" if ends else "length")
    assert stopped[0].stop_reason == "stop"
    assert ask(model, [PROMPTS[0]], num_samples=6, stop=np.array([stop]))[0] == stopped


@pytest.mark.parametrize("tokens", [1, 16])
def test_it_ends_with_a_stop_string(model, monkeypatch, tokens):
    monkeypatch.setattr(Decoder.__init__, "__defaults__", (tokens,))
    free = ask(model, [PROMPTS[0]], num_samples=4, temperature=1.0)[0]
    text = model.tokenizer.decode(free[0].tokens[2:4])
    for stop in (text, [text, "never there"]):
        one = ask(model, [PROMPTS[0]], num_samples=4, stop=stop)[0][0]
        assert one.stop_reason == "stop"
        assert one.tokens == free[0].tokens[: len(one.tokens)]
        assert model.tokenizer.decode(one.tokens).endswith(text)
        assert text not in model.tokenizer.decode(one.tokens[:-1])


def test_a_stop_string_is_looked_for_where_a_token_may_complete_it(model):
    """One of the strings ends with a character of two tokens, which are not characters alone."""
    lists = [["é"], ["ab", "\n"], ["z é"]]
    may = [completing_tokens(model, strings) for strings in lists]
    assert [int(one.sum()) for one in may] < [tiny.VOCABULARY] * 3  # it tells some tokens from others
    rng = np.random.default_rng(0)
    for strings, completing in zip(lists, may, strict=True):
        ending = StopCondition((), tuple(strings))
        text = [*rng.integers(0, 256, 30).tolist(), *model.tokenizer.encode(strings[0], add_special_tokens=False)]
        reached = [ending.is_reached(model.tokenizer, text[: end + 1]) for end in range(len(text))]
        first = reached.index(True)
        assert completing[text[first]]
    assert not completing_tokens(model, []).any()


@pytest.fixture
def ending_model(model, monkeypatch):
    """A model whose end-of-text token is the third that it draws for the first prompt."""
    tokens = ask(model, [PROMPTS[0]], seed=4)[0][0].tokens
    assert tokens[2] not in tokens[:2]
    monkeypatch.setattr(model.network.generation_config, "eos_token_id", [tokens[2], 257])
    return model, tokens


@pytest.mark.parametrize(("stop", "length"), [(None, 3), ([], 8), ([258], 3), (["never there"], 3), ("never there", 3)])
def test_the_end_of_text_ends_it_unless_stop_is_empty(ending_model, stop, length):
    model, tokens = ending_model
    one = ask(model, [PROMPTS[0]], seed=4, stop=stop)[0][0]
    assert one.tokens == tokens[:length]
    assert one.stop_reason == ("stop" if length == 3 else "length")


def test_no_limit_fills_the_context(model):
    prompt = list(range(90))
    (one,) = ask(model, [prompt], max_tokens=None)[0]
    assert len(one.tokens) == tiny.CONTEXT - 90
    assert one.stop_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (list(range(90)), 7, "90 tokens and max_tokens=7 exceed the context of 96"),
        (list(range(96)), None, "96 tokens and max_tokens=None exceed the context of 96"),
        ([], 4, "prompt: is empty"),
        ([3, 259], 4, "holds token 259, but the vocabulary has 259 tokens"),
        ([-1], 4, "holds token -1"),
    ],
)
def test_prompts_that_cannot_be_completed(model, prompt, max_tokens, message):
    with pytest.raises(RolloutError, match=message):
        ask(model, [prompt], max_tokens=max_tokens)


def test_broken_weights_are_an_error(make_engine):
    engine = make_engine()
    with torch.no_grad():
        engine.model.network.model.norm.weight[0] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(RolloutError, match="logits are not finite"):
            ask(engine.model, PROMPTS, temperature=temperature)


# ---- samplers of a trainer -------------------------------------------------------------------------------------------


def step(trainer):
    trainer.forward_backward(tiny.datums(4), "dpo")
    return trainer.optim_step(ADAM)


def drawn(future):
    return future.result().sequences


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, stop=[])


def test_a_live_sampler_answers_for_its_own_weights_only(make_trainer):
    trainer = make_trainer()
    live = trainer.live_sampler(0).result()
    assert live.step == 0 and drawn(live.sample(PROMPTS[0], 1, GREEDY))[0].step == 0
    step(trainer).result()
    for future in (live.sample(PROMPTS[0], 1, GREEDY), live.compute_logprobs(PROMPTS[1])):
        with pytest.raises(RolloutError, match="the weights have changed since the sampler of step 0 was created; sync again"):
            future.result()
    assert trainer.optim_step(ADAM).result()  # a sampler's error is the sampler's own
    with pytest.raises(Exception, match="the weights are at step 2, expected step 1"):
        trainer.live_sampler(1).result()


def test_loading_other_weights_ends_a_live_sampler(make_trainer):
    trainer = make_trainer()
    saved = trainer.save_state("start").result()
    live = trainer.live_sampler(0).result()
    trainer.load_state(saved)
    with pytest.raises(RolloutError, match="the weights have changed"):
        live.sample(PROMPTS[0], 1, GREEDY).result()


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_a_snapshot_keeps_its_weights(make_trainer, options):
    trainer = make_trainer(**options)
    step(trainer)
    snapshot = trainer.snapshot_sampler(1).result()
    before, scores = drawn(snapshot.sample(PROMPTS[0], 1, GREEDY)), snapshot.compute_logprobs(PROMPTS[1]).result()
    for _ in range(3):
        step(trainer)
    assert drawn(snapshot.sample(PROMPTS[0], 1, GREEDY)) == before
    assert snapshot.compute_logprobs(PROMPTS[1]).result() == scores
    newer = trainer.snapshot_sampler().result()
    assert (snapshot.step, newer.step) == (1, 4)
    assert newer.compute_logprobs(PROMPTS[1]).result() != scores


def test_a_snapshot_after_dropout_is_no_different(make_trainer):
    """The network is in training mode then."""
    trainer = make_trainer(lora_rank=4, lora_dropout=0.5)
    step(trainer)
    snapshot = trainer.snapshot_sampler().result()
    assert snapshot.engine().passes.head.transform is not None
    live = trainer.live_sampler(1).result()
    np.testing.assert_allclose(
        snapshot.compute_logprobs(PROMPTS[1]).result()[1:], live.compute_logprobs(PROMPTS[1]).result()[1:], atol=1e-6
    )


def test_what_was_asked_before_a_step_is_answered_before_it(make_trainer):
    trainer = make_trainer()
    live = trainer.live_sampler(0).result()
    asked = live.sample(PROMPTS[0], 1, GREEDY)
    stepped = step(trainer)  # queues behind it
    assert stepped.result() and drawn(asked)[0].step == 0
    assert drawn(asked) == drawn(make_trainer().live_sampler(0).result().sample(PROMPTS[0], 1, GREEDY))


def test_sampling_between_the_halves_of_a_step_changes_nothing(make_trainer):
    found = []
    for ask_between in (False, True):
        trainer = make_trainer(lora_rank=4, lora_dropout=0.3)
        for _ in range(2):
            trainer.forward_backward(tiny.datums(4), "dpo")
            if ask_between:
                drawn(trainer.live_sampler(trainer.engine.step).result().sample(PROMPTS[0], 2, GREEDY))
            trainer.optim_step(ADAM).result()
        found.append(tiny.weights(trainer.engine))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_asked_before_the_first_answer_is_one_batch(make_trainer, monkeypatch):
    batches = []
    original = sample_queue.SlicedSampling

    def counting(model, requests, *rest):
        batches.append(len(requests))
        return original(model, requests, *rest)

    def program():
        trainer = make_trainer(seed=5)
        live = trainer.live_sampler(0).result()
        asked = [live.sample(prompt, 3, SamplingParams(**FREE)) for prompt in PROMPTS]
        first = [drawn(future) for future in asked]
        return first, drawn(live.sample(PROMPTS[0], 3, SamplingParams(**FREE)))

    monkeypatch.setattr(sample_queue, "SlicedSampling", counting)
    first, again = program(), program()
    assert batches == [4, 1, 4, 1]
    assert first == again  # to the bit
    assert first[0][0] != first[1]  # a second request for the same prompt without a seed draws other tokens


def test_two_samplers_of_a_step_do_not_draw_the_same(make_trainer):
    params = SamplingParams(max_tokens=8, stop=[])

    def program():
        trainer = make_trainer()
        samplers = [trainer.snapshot_sampler().result(), trainer.live_sampler(0).result(), trainer.snapshot_sampler().result()]
        futures = [sampler.sample(PROMPTS[0], 1, params) for sampler in samplers]
        return [drawn(future)[0].tokens for future in futures]

    found = program()
    assert len(set(map(tuple, found))) == 3
    assert program() == found


def test_draws_without_a_seed_differ_from_step_to_step(make_trainer):
    """The same random numbers at every step would teach a policy their peculiarities."""
    trainer = make_trainer()
    params = SamplingParams(max_tokens=8, temperature=50.0, stop=[])  # the weights hardly matter
    found = [[one.tokens for one in drawn(trainer.snapshot_sampler().result().sample(PROMPTS[0], 2, params))]]
    trainer.optim_step(AdamParams(learning_rate=0.0)).result()
    found.append([one.tokens for one in drawn(trainer.snapshot_sampler().result().sample(PROMPTS[0], 2, params))])
    assert found[0] != found[1]


def test_a_bad_prompt_fails_alone(make_trainer):
    live = make_trainer().live_sampler(0).result()
    good, bad, scored, long = (
        live.sample(PROMPTS[0], 1, GREEDY),
        live.sample(list(range(95)), 1, GREEDY),
        live.compute_logprobs(PROMPTS[1]),
        live.compute_logprobs(list(range(97))),
    )
    assert len(drawn(good)[0].tokens) == 8
    assert len(scored.result()) == len(PROMPTS[1])
    for future in (bad, long):
        with pytest.raises(RolloutError, match="exceed the context of 96"):
            future.result()


def test_prompts_are_scored(make_trainer, make_engine):
    live = make_trainer().live_sampler(0).result()
    both = live.sample(PROMPTS[1], 2, GREEDY, include_prompt_logprobs=True)
    scored = [live.compute_logprobs(prompt) for prompt in PROMPTS]
    datum = Datum(ModelInput.from_ints(PROMPTS[1][:-1]), {"target_tokens": PROMPTS[1][1:]})
    expected = make_engine().forward([datum]).loss_fn_outputs[0]["logprobs"].array
    assert scored[1].result()[0] is None
    np.testing.assert_allclose(scored[1].result()[1:], expected, atol=1e-5)
    assert both.result().prompt_logprobs == scored[1].result()
    assert scored[2].result() == [None]
    assert live.sample(PROMPTS[0], 1, GREEDY).result().prompt_logprobs is None
    assert len(live.compute_logprobs(list(range(96))).result()) == 96  # a full context can be scored


def test_scoring_ends_for_a_request_that_is_stopped_between_two_parts(make_trainer, monkeypatch):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 1)
    sampler = make_trainer().live_sampler(0).result()
    alone = sampler.compute_logprobs(PROMPTS[3]).result()
    scored, prompts = [], sample_queue._prompt_logprobs

    def stopping(engine, part):
        scored.extend(part)
        futures[1].stop()
        return prompts(engine, part)

    monkeypatch.setattr(sample_queue, "_prompt_logprobs", stopping)
    futures = [sampler.compute_logprobs(prompt) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    with pytest.raises(RolloutError, match="stopped on request"):
        futures[1].result()
    assert len(futures[0].result()) == 3 and futures[2].result() == alone
    assert scored == [PROMPTS[0], PROMPTS[3]]


def test_most_likely_tokens_of_a_stopped_request_are_not_computed(make_trainer, monkeypatch):
    sampler = make_trainer().live_sampler(0).result()
    computed, topk = [], sample_queue._prompt_topk

    def stopping(engine, pending):
        computed.append(pending.prompt)
        futures[1].stop()
        return topk(engine, pending)

    monkeypatch.setattr(sample_queue, "_prompt_topk", stopping)
    futures = [sampler.sample(prompt, 1, GREEDY, topk_prompt_logprobs=2) for prompt in PROMPTS]
    assert [len(one.result().topk_prompt_logprobs) for one in (futures[0], *futures[2:])] == [3, 1, 3]
    with pytest.raises(RolloutError, match="stopped on request"):
        futures[1].result()
    assert computed == [PROMPTS[0], *PROMPTS[2:]]


def test_equal_prompts_are_scored_in_parts(make_trainer, monkeypatch):
    """They are computed once, but each has logprobs of its own."""
    monkeypatch.setattr(sample_queue, "PREFILL_TOKENS", 3)
    sizes, prompts = [], sample_queue._prompt_logprobs
    monkeypatch.setattr(sample_queue, "_prompt_logprobs", lambda of, part: (sizes.append(len(part)), prompts(of, part))[1])
    sampler = make_trainer().live_sampler(0).result()
    scores = [one.result() for one in [sampler.compute_logprobs(PROMPTS[0]) for _ in range(20)]]
    assert sizes == [8, 8, 4] and scores == [scores[0]] * 20


def test_a_sampler_streams(make_trainer):
    trainer = make_trainer()
    live = trainer.live_sampler(0).result()
    params = SamplingParams(max_tokens=20, stop=[], seed=1)
    expected = drawn(live.sample(PROMPTS[0], 2, params))
    pieces = live.stream(PROMPTS[0], 2, params)  # asked here, before the step
    stepped = step(trainer)
    tokens = {0: [], 1: []}
    for piece in pieces:
        tokens[piece.number] += piece.tokens
    assert stepped.result() and [tokens[0], tokens[1]] == [one.tokens for one in expected]
    with pytest.raises(RolloutError, match="the weights have changed"):
        list(live.stream(PROMPTS[0], 2, params))


def test_a_stream_without_a_reader_ends(make_trainer, monkeypatch):
    asked, closed, original = [], threading.Event(), Decoder._round

    def counted(decoder):
        asked.append(1)
        # The other rounds come after the stream was closed.
        assert len(asked) < 3 or closed.wait(WAIT_S)
        return original(decoder)

    live = make_trainer().live_sampler(0).result()
    # Without the rounds of the probe.
    monkeypatch.setattr(Decoder, "_round", counted)
    pieces = live.stream(PROMPTS[0], 1, SamplingParams(max_tokens=90, stop=[]))
    next(pieces)
    pieces.close()
    closed.set()
    assert drawn(live.sample(PROMPTS[0], 1, GREEDY))  # its turn comes
    assert len(asked) < 10  # of 23, and one for the last line


def test_requests_out_of_range_are_refused_by_the_call(make_trainer):
    live = make_trainer().live_sampler(0).result()
    with pytest.raises(RolloutError, match="num_samples must be at least 1, got 0"):
        live.sample(PROMPTS[0], 0, GREEDY)
    with pytest.raises(ConfigError, match="temperature"):
        live.sample(PROMPTS[0], 1, SamplingParams(temperature=-1))


def test_a_closed_trainer_answers_nothing_and_hangs_no_caller(make_trainer):
    trainer = make_trainer()
    live = trainer.live_sampler(0).result()
    asked = live.sample(PROMPTS[0], 1, GREEDY)
    trainer.close()
    assert len(drawn(asked)[0].tokens) == 8  # asked in time
    late = live.sample(PROMPTS[0], 1, GREEDY)
    for _ in range(2):
        with pytest.raises(Exception, match="the trainer is closed"):
            late.result(timeout=WAIT_S)


@pytest.mark.parametrize("look", [futures.wait, lambda them: list(futures.as_completed(them)), lambda them: them[1].done()])
def test_every_way_of_looking_at_a_sample_starts_it(make_trainer, look):
    live = make_trainer().live_sampler(0).result()
    asked = [live.sample(prompt, 1, GREEDY) for prompt in PROMPTS]
    looking = threading.Thread(target=look, args=(asked,), daemon=True)
    looking.start()
    looking.join(WAIT_S)
    assert not looking.is_alive()
    told = threading.Event()
    asked[0].add_done_callback(lambda _: told.set())
    assert told.wait(WAIT_S) and asked[0]._start is None


def test_a_flush_does_not_overtake_another(make_trainer, monkeypatch):
    """Requests of a thread stay behind earlier requests, even while another thread sends those."""
    trainer = make_trainer()
    live, submit, begun, order = trainer.live_sampler(0).result(), trainer._worker.submit_steps, threading.Event(), []

    def slow(job, *rest):
        number = len(job.args[2])
        begun.set()
        time.sleep(0.05 if number == 2 else 0.0)
        order.append(number)
        return submit(job, *rest)

    monkeypatch.setattr(trainer._worker, "submit_steps", slow)
    first = [live.sample(prompt, 1, GREEDY) for prompt in PROMPTS[:2]]
    sending = threading.Thread(target=first[0].done)
    sending.start()
    assert begun.wait(WAIT_S)
    live.sample(PROMPTS[2], 1, GREEDY).result(WAIT_S)
    sending.join(WAIT_S)
    assert order == [2, 1]


def test_running_out_of_memory_while_sampling_names_what_bounds_it(make_trainer, monkeypatch):
    live = make_trainer().live_sampler(0).result()

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("cookbook.backends.local.sample_queue.SlicedSampling", full)
    with pytest.raises(BackendError, match=r"out of memory: .*; lower deployment\.max_batch_tokens"):
        live.sample(PROMPTS[0], 1, GREEDY).result()


def test_threads_may_ask_at_the_same_time(make_trainer):
    from concurrent.futures import ThreadPoolExecutor

    live = make_trainer().live_sampler(0).result()
    expected = drawn(live.sample(PROMPTS[0], 1, GREEDY))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: drawn(live.sample(PROMPTS[0], 1, GREEDY)), range(24)))
    assert all(answer[0].tokens == expected[0].tokens for answer in answers)


@pytest.mark.parametrize("live", [True, False])
def test_the_embedded_deployment(make_trainer, live):
    trainer = make_trainer()
    deployment = EmbeddedConfig(max_batch_tokens=123).deploy(trainer, live=live)
    assert trainer.max_batch_tokens == 123
    sampler = deployment.load(0).result()
    before = drawn(sampler.sample(PROMPTS[0], 1, GREEDY))
    step(trainer).result()
    if live:
        with pytest.raises(RolloutError, match="sync again"):
            sampler.sample(PROMPTS[0], 1, GREEDY).result()
    else:
        assert drawn(sampler.sample(PROMPTS[0], 1, GREEDY)) == before
    assert deployment.load(1).result().step == 1
    deployment.close()
