"""A folder in which the commands of the documentation run, and the words that each runs with."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

from pages import FOUND, PAGES
from runtools import ROOT, checkpoint, train

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.cli.app import run
from cookbook.engine.model import ModelConfig
from cookbook.types import AdamParams, Datum, ModelInput

# Commands that run in tests/system/test_docs_servers.py: they need a server, a job, a hub, or run until they are stopped.
SERVED = r"^serve (?!--verify)|backend=remote|--serve|job=|^jobs (create|attach|logs|stop|delete)|push runs/mine user/name$"

# Commands that do not run as printed, and why; the test that proves them.
ELSEWHERE = {
    "^deployments (create|scale|warm-up|delete)": "vLLM: test_vllm.py::test_the_command_and_a_run_find_the_same_servers",
    "^serve .*deployment=vllm": "vLLM: test_vllm_endpoint.py::test_samples_are_those_of_the_named_weights",
    "backend.*deployment=vllm": "vLLM, GPUs: test_vllm.py::test_grpo_on_two_ranks_learns_through_it",
    "deployment=vllm.*lora": "vLLM: test_vllm.py::test_grpo_of_an_adapter_learns_through_it",
    "deployment=vllm.*on_exit=keep": "vLLM: test_vllm.py::test_grpo_with_samples_that_lag_behind",
    "deployment=vllm": "vLLM: test_vllm.py::test_grpo_learns_through_it",
    "^weights upload": "a server: ../unit/server/test_server_adapters.py::"
    "test_an_adapter_of_peft_computes_the_same_and_is_trained_on",
    "experiment=": "three steps of each, with its judge, server or packages: test_gallery.py::test_an_experiment_runs",
}

# Names on the pages, and the files of this repository that the test uses instead.
STANDS_FOR = {
    "Qwen/Qwen3-0.6B": "./my-model",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "./my-model",
    "model=smollm2_135m": "model=./my-model",
    "build/smollm2": "./my-model",
    "Qwen/Qwen3-8B": "./my-model",
    "qwen3_0p6b": "./my-model",
    "trl-lib/ultrafeedback_binarized": "pairs.jsonl",
    "RUN/config.yaml": "runs/mine/config.yaml",
    "runs/mine/checkpoints/step-000050": "CHECKPOINT",
    "/tmp/mine.html": "mine.html",
    "recipe.teacher=runs/teacher": "recipe.teacher=runs/mine",
    "reward.model=runs/preferences": "reward.model=runs/mine",
    "runs/policy": "runs/mine",
    # With the shorter completions of SHORT.
    "rollout.overlong=1024": "rollout.overlong=8",
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
    shutil.copy("chats.jsonl", "test.jsonl")
    shutil.copy(data / "pairs_eval.jsonl", "pairs.jsonl")
    shutil.copy(data / "gsm8k_eval.jsonl", "gsm8k.jsonl")
    Path("chats").mkdir()
    Path("chats/a.jsonl.gz").write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
    Path("rubric.txt").write_text("Is it right?\n{prompt}\n<answer>\n{completion}\n</answer>\nEnd with 'Score: N'.\n")
    Path("my_env.py").write_text(blocks("environments")[0] + OF_ROWS + "\n\nQuiz = Sums\n")
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
    # The folder of a server without sessions.
    Path("runs/serve/sessions").mkdir(parents=True)
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
    if words[0] in ("train", "eval", "plan", "calibrate") or words[:2] in (["check", "config"], ["check", "data"]):
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
