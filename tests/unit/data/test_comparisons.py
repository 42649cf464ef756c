"""Preference rows as questions of SFT: both orders, the letters, conversations and plain text, and refused rows."""

import pytest
import tiny

from cookbook.data import DataConfig, Renderer, Row, datums
from cookbook.data.formats import Chat, Plain, conversation_reader
from cookbook.errors import ConfigError, DataError

CONFIG = DataConfig(format="comparisons", chat=True)
QUESTION = """\
Which of two answers to this conversation is better?

[user]
2+2=

[answer A]
{}

[answer B]
{}

Reply with A or B."""
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "about {0} {first}"}


def examples(values, config=CONFIG):
    row = Row("pairs.jsonl:3", values)
    return conversation_reader(row, config)(row)


def asked(example):
    return [(message.role, message.content) for message in example.messages]


def test_a_pair_is_a_question_in_both_orders():
    first, second = examples(PAIR)
    # Braces of an answer are text.
    assert asked(first) == [("user", QUESTION.format("4", PAIR["rejected"])), ("assistant", "A")]
    assert asked(second) == [("user", QUESTION.format(PAIR["rejected"], "4")), ("assistant", "B")]
    assert {one.start for one in (first, second)} == {1} and first.where == "pairs.jsonl:3"


def test_whole_conversations_and_a_system_message_are_shown():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}
    turns = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    values = {"chosen": [system, user, *turns], "rejected": [system, user, {"role": "assistant", "content": "five"}]}
    text = examples(values)[0].messages[0].content
    assert "[system]\nBe brief.\n\n[user]\n2+2?\n\n[answer A]\n[assistant]\n4\n\n[user]\nSure?\n\n[assistant]\nyes\n\n" in text
    assert "[answer B]\nfive\n\n" in text
    # The system message of the configuration is one of the conversation, not of the question.
    config = DataConfig(format="comparisons", chat=True, system="Be brief.")
    with_system = examples({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, config)[0]
    assert [message.role for message in with_system.messages] == ["user", "assistant"]
    assert "[system]\nBe brief.\n\n[user]\n2+2?" in with_system.messages[0].content


def test_plain_text_asks_without_a_chat_template():
    first, second = examples(PAIR, DataConfig(format="comparisons"))
    assert isinstance(first, Plain) and first.prompt == QUESTION.format("4", PAIR["rejected"]) + "\n\nThe better answer is"
    assert (first.response, second.response) == (" A", " B")


def test_a_row_is_two_datums_that_train_the_letter():
    renderer = Renderer(tiny.byte_tokenizer(), 1024)
    found = datums.conversation_datums([Row("pairs.jsonl:3", PAIR)], renderer, CONFIG)
    trained = []
    for one in found:
        inputs = one.loss_fn_inputs
        trained.append(inputs["target_tokens"].array[inputs["weights"].array != 0])
    assert [renderer.tokenizer.decode(tokens) for tokens in trained] == ["A<|im_end|>", "B<|im_end|>"]
    assert all(one.where == "pairs.jsonl:3" for one in found)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "4"}, DataError, "chosen and rejected are the same"),
        (
            {"prompt": "2+2=", "completion": "4"},
            DataError,
            'no column "chosen", the row has prompt, completion; set data.columns.chosen',
        ),
        (
            {"prompt": "2+2=", "chosen": "4", "rejected": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            DataError,
            'pairs.jsonl:3: "tool_calls" is not text, and a comparison shows the text of both answers; remove the row',
        ),
    ],
    ids=["equal", "no pair", "calls"],
)
def test_rows_that_cannot_be_compared_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        examples(values)


@pytest.mark.parametrize("kind", ["preferences", "labels", "rollouts"])
def test_other_recipes_refuse_the_format(kind):
    with pytest.raises(ConfigError, match=r"data.format=comparisons does not suit this recipe"):
        datums.check_columns(kind, [Row("pairs.jsonl:3", PAIR)], CONFIG)


def test_rows_without_the_format_are_conversations_as_before():
    [chat] = examples({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}, DataConfig())
    assert isinstance(chat, Chat)
