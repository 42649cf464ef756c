"""Small tokenizers of the kinds that models have: SentencePiece with a space before every text, bytes, and words with marks."""

from __future__ import annotations

from typing import Any

from tiny import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
# Templates of the two families whose turns most models write.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
WORDS = ["2+2=", "4", "2", "+", "=", "a", "b", "def", "f", "(", "x", ")", ":", "return", "Hi"]


def sentencepiece(scheme: str, template: str | None = None, added: tuple[AddedToken, ...] = ()) -> Any:
    """A tokenizer of the Llama-2 kind. ``scheme``: ``prepend`` as in Llama 2's files, else that of Metaspace."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [SPACE, SPACE * 2, SPACE * 4, *WORDS, *(SPACE + word for word in WORDS)]
    vocabulary = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        *((piece, -1.0 - index / 100) for index, piece in enumerate(pieces)),
    ]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    if scheme == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    made.add_special_tokens(list(added))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


def base_model_tokenizer(template: str = CHATML) -> Any:
    """A tokenizer of bytes whose end-of-text token is not the template's end of turn, as with Qwen's base models."""
    made = byte_tokenizer()
    made.chat_template = template
    made.eos_token = "<|endoftext|>"
    return made


def opt_like() -> Any:
    """A tokenizer of bytes that puts its end-of-text token before every text, as that of OPT."""
    made = byte_tokenizer()
    made.chat_template = None
    made.eos_token = made.bos_token = "<|endoftext|>"
    ends = [("<|endoftext|>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=ends)
    return made
