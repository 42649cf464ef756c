"""Sizes of vLLM servers: the commands of the pages with ``deployment=vllm``, on CPUs and GPUs, for models of real shapes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pages import COMPOSED
from runtools import here, write  # noqa: F401 - here is a fixture
from transformers import AutoTokenizer, DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3NextConfig

from cookbook.cli import check_config, deployments
from cookbook.cli.hydra import bridge
from cookbook.config.nodes import build
from cookbook.data import Renderer
from cookbook.deployments.vllm import deployment, process, sizing
from cookbook.deployments.vllm.deployment import VllmConfig
from cookbook.engine.lora_targets import TrainedShare
from cookbook.engine.model import ModelConfig
from cookbook.engine.shape import Shape, kv_numbers
from cookbook.errors import ConfigError
from cookbook.protocols import RankBackend
from cookbook.run import preflight
from cookbook.run.data import SplitRows
from cookbook.run.folder import plain
from cookbook.run.identity import Identity
from cookbook.run.settings import settings
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")

GIB = 1 << 30
TOKENIZER = AutoTokenizer.from_pretrained(packaged("data") / "tiny")


def qwen3(layers: int, width: int) -> Qwen3Config:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3Config(hidden_size=width, num_hidden_layers=layers, max_position_embeddings=40960, **heads)


# Published shapes: architecture, parameters, and GiB of keys and values of a sequence as long as the context, in bfloat16.
LLAMA = LlamaConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072
)
REAL = {
    "qwen3_0p6b": (qwen3(28, 1024), 0.6e9, 4.375),
    "qwen3_1p7b": (qwen3(28, 2048), 1.7e9, 4.375),
    "qwen3_4b": (qwen3(36, 2560), 4.0e9, 5.625),
    "qwen3_8b": (qwen3(36, 4096), 8.2e9, 5.625),
    "llama3p2_1b": (LLAMA, 1.24e9, 4.0),
}


def shape(name: str) -> Shape:
    architecture, parameters, _ = REAL[name]
    share = TrainedShare(int(parameters), 0, int(parameters), (), ())
    context = architecture.max_position_embeddings
    return Shape(TOKENIZER, context, int(2 * parameters), share, 259, kv_numbers(architecture), "bfloat16")


@pytest.fixture
def memory(monkeypatch):
    """Pretend to have this much free memory, and GPUs with as much of it free as they have."""

    def pretend(cpu_gb: float, gpus: int = 0, gpu_gb: float = 80) -> None:
        monkeypatch.setattr(deployment, "free_bytes", lambda device: int(cpu_gb * 1e9))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number=None: (int(gpu_gb * 1e9),) * 2)
        monkeypatch.setattr(process, "check_python", lambda python: None)

    return pretend


@pytest.mark.parametrize("name", REAL)
def test_the_memory_of_a_row_is_what_vllm_needs(name):
    architecture, _, gib = REAL[name]
    context = architecture.max_position_embeddings
    assert kv_numbers(architecture) * 2 * context == gib * GIB
    # vLLM keeps one block for itself.
    assert sizing.row_bytes(kv_numbers(architecture), 2, context) == gib * GIB * (context + sizing.BLOCK) / context


def test_latent_attention_and_recurrent_layers():
    latent = DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64)
    assert kv_numbers(latent) == 3 * (512 + 64)
    mixed = Qwen3NextConfig(num_hidden_layers=8, num_key_value_heads=2, head_dim=256)
    assert mixed.layer_types.count("full_attention") == 2
    assert kv_numbers(mixed) == 2 * 2 * 2 * 256


# Without the command that reads a dataset of the hub.
VLLM = [command for command in COMPOSED if "deployment=vllm" in command or command.startswith("deployments create")]
COMMANDS = [command for command in VLLM if "data=gsm8k" not in command]


def of_data(command: str) -> int:
    """Tokens of the longest prompt and completion of the shipped data, up to the next multiple of 256.

    Completions have 512 tokens if the command names another model than the shipped one.
    """
    return 768 if "model=" in command else 256


def composed(asked: bridge.ComposeRequest) -> Any:
    """The configuration of a command."""
    seen: list[Any] = []
    bridge.run(asked, lambda cfg, _: seen.append(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))))
    return seen[0]


def request(command: str) -> bridge.ComposeRequest:
    """Request that a command of the pages composes."""
    program, *words = shlex.split(command)
    if program == "deployments":
        return bridge.ComposeRequest(deployments.overrides(words[1], words[2:]))
    return bridge.ComposeRequest(words, config_name="serve" if program == "serve" else "train")


def of_run(words: list[str], context: int = 40960) -> VllmConfig:
    """The deployment of a run of GRPO."""
    cfg = composed(bridge.ComposeRequest(["recipe=grpo", "deployment=vllm", *words]))
    typed = settings(cfg)
    rows = SplitRows(typed, Identity(plain(cfg), typed.module.Config, dict))
    return preflight.sized_deployment(typed, rows, Renderer(TOKENIZER, context), shape("qwen3_0p6b"), loaded=False)


def sized(command: str, model: str) -> tuple[VllmConfig, ModelConfig, tuple[int, ...]]:
    """The deployment of a command of the pages, for a model of real shapes."""
    cfg, known = composed(request(command)), shape(model)
    if not command.startswith("train"):
        chosen = replace(build(cfg.model, "model", ModelConfig), dtype="bfloat16")
        return build(cfg.deployment, "deployment").sized(chosen, known, None, (), loaded=True), chosen, ()
    typed = settings(cfg)
    typed.model = replace(typed.model, dtype="bfloat16")
    typed.deployment.preflight(typed.model, typed.backend)
    rows = SplitRows(typed, Identity(plain(cfg), typed.module.Config, dict))
    found = preflight.sized_deployment(typed, rows, Renderer(TOKENIZER, known.max_length), known, loaded=False)
    backend = typed.backend
    return found, typed.model, backend.gpu_numbers() if isinstance(backend, RankBackend) else backend.gpus


def test_the_pages_have_commands_of_each_kind():
    kinds = {" ".join(one.split()[:2]) if one.startswith("deployments") else one.split()[0] for one in COMMANDS}
    assert kinds == {"train", "serve", "deployments create"} and len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", ["qwen3_0p6b", "llama3p2_1b"])
def test_a_command_of_the_pages_starts_on_a_cpu(command, model, memory):
    """With the default sizes vLLM gets memory for the longest sequence, and for up to 64 of them."""
    memory(cpu_gb=64)
    # The GPUs of a job are those of another machine.
    if "backend.gpus" in command and "job=" not in command:
        with pytest.raises(ConfigError, match=r"backend\.(gpus|device)"):
            sized(command, model)
        return
    found, chosen, _ = sized(command, model)
    options = found.options_for(chosen)
    row = sizing.row_bytes(shape(model).kv_numbers, 2, options.max_length)
    assert options.max_length == (of_data(command) if command.startswith("train") else shape(model).max_length)
    assert row <= options.kv_cache_bytes <= 32e9 / found.replicas
    if command.startswith("train"):
        assert options.kv_cache_bytes == -(-64 * row // sizing.MIB) * sizing.MIB
    words = " ".join(process.command(options, 1))
    assert f"--max-model-len {options.max_length} --kv-cache-memory-bytes {options.kv_cache_bytes}" in words
    assert "--enforce-eager" in words and "--no-enable-chunked-prefill" in words


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_starts_on_gpus(command, memory):
    """With CUDA graphs, chunked prefill and the prefix cache. On a GPU of its own vLLM takes its own share."""
    memory(cpu_gb=64, gpus=8)
    found, chosen, trainer = sized(command, "qwen3_8b" if "qwen3_8b" in command else "qwen3_0p6b")
    options = found.options_for(chosen, None, trainer)
    words = " ".join(process.command(options, 1))
    assert "--enable-chunked-prefill --enable-prefix-caching" in words
    assert "eager" not in words and "max-num-batched-tokens" not in words and "max-num-seqs" not in words
    assert options.gpus and not set(trainer) & {one for gpus in options.gpus for one in gpus}
    assert options.kv_cache_bytes is None and "kv-cache-memory" not in words and "gpu-memory" not in words
    assert options.max_length == (of_data(command) if command.startswith("train") else 40960)
    assert found.num_requests(options.gpus) == 256


def test_a_gpu_that_is_shared_with_the_trainer(memory):
    """Servers get half of what weights, gradients and moments leave; the other half is for activations."""
    memory(cpu_gb=64, gpus=1)
    known, model = shape("qwen3_1p7b"), ModelConfig("model", dtype="bfloat16")
    found = VllmConfig().sized(model, known, 1000, (0,), loaded=False)
    left = 80e9 - 1.7e9 * (2 + 16) - 1.7e9 * 2
    options = found.options_for(model, None, (0,))
    assert options.max_length == 1024 and options.kv_cache_bytes == pytest.approx(left / 2, abs=sizing.MIB)
    assert "--gpu-memory-utilization 0.01" in " ".join(process.command(options, 1))
    # A trainer whose weights are loaded has taken that part already; shards hold a part of it.
    loaded = VllmConfig().sized(model, known, 1000, (0,), loaded=True)
    assert loaded.options_for(model).kv_cache_bytes == pytest.approx((left + 3.4e9) / 2, abs=sizing.MIB)
    with pytest.raises(ConfigError, match=r"one sequence of 1,024 tokens needs 0.16 GiB .* 0\.00 GiB of GPU 0 are left"):
        VllmConfig().sized(model, shape("qwen3_8b"), 1000, (0,), loaded=False)
    shards = VllmConfig().sized(model, shape("qwen3_8b"), 1000, (0,), loaded=False, trainer_share=1 / 8)
    assert shards.longest == 1024


@pytest.mark.parametrize(
    ("settings", "longest", "message"),
    [
        (
            {"kv_cache_gb": 0.25},
            3000,
            r"kv_cache_gb: one sequence of 3,072 tokens needs 0\.34 GiB of keys and values, got 0\.25; .* "
            r"deployment\.max_length=2176 or less",
        ),
        ({"max_length": 40960, "kv_cache_gb": 1.0}, None, r"one sequence of 40,960 tokens needs 4\.39 GiB .*, got 1; "),
        (
            {"replicas": 6},
            40900,
            r"needs 4\.39 GiB .*, and 2\.\d\d GiB of memory are left .*\.max_length=\d+ or less",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_server_starts(settings, longest, message, memory):
    memory(cpu_gb=70)
    with pytest.raises(ConfigError, match=message):
        VllmConfig(**settings).sized(ModelConfig("m", dtype="bfloat16"), shape("qwen3_0p6b"), longest, (), loaded=True)


def test_without_data_the_context_is_lowered_to_what_fits(memory):
    memory(cpu_gb=11.6)
    known = shape("qwen3_0p6b")
    found = VllmConfig().sized(ModelConfig("m", dtype="bfloat16"), replace(known, trained=None), None, (), loaded=True)
    room = (11.6e9 - 3 * 1.2e9 - 2e9) / 2
    assert found.longest is not None and found.longest % sizing.BLOCK == 0 and 20000 < found.longest < 40960
    assert room - sizing.BLOCK * 114688 - sizing.MIB < found.options_for(ModelConfig("m")).kv_cache_bytes <= room + sizing.MIB


def test_a_server_that_takes_longer_sequences_is_used_again():
    wanted = process.Options("python", "m", "bfloat16", 512, 1 << 30, 1, 0, ())
    assert replace(wanted, max_length=1024, kv_cache_bytes=2 << 30).serve(wanted)
    assert not replace(wanted, max_length=256).serve(wanted)
    assert not replace(wanted, dtype="float32").serve(wanted)
    fixed = replace(wanted, kv_cache_is_fixed=True)
    assert fixed.serve(fixed) and not replace(fixed, kv_cache_bytes=2 << 30).serve(fixed) and not wanted.serve(fixed)


@pytest.mark.parametrize(
    ("words", "longest"),
    [
        # The longest prompt of the shipped data has fewer than 60 tokens.
        ("rollout.max_tokens=700", 768),
        ("rollout.max_tokens=100 eval.max_tokens=300", 512),
        # Observations may be longer than those of a few episodes, so only the model limits an episode.
        ("env=echo.py:Echo env.rows=4 env.max_turns=4 rollout.max_tokens=200", 40960),
    ],
)
def test_the_longest_sequence_is_that_of_the_data(words, longest, memory):
    memory(cpu_gb=64)
    write("echo.py", 'class Echo:\n    def reset(self, seed): return "x"\n    def step(self, text): return "y" * 20, 0.0\n')
    assert of_run(words.split()).longest == longest


def test_the_longest_rows_of_large_data_are_looked_at(memory, monkeypatch):
    """A sample misses one long row of many."""
    memory(cpu_gb=64)
    monkeypatch.setattr(preflight, "RENDERED_ROWS", 4)
    monkeypatch.setattr(preflight, "LONGEST_ROWS", 2)
    lines = [f'{{"prompt": "{"x" * (900 if number == 77 else 20)}", "answer": "1"}}' for number in range(100)]
    write("rows.jsonl", "\n".join(lines))
    words = ["data=rows.jsonl", "reward=exact", "rollout.max_tokens=16", "eval.max_tokens=16"]
    assert of_run(words, 4096).longest == 1024


def test_check_config_says_that_the_embedded_sampler_is_slow_on_a_gpu(memory):
    for gpus, says in ((0, False), (1, True)):
        memory(cpu_gb=64, gpus=gpus)
        typed = settings(composed(bridge.ComposeRequest(["recipe=grpo"])))
        assert ("9 to 13 ms of Python per token" in check_config._deployment(typed)) == says
