"""The zoo: rows of every kind through the chat templates of every family, compared with a second opinion.

``scripts/make_zoo.py`` collects the templates and tokenizers. A cell of the table is one template, one kind of conversation and
one method. It is ``same``, ``refused: REASON`` or ``differs: WHAT``.

The second opinion on prompts is ``apply_chat_template`` of transformers. That on answers is the mask of TRL's training template
of the family, or of the template's own generation blocks; without either, the text of the template itself.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import places

from cookbook.data import DataConfig, RejectedRows, Renderer, Row, conversation_datums, preference_datums, prompts
from cookbook.data.template import GENERATION_BLOCK

ROOT = places.ROOT / "build/zoo"
# Tokenizers by the prefix of a template's name; every other family takes the last.
FAMILIES = {
    "deepseek": "deepseek",
    "qwen": "qwen",
    "llama3": "llama3",
    "mistral_v1": "mistral_v1",
    "mistral_v2": "mistral_v2",
    "mistral_v3": "mistral_v3",
    "mistral_v7": "mistral_v7",
    "tekken": "tekken_v3",
    "": "smollm2",
}
SPECIALS = re.compile(
    r"<\|[^|>\s]+\|>|<\uff5c[^\uff5c>\s]+\uff5c>|</?[a-z_]+(?:_of_[a-z_]+|_turn)?>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]"
)
# Texts that are tags of a template without being tokens of its family.
NOT_TOKENS = {
    "<tools>",
    "</tools>",
    "<function>",
    "</function>",
    "<parameter>",
    "</parameter>",
    "<parameters>",
    "</parameters>",
}
# Templates of images, whose contents are lists of parts.
IMAGES = {"idefics3", "llava_next", "smolvlm"}

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "first"}, "b": {"type": "integer", "description": "second"}},
            "required": ["a", "b"],
        },
    },
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "5"}


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def answer(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."
CASES: dict[str, list[dict[str, object]]] = {
    "single": [user("What is 2+2?"), answer("Four.")],
    "system": [{"role": "system", "content": "Be brief."}, user("What is 2+2?"), answer("Four.")],
    "turns": [user("Hi"), answer("Hello!"), user("What is 2+2?"), answer("Four."), user("And 3+3?"), answer("It is six.")],
    "tools": [user("What is 2+3?"), CALL, RESULT, answer("It is five.")],
    "calls": [user("What is 2+3?"), CALL, RESULT, answer("It is five.")],
    "reasoning": [user("What is 2+2?"), answer("Four.", reasoning_content="Two and two.")],
    "inline": [user("What is 2+2?"), answer(THOUGHT)],
    "thinking turns": [
        user("What is 2+2?"),
        answer("Four.", reasoning_content="Two and two."),
        user("And 3+3?"),
        answer("Six.", reasoning_content="Three and three."),
    ],
    "prefill": [user("What is 2+2?"), answer("The answer"), answer(" is four.")],
}
METHODS = ("SFT", "DPO", "GRPO")


@dataclass(frozen=True)
class Cell:
    """One result. ``reference``: what it was compared with."""

    template: str
    case: str
    method: str
    result: str
    reference: str = ""


def templates() -> list[str]:
    """Return the names of all text templates."""
    names = [path.stem for path in sorted((ROOT / "templates").glob("*.jinja"))]
    return [name for name in names if not name.endswith("_training") and name not in IMAGES]


def source(name: str) -> str:
    return (ROOT / "templates" / f"{name}.jinja").read_text()


@functools.cache
def base_tokenizer(family: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "tokenizers" / family)


@functools.lru_cache(maxsize=4)
def tokenizer(name: str, template: str | None = None):
    """Return the tokenizer of a family with a chat template. A borrowed vocabulary gets the template's special tokens."""
    family = next(family for begin, family in FAMILIES.items() if name.startswith(begin))
    made = copy.deepcopy(base_tokenizer(family))
    text = source(name)
    if family in ("smollm2", "qwen"):
        marks = [mark for mark in dict.fromkeys(SPECIALS.findall(text)) if mark not in NOT_TOKENS]
        made.add_special_tokens({"additional_special_tokens": marks})
    made.chat_template = text if template is None else template
    if family == "smollm2":
        made.add_special_tokens({"bos_token": "<bos>" if "<bos>" in text or "gemma" in name else "<s>"})
        # The end of turn is the end of text, as published checkpoints have it after their training.
        shown = made.apply_chat_template(CASES["single"], tokenize=False)
        closing = SPECIALS.findall(shown.rpartition("Four.")[2])
        made.eos_token = closing[0] if closing else "<|endoftext|>"
    return made


def cell(name: str, case: str, method: str) -> Cell:
    """Return the result of one cell."""
    renderer = Renderer(tokenizer(name))
    messages = CASES[case]
    tools = [ADD] if case == "tools" else None
    if method == "GRPO":
        result, reference = _prompt(renderer, messages, tools, case), "transformers"
    else:
        result, reference = _answers(name, renderer, messages, tools, case, method)
    return Cell(name, case, method, result, reference)


def _row(values: dict[str, object], tools: list[object] | None) -> list[Row]:
    return [Row("row", values if tools is None else {**values, "tools": tools})]


def _prompt(renderer: Renderer, messages: list[dict[str, object]], tools: list[object] | None, case: str) -> str:
    refusals = RejectedRows(DataConfig(), collect=True)
    before = messages[:-1]
    found = prompts(_row({"prompt": before}, tools), renderer, DataConfig(), 0, refusals)
    ending = {"continue_final_message": True} if case == "prefill" else {"add_generation_prompt": True}
    wanted, error = _applied(renderer.tokenizer, before, tools, **ending)
    if not found:
        return _refused(refusals, error is None)
    if error:
        return f"differs: the reference refuses ({error})"
    return "same" if found[0].tokens == wanted else _difference(renderer.tokenizer, wanted, found[0].tokens)


def _refused(refusals: RejectedRows, can_print: bool) -> str:
    reason = refusals.found[0].reason.removeprefix("row: ")
    return f"{'refused wrongly' if can_print else 'refused'}: {reason}"


def _applied(made, messages, tools, **options) -> tuple[list[int], str]:
    """Return the tokens of transformers' own rendering, and its error."""
    if tools and "Add two numbers" not in made.apply_chat_template(messages[:1], tools=tools, tokenize=False):
        return [], "the template does not print tools"
    last = ""
    for shape in _shapes(messages):
        try:
            text = _text_of(made, shape, tools, **options)
        except Exception as error:  # noqa: BLE001  templates raise errors of many classes
            last = last or str(error).splitlines()[0]
            continue
        if (
            not any(one.get("tool_calls") for one in messages)
            or "add" in text.rpartition("What is 2+3?")[2]
            or len(messages) == 1
        ):
            return made(text, add_special_tokens=False).input_ids, ""
        last = last or "the template drops the tool calls"
    return [], last


def _text_of(made, messages, tools, **options) -> str:
    """Return the text of transformers; below ``apply_chat_template``, which drops a content that is null."""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**made.special_tokens_map, **options}
    [text], _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=made.chat_template, **variables)
    return text


def _shapes(messages):
    """Return the messages with arguments as objects and as text, and with a null content beside calls."""
    messages = [{**one, "content": one.get("content", "")} for one in messages]
    as_text = _as_text(messages)
    return messages, as_text, [{**one, "content": None} if one.get("tool_calls") else one for one in as_text]


def _as_text(messages):
    def changed(call):
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**one, "tool_calls": [changed(call) for call in one["tool_calls"]]} if "tool_calls" in one else one for one in messages
    ]


def _difference(made, wanted: Sequence[int], found: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    expected, got = (made.decode(one[place : place + 8]) for one in (wanted, found))
    return f"differs: token {place}, expected {expected!r}, got {got!r}"


def _answers(name, renderer, messages, tools, case, method) -> tuple[str, str]:
    refusals = RejectedRows(DataConfig(), collect=True)
    if method == "SFT" and case != "prefill":
        sides = [messages]
        found = conversation_datums(_row({"messages": messages}, tools), renderer, DataConfig(), refusals)
    elif method == "SFT":
        sides = [messages]
        row = {"prompt": messages[:-1], "completion": messages[-1:]}
        found = conversation_datums(_row(row, tools), renderer, DataConfig(), refusals)
    else:
        other = answer(str(messages[-1]["content"]).replace("our", "ive").replace("ix", "even").replace("is five", "is six"))
        sides = [messages, [*messages[:-1], {**messages[-1], **other}]]
        row = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": sides[1][-1:]}
        found = preference_datums(_row(row, tools), renderer, DataConfig(), refusals)
    trained = [one for datum in found for one in _trained(datum)]
    decode = renderer.tokenizer.decode
    expected, reference, error = [], "", ""
    for side in sides:
        answers = [i for i, one in enumerate(side) if one["role"] == "assistant" and (method == "SFT" or i == len(side) - 1)]
        answers = answers[-1:] if case == "prefill" else answers
        for index in answers:
            one, reference, problem = _expected(name, renderer, side[: index + 1], tools, case)
            expected.append(one)
            error = error or problem
    if not found:
        return _refused(refusals, not error), reference
    if error:
        return f"differs: the reference refuses ({error})", reference
    if len(expected) != len(trained):
        return f"differs: {len(trained)} trained answers instead of {len(expected)}", reference
    for (prompt, text), (before, tokens) in zip(expected, trained, strict=True):
        if before != prompt:
            return _difference(renderer.tokenizer, prompt, before), reference
        # Some tokenizers decode a text without the space that it begins with.
        got = decode(before + tokens)[len(decode(before)) :]
        if got != text and not _allowed(renderer, got, text):
            return f"differs: trains {got!r}, expected {text!r}", reference
    return "same", reference


def _allowed(renderer: Renderer, got: str, text: str) -> bool:
    """Whether an answer has what the reference marks, and besides the header that its prompt lacks or the end of a call.

    TRL leaves both untrained, so that a model would never write them.
    """
    header = renderer._template.header({})
    specials = renderer.tokenizer.all_special_tokens
    without = got.removeprefix(header)
    return without == text or any(without == text.rstrip("<") + mark for mark in specials)


def _trained(datum) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens before each trained answer of a datum, and those of the answer."""
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.tokens, int(inputs["target_tokens"].array[-1])]
    weights = np.concatenate([[0.0], inputs["weights"].array])
    places = np.flatnonzero(weights)
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        yield tokens[: run[0]], tokens[run[0] : run[-1] + 1]


def _expected(name, renderer, messages, tools, case) -> tuple[tuple[list[int], str], str, str]:
    """Return prompt tokens and answer text of the last message, the name of their source, and its error."""
    made = renderer.tokenizer
    before = messages[:-1]
    ending = {"continue_final_message": True} if case == "prefill" else {"add_generation_prompt": True}
    prompt, error = _applied(made, before, tools, **ending)
    reasons = "reasoning_content" in messages[-1] or "</think>" in str(messages[-1].get("content", ""))
    # A prompt that closes the reasoning does not suit an answer with reasoning.
    if reasons and made.decode(prompt).rstrip().endswith("</think>"):
        prompt, error = _applied(made, before, tools, enable_thinking=True, **ending)
    if case == "prefill":
        messages = [*before[:-1], answer(str(before[-1]["content"]) + str(messages[-1]["content"]))]
    # DeepSeek's template drops the reasoning of answers, and so does TRL's for V3, but not for R1, whose template it is.
    also = "deepseek_r1_distill" if name == "deepseekv3" and case == "inline" else name
    training = ROOT / "templates" / f"{also}_training.jinja"
    own = bool(GENERATION_BLOCK.search(source(name)))
    if training.exists() or own:
        reference = "TRL" if training.exists() else "own blocks"
        text, problem = _masked(tokenizer(name, training.read_text() if training.exists() else None), messages, tools)
    else:
        reference = "text"
        whole, problem = _applied(made, messages, tools)
        text = made.decode(whole)
        start = made.decode(prompt)
        if not problem:
            text = text[len(start) :] if text.startswith(start) else "?"
    if case == "prefill" and not problem:
        text = text.rpartition("The answer")[2]
    said = [str(messages[-1].get("content", "")), str(messages[-1].get("reasoning_content", ""))]
    squeezed = "".join((made.decode(prompt)[-60:] + text).split())
    pieces = [piece for one in said for piece in re.split(r"</?think>", one) if piece.strip()]
    if not problem and any("".join(piece.split()) not in squeezed for piece in pieces):
        problem = "the template drops text"
    return (prompt, _after(made.decode(prompt), text, renderer)), reference, error or problem


def _masked(made, messages, tools) -> tuple[str, str]:
    """Return the text of the last generation block."""
    from transformers.utils.chat_template_utils import render_jinja_template

    problem = ""
    for shape in _shapes(messages):
        options = {"chat_template": made.chat_template, "return_assistant_tokens_mask": True, **made.special_tokens_map}
        try:
            [text], [blocks] = render_jinja_template(conversations=[shape], tools=tools, **options)
        except Exception as error:  # noqa: BLE001  templates raise errors of many classes
            problem = problem or str(error).splitlines()[0]
            continue
        # Blocks that touch are one.
        start, end = blocks[-1] if blocks else (0, 0)
        for before in reversed(blocks[:-1]):
            start = before[0] if before[1] == start else start
        if end > start and (not messages[-1].get("tool_calls") or "add" in text[start:end]):
            return text[start:end], ""
        problem = problem or "nothing is marked"
    return "", problem


def _after(prompt: str, text: str, renderer: Renderer) -> str:
    """Return the text of an answer without the header that the prompt has printed, and without text after its end of turn."""
    # The header of the answer is at the end of the prompt, and the marked text may begin with any part of it.
    header = renderer._template.header({})
    begin = len(prompt) - (len(header) if header and prompt.endswith(header) else 60)
    for place in range(max(begin, 0), len(prompt)):
        size = next(
            (i for i, (a, b) in enumerate(zip(prompt[place:], text, strict=False)) if a != b),
            min(len(prompt) - place, len(text)),
        )
        # The marked text begins with the end of the header, or with its first part, up to a tag that only the prompt has.
        if place + size < len(prompt):
            size = text.rfind(">", 0, size) + 1 if "<think>" in prompt[place:] else 0
        if size:
            text = text[size:]
            break
    stops = [renderer.tokenizer.decode([one]) for one in renderer.stop_token_ids]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def table(names: Sequence[str] | None = None) -> list[Cell]:
    """Return all cells."""
    return [cell(name, case, method) for name in names or templates() for case in CASES for method in METHODS]


def as_markdown(cells: Sequence[Cell]) -> str:
    """Return the table with a row for each template, and below it the reasons."""
    names, cases = list(dict.fromkeys(one.template for one in cells)), list(dict.fromkeys(one.case for one in cells))
    found = {(one.template, one.case, one.method): one for one in cells}
    lines = [f"| template | {' | '.join(cases)} |", f"|---|{'---|' * len(cases)}"]
    for name in names:
        entries = []
        for case in cases:
            results = [
                found[name, case, method].result.partition(":")[0] for method in METHODS if (name, case, method) in found
            ]
            entries.append(results[0] if len(set(results)) == 1 else " / ".join(results))
        lines.append(f"| {name} | {' | '.join(entries)} |")
    reasons = [f"- {one.template}, {one.case}, {one.method}: {one.result}" for one in cells if one.result != "same"]
    return "\n".join([*lines, "", *reasons, ""])


# The cases of each column of the page's table.
COLUMNS = (("single", "turns", "prefill"), ("system",), ("tools",), ("calls",), ("reasoning", "thinking turns"), ("inline",))
PAGE = places.ROOT / "docs/guide/chat-templates.md"


def page_table() -> dict[tuple[str, str, str], str]:
    """Return the result of every cell, ``same`` or ``refused``, by the table of the documentation."""
    lines = [line for line in PAGE.read_text().partition("## What is tested")[2].splitlines() if line.startswith("| `")]
    found = {}
    for line in lines:
        names, *results = (part.strip() for part in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            for cases, result in zip(COLUMNS, results, strict=True):
                for case in cases:
                    for method in METHODS:
                        # The prompt of this case has no reasoning.
                        printed = case == "reasoning" and method == "GRPO"
                        assert (name, case, method) not in found
                        found[name, case, method] = "same" if printed else result
    return found


if __name__ == "__main__":
    import sys

    print(as_markdown(table(sys.argv[1:] or None)))
