"""Rows in every supported format, and the errors for rows in no format."""

import json
from dataclasses import replace

import pytest

from cookbook.data import Columns, DataConfig, Row
from cookbook.data.formats import Chat, Plain, conversation_reader, label_reader, preference_reader, prompt_reader
from cookbook.data.rows import EmptyRowError
from cookbook.errors import ConfigError, DataError

USER, ANSWER, OTHER = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "five"},
)


PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image": None}]


def read(reader, values, **config):
    row = Row("train.jsonl:7", values)
    config = DataConfig(**config)
    found = reader(row, config)(row)
    # Only a comparison has two examples.
    return found[0] if reader is conversation_reader else found


def said(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def test_supervised_formats():
    chat = read(conversation_reader, {"messages": [USER, ANSWER]})
    assert said(chat) == [("user", "2+2?"), ("assistant", "4")]
    assert chat.start == 0
    assert read(conversation_reader, {"prompt": "2+2=", "completion": "4"}) == Plain("train.jsonl:7", "2+2=", "4")
    assert read(conversation_reader, {"text": "once"}) == Plain("train.jsonl:7", "", "once")
    for prompt, completion in (([USER], [ANSWER]), ([USER], "4"), ("2+2?", [ANSWER])):
        chat = read(conversation_reader, {"prompt": prompt, "completion": completion})
        assert (said(chat), chat.start) == ([("user", "2+2?"), ("assistant", "4")], 1)


def test_plain_columns_become_chat_on_request():
    chat = read(conversation_reader, {"prompt": "2+2?", "completion": "4"}, chat=True)
    assert (said(chat), chat.start) == ([("user", "2+2?"), ("assistant", "4")], 1)
    chat = read(prompt_reader, {"prompt": "2+2?"}, chat=True, system="Be brief.")
    assert (said(chat), chat.start) == ([("system", "Be brief."), ("user", "2+2?")], 2)
    pair = read(preference_reader, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, chat=True)
    assert (said(pair.rejected), pair.rejected.start) == ([("user", "2+2?"), ("assistant", "5")], 1)


def test_sharegpt():
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "weight": None}]
    assert said(read(conversation_reader, {"conversations": turns})) == [("user", "2+2?"), ("assistant", "4")]
    assert said(read(conversation_reader, {"dialog": turns}, columns=Columns(messages="dialog")))[1] == ("assistant", "4")
    with pytest.raises(DataError, match=r'"conversations"\[0\] is "from" \'narrator\'; expected one of system, user'):
        read(conversation_reader, {"conversations": [{"from": "narrator", "value": "hi"}]})


CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "value": "2+2?"}, {"role": "assistant", "value": "4"}],
        [{"from": "user", "content": "2+2?"}, {"from": "assistant", "content": "4"}],
        [
            {"from": "human", "value": "2+2?", "role": None, "content": None},
            {"role": "assistant", "content": "4", "from": None},
        ],
    ],
)
def test_names_of_both_formats_may_be_mixed(turns):
    assert said(read(conversation_reader, {"conversations": turns})) == [("user", "2+2?"), ("assistant", "4")]
    with pytest.raises(DataError, match=r'"conversations"\[0\] has "role" and "from"; keep one'):
        read(conversation_reader, {"conversations": [{"role": "user", "from": "human", "value": "hi"}]})


@pytest.mark.parametrize("calls", [CALL, [CALL]])
def test_calls_of_llama_factory(calls):
    """https://github.com/hiyouga/LlamaFactory/issues/2529 and others: the author "function_call" has the calls as JSON text."""
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": json.dumps(calls)},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    chat = read(conversation_reader, {"conversations": turns})
    assert said(chat) == [("user", "2+2?"), ("assistant", ""), ("tool", "4"), ("assistant", "4")]
    assert chat.messages[1].extra == {"tool_calls": [CALL]}


def test_calls_schemas_and_results_as_json_text():
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/885: columns of Arrow hold one type, so data have JSON text."""
    schema = {"type": "function", "function": {"name": "add"}}
    called = {"role": "assistant", "content": None, "tool_calls": json.dumps([{"function": CALL}])}
    for result, text in (({"sum": 4}, '{"sum": 4}'), ([1, "é"], '[1, "é"]'), ([{"a": 1}], '[{"a": 1}]'), (PARTS, "2+2?")):
        row = {"messages": [USER, called, {"role": "tool", "content": result}, ANSWER], "tools": [json.dumps(schema)]}
        chat = read(conversation_reader, row)
        assert (chat.messages[1].extra, chat.tools) == ({"tool_calls": [{"function": CALL}]}, (schema,))
        assert said(chat)[2] == ("tool", text)
    for tools in (["{"], ["4"]):
        with pytest.raises(DataError, match=r'"tools"\[0\] must be a tool schema, an object'):
            read(conversation_reader, {"messages": [USER, ANSWER], "tools": tools})
    with pytest.raises(DataError, match=r'"tool_calls" is broken JSON'):
        read(conversation_reader, {"messages": [USER, {**called, "tool_calls": "[{"}]})


def test_what_a_recipe_reads_decides_between_formats():
    row = {"prompt": "2+2?", "messages": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert isinstance(read(conversation_reader, row), Chat)
    assert read(preference_reader, row).chosen.start == 1
    assert read(prompt_reader, row) == Plain("train.jsonl:7", "2+2?")
    assert read(conversation_reader, {**row, "completion": "4"}, format="prompt_completion").response == "4"
    with pytest.raises(ConfigError, match=r"data\.format=preference does not suit this recipe; it reads messages"):
        read(conversation_reader, row, format="preference")


def test_prompts_leave_answers_out():
    for row in ({"messages": [USER, ANSWER]}, {"messages": [USER]}):
        chat = read(prompt_reader, row)
        assert said(chat)[: chat.start] == [("user", "2+2?")]
    chat = read(prompt_reader, {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]})
    assert said(chat)[: chat.start] == [("user", "2+2?")]
    plain = read(prompt_reader, {"prompt": "2+2=", "completion": "4"}, format="prompt_completion")
    assert plain == Plain("train.jsonl:7", "2+2=")


def test_implicit_prompts_are_whole_messages():
    pair = read(preference_reader, {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]})
    assert (pair.chosen.start, said(pair.chosen)[-1], said(pair.rejected)[-1]) == (
        1,
        ("assistant", "4"),
        ("assistant", "five"),
    )
    # One side has more messages: they belong to its answer, and the other side keeps its own.
    more = [USER, ANSWER, {"role": "user", "content": "sure?"}, OTHER]
    pair = read(preference_reader, {"chosen": [USER, ANSWER], "rejected": more})
    assert (pair.chosen.start, pair.rejected.start) == (1, 1)
    # A long shared history belongs to the prompt, its answers too.
    pair = read(preference_reader, {"chosen": [*more[:3], ANSWER], "rejected": more}, system="Be brief.")
    assert (pair.chosen.start, said(pair.chosen)[0]) == (4, ("system", "Be brief."))
    with pytest.raises(DataError, match="do not begin with the same messages"):
        read(preference_reader, {"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "3+3?"}, OTHER]})


def test_an_explicit_prompt_beside_whole_conversations_has_to_agree():
    row = {"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert read(preference_reader, row).chosen.start == 1
    with pytest.raises(DataError, match='"prompt" is not the prompt that chosen and rejected begin with'):
        read(preference_reader, {**row, "prompt": "3+3?"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, '"rejected" is empty'),
        ({"prompt": "p", "chosen": "a", "rejected": None}, "the columns are prompt, chosen, rejected"),
        ({"prompt": "p", "chosen": "a"}, "this recipe reads chosen\\+rejected"),
        ({"chosen": "a", "rejected": "b"}, "need a prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": 3.5}, '"rejected" must be text, got the float 3.5; write it in quotes'),
        ({"prompt": "p", "chosen": True, "rejected": "b"}, '"chosen" must be text, got the bool True'),
        ({"prompt": "p", "chosen": "a", "rejected": {"x": 1}}, '"rejected" must be a list of messages, got dict'),
        ({"prompt": "p", "chosen": [ANSWER], "rejected": [USER]}, '"rejected" begins with a user message'),
    ],
)
def test_preference_rows_are_read_strictly(values, message):
    with pytest.raises(DataError, match=rf"^train\.jsonl:7: .*{message}"):
        read(preference_reader, values)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_later_row_with_a_missing_side_is_named(side):
    whole = {"prompt": "p", "chosen": "a", "rejected": "b"}
    reader = preference_reader(Row("train.jsonl:1", whole), DataConfig())
    with pytest.raises(DataError, match=rf'^train\.jsonl:2: "{side}" is null'):
        reader(Row("train.jsonl:2", {**whole, side: None}))
    with pytest.raises(DataError, match=rf'^train\.jsonl:3: no column "{side}", the row has'):
        reader(Row("train.jsonl:3", {key: value for key, value in whole.items() if key != side}))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", '"messages" must be a list of messages, got text that is not the JSON of one'),
        (["hello"], r'"messages"\[0\] must be an object with "role" and "content", got str'),
        ([{"content": "hi"}], r'"messages"\[0\] has no "role"'),
        ([{"role": "user"}], r'"messages"\[0\] needs "content" that is text, got none'),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r'"messages"\[0\] "content"\[0\] has "type" \'image\'; cookbook trains',
        ),
        ([{"role": "user", "content": [*PARTS, {"type": "text", "text": "a", "cache": 1}]}], r'.*"content"\[2\] has "cache"'),
        ([{"role": "user", "content": ["a"]}], r'"messages"\[0\] "content"\[0\] must be an object with "type" and "text"'),
        ([{"role": "user", "content": {"text": "a"}}], r'"messages"\[0\] needs "content" that is text, got an object'),
        ([{"role": "user", "content": 1.5}], r'"messages"\[0\] "content" must be text, got the float 1\.5'),
        ([{"from": "gpt", "value": "a", "role": "user"}], r'"messages"\[0\] has "role" and "from"; keep one of the two'),
        ([{**USER, "train": True}], r'"messages"\[0\] has "train" true on a user message'),
        ([USER, {**ANSWER, "train": 0}], r'"messages"\[1\] has "train" 0; give true or false'),
        ([USER, {**ANSWER, "train": True, "weight": 0}], r'"messages"\[1\] contradicts itself with "weight" 0, "train" true'),
        ([USER, {**ANSWER, "train_detail": [1]}], r'"messages"\[1\] has "train_detail", and cookbook trains a message whole'),
        ([USER, {**ANSWER, "tool_calls": {"name": "a"}}], r'"messages"\[1\] "tool_calls" must be a list of objects'),
        ([USER, {**ANSWER, "tool_calls": [{"function": "a"}]}], r'.*"tool_calls"\[0\] "function" must be an object'),
        ([USER, {**ANSWER, "tool_calls": [{"arguments": "{"}]}], r'.*"tool_calls"\[0\] has "arguments" that are broken JSON'),
        ([USER, {**ANSWER, "loss": True, "weight": 0.5}], r'"messages"\[1\] contradicts itself with "weight" 0.5, "loss" true'),
        ([{**USER, "loss": True}], r'"messages"\[0\] has "loss" true on a user message'),
        ([{**USER, "weight": 1}], r'"messages"\[0\] has "weight" 1 on a user message'),
        ([USER, {**ANSWER, "weight": 2}], r'"messages"\[1\] has "weight" 2; give a number from 0'),
        ([USER, {**ANSWER, "weight": "1"}], r'"messages"\[1\] has "weight" \'1\''),
    ],
)
def test_messages_are_read_strictly(messages, message):
    with pytest.raises(DataError, match=rf"^train\.jsonl:7: {message}"):
        read(conversation_reader, {"messages": messages})


@pytest.mark.parametrize(
    "values",
    [{"messages": [USER]}, {"messages": []}, {"prompt": "p", "completion": ""}, {"text": ""}],
)
def test_nothing_to_train_on_is_told_apart(values):
    with pytest.raises(EmptyRowError, match=r"^train\.jsonl:7: .*remove the row or set data\.on_empty=skip$"):
        read(conversation_reader, values)


def test_the_sentence_for_a_row_without_an_answer():
    with pytest.raises(EmptyRowError) as error:
        read(conversation_reader, {"messages": [USER]})
    assert str(error.value) == (
        'train.jsonl:7: "messages" has no assistant turn, so nothing would be trained on; '
        "remove the row or set data.on_empty=skip"
    )


@pytest.mark.parametrize(
    ("reader", "values", "remedy"),
    [
        ("conversation", {"prompt": "p", "chosen": "a", "rejected": "b"}, "choose recipe=dpo or recipe=orpo, or name yours"),
        ("conversation", {"prompt": "p", "answer": "a"}, "name yours, e.g. data.columns.completion=<column>"),
        ("preference", {"messages": []}, "choose recipe=sft, or name yours, e.g. data.columns.chosen=<column> data.columns"),
        ("label", {"prompt": "p", "completion": "c"}, "name yours, e.g. data.columns.label=<column>"),
        ("label", {"messages": []}, "name yours, e.g. data.columns.label=<column>"),
    ],
)
def test_columns_of_another_recipe_name_it(reader, values, remedy):
    readers = {"conversation": conversation_reader, "preference": preference_reader, "label": label_reader}
    with pytest.raises(DataError) as error:
        read(readers[reader], values)
    assert remedy in str(error.value)


def test_unknown_columns_are_listed_with_a_way_out():
    with pytest.raises(DataError) as error:
        read(conversation_reader, {"question": "2+2?", "solution": "4"})
    assert str(error.value) == (
        "train.jsonl:7: the columns are question, solution, and this recipe reads messages or prompt+completion or text "
        "or instruction+output; name yours, e.g. data.columns.prompt=<column> data.columns.completion=<column>"
    )
    named = Columns(prompt="qestion", completion="solution")
    with pytest.raises(DataError, match=r'no column "qestion", .* set data\.columns\.prompt\. Did you mean \'question\'\?'):
        read(conversation_reader, {"question": "2+2?", "solution": "4"}, columns=named)
    fixed = replace(named, prompt="question")
    assert read(conversation_reader, {"question": "2+2?", "solution": "4"}, columns=fixed).response == "4"


def test_options_that_need_a_conversation_are_refused():
    with pytest.raises(ConfigError, match=r"data\.system needs a conversation.*set data\.chat=true"):
        read(conversation_reader, {"prompt": "p", "completion": "c"}, system="Be brief.")
    with pytest.raises(ConfigError, match=r"data\.chat: a text column has no separate prompt"):
        read(conversation_reader, {"text": "once"}, chat=True)


def test_a_system_message_of_the_row_stays():
    own = {"role": "system", "content": "Own."}
    chat = read(conversation_reader, {"messages": [own, USER, ANSWER]}, system="Mine.")
    assert said(chat)[0] == ("system", "Own.")


def test_tools_and_further_keys_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "name": None}
    chat = read(conversation_reader, {"messages": [USER, call], "tools": '[{"name": "add"}]'})
    called = [{"name": "add", "arguments": {}}]
    assert chat.messages[1].to_dict() == {"role": "assistant", "content": "", "tool_calls": called}
    assert chat.tools == ({"name": "add"},)
    with pytest.raises(DataError, match='"tools" is broken JSON'):
        read(conversation_reader, {"messages": [USER, ANSWER], "tools": "[{"})


def test_text_parts_are_joined_and_numbers_are_text():
    chat = read(conversation_reader, {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": 4}]})
    assert said(chat) == [("user", "2+2?"), ("assistant", "4")]
    assert read(conversation_reader, {"prompt": 72, "completion": -1}) == Plain("train.jsonl:7", "72", "-1")
    pair = read(preference_reader, {"prompt": "p", "chosen": 10**20, "rejected": 0}, chat=True)
    assert (said(pair.chosen)[-1], said(pair.rejected)[-1]) == (("assistant", "1" + "0" * 20), ("assistant", "0"))


def test_parts_of_other_formats_are_text_and_reasoning():
    """Parts of OpenAI's Responses, parts without a type, and the reasoning of Magistral's data."""
    question = {"role": "user", "content": [{"type": "input_text", "text": "2+"}, {"text": "2?"}]}
    said_first = [{"type": "thinking", "thinking": [{"type": "text", "text": "Two."}]}, {"type": "text", "text": "4"}]
    for parts in ([{"type": "output_text", "text": "4"}], said_first):
        chat = read(conversation_reader, {"messages": [question, {"role": "assistant", "content": parts}]})
        assert said(chat) == [("user", "2+2?"), ("assistant", "4")]
    assert chat.messages[1].extra == {"reasoning_content": "Two."}
    both = {"role": "assistant", "content": said_first, "reasoning_content": "Two."}
    with pytest.raises(DataError, match="has reasoning in a field and in its content; keep one of the two"):
        read(conversation_reader, {"messages": [question, both]})


def channel(name, content, **more):
    return {"role": "assistant", "channel": name, "content": content, **more}


def test_channels_of_harmony_are_the_fields_of_an_answer():
    """A message in the channel analysis is not an answer of its own."""
    call = channel("commentary", '{"a": 1}', recipient="functions.add")
    result = {"role": "tool", "name": "functions.add", "channel": "commentary", "content": "4"}
    rows = [USER, channel("analysis", "Add."), call, result, channel("analysis", "So."), channel("final", "4"), USER]
    chat = read(conversation_reader, {"messages": [*rows, channel("analysis", "Cut")]})
    function = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert [(one.role, one.content, one.extra) for one in chat.messages] == [
        ("user", "2+2?", {}),
        ("assistant", "", {"reasoning_content": "Add.", "tool_calls": [function]}),
        ("tool", "4", {"name": "functions.add"}),
        ("assistant", "4", {"reasoning_content": "So."}),
        ("user", "2+2?", {}),
        ("assistant", "", {"reasoning_content": "Cut"}),
    ]
    with pytest.raises(DataError, match=r"\[1\] has the channel 'side'; expected one of analysis, commentary, final"):
        read(conversation_reader, {"messages": [USER, channel("side", "x")]})
    with pytest.raises(DataError, match="has reasoning and an answer of different weights"):
        read(conversation_reader, {"messages": [USER, channel("analysis", "x", weight=0), channel("final", "4")]})


def test_pairs_after_a_conversation():
    """LLaMA-Factory's pairs, with each answer as one message, and OpenAI's, with the prompt in an object."""
    chosen, rejected = {"from": "gpt", "value": "4"}, {"from": "gpt", "value": "five"}
    turns = [{"from": "human", "value": "2+2?"}]
    pair = read(preference_reader, {"conversations": turns, "chosen": chosen, "rejected": rejected, "system": "Be brief."})
    assert said(pair.chosen) == [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")] and pair.chosen.start == 2
    assert said(pair.rejected)[-1] == ("assistant", "five")
    columns = Columns(prompt="input", chosen="preferred_output", rejected="non_preferred_output")
    values = {"input": {"messages": [USER], "tools": []}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]}
    pair = read(preference_reader, values, columns=columns)
    assert (said(pair.chosen)[0], said(pair.rejected)[1]) == (("user", "2+2?"), ("assistant", "five"))
    with pytest.raises(DataError, match='has "tools" beside its messages, which is not read; make it a column of the row'):
        read(preference_reader, {**values, "input": {"messages": [USER], "tools": [CALL]}}, columns=columns)


def test_flags_that_leave_an_answer_untrained():
    nothing = ({"weight": 0}, {"train": False}, {"training": False}, {"trainable": False}, {"loss": False}, {"loss": 0})
    for flag in (*nothing, {"train": False, "weight": 0.0}):
        assert read(conversation_reader, {"messages": [USER, {**ANSWER, **flag}]}).messages[1].weight == 0
    for flag in ({"weight": 1}, {"train": True}, {"trainable": True, "weight": 1}, {"train": None}, {"loss": True}):
        assert read(conversation_reader, {"messages": [USER, {**ANSWER, **flag}]}).messages[1].weight == 1
    assert read(conversation_reader, {"messages": [USER, {**ANSWER, "train": True, "weight": 0.5}]}).messages[1].weight == 0.5


def test_arguments_of_tool_calls_become_objects():
    """As vLLM has them when it renders a prompt: chat templates print text in quotes."""
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}, {"name": "now", "arguments": ""}]
    chat = read(conversation_reader, {"messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    expected = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"name": "now", "arguments": {}}]
    assert chat.messages[1].extra == {"tool_calls": expected}


READERS = [
    (conversation_reader, {"messages": [USER, ANSWER]}),
    (conversation_reader, {"prompt": "2+2?", "completion": "4"}),
    (conversation_reader, {"text": "once"}),
    (preference_reader, {"prompt": "p", "chosen": "a", "rejected": "b"}),
    (prompt_reader, {"prompt": "p"}),
]


@pytest.mark.parametrize(("reader", "values"), READERS)
def test_columns_of_images_and_the_like_are_refused(reader, values):
    file = {"bytes": b"1", "path": None}
    for more in ({"images": ["a.png"]}, {"image": "a.png"}, {"Video_URL": "b"}, {"audio": file}, {"plot": file}, {"x": [file]}):
        name = next(iter(more))
        with pytest.raises(DataError, match=rf'^train\.jsonl:7: "{name}" holds media, and the text would be trained without'):
            read(reader, {**values, **more})
    read(reader, {**values, "images": [], "image": None, "audio": "", "videos": [None], "image_caption": "a cat"})


def test_columns_that_are_not_read_are_known():
    def unused(reader, values, **config):
        row = Row("train.jsonl:7", values)
        return list(reader(row, DataConfig(**config)).unused(row))

    more = {"id": 7, "source": "", "score": None, "tags": [], "tools": [{"name": "add"}]}
    assert unused(conversation_reader, {"messages": [USER, ANSWER], **more, "text": "a"}) == ["id", "text"]
    assert unused(conversation_reader, {"conversations": [{"from": "human", "value": "a"}], **more}) == ["id"]
    assert unused(preference_reader, {"prompt": "p", "chosen": "a", "rejected": "b", **more}) == ["id"]
    assert unused(prompt_reader, {"prompt": "p", **more}) == []  # a reward may read any column
    assert unused(conversation_reader, {"text": "a", "tools": "hammer"}) == ["tools"]


def test_what_needs_a_conversation_is_refused_in_plain_text():
    tools = {"tools": [{"name": "add"}]}
    for values in ({"text": "a"}, {"prompt": "p", "completion": "a"}):
        with pytest.raises(DataError, match=r'^train\.jsonl:7: "tools" needs a conversation.*set data\.chat=true'):
            read(conversation_reader, {**values, **tools})
    assert read(conversation_reader, {"prompt": "p", "completion": "a", **tools}, chat=True).tools == ({"name": "add"},)
    with pytest.raises(DataError, match=r'^train\.jsonl:7: "functions" would change the text'):
        read(conversation_reader, {"messages": [USER, ANSWER], "functions": [{"name": "add"}]})
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(DataError, match=r'^train\.jsonl:7: "chat_template_kwargs" needs a conversation'):
        read(conversation_reader, {"prompt": "p", "completion": "a", **options})
    with pytest.raises(DataError, match=r'"tools"\[1\] must be a tool schema, an object, got str'):
        read(conversation_reader, {"messages": [USER, ANSWER], "tools": [{}, "add"]})
    assert read(conversation_reader, {"messages": [USER, ANSWER], "tools": " "}).tools is None


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "tool_calls"])
def test_a_column_that_is_part_of_an_answer_is_refused(name):
    values = {"prompt": "12+30=", "completion": "42", name: "carry nothing"}
    with pytest.raises(
        DataError, match=rf'^train\.jsonl:7: "{name}" is part of an answer, and is not read as a column; move it'
    ):
        read(conversation_reader, values)
    assert read(conversation_reader, {**values, name: None}).prompt == "12+30="
    assert read(prompt_reader, values).prompt == "12+30="  # a reward may read any column


def test_a_prompt_of_messages_beside_whole_conversations_has_to_agree():
    row = {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert read(preference_reader, row).chosen.start == 1
    with pytest.raises(DataError, match='"prompt" is not the prompt that chosen and rejected begin with'):
        read(preference_reader, {**row, "prompt": [{**USER, "content": "3+3?"}]})


ALPACA = {"instruction": "Add.", "input": "2, 2", "output": "4"}


def test_alpaca_keeps_its_input():
    chat = read(conversation_reader, ALPACA, chat=True, system="Be brief.")
    assert said(chat) == [("system", "Be brief."), ("user", "Add.\n\n2, 2"), ("assistant", "4")]
    assert chat.start == 2
    # The texts of PROMPT_DICT in Stanford Alpaca's train.py, with a line end.
    assert read(conversation_reader, ALPACA) == Plain(
        "train.jsonl:7",
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n",
        "4",
    )
    without = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    for empty in ("", None):
        plain = read(conversation_reader, {**ALPACA, "input": empty})
        assert plain.prompt == f"{without}### Instruction:\nAdd.\n\n### Response:\n"
    assert said(read(prompt_reader, {"instruction": "Add.", "input": "2, 2"}, chat=True)) == [("user", "Add.\n\n2, 2")]
    pair = read(preference_reader, {"instruction": "Add.", "input": "2, 2", "chosen": "4", "rejected": "5"}, chat=True)
    assert said(pair.rejected) == [("user", "Add.\n\n2, 2"), ("assistant", "5")]
    reader = conversation_reader(Row("t:1", ALPACA), DataConfig())
    assert list(reader.unused(Row("t:1", {**ALPACA, "source": "x"}))) == ["source"]
    own = {"task": "Add.", "context": "2, 2", "reply": "4"}
    named = Columns(instruction="task", input="context", output="reply")
    assert said(read(conversation_reader, own, columns=named, chat=True))[0] == ("user", "Add.\n\n2, 2")
    # The text column of tatsu-lab/alpaca has all three.
    assert read(conversation_reader, {**ALPACA, "text": "all"}).response == "all"
    assert read(conversation_reader, {**ALPACA, "text": "all"}, format="alpaca").response == "4"


@pytest.mark.parametrize(
    ("values", "config", "message"),
    [
        (
            ALPACA,
            {"columns": Columns(prompt="instruction", completion="output")},
            '"input" belongs to "instruction", .* data.format=alpaca',
        ),
        ({**ALPACA, "history": [["a", "b"]]}, {}, '"history" is not read with an instruction; write the row as messages'),
        ({**ALPACA, "system": "Be brief."}, {}, '"system" needs a conversation, and the row is plain text; set data.chat=true'),
        ({**ALPACA, "output": ""}, {}, '"output" is empty'),
        (ALPACA, {"columns": Columns(input="inputs")}, 'no column "inputs"'),
    ],
)
def test_alpaca_is_read_strictly(values, config, message):
    with pytest.raises(DataError, match=rf"^train\.jsonl:7: {message}"):
        read(conversation_reader, values, **config)


def test_a_system_column_is_the_system_message():
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    row = {"conversations": turns, "system": "Be brief."}
    assert said(read(conversation_reader, row, system="Other."))[0] == ("system", "Be brief.")
    assert list(conversation_reader(Row("t:1", row), DataConfig()).unused(Row("t:1", row))) == []
    same = {"conversations": [{"from": "system", "value": "Be brief."}, *turns], "system": "Be brief."}
    assert len(said(read(conversation_reader, same))) == 3
    with pytest.raises(DataError, match='"system" is not the system message of the conversation; keep one of the two'):
        read(conversation_reader, {**same, "system": "Be long."})
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "system": "Be brief."}
    assert said(read(preference_reader, pair, chat=True).chosen)[0] == ("system", "Be brief.")


@pytest.mark.parametrize("row", [{"prompt": "2+2=", "completion": "4"}, {"messages": [USER, ANSWER]}, ALPACA])
def test_sft_reads_the_desirable_rows_of_kto(row):
    for label in (True, "True", 1, 1.0, "1"):  # CSV has text
        reader = conversation_reader(Row("t:1", row), DataConfig())
        assert reader(Row("t:1", {**row, "label": label})) == reader(Row("t:1", row))
        assert list(reader.unused(Row("t:1", {**row, "label": label}))) == []
    for bad, good in ((False, "true"), ("false", "true"), (0, "1"), ("0", "1")):
        message = rf'"label" is {str(bad).lower()}, .* set data\.on_empty=skip to train on the rows with {good}'
        with pytest.raises(EmptyRowError, match=message):
            read(conversation_reader, {**row, "label": bad})
    # Another kind of label is not KTO's.
    for other in ("maths", 2):
        assert list(reader.unused(Row("t:1", {**row, "label": other}))) == ["label"]
    with pytest.raises(EmptyRowError, match='"good" is false'):
        read(conversation_reader, {**row, "good": False}, columns=Columns(label="good"))


def test_pairs_refuse_the_rows_of_kto():
    with pytest.raises(DataError, match=r'"label" is that of KTO: recipe=kto, or .*: recipe=sft data\.on_empty=skip$'):
        read(preference_reader, {"prompt": "2+2=", "completion": "4", "label": True})
