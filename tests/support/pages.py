"""Commands of the documentation, and the values that each of them sets."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from places import ROOT

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

QWEN = {"model.name": "Qwen/Qwen3-0.6B", "model.random": False, "model.dtype": "auto"}

SFT = {"optim.lr": 2e-5, "recipe.epochs": 3, "schedule.warmup_steps": 0, "schedule.warmup_ratio": 0.03, "eval.max_tokens": 512}

CHATS = {**QWEN, **SFT, "data.path": "chats.jsonl", "data.chat": False}

DEMO = {"optim.lr": 1e-4, "recipe.steps": 50, "rollout.max_tokens": 16, "eval.max_tokens": 16, "schedule.warmup_steps": 0}

CREATED = {"deployment._target_": "cookbook.deployments.vllm.deployment.VllmConfig", "deployment.name": "mine"}

SLURM = {"job.partition": "gpu", "job.gpus": 1, "model.name": "Qwen/Qwen3-8B"}

OWN_FILE = {
    "recipe.name": "sft",
    "model.name": "./my-model",
    "model.lora_rank": 16,
    "data.path": "chats.jsonl",
    "optim.lr": 1e-4,
}
# Every command that composes a configuration, and what it composes to; text: the error that the page shows.
COMPOSED: dict[str, dict[str, object] | str] = {
    "check config recipe=sft model=qwen3_0p6b data=gsm8k": {"model.name": "Qwen/Qwen3-0.6B", "data.name": "openai/gsm8k"},
    "plan recipe=sft model=qwen3_0p6b data=gsm8k": {"model.name": "Qwen/Qwen3-0.6B", "data.name": "openai/gsm8k"},
    "train recipe=sft model=qwen3_0p6b data=gsm8k recipe.steps=20": {"recipe.steps": 20},
    "train recipe=grpo model=qwen3_0p6b data=gsm8k recipe.steps=5 deployment=vllm": {"deployment.max_length": None},
    "train recipe=grop": "error: unknown recipe 'grop'.",
    # The tests write the file that docs/guide/configuration.md shows.
    "train my.yaml": OWN_FILE,
    "train my.yaml optim.lr=1e-4 seed=1": {**OWN_FILE, "seed": 1},
    "train typo.yaml": "error: typo.yaml:5: unknown key 'optim.lrr'.",
    "check config my.yaml": OWN_FILE,
    "check data my.yaml": OWN_FILE,
    "plan my.yaml": OWN_FILE,
    "train my.yaml --cfg job --all": OWN_FILE,
    "train my.yaml seed=1": {**OWN_FILE, "seed": 1},
    "train my.yaml debug=fast out=/tmp/try": {**OWN_FILE, "recipe.steps": 3},
    "train recipe=sft model=./my-model data=chats.jsonl out=runs/s1": {"model.name": "./my-model", "data.path": "chats.jsonl"},
    "train recipe=dpo model=runs/s1 data=pairs.jsonl out=runs/s2": {"model.name": "runs/s1", "data.path": "pairs.jsonl"},
    "train recipe=grpo model=runs/s2 data=gsm8k reward=number": {"model.name": "runs/s2", "data.name": "openai/gsm8k"},
    "train lr=1e-3": "error: unknown key 'lr'; write optim.lr=1e-3",
    "train recipe=sft loss=dpo": "error: loss: recipe=sft trains on conversations",
    "train recipe=dpo loss.normalization=num_sequences": "error: loss: DPO already returns a mean",
    "train recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "train recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl model.chat_template_kwargs={enable_thinking: false}": {
        **CHATS, "model.chat_template_kwargs": {"enable_thinking": False},
    },
    "train recipe=sft model=Qwen/Qwen3-8B data=chats.jsonl model.dtype=bfloat16 model.lora_rank=16 model.quantize=nf4": {
        "model.dtype": "bfloat16", "model.lora_rank": 16, "model.quantize": "nf4", "optim.lr": 2e-4,
    },
    "train recipe=sft model=tiny data=arithmetic_chat recipe.epochs=1 out=runs/sft": {
        "model.random": False, "recipe.epochs": 1,
    },
    "train recipe=dpo model=runs/sft data=arithmetic_pairs eval.max_tokens=16 out=runs/dpo": {
        "model.name": "runs/sft", "optim.lr": 1e-6, "eval.max_tokens": 16,
    },
    "train recipe=grpo model=runs/dpo data=arithmetic recipe.steps=20 rollout.max_tokens=16 eval.max_tokens=16 out=runs/grpo": {
        "model.name": "runs/dpo", "optim.lr": 1e-6, "recipe.steps": 20,
    },
    "train recipe=grpo loss.mask_truncated=true": {"loss.mask_truncated": True},
    "train recipe=grpo rollout.max_tokens=4096 rollout.overlong=1024": {"rollout.overlong": 1024, "rollout.max_tokens": 4096},
    "train recipe=grpo env=my_env.py:MyClass reward=my_env.py:reward_func data=rows.jsonl": {
        "reward.target": "my_env.py:reward_func"
    },
    "train recipe=grpo env=my_env.py:Quiz env.gamma=0.9": {"env.target": "my_env.py:Quiz", "env.gamma": 0.9},
    "train recipe=grpo reward=[number,format] reward.normalize=each": {"reward.normalize": "each"},
    "train recipe=kto model=./my-model data=thumbs.jsonl": {
        "model.name": "./my-model", "data.path": "thumbs.jsonl", "optim.lr": 1e-6, "recipe.epochs": 1,
    },
    "calibrate recipe=grpo model=./my-model data=gsm8k reward=number --price 2.5": {
        "model.name": "./my-model", "data.name": "openai/gsm8k", "optim.lr": 1e-6,
    },
    "train recipe=grpo rollout.refill=2": {"rollout.refill": 2.0, "data.curriculum": None},
    "train recipe=grpo rollout.ahead=1": {"rollout.ahead": 1},
    "train recipe=grpo data.curriculum={}": {"data.curriculum": {}, "rollout.refill": 1.0},
    "train recipe=grpo data.curriculum={new: 0.3, medium: 0.6, hard: 0.1, easy: 0.0}": {
        "data.curriculum": {"new": 0.3, "medium": 0.6, "hard": 0.1, "easy": 0.0},
    },
    "train recipe=sft data=chats/*.jsonl.gz data.streaming=true recipe.steps=5000": {
        "data.path": "chats/*.jsonl.gz", "data.streaming": True, "data.shuffle_buffer": 10000, "recipe.steps": 5000,
    },
    "train recipe=grpo model=./my-model model.lora_rank=16 data=gsm8k reward=number": {
        "model.name": "./my-model", "optim.lr": 1e-5, "recipe.steps": 200, "rollout.max_tokens": 512, "eval.max_tokens": 512,
        "data.name": "openai/gsm8k", "schedule.warmup_ratio": None,
    },
    "train recipe=grpo env=agent env.command=python examples/agent.py {row} optim.lr=3e-4": {
        "env.command": "python examples/agent.py {row}", "optim.lr": 3e-4, "env.workers": 16,
    },
    "train recipe=grpo env=arithmetic recipe.steps=15": {"env.max_turns": 2, "recipe.steps": 15, "optim.lr": 1e-4},
    "train experiment=grpo_chain_sum": {"env.task": "chain_sum", "recipe.steps": 10, "optim.lr": 3e-4, "optim.beta1": 0.5},
    "train recipe=grpo env=my_env.py:Sums env.max_turns=2 recipe.steps=15": {"env.target": "my_env.py:Sums"},
    "train recipe=grpo env=textarena env.game=GuessTheNumber-v0 model=Qwen/Qwen3-0.6B": {
        **QWEN, "env.game": "GuessTheNumber-v0", "env.max_turns": 20,
    },
    "train recipe=grpo env=textarena env.game=TicTacToe-v0 env.opponent=my_opponent.py:opponent model=Qwen/Qwen3-0.6B": {
        **QWEN, "env.opponent": "my_opponent.py:opponent",
    },
    "train recipe=grpo env=textarena env.game=TicTacToe-v0 env.opponent=self model=Qwen/Qwen3-0.6B out=runs/mine": {
        **QWEN, "env.opponent": "self",
    },
    "eval runs/mine env=textarena env.game=TicTacToe-v0 env.opponent=my_opponent.py:opponent": {
        **DEMO, "env.opponent": "my_opponent.py:opponent",
    },
    "train recipe=dpo model=HuggingFaceTB/SmolLM2-135M-Instruct data=trl-lib/ultrafeedback_binarized": {
        "model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "data.name": "trl-lib/ultrafeedback_binarized", "data.path": None,
        "optim.lr": 1e-6, "recipe.epochs": 1, "schedule.warmup_ratio": 0.1, "eval.max_tokens": 512,
    },
    "train recipe=grpo optim.lr=1e-4,2e-4 seed=0,1 -m": DEMO,
    "train recipe=my_grpo": DEMO,
    "train recipe=dpo --cfg job": {"optim.lr": 5e-5, "recipe.epochs": 1, "eval.max_tokens": 16, "schedule.warmup_ratio": None},
    "train --config RUN/config.yaml": DEMO,
    "check data recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "check config recipe=grpo": DEMO,
    "check config recipe=sft model=smollm2_135m": {"model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "optim.lr": 2e-5},
    "train recipe=sft loss=dft debug=fast": {"loss._target_": "cookbook.losses.dft.DFT", "recipe.steps": 3},
    "train recipe=grpo reward=my_file.py:reward": {"reward.target": "my_file.py:reward"},
    "train recipe=grpo reward=[number,format] reward.weights.format=0.2": {
        "reward.weights": {"number": 1.0, "format": 0.2}, "reward.parts.number.column": "answer",
    },
    "train recipe=grpo reward=judge reward.url=http://127.0.0.1:8000/v1 reward.model=Qwen/Qwen3-8B reward.rubric=rubric.txt": {
        "reward.model": "Qwen/Qwen3-8B", "reward.rubric": "rubric.txt", "reward.max_score": 10.0,
    },
    "train recipe=sft model=tiny data=arithmetic_pairs data.format=comparisons optim.lr=1e-3 recipe.steps=100 "
    "out=runs/preferences": {"data.format": "comparisons", "optim.lr": 1e-3},
    "train recipe=grpo model=tiny data=arithmetic_pairs reward=compare reward.model=runs/preferences optim.lr=1e-4 "
    "recipe.steps=30 out=runs/policy": {"reward.model": "runs/preferences", "reward.against": "chosen", "optim.lr": 1e-4},
    "eval runs/policy data=arithmetic_pairs reward=compare reward.model=runs/preferences": {"reward.model": "runs/preferences"},
    "check data recipe=sft data=pairs.jsonl data.format=comparisons": {"data.format": "comparisons"},
    "train recipe=grpo reward=exact debug=fast": {"reward.column": "answer", "recipe.steps": 3},
    "train recipe=grpo tracker=tensorboard debug=fast": {"recipe.steps": 3},
    "train recipe=grpo tracker=wandb tracker.wandb.project=sums": {**DEMO, "tracker.wandb.project": "sums"},
    "train recipe=grpo tracker=[tensorboard,trackio]": {**DEMO, "tracker.trackio.project": "cookbook"},
    "train recipe=grpo tracker={mine: {_target_: my_tracker.Lines}}": {"tracker.mine._target_": "my_tracker.Lines"},
    "train recipe=sft loss={_target_: focal.py:Focal, gamma: 1.0}": {"loss._target_": "focal.py:Focal", "loss.gamma": 1.0},
    "train recipe=sft loss=focal.py:Focal": {"loss._target_": "focal.py:Focal"},
    "train recipe=sft data=chats.jsonl data.eval_fraction=0.1 checkpoint.best=eval/loss eval.patience=3 out=runs/mine": {
        "checkpoint.best": "eval/loss", "eval.patience": 3, "data.eval_fraction": 0.1,
    },
    "train recipe=grpo loss=my_loss": {**DEMO, "loss._target_": "losses.my_loss.GRPO"},
    "train recipe=grpo +hook.note._target_=my_hooks.Note debug=fast": {"hook.note._target_": "my_hooks.Note"},
    "train recipe=grpo +hook.note._target_=my_hooks.Note": {**DEMO, "hook.note._target_": "my_hooks.Note"},
    "train recipe=grpo": DEMO,
    "train recipe=sft backend=mine debug=fast": {"backend._target_": "my_backend.MyBackend"},
    "train experiment=sft_orders": {
        "model.name": "build/smollm2", "recipe.epochs": 1, "optim.lr": 5e-5, "eval.answers": True, "data.path": "orders.jsonl",
    },
    "train experiment=sft_gsm8k": {"model.name": "build/smollm2", "recipe.steps": 10, "eval.limit": 60, "optim.lr": 2e-5},
    "train experiment=sft_chat": {"recipe.name": "sft", "model.random": False, "recipe.epochs": 4, "optim.lr": 1e-3},
    "train experiment=sft_distill": {"data.path": "teacher.jsonl", "model.random": False, "recipe.epochs": 4, "optim.lr": 1e-3},
    "train experiment=grpo_sums out=runs/teacher": DEMO,
    "train recipe=sft model=tiny recipe.steps=200 out=runs/teacher": {"model.random": False, "recipe.steps": 200},
    "train recipe=distill recipe.teacher=runs/teacher": {"recipe.teacher": "runs/teacher", "recipe.steps": 20},
    "train experiment=sft_tools": {"data.path": "calls.jsonl", "out": "runs/sft_tools", "recipe.epochs": 6, "optim.lr": 3e-3},
    "train experiment=grpo_tools": {
        "model.name": "runs/sft_tools/checkpoints/step-000378", "env.max_turns": 2, "recipe.steps": 40,
        "data.chat": True, "rollout.max_tokens": 64, "optim.lr": 1e-4,
    },
    "train experiment=dpo_pairs": {"recipe.name": "dpo", "optim.lr": 5e-5},
    "train experiment=orpo_pairs": {"recipe.name": "orpo", "optim.lr": 3e-4},
    "train experiment=grpo_sums": DEMO,
    "train experiment=grpo_two_digits": {"model.name": "build/smollm2", "optim.lr": 2e-5, "recipe.steps": 20},
    "train experiment=grpo_lora": {**DEMO, "optim.lr": 1e-3, "model.lora_rank": 16},
    "train experiment=grpo_second_try": {**DEMO, "recipe.steps": 15, "env.max_turns": 2},
    "train experiment=grpo_judge": {**DEMO, "reward.url": "http://127.0.0.1:8001/v1"},
    "train experiment=grpo_remote": {**DEMO, "backend.base_url": "http://127.0.0.1:8000"},
    "train experiment=grpo_gsm8k_tiny": {
        "model.random": False, "data.name": None, "data.columns.prompt": "question", "model.lora_rank": 16, "optim.lr": 1e-3,
    },
    "train experiment=grpo_gsm8k": {**QWEN, "model.dtype": "bfloat16", "data.name": "openai/gsm8k", "model.lora_rank": 16},
    "plan recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "eval runs/mine": DEMO,
    "eval runs/mine data=test.jsonl": {"data.path": "test.jsonl", "data.eval_path": None},
    "eval runs/mine data=test.jsonl out=result.json": {"data.path": "test.jsonl", "out": "result.json"},
    "eval runs/mine reward=my_file.py:my_function": {**DEMO, "reward.target": "my_file.py:my_function"},
    "eval runs/mine env=arithmetic": {**DEMO, "env._target_": "cookbook.sampling.environments.Arithmetic"},
    "eval runs/mine eval.pass_at=[1,8]": {**DEMO, "eval.pass_at": [1, 8]},
    "eval runs/mine data=gsm8k reward=number eval.max_tokens=512 eval.pass_at=[1,8] eval.limit=null": {
        "data.name": "openai/gsm8k", "eval.max_tokens": 512, "eval.limit": None,
    },
    "eval runs/mine eval.limit=null --tasks gsm8k,ifeval": {**DEMO, "eval.limit": None},
    "eval runs/mine --tasks my_task --task-folder tasks --fewshot 5 --chat-template": DEMO,
    "eval runs/mine data=ifeval reward=ifeval": {**DEMO, "data.name": "google/IFEval"},
    "eval qwen3_0p6b data=gsm8k out=base.json": {**QWEN, "model.dtype": "bfloat16", "eval.max_tokens": 512},
    "deployments create mine model=tiny deployment.replicas=2": {**CREATED, "deployment.replicas": 2},
    "jobs create mine model=tiny job=local": {"job._target_": "cookbook.jobs.local.LocalJob", "model.random": False},
    "jobs create mine model=qwen3_8b job=slurm job.partition=gpu job.gpus=1": SLURM,
    "train recipe=grpo job=slurm": {**DEMO, "job.partition": None},
    "train recipe=grpo job=local": {**DEMO, "job._target_": "cookbook.jobs.local.LocalJob"},
    "train recipe=grpo model=qwen3_8b data=gsm8k job=slurm job.partition=gpu job.gpus=1 job.time=12:00:00": {
        **SLURM, "job.time": "12:00:00", "optim.lr": 1e-6,
    },
    "train recipe=grpo model=qwen3_8b data=gsm8k backend=remote backend.base_url=http://127.0.0.1:8000 "
    "backend.api_key_file=key": {"backend.api_key_file": "key", "model.name": "Qwen/Qwen3-8B"},
    "serve model=tiny": {"model.random": False},
    "serve backend.ranks=2": {"backend.ranks": 2},
    "serve --verify out=runs/serve": {"out": "runs/serve"},
    "serve model=qwen3_0p6b deployment=vllm": {**QWEN, "model.dtype": "bfloat16", "deployment.replicas": 1},
    "train recipe=sft model=tiny backend.ranks=2": {"backend.ranks": 2, "model.random": False},
    "train recipe=sft model=qwen3_0p6b backend.gpus=8": {"backend.gpus": 8, "backend.ranks": None},
    "train recipe=sft model=qwen3_0p6b backend.gpus=8 backend.shard=all eval.answers=false": {
        "backend.shard": "all",
        "eval.answers": False,
    },
    "train recipe=grpo backend.ranks=2 backend.shard=all deployment=vllm": {**DEMO, "backend.shard": "all"},
    "train recipe=grpo model=qwen3_8b backend.gpus=6 backend.shard=all deployment=vllm deployment.replicas=2": {
        "backend.gpus": 6, "deployment.replicas": 2, "deployment.gpus": None,
    },
    "train recipe=grpo job=slurm backend.gpus=8 backend.shard=all deployment=vllm": {**DEMO, "job.gpus": 8},
    "train recipe=grpo backend=remote backend.base_url=http://127.0.0.1:8000": DEMO,
    "train recipe=grpo deployment=vllm": DEMO,
    "train recipe=grpo deployment=vllm model.lora_rank=16 weight_sync.every=4": DEMO,
    "train recipe=grpo deployment=vllm deployment.name=mine deployment.on_exit=keep": DEMO,
}  # fmt: skip


class Printed(NamedTuple):
    """A command of the pages, without its first word, and the line below it."""

    words: list[str]
    below: str


def commands() -> dict[str, Printed]:
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # A command that another machine runs has the machine's name before its prompt.
        lines = re.findall(r"^(?:\w+)?\$ (?:ssh .*login |printf .*\| )?cookbook (.*)\n(?=(.*))", text, re.MULTILINE)
        inline = re.findall(r"`cookbook ((?:train|eval|plan|serve|check \w+|deployments \w+|jobs \w+) [^`]+)`", text)
        for line, below in [*lines, *((line, "") for line in inline)]:
            words = shlex.split(line, comments=True)
            found[" ".join(words)] = Printed(words, below)
    return found


FOUND = commands()
