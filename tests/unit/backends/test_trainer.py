"""The embedded trainer: calls in order, futures, and errors that cannot be lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import pytest
import tiny
import torch
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.worker import Account, Worker, with_remedy
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, CheckpointError, ConfigError, CookbookError, DataError
from cookbook.losses import DPO, CrossEntropy
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

ADAM = AdamParams(learning_rate=1e-3)
BAD = [Datum(ModelInput.from_ints([1, 2]))]  # no target_tokens
MISSING = "datum 0: missing required field 'target_tokens'"


# ---- order and futures -----------------------------------------------------------------------------------------------


def test_it_computes_what_the_engine_computes(make_trainer, make_engine):
    trainer, engine = make_trainer(), make_engine(all_logprobs=False)  # a trainer's default
    for step in range(2):
        data = tiny.datums(4, seed=step)
        output = trainer.forward_backward(data, "dpo", {"beta": 0.3})
        stepped = trainer.optim_step(ADAM)
        assert output.result().metrics == engine.forward_backward(data, DPO(beta=0.3)).metrics
        assert stepped.result().metrics == engine.optim_step(ADAM, None).metrics
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(trainer.engine), tiny.weights(engine), strict=True))


def test_calls_do_not_block_and_run_in_the_order_they_were_made(make_trainer):
    trainer, order, gate = make_trainer(), [], threading.Event()

    def slow(data, logprobs):
        gate.wait(WAIT_S)
        order.append("slow")
        return logprobs[0].sum(), {}

    def quick(data, logprobs):
        order.append(trainer.engine.step)
        return logprobs[0].sum(), {}

    data = tiny.datums(1)
    futures = [trainer.forward_backward_custom(data, slow), trainer.optim_step(ADAM)]
    futures += [trainer.forward_backward_custom(data, quick), trainer.optim_step(ADAM), trainer.forward(data, "cross_entropy")]
    assert not any(future.done() for future in futures)  # nothing was waited for
    gate.set()
    assert futures[-1].result().loss_fn_outputs[0]["logprobs"].shape == [data[0].model_input.length]
    assert order == ["slow", 1]
    assert trainer.engine.step == 2


def test_the_batch_is_the_one_that_was_passed(make_trainer):
    """The caller may change its list after the call."""
    trainer, gate = make_trainer(), threading.Event()
    reference = trainer.reference()
    trainer.forward_backward_custom(tiny.datums(1), lambda _, rows: (gate.wait(WAIT_S) and rows[0].sum(), {}))
    batch = tiny.datums(3)
    calls = [trainer.forward(batch, "cross_entropy"), trainer.forward_backward(batch, "cross_entropy")]
    logprobs = reference.logprobs(batch)
    batch.clear()
    gate.set()
    assert [len(call.result().loss_fn_outputs) for call in calls] == [3, 3]
    assert len(logprobs.result()) == 3


def test_the_arrays_are_those_that_were_passed(make_trainer):
    """The caller may change its buffers, and the memory of them, after the call."""
    trainer, gate = make_trainer(), threading.Event()
    reference = trainer.reference()
    tokens, weights = np.arange(1, 9), torch.linspace(0.5, 1.0, 8)
    batch = [Datum(ModelInput.from_ints(range(8)), {"target_tokens": tokens, "weights": weights})]
    passed = [batch]
    tinker = pytest.importorskip("tinker")
    inputs = {"target_tokens": tinker.TensorData.from_numpy(tokens), "weights": tinker.TensorData.from_torch(weights)}
    passed.append([tinker.Datum(tinker.ModelInput.from_ints(list(range(8))), inputs)])
    expected = [trainer.forward(data, "cross_entropy").result().metrics["loss"] for data in passed]

    trainer.forward_backward_custom(tiny.datums(1), lambda _, rows: (gate.wait(WAIT_S) and rows[0].sum(), {}))
    calls = [trainer.forward(data, "cross_entropy") for data in passed]
    calls += [trainer.forward_backward_custom(data, CrossEntropy()) for data in passed]
    logprobs = reference.logprobs(batch)
    kept = reference.logprobs([Datum(ModelInput.from_ints(range(8)), {"target_tokens": tokens.copy()})])
    tokens[:], weights[:] = 3, 0.0
    gate.set()
    assert [call.result().metrics["loss"] for call in calls] == expected * 2
    np.testing.assert_array_equal(logprobs.result()[0], kept.result()[0])


def test_futures_can_be_waited_for_in_every_way(make_trainer):
    trainer, data = make_trainer(), tiny.datums(2)
    plain = trainer.forward(data, "cross_entropy").result(timeout=WAIT_S)

    async def program():
        first = await trainer.forward(data, "cross_entropy")
        second = await trainer.forward(data, "cross_entropy").result_async()
        third = await trainer.forward(data, "cross_entropy").coroutine()
        both = await asyncio.gather(trainer.forward(data, "cross_entropy"), trainer.forward(data, "cross_entropy"))
        return [first, second, third, *both]

    for output in [*asyncio.run(program()), trainer.forward(data, "cross_entropy").future().result()]:
        np.testing.assert_array_equal(output.loss_fn_outputs[1]["logprobs"].array, plain.loss_fn_outputs[1]["logprobs"].array)


def test_a_timeout_ends_the_waiting_and_not_the_call(make_trainer):
    trainer, gate = make_trainer(), threading.Event()

    def slow(data, logprobs):
        gate.wait(WAIT_S)
        return logprobs[0].sum(), {}

    running = trainer.forward_backward_custom(tiny.datums(1), slow)
    waiting = trainer.optim_step(ADAM)
    with pytest.raises(FutureTimeout):
        running.result(timeout=0.01)
    for future in (running, waiting):
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(future.result_async(timeout=0.01))
        assert not future.cancel()
    gate.set()
    assert waiting.result(timeout=WAIT_S).metrics["optim/grad_norm"] > 0
    assert trainer.engine.step == 1


def test_tinker_data_is_trained_on(make_trainer):
    tinker = pytest.importorskip("tinker")
    data = tiny.datums(2)
    theirs = [
        tinker.Datum(
            tinker.ModelInput.from_ints(datum.model_input.to_ints()),
            {key: datum.loss_fn_inputs[key].array for key in ("target_tokens", "weights")},
        )
        for datum in data
    ]
    trainer = make_trainer()
    ours = trainer.forward_backward(data, "cross_entropy").result()
    found = trainer.forward_backward(theirs, "cross_entropy").result()
    assert found.metrics["loss"] == pytest.approx(ours.metrics["loss"], rel=1e-6)  # Tinker keeps float32 weights
    assert trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics["optim/lr"] == 1e-3


OWN_THREAD = "the trainer waits for itself"


@pytest.mark.parametrize(
    "ask",
    [
        lambda trainer: trainer.forward(tiny.datums(2), "dpo").result(),
        lambda trainer: trainer.forward(tiny.datums(2), "dpo").exception(timeout=WAIT_S),
        lambda trainer: asyncio.run(trainer.forward(tiny.datums(2), "dpo").coroutine()),
        lambda trainer: trainer.snapshot_sampler().result(),
        lambda trainer: trainer.reference(),
        lambda trainer: trainer.made_before.sample([1, 2], 1, SamplingParams(max_tokens=2)).result(),
        lambda trainer: trainer.close(),
    ],
    ids=["result", "exception", "await", "snapshot", "reference", "sample", "close"],
)
def test_a_loss_that_waits_for_its_own_trainer_is_told(make_trainer, ask):
    trainer = make_trainer()
    trainer.made_before = trainer.snapshot_sampler().result()

    def loss(data, logprobs):
        ask(trainer)
        return logprobs[0].sum(), {}

    with pytest.raises(BackendError, match=rf"{OWN_THREAD}|close: called by a loss") as caught:
        trainer.forward_backward_custom(tiny.datums(1), loss).result(timeout=WAIT_S)
    assert "\n" not in str(caught.value)
    assert trainer.optim_step(ADAM).result(timeout=WAIT_S)


def test_a_callback_may_read_what_is_there_and_ask_for_more(make_trainer):
    trainer, found = make_trainer(), []
    told = threading.Event()

    def callback(future):
        found.append(future.result())
        found.append(trainer.forward(tiny.datums(2), "dpo"))
        with pytest.raises(BackendError, match=OWN_THREAD):
            found[-1].result()
        told.set()

    trainer.forward(tiny.datums(2), "dpo").add_done_callback(callback)
    assert told.wait(WAIT_S)
    assert len(found[1].result(timeout=WAIT_S).loss_fn_outputs) == 2


# ---- errors ----------------------------------------------------------------------------------------------------------


def fails(future, message=MISSING, kind=DataError):
    with pytest.raises(kind, match=message):
        future.result()


def test_an_unread_error_stops_every_step_until_one_is_read(make_trainer):
    trainer, data = make_trainer(), tiny.datums(4)
    before = tiny.weights(trainer.engine)
    trainer.forward_backward(data, "cross_entropy")
    trainer.forward_backward(BAD, "cross_entropy")  # its result is not read
    steps = []
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy").result()
        steps.append(trainer.optim_step(ADAM))
    assert trainer.forward(data, "dpo").result()  # a forward needs no step, so it works; both steps have run
    assert trainer.engine.step == 0
    fails(steps[1])
    fails(steps[0])
    assert tiny.difference(tiny.weights(trainer.engine), before) == 0

    fresh = make_trainer()  # the step has reported the error: the next gradient starts from zero
    for one in (trainer, fresh):
        one.forward_backward(data, "dpo")
        one.optim_step(ADAM).result()
        one.close()
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(trainer.engine), tiny.weights(fresh.engine), strict=True))


def test_a_step_asked_for_before_the_error_was_read_fails_however_fast_the_trainer_is(make_trainer):
    trainer, gate = make_trainer(), threading.Event()
    trainer.forward_backward(tiny.datums(2), "cross_entropy")
    bad = trainer.forward_backward(BAD, "cross_entropy")
    trainer.forward_backward_custom(tiny.datums(2), lambda _, rows: (gate.wait(WAIT_S) * rows[0].sum(), {}))
    early, earlier = trainer.optim_step(ADAM), trainer.optim_step(ADAM)
    fails(bad)
    gate.set()  # the error has been read before the steps have their turn, and after the caller has asked for them
    fails(earlier)
    fails(early)
    trainer.forward_backward(tiny.datums(2), "cross_entropy")
    assert trainer.optim_step(ADAM).result().metrics["optim/grad_norm"] > 0
    assert trainer.engine.step == 1
    trainer.close()


def test_a_call_that_fails_midway_takes_no_earlier_gradient_with_it_unseen(make_trainer):
    """Micro-batches before the one that fails have added to the gradient of an earlier call."""
    good, call = tiny.datums(4), tiny.datums(6, seed=1)
    call[-1] = call[-1].with_inputs(weights=np.full(call[-1].model_input.length, 3e38))
    trainer = make_trainer(micro_batch_tokens=1)
    bad = trainer.forward_backward(call, "cross_entropy")  # the first of its step: nothing is lost with it
    fails(bad, "loss of the whole batch|not finite|returned", BackendError)
    trainer.forward_backward(good, "cross_entropy")
    assert trainer.optim_step(ADAM).result()
    fresh = make_trainer(micro_batch_tokens=1)
    fresh.forward_backward(good, "cross_entropy")
    fresh.optim_step(ADAM).result()
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(trainer.engine), tiny.weights(fresh.engine), strict=True))

    trainer.forward_backward(good, "cross_entropy").result()
    fails(trainer.forward_backward(call, "cross_entropy"), "loss of the whole batch|not finite|returned", BackendError)
    trainer.forward_backward(good, "cross_entropy").result()
    assert not trainer.is_settled
    fails(trainer.optim_step(ADAM), "gradient was dropped because a forward_backward failed", BackendError)
    trainer.forward_backward(good, "cross_entropy")
    trainer.optim_step(ADAM).result()
    fresh.forward_backward(good, "cross_entropy")
    fresh.optim_step(ADAM).result()
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(trainer.engine), tiny.weights(fresh.engine), strict=True))


def test_the_end_of_the_run_reports_unread_errors(make_trainer):
    trainer = make_trainer()
    trainer.forward_backward(BAD, "cross_entropy")
    with pytest.raises(DataError, match=MISSING):
        trainer.close()

    trainer = make_trainer()
    trainer.forward_backward(BAD, "cross_entropy")
    trainer.optim_step(ADAM)  # nor this
    with pytest.raises(DataError, match=MISSING):
        trainer.close()

    trainer = make_trainer()
    fails(trainer.forward_backward(BAD, "cross_entropy"))
    trainer.close()  # it has been read


def test_reading_another_error_hides_none(make_trainer):
    trainer = make_trainer()
    trainer.forward_backward(BAD, "cross_entropy")
    fails(trainer.load_state("nowhere"), "is not a checkpoint", CheckpointError)
    with pytest.raises(DataError, match=MISSING):
        trainer.close()


def test_an_old_error_read_again_hides_no_new_one(make_trainer):
    trainer = make_trainer()
    trainer.forward_backward(BAD, "cross_entropy")
    old = trainer.optim_step(ADAM)
    fails(old)
    trainer.forward_backward(BAD * 2, "cross_entropy")
    trainer.forward(tiny.datums(1), "cross_entropy").result()
    fails(old)
    fails(trainer.optim_step(ADAM))


def test_awaiting_an_error_is_reading_it(make_trainer):
    trainer = make_trainer()

    async def program():
        trainer.forward_backward(BAD, "cross_entropy")
        with pytest.raises(DataError, match=MISSING):
            await trainer.optim_step(ADAM)
        return await trainer.optim_step(ADAM)

    assert asyncio.run(program()).metrics["optim/num_loss_tokens"] == 0


@pytest.mark.parametrize("call", ["forward", "save_state", "load_state", "save_weights_for_sampler_ext"])
def test_every_kind_of_call_counts(make_trainer, tmp_path, call):
    trainer = make_trainer()
    (tmp_path / "taken").mkdir()
    arguments = {"forward": (BAD, "cross_entropy"), "load_state": (str(tmp_path / "taken"),)}.get(call, ("taken",))
    getattr(trainer, call)(*arguments)
    with pytest.raises(CookbookError):
        trainer.optim_step(ADAM).result()


def test_a_gradient_that_is_not_finite_is_dropped(make_trainer):
    trainer, data = make_trainer(), tiny.datums(2)
    before = tiny.weights(trainer.engine)
    trainer.forward_backward_custom(data, lambda _, rows: (rows[0].sum() * 1e36, {}))
    with pytest.raises(BackendError, match=r"the gradient norm is (inf|nan|[0-9.]+e\+3)"):
        trainer.optim_step(ADAM).result()
    assert tiny.difference(tiny.weights(trainer.engine), before) == 0
    trainer.forward_backward(data, "dpo")
    assert trainer.optim_step(ADAM).result().metrics["optim/grad_norm"] > 0


def test_a_bug_in_a_loss_keeps_its_trace(make_trainer):
    trainer = make_trainer()

    def broken(data, logprobs):
        return logprobs[99].sum(), {}

    with pytest.raises(IndexError) as caught:
        trainer.forward_backward_custom(tiny.datums(1), broken).result()
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert not isinstance(caught.value, CookbookError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.forward([], "crossentropy"), "unknown name 'crossentropy'.*cross_entropy"),
        (lambda t: t.forward_backward([], "dpo", {"bta": 1}), "unknown key 'loss_fn_config.bta'"),
        (lambda t: t.optim_step(ADAM, "tokens"), "grad_accumulation_normalization: expected null"),
        (lambda t: t.save_state("../elsewhere"), "checkpoint name"),
        (lambda t: t.save_weights_for_sampler_ext("a", checkpoint_type="diff"), "got 'diff'"),
    ],
)
def test_mistakes_that_need_no_model_are_raised_by_the_call(make_trainer, call, message):
    trainer = make_trainer()
    with pytest.raises(CookbookError, match=message):
        call(trainer)
    assert trainer.optim_step(ADAM).result()  # and are forgotten


def test_the_reference_is_the_model_at_the_start(make_trainer, make_engine):
    data = tiny.datums(2)
    expected = [row["logprobs"].array for row in make_engine().forward(data).loss_fn_outputs]
    for options in ({}, {"lora_rank": 4}):
        trainer = make_trainer(**options)
        reference = trainer.reference()
        for _ in range(2):
            trainer.forward_backward(data, "dpo")
            trainer.optim_step(AdamParams(learning_rate=1e-2))
        for found, start in zip(reference.logprobs(data).result(), expected, strict=True):
            np.testing.assert_allclose(found, start, atol=1e-5)


def test_the_reference_of_a_trained_adapter_is_the_trained_one(make_trainer):
    trainer, data = make_trainer(lora_rank=4), tiny.datums(2)
    trainer.forward_backward(data, "dpo")
    trainer.optim_step(AdamParams(learning_rate=1e-2))
    expected = trainer.forward(data, "dpo").result().loss_fn_outputs
    reference = trainer.reference()
    trainer.forward_backward(data, "dpo")
    trainer.optim_step(AdamParams(learning_rate=1e-2))
    for found, row in zip(reference.logprobs(data).result(), expected, strict=True):
        np.testing.assert_array_equal(found, row["logprobs"].array)


def storages(network, names):
    return [p.untyped_storage().data_ptr() for name, p in network.named_parameters() if name in names]


def test_a_frozen_copy_under_an_adapter_copies_the_adapter_only(make_trainer):
    for options in ({"lora_rank": 4}, {}):
        trainer, data = make_trainer(**options), tiny.datums(2)
        trainer.forward_backward(data, "dpo")
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
        model, frozen = trainer.engine.model, trainer.snapshot_sampler().result().engine().model
        trained = {name for name, _ in model.trainable()}
        base = {name for name, _ in model.network.named_parameters()} - trained
        assert bool(base) == bool(options)
        assert storages(model.network, base) == storages(frozen.network, base)
        assert not set(storages(model.network, trained)) & set(storages(frozen.network, trained))
        assert model.trainable() and all(p.requires_grad for name, p in model.network.named_parameters() if name in trained)


# ---- start and end ---------------------------------------------------------------------------------------------------


def test_closing_waits_and_refuses_more(make_trainer):
    trainer = make_trainer()
    last = trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.close()
    assert last.done()
    trainer.close()  # twice is fine
    with pytest.raises(BackendError, match="the trainer is closed"):
        trainer.forward(tiny.datums(2), "dpo")


def test_a_model_that_cannot_be_loaded_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(BackendError, match="no such folder"):
        LocalTrainer(ModelConfig(str(tmp_path / "nothing")), LocalConfig())
    assert threading.active_count() == before


def test_a_broken_model_file_is_one_line(tmp_path, tiny_folder):
    import shutil

    shutil.copytree(tiny_folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(BackendError, match="cannot load the weights") as caught:
        LocalTrainer(ModelConfig(str(tmp_path / "broken")), LocalConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "tight"}, "backend.packing: expected one of"),
        ({"threads": 0}, "threads and micro_batch_tokens must be at least 1"),
        ({"activation_checkpointing": "maybe"}, "expected auto, true or false"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalConfig(**options)


@pytest.mark.parametrize("device", ["warp", "cuda"])
def test_a_device_that_is_missing(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match=r"backend\.device: "):
        LocalConfig(device=device).torch_device()


def test_what_is_public_of_the_engine(make_trainer):
    trainer = make_trainer()
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM).result()
    assert (trainer.step, trainer.max_length) == (1, tiny.CONTEXT)


class SlowJobs(deque):
    """Jobs arrive late: another thread has all the time to come between."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Event()

    def append(self, job):
        self.begun.set()
        time.sleep(0.05)
        super().append(job)


def test_a_job_that_was_accepted_while_another_thread_closes_is_done():
    worker = Worker(1)
    lane = worker.lane(Account())
    lane._queue.jobs = SlowJobs()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lane.submit, lambda: "done")
        assert lane._queue.jobs.begun.wait(WAIT_S)
        worker.close()
        assert answer.result().result(timeout=WAIT_S) == "done"


def test_the_worker_ends_without_references_to_it():
    worker = Worker(1)
    thread, last = worker.thread, worker.submit(lambda: time.sleep(0.05) or "done")
    del worker
    thread.join(WAIT_S)
    assert last.result(timeout=0) == "done" and not thread.is_alive()


def test_the_worker_outlives_its_jobs():
    worker = Worker(1)
    held = worker.submit(lambda: 1 / 0)
    assert isinstance(held.exception(), ZeroDivisionError)
    assert worker.submit(threading.get_ident).result() != threading.get_ident()
    assert worker.submit(torch.get_num_threads).result() == 1
    slow = worker.submit(lambda: time.sleep(0.05) or "done")
    worker.close()
    assert slow.result(timeout=0) == "done"


def test_running_out_of_memory_says_what_to_turn():
    message = r"out of memory: .*; lower backend.micro_batch_tokens"
    for error in (torch.OutOfMemoryError("CUDA out of memory\nmore"), RuntimeError("[enforce] can't allocate memory: 5 bytes")):
        found = with_remedy(error)
        assert isinstance(found, BackendError)
        with pytest.raises(BackendError, match=message):
            raise found
    other = RuntimeError("something else")
    assert with_remedy(other) is other
