"""Folders of other people's models: what cannot be trained is refused in one line, and several chat templates survive."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from tokentools import CHATML, base_model_tokenizer

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import sampler_checkpoints
from cookbook.data import Renderer
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages
from cookbook.data.template import template_sources
from cookbook.engine.model import ModelConfig, load, load_tokenizer
from cookbook.errors import BackendError, DataError

TOOLS = "{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}" + CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edited(folder: Path, file: str, **changes: object) -> Path:
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def error_of(folder: Path) -> str:
    with pytest.raises(BackendError) as error:
        load(ModelConfig(str(folder)), torch.device("cpu"), seed=0)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder), "FOLDER")


def test_an_encoder_with_a_decoder_is_refused(folder):
    edited(folder, "config.json", model_type="t5", is_encoder_decoder=True, architectures=["T5ForConditionalGeneration"])
    assert error_of(folder) == "model.name: 'FOLDER' is an encoder-decoder model, got t5; use a causal language model"


def test_a_class_that_is_not_a_causal_language_model_is_named(folder):
    edited(folder, "config.json", model_type="llava", architectures=["LlavaModel"])
    said = "model.name: 'FOLDER' is not a causal language model of transformers, got LlavaModel; use a text model"
    assert error_of(folder) == said


def test_a_classifier_is_named(folder):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(folder, tie_word_embeddings=False)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    assert "lm_head.weight, and its config.json names Qwen3ForSequenceClassification; use a complete" in error_of(folder)


def test_code_of_a_repository_is_not_run_without_a_key(folder):
    edited(folder, "config.json", model_type="new", auto_map={"AutoConfig": "configuration.New"})
    (folder / "configuration.py").write_text("raise SystemExit('the code has run')")
    assert error_of(folder).endswith(
        "needs Python code of the repository; read the code, then set model.trust_remote_code=true"
    )


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(folder, file):
    (folder / file).write_bytes(POINTER)
    assert error_of(folder).endswith(f"{file} is a pointer of Git LFS and not the file; download it with git lfs pull")


def test_weights_of_other_shapes_and_a_missing_tokenizer_are_named(folder):
    edited(folder, "config.json", intermediate_size=64)
    assert "the weights have other shapes than config.json says; pass a folder" in error_of(folder)
    (folder / "tokenizer.json").unlink()
    assert "cannot load the tokenizer in 'FOLDER': no tokenizer.json; pass a folder" in error_of(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_are_refused(folder, method):
    edited(folder, "config.json", quantization_config={"quant_method": method, "bits": 4})
    assert error_of(folder) == "model.name: quantized weights are not supported, got 'FOLDER'; use the 16-bit model"


# ---- several chat templates ------------------------------------------------------------------------------------------------


def named(folder: Path, **templates: str) -> Path:
    """Give the tokenizer templates by name, in the form of Command R and Hermes."""
    tokenizer = base_model_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    return edited(folder, "tokenizer_config.json", chat_template=listed)


def test_rows_with_tools_have_the_template_for_tools(folder):
    render = Renderer(load_tokenizer(ModelConfig(str(named(folder, default=CHATML, tool_use=TOOLS)))))
    messages = parse_messages(TURNS, "row", "messages")
    plain, tooled = render.render([Chat("row", messages), Chat("row", messages, tools=(TOOL,))])
    assert '"name": "add"' in render.printed(tooled.tokens) and "add" not in render.printed(plain.tokens)
    assert render.stop_token_ids == Renderer(base_model_tokenizer()).stop_token_ids


def test_a_tokenizer_without_a_default_template_is_named(folder):
    model = load(ModelConfig(str(named(folder, tool_use=TOOLS))), torch.device("cpu"), seed=0)
    render = Renderer(model.tokenizer)
    messages = parse_messages(TURNS, "row", "messages")
    with pytest.raises(DataError, match="none named default, got tool_use; give a Jinja file"):
        render.render([Chat("row", messages)])
    [one] = render.render([Chat("row", messages, tools=(TOOL,))])
    assert '"name": "add"' in render.printed(one.tokens)


def test_checkpoints_and_exports_have_all_templates(folder, tmp_path):
    import gguf

    from cookbook.cli import weights

    templates = {"default": CHATML, "tool_use": TOOLS}
    trainer = LocalTrainer(ModelConfig(str(named(folder, **templates))), LocalConfig(), seed=0, folder=tmp_path / "run")
    state = Path(trainer.save_state("state").result().path)
    sampler_checkpoints.export(state, tmp_path / "exported")
    for place in (state, tmp_path / "exported"):
        assert template_sources(load_tokenizer(ModelConfig(str(place)))) == templates
    weights.export_gguf(state, tmp_path / "gguf", merged=False, precision=None)
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    found = {
        name: bytes(fields[f"tokenizer.{name}"].parts[-1]).decode() for name in ("chat_template", "chat_template.tool_use")
    }
    assert found == {"chat_template": CHATML, "chat_template.tool_use": TOOLS}
