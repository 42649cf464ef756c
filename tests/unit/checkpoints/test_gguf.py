"""``weights export --gguf``, read back by transformers and by llama.cpp itself, in the builds of the package xllamacpp."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marks import rotating
from runtools import SMALL, checkpoint, here, train  # noqa: F401 - here is a fixture
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokentools import CHATML, LLAMA2, base_model_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from cookbook.cli.app import run
from cookbook.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="gguf is an extra")

from cookbook.checkpoints import gguf_file  # noqa: E402 - it imports gguf

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.slow]
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install xllamacpp")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 420, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 400,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=ROPE),
    "llama-tied": LlamaConfig(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters=ROPE),
    "qwen3": Qwen3Config(**SHAPE, rope_parameters=ROPE, head_dim=128, tie_word_embeddings=True),
    "qwen3-wide": Qwen3Config(**SHAPE, rope_parameters=ROPE, head_dim=32),
}
TEXTS = ["The 1234 cats aren't here.\n\n  Nor   there!", "größe 日本 <|im_start|>user\nhi<|im_end|>", "x = 10**3; y=(x+1)%7"]


def tokenizer(kind="qwen2"):
    """A byte-level BPE of 420 tokens, with the division into words that llama.cpp calls ``kind``."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt-2", "smollm"))
    pattern = next((steps[0] for steps, name in gguf_file.DIVISIONS.items() if name == kind), "")
    before = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(kind, [pre_tokenizers.Split(Regex(pattern), "isolated")])
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level]) if before else byte_level
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [*TEXTS, "the here there are not 123 456 000 == ** "] * 3
    made.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    chat = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, chat_template=chat)


def saved(name, dtype=torch.float32, kind="qwen2"):
    """A folder with random weights."""
    torch.manual_seed(0)
    words = tokenizer(kind)
    config = CONFIGS[name]
    config.eos_token_id = words.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained("source")
    words.save_pretrained("source")
    Path("made").mkdir()
    return model.eval(), words


def logprobs(model, tokens):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "float16")])
@pytest.mark.parametrize(
    "name", rotating([name for name in CONFIGS if name not in ("llama3", "qwen3-wide")], 2)
)  # it reads neither key, and takes a head_dim of 128
def test_transformers_reads_the_same_model(name, dtype, precision):
    model, words = saved(name, dtype)
    gguf_file.write(Path("source"), Path("made"), precision)
    read = AutoModelForCausalLM.from_pretrained("made", gguf_file="model.gguf", dtype=torch.float32)
    tokens = words(TEXTS[0]).input_ids
    # transformers computes both in float32; float16 rounds the weights to 11 bits.
    expected = logprobs(model.float(), tokens)
    assert (logprobs(read, tokens) - expected).abs().max() < (2e-2 if precision else 1e-5)
    assert expected.std() > 0.1  # the model prefers some tokens


@needs_llama_cpp
@pytest.mark.parametrize("name", rotating(CONFIGS, 2))
def test_llama_cpp_computes_the_same_logprobs(name):
    model, words = saved(name)
    gguf_file.write(Path("source"), Path("made"))
    # Longer than the trained context of the scaled positions.
    tokens = (words(" ".join(TEXTS)).input_ids * 5)[:200]
    lengths = [1, 2, 3, 10, 50, 64, 65, 100, 150, 200]
    found = torch.tensor(llama_cpp([tokens[:length] for length in lengths], model.config.vocab_size))
    expected = logprobs(model, tokens)[[length - 1 for length in lengths]]
    assert (found - expected).abs().max() < 2e-3 and expected.std() > 0.1


@needs_llama_cpp
@pytest.mark.parametrize("kind", sorted(set(gguf_file.DIVISIONS.values())))
def test_llama_cpp_finds_the_same_tokens(kind):
    _, words = saved("qwen3", kind=kind)
    gguf_file.write(Path("source"), Path("made"))
    assert llama_cpp(TEXTS) == [words(text).input_ids for text in TEXTS]


@needs_llama_cpp
def test_llama_cpp_answers_as_the_run_does(capsys):
    assert train(*SMALL["sft"], "out=run") == 0
    assert run(["weights", "export", str(checkpoint("run")), "made", "--gguf"]) == 0
    model, words = (kind.from_pretrained(checkpoint("run")) for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokens = words("2+3=").input_ids
    found = torch.tensor(llama_cpp([tokens], model.config.vocab_size))
    assert (found - logprobs(model, tokens)[-1:]).abs().max() < 2e-3
    assert llama_cpp(["2+3=<|im_end|>"]) == [words("2+3=<|im_end|>").input_ids]


def llama_cpp(values, vocabulary=0):
    """Ask llama.cpp, in a process of its own: log-probabilities of the vocabulary after each prompt; or the tokens of texts."""
    program = """
import json, sys, urllib.request, xllamacpp
values, vocabulary = json.loads(sys.stdin.read())
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel, params.warmup = "made/model.gguf", 0, 256, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
def post(path, **body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request))
plain = post("/tokenize", content="a", add_special=False)["tokens"][0]
def row(prompt):
    # Only an answer that is text has log-probabilities. The bias chooses the answer; it does not change them.
    answer = post("/completion", prompt=prompt, n_predict=1, n_probs=vocabulary, logit_bias=[[plain, 1e4]], cache_prompt=False)
    found = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
    return [found[number] for number in range(vocabulary)]
if not vocabulary:
    print(json.dumps([post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"] for text in values]))
else:
    print(json.dumps([row(prompt) for prompt in values]))
"""
    given = json.dumps([values, vocabulary])
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_exported_run_has_a_modelfile(capsys):
    assert train(*SMALL["sft"], "out=run") == 0
    assert run(["weights", "export", str(checkpoint("run")), "made", "--gguf", "--precision=bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("model.gguf 1.3 MB, Modelfile")
    text = Path("made/Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\n") and 'PARAMETER stop "<|im_end|>"\n' in text
    reader = gguf.GGUFReader("made/model.gguf")
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == 258
    assert "<|im_start|>" in reader.get_field("tokenizer.chat_template").contents()


def test_misuse_is_one_line_and_leaves_nothing(capsys):
    assert train(*SMALL["grpo"], "model.lora_rank=4", "out=run") == 0
    found = str(checkpoint("run"))
    for words, message in (
        ([found], "--gguf needs full weights, and this is an adapter; add --merged"),
        ([found, "--merged", "--precision=int4"], "--precision must be one of float32, float16, bfloat16, got 'int4'"),
    ):
        assert run(["weights", "export", *words[:1], "made", "--gguf", *words[1:]]) == 2
        assert message in capsys.readouterr().err and not Path("made").exists()
    assert run(["weights", "export", found, "made", "--gguf", "--merged"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "covers the architectures llama, qwen2, qwen3, got gpt2",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "position scalings default and llama3",
        ),
    ],
)
def test_what_is_not_covered_is_refused(change, message):
    saved("qwen3")
    file = Path("source/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        gguf_file.write(Path("source"), Path("made"))


def test_another_division_into_words_is_refused():
    saved("qwen3")
    file = Path("source/tokenizer.json")
    facts = json.loads(file.read_text())
    facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z]+"
    file.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="covers the tokenizers of GPT-2, Llama 3, Qwen and SmolLM"):
        gguf_file.write(Path("source"), Path("made"))


# ---- the Modelfile ---------------------------------------------------------------------------------------------------

DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
LLAMA3_TURNS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, f'TEMPLATE """{gguf_file.CHATML}"""\n'),
        (DEFAULT_SYSTEM + CHATML, f'TEMPLATE """{gguf_file.CHATML}"""\nSYSTEM """Be brief."""\n'),
        (LLAMA3_TURNS, f'TEMPLATE """{gguf_file.LLAMA3}"""\n'),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), "# The chat template of the model has no counterpart"),
        ("<|im_start|>" + LLAMA2, "# The chat template of the model has no counterpart"),
    ],
)
def test_the_modelfile_prompts_as_the_chat_template(template, expected):
    words = base_model_tokenizer(template)
    words.bos_token = "<|bos|>"
    text = gguf_file._modelfile(words, is_of_text=False)
    assert text.startswith(f"FROM ./model.gguf\n{expected}")
    assert 'PARAMETER stop "<|endoftext|>"\n' in text
    assert ('PARAMETER stop "<|im_end|>"\n' in text) == ("<|im_end|>" in template)
    assert ("SYSTEM" in text) == ("Be brief" in template)


def test_the_modelfile_of_a_model_of_texts():
    text = gguf_file._modelfile(base_model_tokenizer(), is_of_text=True)
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop')
