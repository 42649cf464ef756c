"""The sequences that train the answers of a conversation, each answer after the prompt that it is sampled from.

The prompt of an answer is what the chat template prints for the messages before the answer, with the header of an answer to
sample. Usually the text of the whole conversation contains the prompt of every answer and the answer after the prompt, so one
sequence trains all answers. Published chat templates break this in three ways:

- They rewrite earlier turns, such as Qwen3, which removes the reasoning of all answers before the last question. The whole text
  then shows an earlier answer as it is never sampled, so that answer is trained in a sequence that ends with it.
- The header of an answer to sample differs from the header of an answer of the conversation, such as that of DeepSeek-R1, which
  opens the reasoning. The sequence then has the header to sample.
- The end of the header and the first characters of the answer have a common token in the whole text, such as two line ends.
  The sequence then has the tokens of the prompt, and after them those of the answer. The renderer compares the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cookbook.data.formats import Chat
from cookbook.data.messages import CALLS, REASONING, ChatMessage, is_prefill
from cookbook.data.template import PROBE, TAGS, ChatTemplate, dropped_text, missing_text
from cookbook.errors import DataError

# Characters [start, end) of the rendered text, and the weight that they are trained with.
Span = tuple[int, int, float]
# Text that the template cannot confuse with text of its own or of a row.
MARK = "\u241ebegin\u241e"
REASONING_END = re.compile(r"</[\w:|]+>|\[/THINK\]")
# A tag at the end of a prompt that opens the reasoning, and a block of reasoning without text.
OPENED = re.compile(r"(<([\w:]+)>|\[(THINK)\])\s*\Z")
# Of these tags, the ones whose text is reasoning. Others, such as <assistant>, name the author of a turn.
REASONING_TAG = re.compile(r"think|thought|reason", re.IGNORECASE)
EMPTY_BLOCK = re.compile(r"\s*(<([\w:]+)>\s*</\2>|\[THINK\]\s*\[/THINK\])\s*")
REST_OF_EMPTY_BLOCK = re.compile(r"\s*(</([\w:]+)>|\[/(THINK)\])\s*")
# The tag that begins a text with reasoning, and an empty block of reasoning, or its last tag, at the end of a prompt.
OPENING = re.compile(r"\s*(<([\w:]+)>|\[(THINK)\])")
CLOSED = re.compile(r"((?:<([\w:]+)>\s*)?</([\w:]+)>|(?:\[THINK\]\s*)?\[/(THINK)\])\s*\Z")

REWRITES = (
    "the chat template rewrites earlier turns when more follow, so one sequence cannot train all answers of a conversation as "
    "they are sampled; data.train_on=assistant falls back to one sequence per answer for such conversations"
)
REWRITES_PAIR = (
    "the chat template rewrites earlier turns when more follow; answers before the last are trained as the template prints "
    "them in front of the last answer"
)
OTHER_TOKENS = (
    "the end of the generation prompt and the start of some answers have other tokens in one text than apart; the rows are "
    "trained with the tokens of the prompt as it is sampled, and several such answers of a conversation as one sequence each"
)
CLOSED_REASONING = (
    "the chat template closes the reasoning in front of some answers that have reasoning in their text; these answers are "
    "trained without the empty block, as they are sampled if the generation prompt leaves the reasoning open, with "
    "model.chat_template_kwargs such as {enable_thinking: true}"
)
DOUBLE_REASONING = (
    "the chat template prints an empty block of reasoning in front of answers that have reasoning in their text; these answers "
    "are trained as printed; give their reasoning in the field reasoning_content if the template reads it"
)
DROPPED_REASONING = (
    "the chat template drops the reasoning inside of answers, and its generation prompt opens the reasoning; the answers are "
    "trained with their reasoning, as they are sampled"
)


@dataclass(frozen=True)
class TrainedText:
    """The text of one sequence, which has the first ``num_messages`` messages, and the spans of the answers that it trains.

    ``prompts``: for each answer, the number of characters of its prompt.
    """

    text: str
    spans: Sequence[Span]
    prompts: Sequence[int]
    num_messages: int
    answers: Sequence[int] = ()
    ends_with_call: bool = False


@dataclass(frozen=True)
class SampledAnswer:
    """An answer after its prompt. ``text`` ends with the turn; ``tail``: what the template prints after its last turn."""

    prompt: str
    text: str
    tail: str = ""

    @property
    def whole(self) -> str:
        return self.prompt + self.text


class SampledTurns:
    """The sequences of conversations by one chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # For conversations of one shape, the number of characters of white space between the prompt of each trained answer and
        # its generation block; None: the blocks do not begin where sampling begins.
        self._block_shapes: dict[object, Mapping[int, int] | None] = {}

    def sequences(
        self, chats: Sequence[Chat], answer_weights: Sequence[Mapping[int, float]], train_on: str, *, split: bool
    ) -> list[list[TrainedText]]:
        """Return the sequences of each chat, in the order of their last messages.

        Args:
            answer_weights: for each chat, the weights of the answers to train, by message index.
            split: whether a chat may have several sequences; otherwise answers before the last are trained as they are printed.
        """
        chats = [self.with_opened_reasoning(chat) for chat in chats]
        renderings = self._template.rendered(chats, header=False)
        return [self._of_chat(*row, train_on, split) for row in zip(chats, answer_weights, renderings, strict=True)]

    def separate(self, chat: Chat, answer_weights: Mapping[int, float]) -> list[TrainedText]:
        """Return a sequence for each answer."""
        chat = self.with_opened_reasoning(chat)
        text = self._template.printed(chat, header=False)
        return [
            self._alone(chat, self.sampled(chat, index, text), {index: answer_weights[index]})
            for index in sorted(answer_weights)
        ]

    def prompts(self, chats: Sequence[Chat]) -> list[str]:
        """Return the text of the prompt of each chat: the messages before ``start``, and the header of an answer to sample.

        If the prompt ends with the start of an answer, it ends with this text, for the model to continue.
        """
        questions = [self._asked(self.with_opened_reasoning(chat)) for chat in chats]
        plain = iter(self._template.prompts([chat for chat in questions if not is_prefill(chat.messages[: chat.start])]))
        return [self.prefilled(chat) if is_prefill(chat.messages[: chat.start]) else next(plain) for chat in questions]

    def _asked(self, chat: Chat) -> Chat:
        """Return the prompt of a chat as a chat of its own, with the start of the answer as its last message."""
        messages = chat.messages[: chat.start]
        if is_prefill(messages) and messages[-1].is_empty:
            # The header is the start of every answer.
            messages = messages[:-1]
        if chat.prefill:
            messages = (*messages, _without_calls(replace(chat.messages[chat.start], content=chat.prefill)))
        return replace(chat, messages=messages, start=len(messages), prefill="")

    def prefilled(self, chat: Chat) -> str:
        """Return the prompt of a chat whose last message is the start of an answer.

        It is what the template prints up to the end of this message. A start that opens the reasoning directly follows the
        header of an answer to sample: the template would print it as a complete text.
        """
        index = len(chat.messages) - 1
        begun = chat.messages[index]
        self._template.check_fields(chat, self._template.printed(chat, header=False), header=False)
        prompt = self._prompt(chat, index) if index else ""
        tags = TAGS.findall(begun.content)
        if tags and "/" not in tags[-1]:
            opened = OPENED.search(prompt)
            start = begun.content.lstrip()
            if opened and start.startswith(opened[1]):
                return prompt[: opened.start()] + start if len(start) > len(opened[0]) else prompt
            return prompt + begun.content
        marked = replace(chat, messages=(*chat.messages[:index], replace(begun, content=begun.content + MARK)))
        before, mark, _ = self._template.printed(marked, header=False).rpartition(MARK)
        return before if mark else prompt + begun.content

    def _continued(self, chat: Chat, index: int, text: str) -> SampledAnswer:
        """Return an answer whose start is a part of its prompt. ``text``: the whole conversation.

        Raises:
            DataError: the template drops a part of the answer.
        """
        prompt, message = self.prefilled(self._asked(chat)), chat.messages[index]
        until, tail = self._until(chat, index, text)
        if until.startswith(prompt):
            answer = SampledAnswer(prompt, until[len(prompt) :], tail)
        else:
            # The template prints the whole answer in another way than its start.
            closing = self._template.end_of_turn.removesuffix(self._template.last_word)
            answer = SampledAnswer(prompt, message.content.removeprefix(chat.prefill) + closing, tail)
        if missing := missing_text(message.texts(), answer.whole):
            raise dropped_text(chat, index, missing)
        return answer

    def with_opened_reasoning(self, chat: Chat) -> Chat:
        """Return the chat with the tag that opens the reasoning before answers that only have the tag that closes it.

        A sampled answer is such a text if the generation prompt has printed the first tag. Some templates would print the whole
        text behind an empty block of reasoning.
        """
        if not any(message.role == "assistant" and REASONING_END.search(message.content) for message in chat.messages):
            return chat
        header = self._template.header(chat.options)

        def whole(message: ChatMessage) -> ChatMessage:
            tag = opened_reasoning(header, message.content) if message.role == "assistant" else ""
            return replace(message, content=tag + message.content) if tag and tag.strip() not in message.content else message

        return replace(chat, messages=tuple(map(whole, chat.messages)))

    def _of_chat(
        self,
        chat: Chat,
        answer_weights: Mapping[int, float],
        rendering: tuple[str, list[tuple[int, int]]],
        train_on: str,
        split: bool,
    ) -> list[TrainedText]:
        text, blocks = rendering
        self._template.check_fields(chat, text, header=False)
        answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if (
            len(blocks) == len(answers)
            and not chat.prefill
            and (marked := self._by_blocks(chat, text, answer_weights, dict(zip(answers, blocks, strict=True)), train_on))
        ):
            return [marked]
        # The answers to train are checked below, each after its prompt.
        trained = dict.fromkeys(range(len(chat.messages)), text) if train_on == "all" else {}
        self._template.check_texts(chat, trained, text, without=answer_weights)
        sampled = {index: self.sampled(chat, index, text) for index in sorted(answer_weights)}
        fitting = {index: answer for index, answer in sampled.items() if text.startswith(answer.whole)}
        if train_on == "all":
            # Every token is trained. Only the answers of another weight need their place.
            places = {index: (len(answer.prompt), len(answer.whole)) for index, answer in fitting.items()}
            places |= {index: self._in_place(chat, index, text, header=False) for index in sampled.keys() - fitting.keys()}
            return [_text(chat, text, places, answer_weights, len(chat.messages))]
        if len(fitting) == len(sampled):
            places = {index: (len(answer.prompt), len(answer.whole)) for index, answer in fitting.items()}
            return [_text(chat, text, places, answer_weights, len(chat.messages))]
        if not split:
            return [self._in_one(chat, sampled, answer_weights)]
        return self._few(chat, text, sampled, answer_weights)

    def _few(
        self, chat: Chat, text: str, sampled: dict[int, SampledAnswer], answer_weights: Mapping[int, float]
    ) -> list[TrainedText]:
        """Return as few sequences as show every answer as it is sampled."""
        result = []
        left = dict(sampled)
        fitting = {index for index, answer in left.items() if text.startswith(answer.whole)}
        if fitting:
            places = {index: (len(left[index].prompt), len(left[index].whole)) for index in sorted(fitting)}
            result.append(_text(chat, text, places, answer_weights, len(chat.messages)))
        left = {index: answer for index, answer in left.items() if index not in fitting}
        while left:
            last = left[max(left)]
            until = last.whole + last.tail
            together = {index: answer for index, answer in left.items() if until.startswith(answer.whole)}
            places = {index: (len(answer.prompt), len(answer.whole)) for index, answer in together.items()}
            result.append(_text(chat, until, places, answer_weights, max(left) + 1))
            left = {index: answer for index, answer in left.items() if index not in together}
        if len(result) > 1:
            self._template.note(REWRITES)
        return result[::-1]

    def _in_one(self, chat: Chat, sampled: Mapping[int, SampledAnswer], answer_weights: Mapping[int, float]) -> TrainedText:
        """Return one sequence: the last answer as it is sampled, and the others as the template prints them before it."""
        index = max(sampled)
        last = sampled[index]
        places = {}
        for other, answer in sampled.items():
            if last.whole.startswith(answer.whole):
                places[other] = (len(answer.prompt), len(answer.whole))
            else:
                before = replace(chat, messages=chat.messages[:index])
                places[other] = self._in_place(before, other, last.prompt, header=True)
                self._template.note(REWRITES_PAIR)
        return _text(chat, last.whole + last.tail, places, answer_weights, index + 1)

    def _alone(self, chat: Chat, answer: SampledAnswer, answer_weights: Mapping[int, float]) -> TrainedText:
        [index] = answer_weights
        places = {index: (len(answer.prompt), len(answer.whole))}
        return _text(chat, answer.whole + answer.tail, places, answer_weights, index + 1)

    def _by_blocks(
        self, chat: Chat, text: str, answer_weights: Mapping[int, float], blocks: Mapping[int, tuple[int, int]], train_on: str
    ) -> TrainedText | None:
        """Return the sequence whose answers are the template's generation blocks; None if they are not sampled that way.

        Conversations of one shape are compared with their prompts once: a template treats them the same way.
        """
        shape = (
            tuple(sorted(answer_weights)),
            bool(chat.tools),
            repr(chat.options),
            tuple(
                (message.role, bool(message.content.strip()), "</" in message.content, message.said)
                for message in chat.messages
            ),
        )
        if shape not in self._block_shapes:
            leads = {index: self._lead_of_block(chat, index, text, blocks[index]) for index in answer_weights}
            whole = {index: lead for index, lead in leads.items() if lead is not None}
            self._block_shapes[shape] = whole if len(whole) == len(leads) else None
        spaces = self._block_shapes[shape]
        if spaces is None:
            return None
        places = {index: (blocks[index][0] - spaces[index], blocks[index][1]) for index in answer_weights}
        texts = dict.fromkeys(range(len(chat.messages)), text) if train_on == "all" else {}
        trained = texts | {index: text[start:end] for index, (start, end) in places.items()}
        self._template.check_texts(chat, trained, text)
        return _text(chat, text, places, answer_weights, len(chat.messages))

    def _lead_of_block(self, chat: Chat, index: int, text: str, block: tuple[int, int]) -> int | None:
        """Return the number of characters of white space between the prompt of an answer and its generation block.

        The model has to write this white space. Other text in front of the block stays untrained, so its length is 0. None: the
        answer is not sampled as the conversation prints it.
        """
        if index == 0:
            return 0
        try:
            prompt, until = self._prompt(chat, index), self._until(chat, index, text)[0]
        except DataError:
            # The template accepts whole conversations only.
            return 0
        if block[0] < len(prompt) or not until.startswith(prompt) or not text.startswith(until):
            return None
        lead = text[len(prompt) : block[0]]
        return 0 if lead.strip() else len(lead)

    def _prompt(self, chat: Chat, index: int) -> str:
        return self._template.printed(replace(chat, messages=chat.messages[:index]), header=True)

    def _first_prompt(self, chat: Chat, until: str) -> str:
        """Return the prompt of an answer with which a conversation begins: the text up to the end of its header.

        Raises:
            DataError: the text does not have the header of an answer to sample.
        """
        prompt = self._template.shown(replace(chat, messages=()), header=True)
        if prompt is not None and until.startswith(prompt):
            return prompt
        header = self._template.header(chat.options)
        place = until.find(header) if header else -1
        if place < 0:
            raise DataError(f"{chat.where}: the chat template prints no header in front of the first answer")
        return until[: place + len(header)]

    def _until(self, chat: Chat, index: int, text: str) -> tuple[str, str]:
        """Return the text of the messages up to an answer, and what the template prints after its last turn."""
        until = text
        if index < len(chat.messages) - 1:
            until = self._template.printed(replace(chat, messages=chat.messages[: index + 1]), header=False)
            bare = until.removesuffix(self._template.last_word)
            return bare, until[len(bare) :]
        return until, ""

    def sampled(self, chat: Chat, index: int, text: str) -> SampledAnswer:
        """Return an answer as it is sampled. ``text``: the whole conversation.

        Raises:
            DataError: the conversation begins with the answer, or the template drops a part of the answer.
        """
        if chat.prefill and index == chat.start:
            return self._continued(chat, index, text)
        try:
            until, tail = self._until(chat, index, text)
            # Some templates print no conversation without a message. The prompt of a first answer is its header.
            prompt = self._prompt(chat, index) if index else self._first_prompt(chat, until)
        except DataError:
            # The template accepts the whole conversation only, as Qwen3.5's one with an answer before the first question.
            start, end = self._in_place(chat, index, text, header=False)
            return SampledAnswer(text[:start], text[start:end])
        chat = replace(chat, messages=chat.messages[: index + 1])
        if until.startswith(prompt):
            answer = SampledAnswer(prompt, until[len(prompt) :], tail)
            lead = self._lead(chat)
            if lead and answer.text.startswith(lead):
                self._template.note(
                    f"answers begin with {lead!r}, which the generation prompt lacks, so the model learns to write it"
                )
            if _without_closed_block(chat.messages[-1], answer) is not None:
                self._template.note(DOUBLE_REASONING)
        else:
            answer = self._other_header(chat, prompt, until, tail)
            if (whole := _without_closed_block(chat.messages[-1], answer)) is not None:
                self._template.note(CLOSED_REASONING)
                answer = whole
        return self._complete(chat, answer)

    def _lead(self, chat: Chat) -> str:
        """Return what the template prints between the header to sample and a plain answer."""
        texts = self._template.probe(chat.options)
        return (
            ""
            if texts is None or not texts[1].startswith(texts[0])
            else texts[1][len(texts[0]) :].partition(PROBE[1].content)[0]
        )

    def _other_header(self, chat: Chat, prompt: str, until: str, tail: str) -> SampledAnswer:
        """Return the last message as an answer to a prompt that the text ``until`` does not begin with."""
        place = self._where_they_part(chat, prompt, until)
        if place is None:
            # The messages before the answer are printed differently too. The answer alone shows how the header differs.
            alone = self._with_short_context(chat)
            if alone is not None and until.endswith(alone.text):
                return SampledAnswer(prompt, alone.text, tail)
            start, header = self._start_of_text(chat, until), self._template.header(chat.options)
            begin = until.rfind(header, 0, start) if header else -1
            return SampledAnswer(prompt, until[begin + len(header) if begin >= 0 else start :], tail)
        lacks = prompt[place:]
        last = chat.messages[-1]
        reasons = bool(set(last.said) & set(REASONING)) or REASONING_END.search(last.content) is not None
        is_printed = reasons and not missing_text(last.texts(), until[place:])
        if lacks.strip() and is_printed and REASONING_END.search(lacks):
            self._template.note(
                f"the generation prompt ends with {lacks!r}, and some answers have reasoning, which are trained as the "
                "template prints them; sample with model.chat_template_kwargs that leave the reasoning open, such as "
                "{enable_thinking: true}"
            )
            return SampledAnswer(prompt[:place], until[place:], tail)
        start = self._start_of_text(chat, until)
        has = until[place:start]
        instead = f"; the rows have {has!r} there" if has else ""
        if has.strip() and lacks.strip().endswith(has.strip()):
            # The prompt has printed the same header with other white space, or has closed the reasoning.
            place = start
        self._template.note(
            f"the generation prompt ends with {lacks!r}, which the chat template does not print in a conversation{instead}; "
            "answers are trained after the generation prompt, as they are sampled"
        )
        return SampledAnswer(prompt, until[place:], tail)

    def _where_they_part(self, chat: Chat, prompt: str, until: str) -> int | None:
        """Return the place in the header of the last message from which its prompt differs; None if it differs before."""
        common = _common(prompt, until)
        context = self._template.shown(replace(chat, messages=chat.messages[:-1]), header=False)
        if context is not None:
            context = context.removesuffix(self._template.last_word)
        if context is None or not prompt.startswith(context):
            # The template does not print a conversation without an answer at its end, or prints it differently.
            header = self._template.header(chat.options)
            if not prompt.endswith(header):
                return None
            context = prompt.removesuffix(header)
        if common < len(context):
            return None
        # Different tags have their first character in common, not a token.
        tag = max(prompt.rfind(begin, len(context), common) for begin in "<[")
        if tag >= 0 and not set(prompt[tag:common]) & {">", "]"}:
            common = tag
        start = self._start_of_text(chat, until)
        if common <= start:
            return common
        # The answer's text begins like the header. It counts as the header's only up to the end of a tag.
        tag = max(prompt.rfind(end, start, common) for end in ">]")
        return start if tag < 0 else common if not prompt[tag + 1 : common].strip() else tag + 1

    def _start_of_text(self, chat: Chat, until: str) -> int:
        """Return the place in ``until`` at which the template prints text of the last message."""
        printed = self._template.shown(
            replace(chat, messages=(*chat.messages[:-1], _marked(chat.messages[-1], before=True))), False
        )
        return _common(until, printed) if printed is not None else len(until)

    def _with_short_context(self, chat: Chat) -> SampledAnswer | None:
        """Return the last message as the answer to a short question, or to the result of a tool if it is one; None: refused."""
        result = [message for message in chat.messages[-2:-1] if message.role == "tool"]
        context: tuple[ChatMessage, ...] = PROBE[:1]
        if result:
            called = {"tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}]}
            context = (*context, ChatMessage("assistant", "", extra=called), *result)
        if chat.messages[0].role == "system":
            context = (chat.messages[0], *context)
        short = replace(chat, messages=(*context, chat.messages[-1]))
        if len(short.messages) >= len(chat.messages):
            return None
        text = self._template.shown(short, header=False)
        prompt = self._template.shown(replace(short, messages=short.messages[:-1]), header=True)
        if text is None or prompt is None:
            return None
        if text.startswith(prompt):
            return SampledAnswer(prompt, text[len(prompt) :])
        place = self._where_they_part(short, prompt, text)
        return None if place is None else SampledAnswer(prompt, text[place:])

    def _in_place(self, chat: Chat, index: int, text: str, *, header: bool) -> tuple[int, int]:
        """Return the place of an answer in the text of the conversation, wherever the template prints it.

        Raises:
            DataError: the template does not print the answer.
        """
        message = chat.messages[index]

        def changed(before: bool) -> str:
            messages = (*chat.messages[:index], _marked(message, before=before), *chat.messages[index + 1 :])
            return self._template.printed(replace(chat, messages=messages), header=header)

        start = _common(text, changed(True))
        behind = _common(text[::-1], changed(False)[::-1])
        end = len(text) - behind
        # Reasoning of an answer before the last may be missing on purpose.
        said = [("content", TAGS.split(message.content)[-1]), *message.call_texts()]
        if missing := missing_text(said, text[start:end]):
            raise dropped_text(chat, index, missing)
        return start, max(start, end)

    def _complete(self, chat: Chat, answer: SampledAnswer) -> SampledAnswer:
        """Return the answer, which is the last message, after a check that it has all of the message's text.

        Raises:
            DataError: the template drops a part.
        """
        message = chat.messages[-1]
        header = self._template.header(chat.options)
        opened = header if answer.prompt.endswith(header) else ""
        if not (missing := missing_text(message.texts(), opened + answer.text)):
            return answer
        if (whole := _with_reasoning(message, answer)) is not None:
            self._template.note(DROPPED_REASONING if whole.prompt == answer.prompt else CLOSED_REASONING)
            return whole
        raise dropped_text(chat, len(chat.messages) - 1, missing)


def _with_reasoning(message: ChatMessage, answer: SampledAnswer) -> SampledAnswer | None:
    """Return the answer with the reasoning that its content has and the template drops; None if that is not the case.

    The content has to begin as the prompt ends, with the tag that opens the reasoning. A sampled answer continues after it. If
    the prompt has closed the reasoning, the answer follows the prompt without the empty block.
    """
    opened, content = OPENED.search(answer.prompt), message.content.lstrip()
    if opened is None:
        return _instead_of_closed_block(content, answer)
    tag, name = opened[1], opened[2] or opened[3]
    close = f"[/{name}]" if tag.startswith("[") else f"</{name}>"
    reasoning, closed, said = content.removeprefix(tag).partition(close)
    if not content.startswith(tag) or not closed or not said.strip() or said.strip() not in answer.text:
        return None
    # The prompt may also have printed the white space after the tag.
    space = opened[0].removeprefix(tag)
    reasoning = reasoning.removeprefix(space)
    end = answer.text.index(said.strip()) + len(said.strip())
    return replace(answer, text=reasoning + closed + said.rstrip() + answer.text[end:])


def _without_closed_block(message: ChatMessage, answer: SampledAnswer) -> SampledAnswer | None:
    """Return the answer without an empty block of reasoning in front of the reasoning in its text; None without such a block.

    The template prints the block in the answer or at the end of the prompt.
    """
    content = message.content.lstrip()
    tag = OPENING.match(content)
    if tag is None or f"/{tag[2] or tag[3]}" not in content:
        return None
    name, closed = tag[2] or tag[3], CLOSED.search(answer.prompt)
    if closed and (closed[3] or closed[4]) == name and answer.text.startswith(tag[1]):
        return replace(answer, prompt=answer.prompt[: closed.start()])
    block = EMPTY_BLOCK.match(answer.text) or REST_OF_EMPTY_BLOCK.match(answer.text)
    if block is None or f"/{name}" not in block[0] or not answer.text.startswith(tag[1], block.end()):
        return None
    following, opened = answer.text[block.end() :], OPENED.search(answer.prompt)
    if opened is None or opened[1] != tag[1]:
        return replace(answer, text=following)
    # The prompt has printed the tag, and maybe white space after it.
    return replace(answer, text=following.removeprefix(tag[1]).removeprefix(opened[0].removeprefix(tag[1])))


def _instead_of_closed_block(content: str, answer: SampledAnswer) -> SampledAnswer | None:
    """Return an answer with the reasoning that its content begins with, in place of the empty block at the prompt's end."""
    tag, closed = OPENING.match(content), CLOSED.search(answer.prompt)
    if tag is None or closed is None or (closed[3] or closed[4]) != (tag[2] or tag[3]):
        return None
    close = f"[/{tag[3]}]" if tag[3] else f"</{tag[2]}>"
    reasoning, mark, said = content.partition(close)
    if not mark or not said.strip() or said.strip() not in answer.text:
        return None
    end = answer.text.index(said.strip()) + len(said.strip())
    text = reasoning + close + said.rstrip() + answer.text[end:]
    return replace(answer, prompt=answer.prompt[: closed.start()], text=text)


def _without_calls(message: ChatMessage) -> ChatMessage:
    return replace(message, extra={name: value for name, value in message.extra.items() if name not in CALLS})


def _common(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    differing = (place for place, (character, other) in enumerate(zip(first, second, strict=False)) if character != other)
    return next(differing, min(len(first), len(second)))


def _marked(message: ChatMessage, *, before: bool) -> ChatMessage:
    """Return the message with a mark before, or after, each of its texts."""

    def marked(text: str) -> str:
        return MARK + text if before else text + MARK

    extra = dict(message.extra)
    for name in REASONING:
        if isinstance(text := extra.get(name), str) and text:
            extra[name] = marked(text)
    if extra.get("tool_calls"):
        calls = list(extra["tool_calls"])
        place = 0 if before else -1
        function = calls[place].get("function", calls[place])
        changed = {**function, "name": marked(str(function.get("name", "")))}
        if not before and isinstance(arguments := function.get("arguments"), Mapping) and arguments:
            changed = {**function, "arguments": {**arguments, list(arguments)[-1]: MARK}}
        calls[place] = {**calls[place], "function": changed} if "function" in calls[place] else changed
        extra["tool_calls"] = calls
    has_content = bool(message.content.strip()) or not set(extra) & {*REASONING, *CALLS}
    return replace(message, content=marked(message.content) if has_content else message.content, extra=extra)


def _text(
    chat: Chat, text: str, places: Mapping[int, tuple[int, int]], answer_weights: Mapping[int, float], num_messages: int
) -> TrainedText:
    order = sorted(places)
    spans = [(*places[index], answer_weights[index]) for index in order]
    ends_with_call = bool(chat.messages[num_messages - 1].extra.get("tool_calls"))
    return TrainedText(text, spans, [start for start, _, _ in spans], num_messages, order, ends_with_call)


def without_empty_reasoning(sequence: TrainedText) -> TrainedText:
    """Return the sequence without the blocks of empty reasoning at the start of its answers, which stay untrained."""
    spans = []
    for start, end, weight in sequence.spans:
        answer = sequence.text[start:end]
        block = EMPTY_BLOCK.match(answer)
        if block is None and (opened := OPENED.search(sequence.text[:start])):
            closing = REST_OF_EMPTY_BLOCK.match(answer)
            block = closing if closing and (closing[2] or closing[3]) == (opened[2] or opened[3]) else None
        spans.append((start + (block.end() if block else 0), end, weight))
    return replace(sequence, spans=spans)


def reasoning_tag(prompt: str) -> str:
    """Return the tag at the end of a prompt that opens the reasoning, with the white space after it; empty without one."""
    opened = OPENED.search(prompt)
    return opened[0] if opened and REASONING_TAG.search(opened[1]) else ""


def opened_reasoning(prompt: str, answer: str) -> str:
    """Return the tag at the end of the prompt that opens the reasoning which the answer closes; empty without such a tag."""
    opened = OPENED.search(prompt)
    if opened is None:
        return ""
    name = opened[2] or opened[3]
    return opened[0] if f"</{name}>" in answer or f"[/{name}]" in answer else ""
