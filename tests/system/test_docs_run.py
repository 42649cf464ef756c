"""The commands and the Python of the pages, run as they are written, with few steps and with files in place of the hub's."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evaltools import need_lm_eval
from exampletools import judge
from marks import some
from pageruns import ELSEWHERE, SERVED, SHORT, blocks, elsewhere, words_of
from pages import COMPOSED, FOUND, PAGES
from runtools import ROOT, checkpoint, here, inside, train  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.sampling.rewards import Limits

# The shipped model wins no game of this: a run without any gradient ends with exit code 2, saved.
WITHOUT_GRADIENT = ("env.game=TicTacToe-v0",)


RUN = [one for one in FOUND if elsewhere(one) is None and not isinstance(COMPOSED.get(one), str)]
LM_EVAL = [one for one in RUN if re.search("--tasks|reward=ifeval", one)]
HERE = [one for one in RUN if one not in LM_EVAL and not re.search(SERVED, one)]


def test_what_is_run_elsewhere_is_run_there() -> None:
    assert len(HERE) > 65 and len(LM_EVAL) == 3
    assert {elsewhere(one) for one in FOUND} == {*ELSEWHERE.values(), None}
    for reason in ELSEWHERE.values():
        file, name = reason.rpartition(": ")[2].split("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / "system" / file).read_text(encoding="utf-8")


# In CI the first of the commands of each name, and some that train: other ones with each commit. The others run at night.
NAMES = {re.match(r"(check |weights |cache |fork )?\S+", one)[0]: one for one in reversed(HERE) if not one.startswith("train")}
SEVERAL_PROCESSES = r"backend\.(ranks|gpus)=| -m$|env=agent"
IN_CI = {*NAMES.values(), *some([one for one in HERE if one.startswith("train") and not re.search(SEVERAL_PROCESSES, one)], 6)}


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.slow if one in IN_CI else pytest.mark.nightly) for one in HERE]
)
def test_a_command_runs(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.startswith("fork"):
        for name in ("recipes", "losses", "conf"):
            shutil.rmtree(name)
    if "gguf" in command:
        pytest.importorskip("gguf", reason="gguf is an extra")
    for name in ("wandb", "trackio", "tensorboard", "textarena"):
        if name in command:
            pytest.importorskip(name, reason=f"{name} is an extra")
    if "trackio" in command:
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", place / "trackio")
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+3=\n4+4=\n"))
    if "my.yaml" in command and not command.startswith("init"):
        assert run(["init", "sft", "my.yaml"]) == 0
    words = words_of(command)
    with judge() if "reward=judge" in words else none() as url:
        words += [f"reward.url={url}", "reward.cache=null"] if url else []
        assert run(words) == (2 if any(one in command for one in WITHOUT_GRADIENT) and words[0] == "train" else 0)


@contextmanager
def none() -> Iterator[None]:
    yield None


@pytest.mark.nightly
@pytest.mark.parametrize("command", LM_EVAL)
def test_a_command_with_lm_eval_runs(command: str, place: Path) -> None:
    need_lm_eval()
    assert run(words_of(command)) == 0


# Python


@pytest.mark.slow
def test_the_python_of_the_api_page_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, loop, *_ = blocks("python-api")
    few = recipe.replace('"recipe.steps=20"', f'"recipe.steps=1", *{SHORT[:-1]!r}, "eval.every=1"')
    exec(compile(few, "docs/guide/python-api.md", "exec"), {})
    assert "<RunResult runs/grpo-" in capsys.readouterr().out
    exec(compile(loop, "docs/guide/python-api.md", "exec"), {})
    assert "'nll'" in capsys.readouterr().out.replace("nll:", "'nll'")


@pytest.mark.slow
def test_the_loss_of_the_models_page_trains_with_transformers(place: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import cookbook

    model = AutoModelForCausalLM.from_pretrained("my-model")
    before = model.model.embed_tokens.weight.detach().clone()
    rows = [{"input_ids": [10, 11, 12, 13], "labels": [10, 11, 12, 13]}] * 2
    args = TrainingArguments("trained", max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    [text] = blocks("models")
    names: dict[str, Any] = {"model": model, "args": args, "rows": rows, "Trainer": Trainer, "cookbook": cookbook}
    exec(compile(text, "docs/guide/models.md", "exec"), names)
    assert not before.equal(model.model.embed_tokens.weight)


@pytest.mark.slow
def test_the_clients_of_a_server_run(place: Path) -> None:
    tinker = pytest.importorskip("tinker", reason="tinker is an extra")
    import servertools

    with servertools.running(ROOT / "data" / "tiny", place / "server") as server:
        [connect] = blocks("tinker-compatibility")
        names: dict[str, Any] = {}
        exec(connect.replace("http://127.0.0.1:8000", server.url), names)
        [loop] = blocks("remote")
        array = {"target_tokens": [11, 12, 13], "weights": [0.0, 1.0, 1.0]}
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([10, 11, 12]), loss_fn_inputs=array)]
        seen: list[float] = []

        def focal(data: Any, logprobs: Any) -> Any:
            loss = -sum(row.sum() for row in logprobs)
            seen.append(loss.item())
            return loss, {}

        loop += "    result.result()\n"
        exec(loop.replace("http://127.0.0.1:8000", server.url).replace("range(40)", "range(4)"),
             {"tinker": tinker, "data": data, "focal": focal})  # fmt: skip
    assert len(seen) == 4 and seen[-1] < seen[0]


@pytest.mark.nightly
def test_the_python_of_the_jobs_page_runs(place: Path) -> None:
    [text] = blocks("jobs")
    local = re.sub(r"cookbook\.SlurmJob\(.*\)", "cookbook.LocalJob()", text).replace(
        "Qwen/Qwen3-8B", str(ROOT / "data" / "tiny")
    )
    assert local != text
    names: dict[str, Any] = {}
    exec(compile(local, "docs/operate/jobs.md", "exec"), names)
    assert names["manager"].get("mine").state.value == "DELETED"


def test_code_that_the_pages_show_is_that_of_the_package() -> None:
    """Excerpts: each line of the block is in the file, without comments and spaces."""
    excerpts = {
        ("README", "run.steps"): "recipes/grpo.py",
        ("CONTRIBUTING", "class DFT"): "cookbook/losses/dft.py",
    }
    for (page, part), file in excerpts.items():
        block = next(text for text in blocks(page) if part in text)
        source = "".join((ROOT / file).read_text(encoding="utf-8").split())
        lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
        assert [line for line in lines if "".join(line.split()) not in source] == [], file


@pytest.mark.slow
def test_the_environment_of_the_readme_is_played(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = next(text for text in blocks("README") if "class Sums" in text)
    assert len([line for line in block.splitlines() if line]) <= 12
    (place / "twelve.py").write_text(block)
    assert run(["check", "env", "twelve.py:Sums", "workers=0", "timeout_s=null", "max_turns=2"]) == 0
    assert "fail" not in capsys.readouterr().out


def test_the_reward_of_the_contributors_page_judges() -> None:
    names: dict[str, Any] = {"dataclass": dataclass, "Limits": Limits, "Mapping": Mapping, "Any": Any}
    exec(next(text for text in blocks("CONTRIBUTING") if "class Exact" in text), names)
    assert names["Exact"]()("4", {"answer": "4"}) == 1.0 and names["Exact"]()("5", {"answer": "4"}) == 0.0


def test_every_block_of_python_is_in_a_test() -> None:
    """A page with new Python needs a test; pages whose Python another test runs are named here."""
    others = {"data", "endpoint", "environments", "rewards"}
    named = {
        "README",
        "CONTRIBUTING",
        "python-api",
        "models",
        "tinker-compatibility",
        "remote",
        "jobs",
        "own-recipe",
        "trackers",
    }
    assert {page.stem for page in PAGES if blocks(page.stem)} <= others | named
    counts = {"python-api": 4, "models": 1, "tinker-compatibility": 1, "remote": 1, "jobs": 1, "own-recipe": 1, "trackers": 2}
    assert {name: len(blocks(name)) for name in counts} == counts
    # The other two blocks of python-api run in processes of test_pipeline.py.
