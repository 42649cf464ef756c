"""The zoo of chat templates: 19 cells in CI, all of them nightly. The table of a template is written to build/zoo/table/.

CI runs ``make zoo`` before. Without it the tests skip. The small templates of ``tests/unit/data/test_sampled_turns.py`` have
the same structure.
"""

import sys
from collections import Counter

import pytest
import zootools
from zootools import CASES, ROOT, answer, cell, user

from cookbook.data import Renderer
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages

needs_zoo = pytest.mark.skipif(not (ROOT / "tokenizers/smollm2").is_dir(), reason="build/zoo is missing; run make zoo")

# One cell of each kind of structure.
REPRESENTATIVE = [
    ("deepseek_r1_distill", "single", "SFT"),
    ("deepseek_r1_distill", "inline", "DPO"),
    ("deepseekv3", "calls", "SFT"),
    ("gemma4_v5", "tools", "SFT"),
    ("glm4moe", "turns", "SFT"),
    ("gptoss", "thinking turns", "SFT"),
    ("lfm2_2_5", "thinking turns", "SFT"),
    ("nemotron_3_nano", "single", "SFT"),
    ("nemotron_3_nano", "inline", "DPO"),
    ("phi3", "system", "GRPO"),
    ("qwen2_5", "tools", "SFT"),
    ("qwen3", "turns", "SFT"),
    ("qwen3", "tools", "DPO"),
    ("qwen3_5_nothink", "reasoning", "SFT"),
    ("qwen3_5_think", "inline", "SFT"),
    ("qwen3_8", "turns", "SFT"),
    ("nemotron_3_nano", "prefill", "SFT"),
    ("deepseek_r1_distill", "prefill", "GRPO"),
    ("llama3", "prefill", "DPO"),
]
MISTRAL_FILES = {
    "mistral_v1": "tokenizer.model.v1",
    "mistral_v2": "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_v7": "mistral_instruct_tokenizer_241114.model.v7",
    "tekken_v3": "tekken_240718.json",
}
TURNS = [user("Hi"), answer("Hello!"), user("What is 2+2?")]


def test_the_numbers_of_the_page_are_those_of_its_table():
    table = zootools.page_table()
    results = Counter(table.values())
    numbers = f"{len(table):,} cells: {results['same']} same, {results['refused']} refused, 0 differ."
    said = " ".join(zootools.PAGE.read_text().split())
    assert set(results) == {"same", "refused"}
    assert f"{len({name for name, _, _ in table})} templates, {len(CASES)} kinds of conversations" in said
    assert numbers in said


@needs_zoo
def test_the_page_has_every_template():
    assert {name for name, _, _ in zootools.page_table()} == set(zootools.templates())


@needs_zoo
@pytest.mark.slow
@pytest.mark.parametrize(("template", "case", "method"), REPRESENTATIVE)
def test_representative_cells_are_the_same(template, case, method):
    assert cell(template, case, method).result == "same" == zootools.page_table()[template, case, method]


@needs_zoo
@pytest.mark.nightly
@pytest.mark.parametrize("name", zootools.templates())
def test_no_cell_differs_and_every_row_that_a_template_can_print_is_trained(name):
    cells = zootools.table([name])
    (ROOT / "table").mkdir(exist_ok=True)
    (ROOT / "table" / f"{name}.md").write_text(zootools.as_markdown(cells))
    wrong = [
        f"{one.case}, {one.method}: {one.result}" for one in cells if one.result.startswith(("differs", "refused wrongly"))
    ]
    assert not wrong, "\n" + "\n".join(wrong)
    page = zootools.page_table()
    other = [one for one in cells if one.result.partition(":")[0] != page[name, one.case, one.method]]
    assert not other, f"docs/guide/chat-templates.md has another result: {other}"
    # Every template prints plain conversations of one turn and of several.
    assert sum(one.result == "same" for one in cells) >= 9


def _packages() -> None:
    for folder in ("site", "packages/mistral-common", "packages/llama-models"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))


def _row(renderer: Renderer, messages: list[dict[str, object]]) -> list[int]:
    [one] = renderer.render([Chat("row", parse_messages(messages, "row", "messages"))])
    return one.tokens


@needs_zoo
@pytest.mark.nightly
def test_llama_3_has_the_tokens_of_its_own_encoder():
    _packages()
    from llama_models.datatypes import RawMessage
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer

    own = ChatFormat(Tokenizer.get_instance())
    renderer = Renderer(zootools.tokenizer("llama3"))
    for messages in (CASES["single"], CASES["system"], CASES["turns"]):
        raw = [RawMessage(role=one["role"], content=one["content"]) for one in messages]
        assert renderer.prompt_tokens(messages[:-1]) == own.encode_dialog_prompt(raw[:-1]).tokens
        # The prompt of the next answer, without its header of four tokens, is the whole conversation.
        assert _row(renderer, messages) == own.encode_dialog_prompt(raw).tokens[:-4]


@needs_zoo
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mistral_v1", "mistral_v2", "mistral_v3", "mistral_v7", "tekken_v3"])
def test_mistral_has_the_tokens_of_its_own_encoder(name):
    _packages()
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.from_file(ROOT / "packages/mistral-common/mistral_common/data" / MISTRAL_FILES[name])
    renderer = Renderer(zootools.tokenizer(name))
    for messages in ([user("What is 2+2?")], TURNS):
        expected = own.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
        assert renderer.prompt_tokens(messages) == expected
    # A conversation is the start of the prompt of its next answer.
    whole = own.encode_chat_completion(ChatCompletionRequest(messages=TURNS)).tokens
    row = _row(renderer, TURNS[:2])
    assert row == whole[: len(row)]
