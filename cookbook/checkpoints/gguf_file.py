"""GGUF, the file format of llama.cpp and Ollama, written with llama.cpp's own package ``gguf``.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from cookbook.checkpoints import manifest, tensor_digests
from cookbook.data.encoding import TextEncoder
from cookbook.data.formats import Chat
from cookbook.data.messages import ChatMessage
from cookbook.data.stop_tokens import configure, stop_token_ids
from cookbook.data.template import ChatTemplate, template_sources
from cookbook.errors import CheckpointError
from cookbook.types import JsonObject

log = logging.getLogger("cookbook")

Precision = Literal["float32", "float16", "bfloat16"]
TYPES: dict[Precision, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}

# llama.cpp knows a tokenizer's division into words by a name: here by the steps of tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIVISIONS = {
    ("ByteLevel regex",): "gpt-2",
    ("Digits individual", "ByteLevel regex"): "smollm",
    (_WORDS % "", "ByteLevel"): "qwen2",
    (_WORDS % "{1,3}", "ByteLevel"): "llama-bpe",
}
# llama.cpp refuses a file without merges. This one never applies: both sides are whole special tokens.
NO_MERGES = "<|none|> <|none|>"

# Templates in Ollama's language for the two families whose models all write turns in the same way. For each: a turn and the
# header of an answer as format strings of Python.
CHATML = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
LLAMA3 = (
    "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
OLLAMA = {
    CHATML: ("<|im_start|>{}\n{}<|im_end|>\n", "<|im_start|>assistant\n"),
    LLAMA3: ("<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
}
# A text to complete, without turns.
TEXT = "{{ .Prompt }}"
CONVERSATION = [("user", "first question"), ("assistant", "first answer"), ("user", "second question")]


def write(folder: Path, out: Path, precision: Precision | None = None) -> None:
    """Write ``model.gguf`` and an Ollama ``Modelfile`` of the Hugging Face folder ``folder`` into the folder ``out``.

    ``precision`` is that of the matrices, by default the weights' own; vectors are float32.

    Raises:
        CheckpointError: an architecture, tokenizer or position scaling that this export does not cover.
    """
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (folder / "generation_config.json").is_file():
        configure(tokenizer, json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id"))
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{folder}: --gguf covers the architectures {known}, got {config.model_type}; export a folder, and convert it with "
            "llama.cpp: python convert_hf_to_gguf.py OUT"
        )
    own: Precision = "bfloat16" if str(config.dtype) == "torch.bfloat16" else "float32"
    kind, file_type = TYPES[precision or own]
    writer = gguf.GGUFWriter(out / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
    factors = _rope_factors(folder, config)
    _write_shape(writer, config)
    writer.add_file_type(file_type)
    _write_tokenizer(writer, folder, config, tokenizer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in _tensors(folder, config):
        array, vector = tensor.float().numpy(), tensor.dim() == 1
        used = gguf.GGMLQuantizationType.F32 if vector else kind
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quants.quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    modelfile = _modelfile(tokenizer, is_of_text=manifest.is_of_text(folder))
    (out / "Modelfile").write_text(modelfile, encoding="utf-8")


def _write_shape(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _rope_factors(folder: Path, config: PretrainedConfig) -> npt.NDArray[np.float32] | None:
    """Return what divides each rotation frequency, shape ``(head_dim / 2,)``; None without scaling.

    Llama 3.1 scales low frequencies and leaves high ones: transformers' ``_compute_llama3_parameters`` is the source.
    """
    rope: JsonObject = config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise CheckpointError(f"{folder}: --gguf covers the position scalings default and llama3, got {rope['rope_type']}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float64) / head)
    ratio = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((ratio - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - share) / rope["factor"] + share), dtype=np.float32)


def _tensors(folder: Path, config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by Hugging Face name. A tied output head is left out: llama.cpp uses the embedding."""
    for file in sorted(folder.glob(tensor_digests.FILES)):
        for name, tensor in tensor_digests.tensors_in(file):
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            yield name, _interleaved(config)(name, tensor)


def _interleaved(config: PretrainedConfig) -> Callable[[str, Tensor], Tensor]:
    """Return the reordering of queries and keys: in Llama models llama.cpp rotates pairs, transformers halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def reorder(name: str, tensor: Tensor) -> Tensor:
        num_heads = heads.get(name.split(".")[-2]) if config.model_type == "llama" and "." in name else None
        if num_heads is None:
            return tensor
        return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)

    return reorder


def _write_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    facts: JsonObject = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = facts["model"], {token["id"]: token for token in facts["added_tokens"]}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_division(folder, facts, has_merges=bool(merges)))
    texts = {number: text for text, number in model["vocab"].items()} | {
        number: token["content"] for number, token in added.items()
    }
    tokens, types = [], []
    for number in range(config.vocab_size):
        # Rows of the embedding beyond the vocabulary get a name that no text contains.
        tokens.append(texts.get(number, f"[PAD{number}]"))
        if number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL if number in texts else gguf.TokenType.UNUSED)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or [NO_MERGES])
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    # llama.cpp ends an answer at either of the two.
    ends = [token for token in stop_token_ids(tokenizer) if token != tokenizer.eos_token_id]
    if tokenizer.chat_template is not None and ends:
        writer.add_eot_token_id(ends[0])
    writer.add_add_bos_token(TextEncoder(tokenizer).opening == [tokenizer.bos_token_id])
    if tokenizer.chat_template is not None:
        named = [{"name": name, "template": source} for name, source in template_sources(tokenizer).items()]
        writer.add_chat_template(named if isinstance(tokenizer.chat_template, dict) else tokenizer.chat_template)


def _step_name(step: JsonObject) -> str:
    """Name of a step of the pre-tokenizer with the option that decides, as in DIVISIONS."""
    kind = step.get("type")
    if kind == "ByteLevel":
        return "ByteLevel regex" if step.get("use_regex", True) else "ByteLevel"
    if kind == "Digits":
        return "Digits individual" if step.get("individual_digits") else "Digits"
    regex: str = step.get("pattern", {}).get("Regex", str(kind))
    return regex


def _division(folder: Path, facts: JsonObject, *, has_merges: bool) -> str:
    """Return llama.cpp's name of the tokenizer's division into words.

    Raises:
        CheckpointError: the tokenizer is not a byte-level BPE that llama.cpp has a name for.
    """
    pre_tokenizer = facts["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    names = tuple(_step_name(step) for step in steps)
    # Without merges every byte is a token, however words are divided.
    if not has_merges and names[-1:] in (("ByteLevel",), ("ByteLevel regex",)):
        return "gpt-2"
    if facts["model"].get("type") != "BPE" or facts.get("normalizer") not in (None, {"type": "NFC"}) or names not in DIVISIONS:
        raise CheckpointError(
            f"{folder}: --gguf covers the tokenizers of GPT-2, Llama 3, Qwen and SmolLM; export a folder, and convert it with "
            "llama.cpp: python convert_hf_to_gguf.py OUT"
        )
    return DIVISIONS[names]


def _modelfile(tokenizer: PreTrainedTokenizerBase, *, is_of_text: bool) -> str:
    """Return Ollama's description of the model: the file, how a conversation is written, and where an answer stops.

    ``is_of_text``: the model was trained on texts without a chat template.
    """
    lines = ["FROM ./model.gguf"]
    if is_of_text:
        lines.append(f'TEMPLATE """{TEXT}"""')
    elif (ollama := _ollama_template(tokenizer)) is not None:
        template, system = ollama
        lines.append(f'TEMPLATE """{template}"""')
        if system:
            # Ollama puts this message before a conversation without a system message, as the chat template does.
            lines.append(f'SYSTEM """{system}"""')
    elif tokenizer.chat_template:
        lines.append("# The chat template of the model has no counterpart here: write one in Ollama's language as TEMPLATE.")
        log.warning(
            "weights export: the Modelfile has no TEMPLATE, because the model's chat template is neither ChatML nor Llama 3's; "
            "Ollama may recognize the template in model.gguf, else write one"
        )
    stops = tokenizer.convert_ids_to_tokens(list(stop_token_ids(tokenizer)))
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop]
    return "\n".join(lines) + "\n"


def _ollama_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return the template that prints conversations as the chat template does, and its default system message.

    None: no known template does.
    """
    if not tokenizer.chat_template:
        return None
    printed = _printed(tokenizer, CONVERSATION), _printed(tokenizer, [("system", "instruction"), *CONVERSATION])
    for template, (turn, header) in OLLAMA.items():

        def said(turns: Sequence[tuple[str, str]], turn: str = turn, header: str = header) -> str:
            return "".join(turn.format(role, text) for role, text in turns) + header

        plain, instructed = said(CONVERSATION), said([("system", "instruction"), *CONVERSATION])
        if printed[1] != instructed or not printed[0].endswith(plain):
            continue
        before, after = turn.format("system", "\0").split("\0")
        block = printed[0].removesuffix(plain)
        system = block[len(before) : len(block) - len(after)]
        if not block or (block == turn.format("system", system) and '"""' not in system):
            return template, system
    return None


def _printed(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]]) -> str:
    """Return a conversation as the chat template prints it, without the token that Ollama adds itself; empty: refused."""
    chat = Chat("", tuple(ChatMessage(role, text) for role, text in turns))
    text = ChatTemplate(tokenizer).shown(chat, header=True) or ""
    return text.removeprefix(str(tokenizer.bos_token)) if tokenizer.bos_token else text
