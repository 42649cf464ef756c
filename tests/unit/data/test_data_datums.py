"""From rows to datums: what is trained, what is left out, and the real GSM8K files through both recipes' readers."""

import json
import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest
from places import GSM8K
from tiny import byte_tokenizer
from tokenizers import decoders

from cookbook.data import (
    Columns,
    DataConfig,
    RejectedRows,
    Renderer,
    Row,
    conversation_datums,
    load_rows,
    preference_datums,
    prompts,
)
from cookbook.errors import ConfigError, DataError
from cookbook.sampling.rewards import Number

needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the real files are not at {GSM8K}")

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), max_length=4096)


def rows(*values) -> list[Row]:
    return [Row(f"train.jsonl:{number}", value) for number, value in enumerate(values, start=1)]


def trained(renderer: Renderer, datum) -> str:
    inputs = datum.loss_fn_inputs
    return renderer.tokenizer.decode(inputs["target_tokens"].array[inputs["weights"].array != 0])


def test_datums_name_their_row_and_keep_the_order(renderer):
    values = [{"messages": [USER, {**ANSWER, "content": str(n)}]} for n in range(300)]  # more than one batch
    datums = conversation_datums(rows(*values), renderer, DataConfig())
    assert [datum.where for datum in datums] == [f"train.jsonl:{n + 1}" for n in range(300)]
    assert [trained(renderer, datum) for datum in datums] == [f"{n}<|im_end|>" for n in range(300)]
    more = datums[7].with_inputs(reference_logprobs=np.zeros(datums[7].model_input.length))
    assert more.where == pickle.loads(pickle.dumps(more)).where == "train.jsonl:8"


def test_targets_are_the_inputs_shifted_and_the_first_answer_token_counts(renderer):
    [datum] = conversation_datums(rows({"prompt": "ab", "completion": "cd"}), renderer, DataConfig())
    ids = renderer.tokenizer.encode("abcd<|im_end|>")
    assert datum.model_input.to_ints() == ids[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == ids[1:]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 1, 1, 1]


def test_plain_text_is_trained_whole_and_ends(renderer):
    [datum] = conversation_datums(rows({"text": "abc"}), renderer, DataConfig())
    assert trained(renderer, datum) == "bc<|im_end|>"  # nothing predicts the first token
    [datum] = conversation_datums(rows({"text": "abc<|im_end|>"}), renderer, DataConfig())
    assert trained(renderer, datum) == "bc<|im_end|>"
    [datum] = conversation_datums(rows({"prompt": "ab", "completion": "c"}), renderer, DataConfig(train_on="all"))
    assert trained(renderer, datum) == "bc<|im_end|>"


def test_each_answer_in_the_context_it_is_sampled_in():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    renderer = Renderer(tokenizer)
    turns = [USER, ANSWER, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    data = rows({"messages": turns}, {"messages": [*turns[:1], {**ANSWER, "weight": 0}, *turns[2:]]})
    # The template rewrites the first answer, so one sequence cannot train both.
    for train_on in ("assistant", "each_assistant"):
        datums = conversation_datums(data, renderer, DataConfig(train_on=train_on))
        assert [(datum.where, datum.question, trained(renderer, datum)) for datum in datums] == [
            ("train.jsonl:1", str(USER["content"]), "<think></think>4<|im_end|>"),
            ("train.jsonl:1", "3+3?", "<think></think>6<|im_end|>"),
            ("train.jsonl:2", "3+3?", "<think></think>6<|im_end|>"),
        ]
        prompt = renderer.prompt_tokens(turns[:3])
        assert datums[1].model_input.to_ints()[: len(prompt)] == prompt


def test_pairs_train_the_whole_answer_however_similar_the_answers_are(renderer):
    """Field traps: the same first tokens in both answers, and one answer that begins the other."""
    data = rows(
        {"prompt": "2+2=", "chosen": "The answer is 4", "rejected": "The answer is 5"},
        {"prompt": "2+2=", "chosen": "4", "rejected": "4 or 5"},
    )
    for chat in (False, True):
        datums = preference_datums(data, renderer, DataConfig(chat=chat))
        assert [trained(renderer, datum).removesuffix("<|im_end|>") for datum in datums] == [
            "The answer is 4",
            "The answer is 5",
            "4",
            "4 or 5",
        ]
        assert [datum.where for datum in datums] == ["train.jsonl:1"] * 2 + ["train.jsonl:2"] * 2


def test_a_prompts_own_answers_are_not_trained_in_pairs(renderer):
    history = [USER, ANSWER, {"role": "user", "content": "sure?"}]
    sides = {"chosen": [*history, {**ANSWER, "content": "yes"}], "rejected": [*history, {**ANSWER, "content": "no"}]}
    datums = preference_datums(rows(sides), renderer, DataConfig())
    assert [trained(renderer, datum) for datum in datums] == ["yes<|im_end|>", "no<|im_end|>"]


def test_empty_rows_fail_or_are_skipped_with_a_count(renderer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)  # a run before this test may have changed it
    data = rows({"messages": [USER, ANSWER]}, {"messages": [USER]}, {"messages": [USER, {**ANSWER, "weight": 0}]})
    with pytest.raises(DataError, match=r'^train\.jsonl:2: "messages" has no assistant turn'):
        conversation_datums(data, renderer, DataConfig())
    with pytest.raises(DataError, match=r"^train\.jsonl:3: nothing to train on, all weights are 0"):
        conversation_datums(data[2:], renderer, DataConfig())
    with caplog.at_level(logging.WARNING):
        datums = conversation_datums(data, renderer, DataConfig(on_empty="skip"))
    assert [datum.where for datum in datums] == ["train.jsonl:1"]
    assert "left out 2 of 3 rows; the first: train.jsonl:2" in caplog.text
    with pytest.raises(DataError, match=r"data: all 2 rows were left out; the first: train\.jsonl:2"):
        conversation_datums(data[1:], renderer, DataConfig(on_empty="skip"))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "each_assistant", "all"])
def test_empty_answers_are_empty_rows(renderer, train_on):
    """The template finds them while it renders many rows; the policy applies to the empty row only."""
    data = rows({"messages": [USER, {**ANSWER, "content": ""}]}, {"messages": [USER, ANSWER]})
    config = DataConfig(train_on=train_on)
    with pytest.raises(DataError, match=r"^train\.jsonl:1: message 1 is an empty answer"):
        conversation_datums(data, renderer, config)
    [kept] = conversation_datums(data, renderer, replace(config, on_empty="skip"))
    assert kept.where == "train.jsonl:2"
    pairs = rows(*({"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": text}]} for text in (" ", "5")))
    with pytest.raises(DataError, match=r"^train\.jsonl:1: message 1 is an empty answer"):
        preference_datums(pairs, renderer, DataConfig())
    kept = preference_datums(pairs, renderer, DataConfig(on_empty="skip"))
    assert [datum.where for datum in kept] == ["train.jsonl:2"] * 2


def test_what_the_template_drops_is_refused_in_pairs_and_prompts_too(renderer):
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [calls]}
    for make, row in ((preference_datums, pair), (conversation_datums, {"messages": [USER, calls]})):
        with pytest.raises(DataError, match=r'^train\.jsonl:1: the chat template does not print "tool_calls" of message 1'):
            make(rows(row), renderer, DataConfig())
    for make, row in ((preference_datums, pair | {"rejected": [ANSWER, USER]}), (prompts, {"prompt": [USER]})):
        with pytest.raises(DataError, match=r'^train\.jsonl:1: the chat template does not print "tools"'):
            make(rows(row | {"tools": [{"name": "add"}]}), renderer, DataConfig())


def test_flags_mask_answers_in_every_mode(renderer):
    turns = [USER, {**ANSWER, "content": "no", "train": False}, USER, ANSWER]
    for train_on in ("assistant", "last_assistant", "each_assistant"):
        [datum] = conversation_datums(rows({"messages": turns}), renderer, DataConfig(train_on=train_on))
        assert trained(renderer, datum) == "4<|im_end|>"
    [datum] = conversation_datums(rows({"messages": turns}), renderer, DataConfig(train_on="all"))
    assert trained(renderer, datum).count("<|im_end|>") == 3 and "no" not in trained(renderer, datum)
    sides = {"chosen": [*turns[:2], ANSWER], "rejected": [*turns[:2], {**ANSWER, "content": "5"}]}
    chosen, rejected = preference_datums(rows({"prompt": [USER], **sides}), renderer, DataConfig())
    assert [trained(renderer, one) for one in (chosen, rejected)] == ["4<|im_end|>", "5<|im_end|>"]


def test_columns_not_used_are_logged_once(renderer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)
    refusals = RejectedRows(DataConfig())
    more = {"id": 1, "tools": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            conversation_datums(rows({"messages": [{**USER, "at": 1}, ANSWER], **more}), renderer, DataConfig(), refusals)
        prompts(rows({"prompt": [USER], **more}), renderer, DataConfig(), refusals=refusals)
    assert [record.getMessage() for record in caplog.records] == ["data: columns not used for training: id, at of messages"]


def test_long_rows_fail_are_skipped_or_cut(renderer):
    data = rows({"prompt": "abc", "completion": "defgh"}, {"prompt": "a", "completion": "b"})
    with pytest.raises(DataError, match=r"^train\.jsonl:1: 9 tokens, and 6 fit; .*data\.on_long=skip or truncate"):
        conversation_datums(data, renderer, DataConfig(max_length=6))
    skipped = conversation_datums(data, renderer, DataConfig(max_length=6, on_long="skip"))
    assert [datum.where for datum in skipped] == ["train.jsonl:2"]
    cut = conversation_datums(data, renderer, DataConfig(max_length=6, on_long="truncate"))
    assert trained(renderer, cut[0]) == "def"
    assert trained(renderer, cut[1]) == "b<|im_end|>"
    with pytest.raises(DataError, match=r"^train\.jsonl:1: nothing to train on in the first 3 tokens"):
        conversation_datums(data, renderer, DataConfig(max_length=3, on_long="truncate"))


def test_a_pair_is_left_out_whole(renderer):
    data = rows({"prompt": "a", "chosen": "b", "rejected": "cdefgh"}, {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(DataError, match=r"^train\.jsonl:1: rejected: 8 tokens, and 5 fit"):
        preference_datums(data, renderer, DataConfig(max_length=5))
    kept = preference_datums(data, renderer, DataConfig(max_length=5, on_long="skip"))
    assert [datum.where for datum in kept] == ["train.jsonl:2"] * 2


def test_prompts_leave_room_for_the_completion(renderer):
    data = rows({"prompt": "abcdef", "answer": 1}, {"prompt": "a", "answer": 2})
    [first, second] = prompts(data, renderer, DataConfig(max_length=10), max_tokens=4)
    assert (first.tokens, first.text, first.row) == (renderer.tokenizer.encode("abcdef"), "abcdef", data[0])
    for on_long in ("fail", "truncate"):
        message = r"^train\.jsonl:1: a prompt of 6 tokens and a completion of up to 5 do not fit in 10; lower rollout"
        with pytest.raises(DataError, match=message):
            prompts(data, renderer, DataConfig(max_length=10, on_long=on_long), max_tokens=5)
    [kept] = prompts(data, renderer, DataConfig(max_length=10, on_long="skip"), max_tokens=5)
    assert kept.row is data[1]
    assert second.tokens == kept.tokens


def test_a_length_above_the_context_is_refused(renderer):
    with pytest.raises(ConfigError, match=r"data\.max_length=5000 is above the model's context of 4096"):
        conversation_datums(rows({"text": "ab"}), renderer, DataConfig(max_length=5000))


def test_no_rows_are_no_datums(renderer):
    assert conversation_datums([], renderer, DataConfig()) == []
    assert prompts([], renderer, DataConfig()) == []


def test_text_and_chat_rows_in_one_file(renderer):
    data = rows({"prompt": "ab", "completion": "c"}, {"prompt": [USER], "completion": [ANSWER]})
    assert [trained(renderer, datum) for datum in conversation_datums(data, renderer, DataConfig())] == [
        "c<|im_end|>",
        "4<|im_end|>",
    ]


def gsm8k(**changes) -> DataConfig:
    columns = Columns(prompt="question", completion="answer")
    return DataConfig(**{"path": str(GSM8K), "eval_split": "test", "columns": columns, "chat": True} | changes)


@needs_gsm8k
def test_gsm8k_supervised(renderer):
    config = gsm8k(limit=500)
    data = load_rows(config)
    datums = conversation_datums(data, renderer, config)
    assert [datum.where for datum in datums] == [f"{GSM8K / 'train.jsonl'}:{n}" for n in range(1, 501)]
    for row, datum in zip(data, datums, strict=True):
        assert trained(renderer, datum) == row.values["answer"] + "<|im_end|>"


@pytest.mark.slow
@needs_gsm8k
def test_gsm8k_prompts_and_rewards(renderer):
    config = gsm8k()
    assert len(load_rows(config)) == 7473
    held_out = load_rows(config, "eval")
    assert len(held_out) == 1319
    found = prompts(held_out, renderer, config, max_tokens=256)
    assert found[0].text == f"<|im_start|>user\n{held_out[0].values['question']}<|im_end|>\n<|im_start|>assistant\n"
    data = [prompt.row for prompt in found]
    golds = [row.values["answer"].rpartition("####")[2].strip() for row in data]
    reward = Number()
    assert [reward(f"So it is ${gold}.", row.values) for gold, row in zip(golds, data, strict=True)] == [1.0] * len(data)
    assert [reward(f"{gold}1", row.values) for gold, row in zip(golds, data, strict=True)] == [0.0] * len(data)


@needs_gsm8k
def test_gsm8k_from_one_file_holds_rows_out(renderer):
    config = gsm8k(path=str(GSM8K / "train.jsonl"), eval_fraction=0.05)
    train, held_out = load_rows(config), load_rows(config, "eval")
    assert (len(train), len(held_out)) == (7473 - 374, 374)
    assert not {row.where for row in train} & {row.where for row in held_out}


def test_every_shipped_data_file_is_read(tmp_path, renderer):
    """The YAML of ``conf/data`` types, and its keys are the class's."""

    from cookbook.cli.hydra import conf_files
    from cookbook.config.typed import construct

    file = tmp_path / "train.jsonl"
    file.write_text(2 * (json.dumps({"question": "2+2?", "answer": "#### 4", "text": "x"}) + "\n"))
    for name in ("jsonl", "hub", "gsm8k"):
        values = conf_files.values(conf_files.find("data", name))
        assert values.pop("_target_") == "cookbook.data.DataConfig"
        assert list(values) == list(DataConfig.__dataclass_fields__)
        values.update(path=str(file), name=None)
        config = construct(DataConfig, values, "data")
        assert conversation_datums(load_rows(config), renderer, config)


def test_the_bytes_of_what_is_trained_are_counted(renderer: Renderer) -> None:
    """The answer's UTF-8 bytes; neither the prompt nor the end of turn, which is a special token."""
    row = Row("rows:1", {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "né €"}]})
    (datum,) = conversation_datums([row], renderer, DataConfig())
    assert int(datum.loss_fn_inputs["num_bytes"].array) == len("né €".encode())


@pytest.mark.parametrize("decoder", ["bytes", "other"])
def test_the_bytes_of_any_tokens_are_those_of_their_text(decoder: str) -> None:
    """Random tokens: characters of several tokens, parts of characters, special tokens, empty rows; in any order of calls."""
    tokenizer = byte_tokenizer()
    if decoder == "other":
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    renderer, draw = Renderer(tokenizer), np.random.default_rng(0)
    rows = [draw.integers(0, len(tokenizer), count).astype(np.int32) for count in draw.integers(0, 12, 100)]
    rows += [np.array(tokenizer.encode(text), np.int32) for text in ("né €", " a b", "漢字 and 😀")]
    expected = [len(text.encode()) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
    alone = [renderer.num_bytes(row, np.array([len(row)])) for row in rows[50:]]
    assert [size for sizes in alone for size in sizes] == expected[50:]
    assert renderer.num_bytes(np.concatenate(rows), np.cumsum([len(row) for row in rows])) == expected


def test_pairs_of_equal_tokens_are_refused_by_row(caplog):
    """A normalizer, or a cut at ``data.max_length``, makes different answers the same tokens."""
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    own = Renderer(tokenizer)
    pairs = rows({"prompt": "a", "chosen": "Yes", "rejected": "yes"}, {"prompt": "a", "chosen": "yes", "rejected": "no"})
    with pytest.raises(
        DataError, match=r"train.jsonl:1: chosen and rejected are the same tokens, so neither is preferred; remove the row"
    ):
        preference_datums(pairs, own, DataConfig())
    assert [datum.where for datum in preference_datums(pairs, own, DataConfig(on_empty="skip"))] == [
        "train.jsonl:2",
        "train.jsonl:2",
    ]
    cut = DataConfig(on_long="truncate", max_length=4)
    long = rows({"prompt": "a", "chosen": "bcde", "rejected": "bcdf"})
    with pytest.raises(DataError, match=r"train.jsonl:1: chosen and rejected are the same tokens in the first 4, so neither"):
        preference_datums(long, Renderer(byte_tokenizer()), cut)


def test_tokens_beyond_the_models_vocabulary_are_refused_by_row():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    known = len(tokenizer) - 1
    renderer = Renderer(tokenizer, 64, known)
    texts = rows({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "<new>"})
    message = (
        rf"train.jsonl:2: token {known} \('<new>'\) is beyond the model's vocabulary of {known}; use the model's own tokenizer"
    )
    with pytest.raises(DataError, match=message):
        conversation_datums(texts, renderer, DataConfig())
    assert len(conversation_datums(texts, renderer, DataConfig(on_bad_row="skip"))) == 1
    with pytest.raises(DataError, match=rf"train.jsonl:1: token {known} "):
        prompts(rows({"prompt": "a<new>"}), renderer, DataConfig(), 4)
    with pytest.raises(DataError, match=rf"train.jsonl:1: chosen: token {known} "):
        preference_datums(rows({"prompt": "a", "chosen": "<new>", "rejected": "b"}), renderer, DataConfig())
    # A model may have more embeddings than its tokenizer has tokens.
    assert Renderer(tokenizer, 64, known + 100).known_ids is None
