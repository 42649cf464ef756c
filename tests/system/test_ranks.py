"""Several ranks compute what one process computes, each its share. The ranks are processes, and talk through gloo."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leading
import numpy as np
import pytest
import ranktools
import tiny
import torch
from marks import rest_nightly, rotating, some
from rankcases import LORA, MOE, SAME, UNTIED, case, differs, save_models
from waiting import WAIT_S, until

from cookbook.checkpoints import gathered, manifest, sampler_checkpoints
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.engine.parallel import Ranks, RanksLostError
from cookbook.engine.ranks import messages
from cookbook.engine.ranks.commands import EXIT_LOST, Leader, PerRank
from cookbook.engine.ranks.processes import Agreement, ProcessRanks, _listener
from cookbook.errors import BackendError

SHARDS = ("none", "all")


# Replicas and shards, a kept gradient and a shared prompt. The other kinds are slow cases.
FAST = [
    case("none", "grpo", data="shared", accumulates=True, repeats=True),
    case("all", "sft", **UNTIED, repeats=True, options={"activation_checkpointing": True}),
]
MIXED = [
    case("all", "custom", data="seven", options={"retain_bytes": 0, "packing": "padded"}),
    case("all", "grpo", data="one prompt", **LORA, steps=2),
    case("all", "dpo", data="longest", options={"dtype": "float32"}, steps=2),
    case("all", "grpo entropy", model="moe", options={"router_aux_loss_coef": 0.01}, steps=2),
]
# test_rank_matrix.py has every loss with most of these.
VARIANTS: list[dict[str, Any]] = [
    {},
    UNTIED,
    MOE,
    {**MOE, "options": {"router_aux_loss_coef": 0.01}},
    LORA,
    {"options": {"dtype": "float32"}},
    # As one process with another size of its passes.
    {"options": {"dtype": "bfloat16"}},
    {"options": {"activation_checkpointing": True}},
    {"options": {"activation_offloading": True}},
    {"options": {"retain_bytes": 0}},
    {"options": {"packing": "padded"}},
    {"options": {"shared_prompts": False}, "data": "shared"},
    {"options": {"fused_layers": False, "trim_last_layer": False}},
    {"data": "seven", "accumulates": True},
    {"retained": True},
    # Tokens that the run adds, in full and under LoRA, and adapters on experts.
    {"data": "added tokens", "options": {"add_tokens": ["<a>", "<b>"]}},
    {**UNTIED, "data": "added tokens", "options": {"add_tokens": ["<a>", "<b>"], "lora_rank": 4}},
    {**MOE, **LORA},
    {"data": "longest"},
    {"data": "pair"},
    {"data": "one"},
    {"data": "pair", "options": {"packing": "padded", "dtype": "float32"}},
]
SLOW = {
    shard: [
        *(case(shard, "custom", **variant) for variant in VARIANTS),
        *(one for one in MIXED if one["shard"] == shard),
    ]
    for shard in SHARDS
}
HYBRID = [
    *(case("node", "custom", **variant) for variant in VARIANTS[:6]),
    *(case(shard, "grpo", **LORA) for shard in SHARDS),
    case("node", "sft", repeats=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the models."""
    return save_models(tmp_path_factory.mktemp("models"))


def check(
    cases: list[dict[str, Any]], count: int, models: dict[str, str], folder: Path, **variables: str
) -> dict[str, dict[str, Any]]:
    """Run all cases in one group, and report every one that differs from one process. Return the results."""
    given = [{**one, "model": models[one["model"]]} for one in cases]
    results = ranktools.results_of(count, folder, given, **variables)
    differences(cases, results, count)
    return results


def differences(cases: list[dict[str, Any]], results: dict[str, dict[str, Any]], count: int) -> None:
    """Fail for every case in which the ranks differ from one process, or do not share the work."""
    wrong = [f"{one['name']}: {results[one['name']]}" for one in cases if differs(one, results[one["name"]], count)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def fast(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """Results of one pair of processes, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("fast")
    given = [{**one, "model": models[one["model"]]} for one in FAST]
    programs = [("checkpoints", models["untied"]), ("errors", models["tied"]), ("sampled_from", models["tied"])]
    return ranktools.results_of(2, folder, given, programs, sampled=models["tied"]), folder


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_computes(fast):
    differences(FAST, fast[0], 2)


@pytest.mark.slow
def test_two_ranks_share_the_prompts_of_a_batch(fast):
    found = fast[0]["sampled"]
    assert found["same tokens"] and found["logprobs"] < SAME["float64"]
    assert all(0.3 < share < 0.7 for share in found["shares"]), found["shares"]


def close(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    return one == pytest.approx(other, rel=tolerance)


@pytest.mark.slow
def test_a_trainer_on_two_ranks_is_one_trainer(fast, models, tmp_path):
    """Losses, checkpoints, digests and reference of sharded weights are those of one process."""
    results, folder = fast
    found, expected = results["checkpoints"], leading.checkpoints(models["untied"], tmp_path)
    assert found["digests"] == expected["digests"]
    assert all(close(found[key], expected[key]) for key in ("losses", "later", "reference", "logprobs", "again"))
    # Loaded into the same ranks, a checkpoint continues bit for bit.
    assert found["again"] == found["later"]
    assert files_of(folder / "base") == files_of(tmp_path / "base")
    assert weights_of(sampler_checkpoints.reconstruct(folder / "delta")) == pytest.approx(
        weights_of(sampler_checkpoints.reconstruct(tmp_path / "delta")), rel=1e-9, abs=1e-12
    )
    for name in ("aside", "three"):
        assert trained(folder / name, models) == pytest.approx(trained(tmp_path / name, models), rel=1e-9, abs=1e-12)
    # What two ranks have written, one process continues.
    resumed = leading.resume(models["untied"], folder)
    assert resumed["step"] == 4 and close(resumed["again"], found["later"])


def check_sampled_from(found: dict[str, Any], folder: Path, model: str, alone: Path) -> None:
    """Compare every file of every checkpoint, manifests with their digests included, with those of one process."""
    expected = leading.sampled_from(model, alone)
    assert "a delta needs a checkpoint before it (" in found["gone"] and "other is gone); write" in expected["gone"]
    names = {f"{dtype}/{name}" for dtype in ("float64", "bfloat16") for name in ("base", "delta", "second")} | {"adapted/under"}
    for name in names:
        assert files_of(folder / name, all_files=True) == files_of(alone / name, all_files=True), name
    assert manifest.read(alone / "bfloat16" / "second")["kind"] == "delta"


@pytest.mark.slow
def test_sharded_ranks_save_the_files_of_one_process_at_equal_weights(fast, models, tmp_path):
    check_sampled_from(fast[0]["sampled_from"], fast[1], models["tied"], tmp_path)


@pytest.mark.parametrize(
    ("count", "shard", "model"), rest_nightly([(4, "node", "untied"), (2, "all", "moe"), (3, "all", "moe")])
)
def test_ranks_of_any_number_save_the_files_of_one_process(models, tmp_path, count, shard, model):
    folder = tmp_path / "ranks"
    folder.mkdir()
    programs = [("sampled_from", models[model])]
    found = ranktools.results_of(count, folder, programs=programs, shard=shard, LOCAL_WORLD_SIZE="2")["sampled_from"]
    check_sampled_from(found, folder, models[model], tmp_path / "alone")


@pytest.mark.slow
def test_an_error_on_one_rank_is_one_line_and_the_group_lives_on(fast, models, tmp_path):
    check_errors(fast[0]["errors"], leading.errors(models["tied"], tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("shard", SHARDS)
def test_a_group_may_be_idle_for_longer_than_the_time_out_of_its_collective_operations(models, tmp_path, shard):
    """A rank that fails takes part in the sums of the replicas, or the others would wait until the time-out."""
    programs = [("errors", models["tied"])]
    found = ranktools.results_of(2, tmp_path, programs=programs, shard=shard, IDLE_S="32", TIMEOUT_S="30")["errors"]
    check_errors(found, leading.errors(models["tied"], tmp_path), shard)


def test_the_ranks_find_each_other_through_one_address(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def address(host: str) -> str | None:
        descriptor = _listener(host, 0)
        with contextlib.closing(socket.socket(fileno=descriptor)) if descriptor else contextlib.nullcontext() as listener:
            return listener.getsockname()[0] if listener else None

    assert address("127.0.0.1") == "127.0.0.1"
    # Ranks on other nodes could not connect to these: a name of the loopback interface, an address of another machine.
    assert address("localhost") is None and address("203.0.113.1") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert address("localhost") == "127.0.0.1"


def test_objects_are_not_registered_while_another_thread_packs_a_command():
    class First(Ranks):
        def send(self, message: object) -> None:
            pass

    leader = Leader(First())  # type: ignore[arg-type]

    def make() -> PerRank:
        leader._sending.acquire()
        return PerRank()

    thread = threading.Thread(target=leader.call, args=(False, make, len), daemon=True)
    thread.start()
    # The lock is held by then, or the thread has ended.
    until(lambda: leader._sending.locked() or not thread.is_alive())
    assert thread.is_alive() and not leader._objects
    leader._sending.release()
    thread.join(WAIT_S)
    assert len(leader._objects) == 1


def test_a_rank_that_cannot_copy_its_part_ends_the_group():
    """The other ranks wait for the part, so an error of the call alone would leave them waiting."""
    ranks = ProcessRanks.__new__(ProcessRanks)
    ranks.rank, ranks.size = 1, 2
    # A tensor without memory cannot be copied.
    layout = gathered._Layout(ranks, None, {"weight": torch.empty(2, device="meta")}, None, [["weight"]], {})  # type: ignore[arg-type]
    with pytest.raises(RanksLostError, match=r"^rank 1 of 2: NotImplementedError: Cannot copy out of meta tensor"):
        layout.gather(lambda *_: None, copies={})


@pytest.mark.parametrize("other", [True, Agreement(ends_command=True, error=BackendError("model.name: unreadable"))])
def test_an_error_that_takes_one_rank_alone_out_of_a_command_ends_the_group(other):
    """The other ranks are in the middle of the command, and would wait for the rank at the next agreement."""
    ranks = ProcessRanks.__new__(ProcessRanks)
    ranks.rank, ranks.size = 0, 2

    theirs = torch.tensor(list(messages.packed(other)), dtype=torch.uint8)

    def all_gather(found: list[torch.Tensor], own: torch.Tensor) -> None:
        found[0].copy_(own)
        if own.dtype == torch.int64:
            found[1].fill_(len(theirs))
        else:
            found[1][: len(theirs)] = theirs

    ranks._dist = SimpleNamespace(all_gather=all_gather)
    error = BackendError("model.name: unreadable")

    def fail() -> None:
        raise error

    with pytest.raises(RanksLostError, match=r"rank 0 of 2: one rank alone failed: model\.name: unreadable") as lost:
        ranks.together(fail)
    assert str(lost.value.__cause__) == str(error)
    if isinstance(other, Agreement):
        for inside in (lambda: ranks.gathered(True), lambda: ranks.together(lambda: None)):
            with pytest.raises(RanksLostError, match=r"one rank alone failed: model\.name"):
                inside()
        with pytest.raises(BackendError, match=r"model\.name: unreadable"):
            ranks.together(lambda: None, ends_command=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of another process")
def test_a_rank_without_memory_fails_the_call_and_the_group_lives_on(models, tmp_path):
    programs = [("out_of_memory", models["tied"])]
    found = ranktools.results_of(2, tmp_path, programs=programs, shard="none")["out_of_memory"]
    assert found["refused"].startswith("out of memory: ") and "backend.micro_batch_tokens" in found["refused"]
    (tmp_path / "pid-1").unlink()
    assert close(found["losses"], leading.out_of_memory(models["tied"], tmp_path)["losses"])


def check_errors(found: dict[str, Any], expected: dict[str, Any], shard: str = "all") -> None:
    assert found["not finite"].startswith("loss cross_entropy: returned inf for datum")
    assert all(found[key] == expected[key] for key in ("bad datum", "custom", "checkpoint"))
    assert close(found["losses"], expected["losses"])
    if shard == "none":
        return
    assert "sampling: weights that are sharded over ranks would be gathered for every token" in found["sampling"]
    assert found["optimizer"].startswith("backend.optimizer: adafactor cannot update weights that are sharded")


def files_of(folder: Path, *, all_files: bool = False) -> dict[str, bytes]:
    """The files of a checkpoint, without its manifest unless ``all_files``."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if all_files or path.name != manifest.NAME}


def weights_of(weights: Weights) -> Any:
    return np.concatenate([weights.tensors[name].double().numpy().ravel() for name in sorted(weights.tensors)])


def trained(folder: Path, models: dict[str, str]) -> Any:
    """Weights and moments of a checkpoint, as one process loads them."""
    trainer = leading.made(models["untied"], folder)
    trainer.load_state(str(folder)).result()
    tensors = {**dict(trainer.engine.model.trainable()), **trainer.engine.optimizer.state()}
    trainer.close()
    return np.concatenate([tensors[name].detach().double().numpy().ravel() for name in sorted(tensors)])


@pytest.mark.parametrize(
    ("shard", "program", "model"),
    rest_nightly(
        [
            ("none", "checkpoints", "tied"),
            ("all", "adapter", "tied"),
            ("none", "adapter", "tied"),
            ("all", "checkpoints", "moe"),
        ],
        slow=2,
    ),
)
def test_replicas_and_adapters_are_led_too(models, tmp_path, shard, program, model):
    one, other = tmp_path / "ranks", tmp_path / "alone"
    one.mkdir()
    found = ranktools.results_of(2, one, programs=[(program, models[model])], shard=shard)[program]
    expected = leading.PROGRAMS[program](models[model], other)
    assert found["digests"] == expected["digests"]
    assert all(close(found[key], expected[key]) for key in expected if key != "digests")
    for name in {"base", "delta"} & {path.name for path in one.iterdir()}:
        assert weights_of(sampler_checkpoints.reconstruct(one / name)) == pytest.approx(
            weights_of(sampler_checkpoints.reconstruct(other / name)), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize(("before", "after"), rest_nightly([(1, 2), (4, 2), (2, 4)]))
def test_a_checkpoint_continues_on_another_number_of_ranks(models, tmp_path, before, after):
    if before == 1:
        expected = leading.checkpoints(models["untied"], tmp_path)
    else:
        expected = ranktools.results_of(before, tmp_path, programs=[("checkpoints", models["untied"])])["checkpoints"]
    found = ranktools.results_of(after, tmp_path, programs=[("resume", models["untied"])])["resume"]
    assert found["step"] == 4 and close(found["again"], expected["later"])


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_holds_the_whole_model_while_it_is_loaded_saved_for_sampling_or_trained(tmp_path):
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 28, "head_dim": 128}
    tiny.save(tmp_path / "small", tie_word_embeddings=False)
    model = tiny.save(tmp_path / "large", **shape)
    grown = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"memory": str(model)}))
        ranktools.parent().fork(count, folder, {})
        assert not any(ranktools.parent().wait()), ranktools.outputs_of(folder)
        grown[count] = [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(count)]
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    shares = {count: [{key: one[key] / num_bytes for key in one} for one in found] for count, found in grown.items()}
    print(shares)
    assert shares[1][0]["load"] > 0.9
    # One process trains with weights, gradients and two moments.
    assert shares[1][0]["train"] > 3.9
    for key in ("load", "train"):
        assert max(rank[key] for rank in shares[2]) < 0.7 * shares[1][0][key], key
    # A base needs a few tensors. A delta needs the half of the weights that a rank keeps for the next one, and a few tensors.
    assert max(rank["base"] for rank in shares[2]) < 0.15 and max(rank["delta"] for rank in shares[2]) < 0.75


@pytest.mark.parametrize(("shard", "victim"), rotating(itertools.product(SHARDS, (0, 1)), 2))
def test_a_killed_rank_ends_the_group(models, tmp_path, shard, victim):
    """No process stays, and none takes the closed connection for an answer."""
    job = {"cases": [], "programs": [("killed", models["tied"])], "shard": shard}
    (tmp_path / "job.json").write_text(json.dumps(job))
    parent = ranktools.parent()
    ranks = parent.fork(2, tmp_path, {})
    until((tmp_path / "started").exists)
    os.kill(ranks[victim], signal.SIGKILL)
    assert parent.wait()[1 - victim] == EXIT_LOST
    output = (tmp_path / f"output-{1 - victim}").read_text()
    assert output.strip().splitlines()[-1].startswith("error: rank ") and "Traceback" not in output


# A few of the cases in CI, other ones each week; all of them at night.
@pytest.mark.parametrize("count", rest_nightly([5, None]))
@pytest.mark.parametrize("shard", SHARDS)
def test_two_ranks_compute_every_loss_and_every_option(models, tmp_path, shard, count):
    once = [case(shard, "sft"), case(shard, "custom"), case(shard, "custom", **LORA), case(shard, "custom", **UNTIED)]
    chosen = [once[0], *some(SLOW[shard], count)]
    results = check(chosen, 2, models, tmp_path)
    # The ranks compute every token once, as one process does, also for a custom loss: no logprobs are computed twice.
    for name in {one["name"] for one in once} & results.keys():
        assert results[name]["tokens"] == 1.0, name


@pytest.mark.parametrize("count", rest_nightly([3, None]))
def test_four_ranks_shard_within_nodes(models, tmp_path, count):
    check(some(HYBRID, count), 4, models, tmp_path, LOCAL_WORLD_SIZE="2")
