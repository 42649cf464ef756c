"""Streams: the order of the shuffle buffer, every kind of source, resuming at any batch, bad rows, and refusals."""

import functools
import gzip
import json
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import zstandard
from runtools import FOUR, SMALL, here, same_as_undisturbed, stop_at, train  # noqa: F401 - here is a fixture
from tiny import byte_tokenizer

from cookbook.data import DataConfig, RejectedRows, Renderer, conversation_datums, load_rows, preference_datums, prompts
from cookbook.data.datum_table import Pairs
from cookbook.data.datums import stream_reader
from cookbook.data.rows import DataSource
from cookbook.data.source import stream_rows
from cookbook.data.stream import RowStream, StreamedBatches, StreamPosition, StreamResume, shuffled
from cookbook.errors import ConfigError, DataError

SKIP = {"on_long": "skip", "on_empty": "skip", "on_bad_row": "skip"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Delete the cache of ``datasets`` after the test."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, lines, packed=bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(packed(text.encode()))
    return str(path)


def numbered(size: int, name: str = "row"):
    return [{"text": f"{name} {index}"} for index in range(size)]


# ---- order -----------------------------------------------------------------------------------------------------------


def order(size: int, buffer: int, seed=0) -> list[int]:
    return list(shuffled(iter(range(size)), buffer, np.random.Generator(np.random.PCG64(seed))))


def test_the_buffer_reads_each_row_once_and_no_further_than_its_size():
    for size, buffer in ((100, 10), (10, 100), (10, 10), (0, 3), (1, 1)):
        found = order(size, buffer)
        assert sorted(found) == list(range(size))
        assert all(row <= place + buffer for place, row in enumerate(found))
    assert order(30, 1) == list(range(30))
    assert order(30, 10) != order(30, 10, seed=1) != list(range(30))
    endless = count()
    assert len(list(islice(shuffled(endless, 10, np.random.default_rng(0)), 5))) == 5
    assert next(endless) == 15


def test_an_order_is_about_uniform():
    """The first row of a buffer that holds all rows is equally likely to come anywhere."""
    places = [order(4, 8, seed).index(0) for seed in range(400)]
    # Binomial with mean 100 and a deviation of 8.7: 4 deviations.
    assert all(65 <= places.count(place) <= 135 for place in range(4))


# ---- sources ---------------------------------------------------------------------------------------------------------


def as_parquet(folder: Path) -> dict[str, object]:
    from datasets import Dataset

    folder.mkdir()
    Dataset.from_list(numbered(9)).to_parquet(folder / "a.parquet")
    return {"path": str(folder / "a.parquet"), "split": "train[2:7]"}


def saved(folder: Path) -> dict[str, object]:
    from datasets import Dataset

    Dataset.from_list(numbered(9)).save_to_disk(folder)
    return {"path": str(folder)}


def hub(folder: Path) -> dict[str, object]:
    write(folder / "data" / "train-00000-of-00001.jsonl", numbered(9))
    return {"name": str(folder), "split": "train[:4]+train[6:]"}


def in_files(folder: Path) -> list[str]:
    zipped = write(folder / "b.jsonl.gz", numbered(3, "b"), gzip.compress)
    return [write(folder / "c.jsonl.zst", numbered(4, "c"), zstandard.ZstdCompressor().compress), zipped]


def table(path: Path, separator: str) -> dict[str, object]:
    return {"path": write(path, [separator.join(("text", "other")), *(f"row {n}{separator}{n}" for n in range(5))])}


SOURCES = {
    "jsonl": lambda at: {"path": write(at / "a.jsonl", numbered(9)), "limit": 4},
    "json": lambda at: {"path": write(at / "a.json", [json.dumps(numbered(9))])},
    "csv": lambda at: table(at / "a.csv", ","),
    "tsv": lambda at: table(at / "a.tsv", "\t"),
    "list": lambda at: {"path": in_files(at)},
    "pattern": lambda at: {"path": f"{at}/*.jsonl*", "limit": 5} if in_files(at) else {},
    "folder": lambda at: {"path": str(Path(write(at / "test.jsonl", numbered(3))).parent), "split": "test[1:]"},
    "shards": lambda at: {"path": str(Path(in_files(at / "train")[0]).parent.parent)},
    "parquet": as_parquet,
    "saved": saved,
    "hub": hub,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_has_the_rows_of_the_data_in_their_order_under_their_names(source, tmp_path):
    keys = SOURCES[source](tmp_path / "data")
    expected = load_rows(DataConfig(**keys))
    config = DataConfig(**keys, streaming=True)
    assert list(stream_rows(config, RejectedRows(config))) == list(expected)
    assert len(expected) > 1


def test_a_line_is_read_when_it_is_used(tmp_path):
    lines = [json.dumps(row) for row in numbered(5)]
    config = DataConfig(path=write(tmp_path / "a.jsonl", [*lines, "broken"]), streaming=True)
    stream = stream_rows(config, RejectedRows(config))
    assert len(list(islice(stream, 5))) == 5
    with pytest.raises(DataError, match=r"a\.jsonl:6: broken JSON at column 1"):
        next(stream)


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_a_mixture_alternates_by_weight(until, tmp_path):
    sizes = {"a": 12, "b": 2, "c": 90}
    paths = [write(tmp_path / f"{name}.jsonl", numbered(size, name)) for name, size in sizes.items()]
    mix = [DataSource(path=path, weight=weight) for path, weight in zip(paths, (2, 1, 1), strict=True)]
    config = DataConfig(mix=mix, mix_until=until, streaming=True)
    found = [row.values["text"].split()[0] for row in stream_rows(config, RejectedRows(config))]
    for stretch in (found[:4], found[4:8]):
        assert sorted(stretch) == ["a", "a", "b", "c"]
    counts = {name: found.count(name) for name in sizes}
    # Up to the third row of b, which does not exist; and up to row 91 of c.
    ends = {"first_exhausted": {"a": 5, "b": 2, "c": 2}, "all_exhausted": {"a": 181, "b": 91, "c": 90}}
    assert counts == ends[until]
    for row, source in zip(stream_rows(config, RejectedRows(config)), found, strict=True):
        assert row.source is not None and row.source.config.path == paths["abc".index(source)]


# ---- resuming --------------------------------------------------------------------------------------------------------


def chat(number: int):
    """Broken lines, rows without an answer, rows that are too long, and rows of one to three answers."""
    if number % 11 == 3:
        return "{broken"
    ask, answer = {"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": str(number)}
    if number % 13 == 4:
        return {"messages": [ask]}
    if number % 17 == 5:
        return {"messages": [ask, {**answer, "content": "long " * 99}]}
    return {"messages": [ask, answer] * (1 + number % 3)}


def pair(number: int):
    return {"prompt": f"{number}?", "chosen": "yes", "rejected": "yes" if number % 7 == 0 else "no"}


# Lines, kind, function, and keys of `data`.
KINDS = {
    "sft": (chat, "conversations", conversation_datums, {}),
    "each": (chat, "conversations", conversation_datums, {"train_on": "each_assistant"}),
    "dpo": (pair, "preferences", lambda *one, **more: Pairs(preference_datums(*one, **more)), {}),
    "grpo": (chat, "rollouts", prompts, {}),
}


@functools.cache
def shared_tokenizer():
    return byte_tokenizer()


def opened(kind: str, path: str, resume: StreamResume | None = None, size: int = 5, **keys) -> StreamedBatches:
    _, name, make, own = KINDS[kind]
    config = DataConfig(path=path, streaming=True, **{"max_length": 120, **SKIP, **own, **keys})
    refusals, renderer = RejectedRows(config), Renderer(shared_tokenizer(), 1024)
    reader = stream_reader(name, config)
    buffer = config.shuffle_buffer if config.shuffle else 0
    stream = RowStream(
        lambda: stream_rows(config, refusals),
        lambda part: make(part, renderer, config, refusals=refusals, reader=reader),
        renderer,
        refusals,
        buffer,
    )
    return StreamedBatches(stream, size, 3, resume)


def content(batch) -> str:
    def of(one) -> object:
        if isinstance(one, list | tuple):
            return [of(part) for part in one]
        if hasattr(one, "row"):
            return one.row.where, one.tokens
        return one.where, one.model_input.tokens, {name: value.array.tolist() for name, value in one.loss_fn_inputs.items()}

    return repr([of(one) for one in batch])


def differs(before: str, now: str) -> None:
    raise ConfigError(f"{before}, {now}")


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("sft", {"shuffle_buffer": 7}),
        ("each", {"shuffle_buffer": 7}),
        ("each", {"shuffle": False}),
        ("dpo", {"shuffle_buffer": 1000}),
        ("grpo", {"shuffle_buffer": 7}),
    ],
)
def test_a_stream_resumes_at_every_batch_of_every_epoch(kind, keys, tmp_path):
    path = write(tmp_path / "a.jsonl", map(KINDS[kind][0], range(26)))
    straight = opened(kind, path, **keys)
    refusals = straight._stream.refusals
    positions, batches, bad = [], [], []
    for index in range(12):
        # As the manifest of a checkpoint stores the position.
        positions.append(json.loads(json.dumps(asdict(straight.position))))
        bad.append(set(refusals._places))
        batches.append(content(straight[index]))
    assert straight.position.epoch >= 1
    # The last batch of an epoch may have one row, which may be the same in two epochs.
    assert len(set(batches)) >= (9 if "shuffle_buffer" in keys else 4)
    for index, position in enumerate(positions):
        resumed = opened(kind, path, StreamResume(StreamPosition(**position), differs), **keys)
        met = resumed._stream.refusals._places
        assert content(resumed[index]) == batches[index]
        # A run lists a bad row at the step at which it meets the row: a resumed run meets new ones at the same steps.
        assert met - bad[index] == ({*refusals._places} if index == 11 else bad[index + 1]) - bad[index]
    # Any batch is a function of its index.
    assert [content(straight[index]) for index in (3, 1, 10)] == [batches[index] for index in (3, 1, 10)]


class CountedCalls:
    """A renderer whose output depends on its earlier rows, as that of a template that has refused tool calls as objects."""

    def __init__(self) -> None:
        self.calls = 0

    def state(self):
        return {"calls": self.calls}

    def restore(self, calls: int) -> None:
        self.calls = calls

    def make(self, part):
        self.calls += 1
        return [(row.where, self.calls, answer) for row in part for answer in range(3)]


def test_the_effect_of_earlier_rows_on_the_renderer_is_restored(tmp_path):
    config = DataConfig(path=write(tmp_path / "a.jsonl", numbered(11)), streaming=True)

    def batches(resume=None):
        renderer, refusals = CountedCalls(), RejectedRows(config)
        return StreamedBatches(
            RowStream(lambda: stream_rows(config, refusals), renderer.make, renderer, refusals, 4), 5, 0, resume
        )

    straight = batches()
    positions, found = [], []
    for index in range(12):
        positions.append(straight.position)
        found.append(straight[index])
    assert any(position.used for position in positions)
    for index, position in enumerate(positions):
        resumed = batches(StreamResume(position, differs))
        assert [resumed[later] for later in range(index, 12)] == found[index:]


def test_an_epoch_has_each_row_once_and_the_next_another_order(tmp_path):
    path = write(tmp_path / "a.jsonl", map(pair, range(23)))
    batches = opened("dpo", path, shuffle_buffer=6)
    epochs = [[one[0].where for index in range(4) for one in batches[4 * epoch + index]] for epoch in range(3)]
    usable = [row.where for row in load_rows(DataConfig(path=path)) if int(row.where.rpartition(":")[2]) % 7 != 1]
    assert all(sorted(epoch) == sorted(usable) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_changed_rows_are_refused_as_far_as_the_run_has_read_them(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in numbered(30)]
    write(path, lines)
    batches = opened("sft", str(path), shuffle_buffer=3, max_length=None)
    _ = batches[0], batches[1]
    resume = StreamResume(batches.position, differs)
    expected = content(batches[2])
    # 13 rows have been read: 10 of the batches, and 3 in the buffer.
    write(path, [*lines[:20], json.dumps({"text": "fixed"})])
    assert content(opened("sft", str(path), resume, shuffle_buffer=3, max_length=None)[2]) == expected
    write(path, [*lines[:12], json.dumps({"text": "changed"}), *lines[13:]])
    with pytest.raises(ConfigError, match=r"^13 rows with checksum \w{8}, 13 rows with checksum \w{8}$"):
        opened("sft", str(path), resume, shuffle_buffer=3, max_length=None)[2]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_bad_row_stops_the_run_when_it_is_met(tmp_path):
    path = write(tmp_path / "a.jsonl", [*[json.dumps(row) for row in numbered(12)], '{"text": 1.5}'])
    batches = opened("sft", path, on_bad_row="fail", shuffle=False)
    _ = batches[0], batches[1]
    with pytest.raises(DataError, match=r"a\.jsonl:13: .*text"):
        batches[2]


def test_rows_that_are_all_left_out_end_the_run(tmp_path):
    path = write(tmp_path / "a.jsonl", [pair(7 * number) for number in range(5)])
    with pytest.raises(
        DataError, match=r"all 5 rows were left out; the first: .*a\.jsonl:\d: chosen and rejected are the same"
    ):
        opened("dpo", path)[0]
    with pytest.raises(DataError, match=r"empty\.jsonl: holds no rows"):
        opened("sft", write(tmp_path / "empty.jsonl", []))
    changing = write(tmp_path / "b.jsonl", numbered(5))
    batches = opened("sft", changing, shuffle=False)
    _ = batches[0]
    write(tmp_path / "b.jsonl", [{"text": ""}])
    with pytest.raises(DataError):
        batches[1]


def test_a_stream_has_no_number_and_no_places(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(5))
    batches = opened("sft", path)
    with pytest.raises(ConfigError, match=r"recipe\.steps: missing, .* set recipe\.steps to the number of optimizer steps"):
        len(batches)
    with pytest.raises(ConfigError, match=r"data\.streaming: .* asks for their number; set data\.streaming=false"):
        len(batches._stream)
    with pytest.raises(ConfigError, match=r"data\.streaming: .* single rows .*; set data\.streaming=false"):
        batches._stream[0]
    with pytest.raises(ConfigError, match=r"data\.shuffle_buffer must be at least 1, got 0"):
        DataConfig(shuffle_buffer=0)


def test_rows_that_depend_on_their_number_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(5))
    for keys, message in (
        (
            {"eval_fraction": 0.1},
            r"data\.eval_fraction=0\.1: .* set data\.eval_fraction=0, and hold rows out with data\.eval_path",
        ),
        ({"split": "train[:50%]"}, r"data\.split: .* give numbers of rows, or set data\.streaming=false"),
        ({"split": "train[-2:]"}, r"data\.split: .* give numbers of rows, or set data\.streaming=false"),
    ):
        config = DataConfig(path=path, streaming=True, **keys)
        with pytest.raises(ConfigError, match=message):
            list(stream_rows(config, RejectedRows(config)))
    config = DataConfig(path=path, streaming=True, split="train[2:]", eval_split="train[:2]", eval_fraction=0.1)
    assert len(list(stream_rows(config, RejectedRows(config)))) == 3
    assert len(load_rows(config, "eval")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=sft"], "recipe.steps: missing, and data.streaming=true reads rows without counting them; set "),
        (["recipe=sft", "recipe.steps=2", "data.eval_path=null", "data.eval_fraction=0.1"], "data.eval_fraction=0.1: the rows"),
        (["recipe=sft", "recipe.steps=2", "data.split=train[:10%]"], "data.split: a percentage or a negative number needs"),
        (["recipe=grpo", "env=python", "env.target=guess.py:Guess"], "data.streaming: the rows of an environment are read"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_run_that_needs_the_number_of_rows_is_refused_in_one_line(words, message, capsys):
    Path("guess.py").write_text(
        "class Guess:\n    def reset(self, prompt):\n        pass\n\n    def step(self, text):\n        return '', 1.0, True\n"
    )
    assert train(*words, "data.streaming=true") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and len(error.strip().splitlines()) == 1 and not Path("runs").exists()


# ---- runs ------------------------------------------------------------------------------------------------------------


def streamed(recipe: str, buffer: int = 8) -> list[str]:
    return [*SMALL[recipe], "data.streaming=true", f"data.shuffle_buffer={buffer}"]


@pytest.mark.usefixtures("here")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_two_processes_of_a_streamed_run_equal_one(recipe, capsys):
    words = [*streamed(recipe), *FOUR]
    assert train(*words, "out=straight") == 0
    assert train(*words, "out=stopped", *stop_at(2)) == 130
    capsys.readouterr()
    assert train(*words, "out=stopped") == 0
    assert " rows again in " in capsys.readouterr().out
    same_as_undisturbed()
