"""The commands and the Python of the pages, run as they are written, with few steps and with files in place of the hub's."""

from __future__ import annotations

import gzip
import io
import os
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
from marks import some
from runtools import ROOT, checkpoint, here, inside, train  # noqa: F401 - here is a fixture
from test_gallery import judge
from test_readme import COMPOSED, FOUND, PAGES

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.cli.app import run
from cookbook.engine.model import ModelConfig
from cookbook.sampling.rewards import Limits
from cookbook.types import AdamParams, Datum, ModelInput

# Commands that run in tests/test_docs_servers.py: they need a server, a job, a hub, or run until they are stopped.
SERVED = r"^serve|backend=remote|--serve|job=|^jobs (create|attach|logs|stop|delete)|push runs/mine user/name --private"
# Commands that do not run as printed, and why; the test that proves them.
ELSEWHERE = {
    "^deployments (create|scale|warm-up|delete)": "vLLM: test_vllm.py::test_the_command_and_a_run_find_the_same_servers",
    "^serve .*deployment=vllm": "vLLM: test_vllm_endpoint.py::test_samples_are_those_of_the_named_weights",
    "backend.*deployment=vllm": "vLLM, GPUs: test_vllm.py::test_grpo_on_two_ranks_learns_through_it",
    "deployment=vllm.*lora": "vLLM: test_vllm.py::test_grpo_of_an_adapter_learns_through_it",
    "deployment=vllm.*on_exit=keep": "vLLM: test_vllm.py::test_grpo_with_samples_that_lag_behind",
    "deployment=vllm": "vLLM: test_vllm.py::test_grpo_learns_through_it",
    "experiment=": "three steps of each, with its judge, server or packages: test_gallery.py::test_an_experiment_runs",
}
# Names on the pages, and the files of this repository that the test uses instead.
STANDS_FOR = {
    "Qwen/Qwen3-0.6B": "./my-model",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "./my-model",
    "model=smollm2_135m": "model=./my-model",
    "qwen3_0p6b": "./my-model",
    "trl-lib/ultrafeedback_binarized": "pairs.jsonl",
    "RUN/config.yaml": "runs/mine/config.yaml",
    "runs/mine/checkpoints/step-000050": "CHECKPOINT",
    "/tmp/mine.html": "mine.html",
    "recipe.teacher=runs/teacher": "recipe.teacher=runs/mine",
    # Two processes in place of eight GPUs.
    "backend.gpus=8": "backend.ranks=2",
    # The tasks of lm-eval with these names download their documents.
    "gsm8k,ifeval": "my_task",
}
SHORT = ["data.limit=24", "eval.limit=2", "rollout.max_tokens=16", "eval.max_tokens=16", "recipe.steps=1"]
GSM8K = [
    "data.name=null",
    "data.path=gsm8k.jsonl",
    "data.eval_path=gsm8k.jsonl",
    "data.eval_split=null",
    "data.eval_fraction=0",
]
IFEVAL = ["data.name=null", "data.path=ifeval.jsonl", "data.eval_path=ifeval.jsonl", "data.eval_split=null"]
# The shipped model wins no game of this: a run without any gradient ends with exit code 2, saved.
WITHOUT_GRADIENT = ("env.game=TicTacToe-v0",)


# An environment whose episodes are rows of the data.
OF_ROWS = """

class MyClass:
    def reset(self, question, answer):
        self.answer = answer
        return question

    def step(self, text):
        return None

    def get_reward(self):
        return 0.0
"""
# A task of lm-eval.
TASK = """\
task: my_task
dataset_path: json
dataset_kwargs: {data_files: {test: gsm8k.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["=", " "], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def blocks(name: str) -> list[str]:
    """The Python of a page."""
    [page] = (page for page in PAGES if page.stem == name)
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def prepare() -> None:
    """Write what the commands name into this folder: runs of GRPO, data, and the Python of the pages."""
    data = ROOT / "data" / "arithmetic"
    assert train("recipe=grpo", *SHORT, "recipe.prompts_per_step=4", "recipe.steps=2", "out=runs/mine") == 0
    assert train("recipe=grpo", *SHORT, "recipe.prompts_per_step=4", "model.lora_rank=4", "out=runs/adapter") == 0
    for name in ("a", "b", "other", "grpo_sums", "grpo_lora", "sft", "dpo"):
        shutil.copytree("runs/mine", f"runs/{name}")
    shutil.copytree(ROOT / "data" / "tiny", "my-model")
    shutil.copy(data / "chat_eval.jsonl", "chats.jsonl")
    shutil.copy(data / "pairs_eval.jsonl", "pairs.jsonl")
    shutil.copy(data / "gsm8k_eval.jsonl", "gsm8k.jsonl")
    Path("chats").mkdir()
    Path("chats/a.jsonl.gz").write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
    Path("rubric.txt").write_text("Is it right?\n{prompt}\n<answer>\n{completion}\n</answer>\nEnd with 'Score: N'.\n")
    Path("my_env.py").write_text(blocks("environments")[0] + OF_ROWS)
    Path("rows.jsonl").write_text('{"question": "2+3=", "answer": "5"}\n' * 3)
    Path("my_opponent.py").write_text(blocks("environments")[1])
    Path("my_file.py").write_text(blocks("rewards")[0])
    Path("focal.py").write_text(blocks("own-recipe")[0])
    Path("my_tracker.py").write_text(blocks("trackers")[0])
    note, backend = (next(text for text in blocks("CONTRIBUTING") if f"class {name}" in text) for name in ("Note", "MyBackend"))
    Path("my_hooks.py").write_text(f"import cookbook\n{note}")
    own = "from cookbook.backends.local import LocalConfig\ndef MyTrainer(*args):\n    return LocalConfig().make_trainer("
    own += "args[0], seed=args[1], folder=args[2])\n"
    imports = "from dataclasses import dataclass\nfrom pathlib import Path\nfrom cookbook.engine.model import ModelConfig\n"
    Path("my_backend.py").write_text(imports + "from cookbook.protocols import Trainer\n" + own + backend)
    Path("conf/backend").mkdir(parents=True)
    Path("conf/backend/mine.yaml").write_text("_target_: my_backend.MyBackend\n")
    assert run(["fork", "grpo", "my_grpo"]) == run(["fork", "loss", "grpo", "my_loss"]) == 0
    shutil.copytree(ROOT / "examples", "examples")
    # A program that needs no row of the data.
    agent = Path("examples/agent.py").read_text().replace("json.loads(sys.argv[1])", '{"prompt": "2+3=", "answer": "5"}')
    Path("agent.py").write_text(agent)
    Path("tasks").mkdir()
    Path("tasks/my_task.yaml").write_text(TASK)
    instructions = '"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]'
    Path("ifeval.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", {instructions}}}\n' for n in range(4)))
    chain = LocalTrainer(ModelConfig("my-model"), LocalConfig(), seed=0, folder=Path("chain"))
    chain.save_weights_for_sampler_ext("v0", checkpoint_type="base").result()
    datum = Datum(ModelInput.from_ints([10, 11, 12]), {"target_tokens": [11, 12, 13], "weights": [0.0, 1.0, 1.0]})
    chain.forward_backward([datum], "cross_entropy")
    chain.optim_step(AdamParams(learning_rate=1e-3)).result()
    chain.save_weights_for_sampler_ext("v1", checkpoint_type="delta").result()
    chain.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    with inside(folder):
        prepare()
    return folder


@pytest.fixture
def place(filled: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A copy of the filled folder, as the current directory."""
    shutil.copytree(filled, here / "pages")
    monkeypatch.chdir(here / "pages")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COOKBOOK_CACHE", str(here / "cache"))
    # The programs that a command names `python`, and servers in processes of their own.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The records of jobs: the id of a deleted job stays taken.
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    return here / "pages"


def words_of(command: str) -> list[str]:
    """Return the words of a command of the pages, shortened, with local substitutes for names of the hub."""
    # README's run folders are named after their start time.
    words = [re.sub(r"runs/grpo-\d{8}-\d{6}-\w{4}", "runs/mine", word) for word in FOUND[command].words]
    for name, other in STANDS_FOR.items():
        words = [word.replace(name, other) for word in words]
    if words[:2] == ["check", "loss"]:
        words = [word.replace("my_file.py", "focal.py") for word in words]
    step = Path("chain/v1") if "reconstruct" in words else checkpoint("runs/adapter" if "--merged" in words else "runs/mine")
    words = [word.replace("CHECKPOINT", str(step)) for word in words]
    if words[0] in ("train", "eval", "plan") or words[:2] in (["check", "config"], ["check", "data"]):
        if "--cfg" not in words and "--config" not in words:
            words += [one for one in SHORT if words[0] == "train" or not one.startswith("recipe.steps")]
        words += GSM8K if "data=gsm8k" in words else IFEVAL if "data=ifeval" in words else []
        words += ["--task-folder", "tasks"] if "--tasks" in words and "--task-folder" not in words else []
    if words[0] == "train" and "--cfg" not in words:
        samples = any("grpo" in word or "distill" in word for word in words) or "--config" in words
        words += ["recipe.prompts_per_step=4" if samples else "recipe.batch_size=4"]
        words += [] if "-m" in words else ["out=runs/new"]
        # A second for each rollout's process.
        words += ["recipe.group_size=2"] if "env=agent" in words else []
    return words


def elsewhere(command: str) -> str | None:
    return next((test for pattern, test in ELSEWHERE.items() if re.search(pattern, command)), None)


RUN = [one for one in FOUND if elsewhere(one) is None and not isinstance(COMPOSED.get(one), str)]
LM_EVAL = [one for one in RUN if re.search("--tasks|reward=ifeval", one)]
HERE = [one for one in RUN if one not in LM_EVAL and not re.search(SERVED, one)]


def test_what_is_run_elsewhere_is_run_there() -> None:
    assert len(HERE) > 65 and len(LM_EVAL) == 3
    assert {elsewhere(one) for one in FOUND} == {*ELSEWHERE.values(), None}
    for reason in ELSEWHERE.values():
        file, name = reason.rpartition(": ")[2].split("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


# In CI the first of the commands of each name, and some that train: other ones with each commit. The others run at night.
NAMES = {re.match(r"(check |weights |cache |fork )?\S+", one)[0]: one for one in reversed(HERE) if not one.startswith("train")}
SEVERAL_PROCESSES = r"backend\.(ranks|gpus)=| -m$|env=agent"
IN_CI = {*NAMES.values(), *some([one for one in HERE if one.startswith("train") and not re.search(SEVERAL_PROCESSES, one)], 8)}


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
    few = recipe.replace("recipe.steps=20", "recipe.steps=1").replace("lr=1e-4", f'lr=1e-4", *{SHORT[:-1]!r}, "eval.every=1')
    exec(compile(few, "docs/python-api.md", "exec"), {})
    assert "<RunResult runs/grpo-" in capsys.readouterr().out
    exec(compile(loop, "docs/python-api.md", "exec"), {})
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
    exec(compile(text, "docs/models.md", "exec"), names)
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


@pytest.mark.slow
def test_the_python_of_the_jobs_page_runs(place: Path) -> None:
    [text] = blocks("jobs")
    local = re.sub(r"cookbook\.SlurmJob\(.*\)", "cookbook.LocalJob()", text).replace(
        "Qwen/Qwen3-8B", str(ROOT / "data" / "tiny")
    )
    assert local != text
    names: dict[str, Any] = {}
    exec(compile(local, "docs/jobs.md", "exec"), names)
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
    counts = {"python-api": 4, "models": 1, "tinker-compatibility": 1, "remote": 1, "jobs": 1, "own-recipe": 1, "trackers": 1}
    assert {name: len(blocks(name)) for name in counts} == counts
    # The other two blocks of python-api run in processes of test_pipeline.py.
