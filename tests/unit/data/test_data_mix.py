"""Several files, folders, slices and sums of splits, and mixtures: which rows, in which order, under which names."""

import gzip
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from marks import rest_slow
from places import ROOT
from runtools import here, rows, train  # noqa: F401 - here is a fixture

from cookbook.cli.hydra import shorthand
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.config.nodes import build
from cookbook.data import DataConfig, load_rows, splits
from cookbook.data.datums import check_columns
from cookbook.data.formats import conversation_reader
from cookbook.data.rows import Columns, DataSource, RejectedRows, Row
from cookbook.errors import ConfigError, DataError

DOCS = ROOT / "docs/guide/data.md"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Delete the cache of ``datasets`` after the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, count: int, name: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"text": f"{name or path.name} {index}"}) + "\n" for index in range(count))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def texts(found) -> list[str]:
    return [row.values["text"] for row in found]


def of(path, which="train", **config) -> list[str]:
    return texts(load_rows(DataConfig(path=path, **config), which))


# ---- files and folders -----------------------------------------------------------------------------------------------


def test_lists_and_patterns_are_read_file_after_file(tmp_path):
    b, a = write(tmp_path / "b.jsonl", 2), write(tmp_path / "a.jsonl.gz", 1)
    write(tmp_path / "deep" / "c.jsonl", 1)
    write(tmp_path / ".hidden.jsonl", 1)
    assert of([b, a]) == ["b.jsonl 0", "b.jsonl 1", "a.jsonl.gz 0"]  # the order of the list
    assert of(f"{tmp_path}/*.jsonl*") == ["a.jsonl.gz 0", "b.jsonl 0", "b.jsonl 1"]  # sorted
    assert of(f"{tmp_path}/**/*.jsonl") == ["b.jsonl 0", "b.jsonl 1", "c.jsonl 0"]
    found = load_rows(DataConfig(path=[f"{tmp_path}/?.jsonl", a], limit=3))
    assert [row.where for row in found] == [f"{b}:1", f"{b}:2", f"{a}:1"]


def test_a_name_with_brackets_is_a_file_if_it_exists(tmp_path):
    assert of(write(tmp_path / "run[1].jsonl", 1)) == ["run[1].jsonl 0"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jsonl", "a.jsonl"], r"data\.path: .*a\.jsonl is named twice"),
        (["a.jsonl", "*.jsonl"], r"data\.path: .*a\.jsonl is named twice"),
        (["a.jsonl", "t.csv"], r"data\.path: .*a\.jsonl and .*t\.csv differ in format, \.jsonl and \.csv; .* data\.mix"),
        (["*.parquet"], r"data\.path: no file matches .*\.parquet"),
        (["a.jsonl", "b.jsonl"], r"data\.path: .*b\.jsonl does not exist.* Did you mean 'a\.jsonl'\?"),
        ([], r"data\.path: the list is empty"),
    ],
)
def test_lists_that_cannot_be_read(tmp_path, names, message):
    write(tmp_path / "a.jsonl", 1)
    (tmp_path / "t.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=message):
        of([str(tmp_path / name) for name in names])


def test_a_bad_row_of_several_files_keeps_file_and_line(tmp_path):
    write(tmp_path / "a.jsonl", 2)
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n{"text"\n')
    pattern = f"{tmp_path}/*.jsonl"
    with pytest.raises(DataError, match=rf"^{tmp_path}/b\.jsonl:2: broken JSON"):
        of(pattern)
    refusals = RejectedRows(DataConfig(on_bad_row="skip"))
    assert len(load_rows(DataConfig(path=pattern), refusals=refusals)) == 3
    assert [one.where for one in refusals.found] == [f"{tmp_path}/b.jsonl:2"]


def test_folders_are_read_by_the_rules_of_datasets_with_file_and_line(tmp_path):
    """Each layout also goes through the library itself, which has to find the same rows."""
    from datasets import load_dataset

    layouts = {
        "shards": {
            "data/train-00000-of-00002.jsonl": 2,
            "data/train-00001-of-00002.jsonl": 1,
            "data/dev-00000-of-00001.jsonl": 1,
        },
        "plain": {"b.jsonl": 1, "a.jsonl": 2, "LICENSE": 1, "README.md": 1},
        "named": {"my_train_1.jsonl": 1, "my_train_2.jsonl": 1, "my_test.jsonl": 1},
        "packed": {"train/a.jsonl.gz": 2, "test/a.jsonl.gz": 1},
    }
    for layout, files in layouts.items():
        for name, count in files.items():
            write(tmp_path / layout / name, count)
        found = load_rows(DataConfig(path=str(tmp_path / layout)))
        assert texts(found) == load_dataset(str(tmp_path / layout), split="train")["text"], layout
        assert all(re.search(r"\.jsonl(\.gz)?:[12]$", row.where) for row in found), layout
    with pytest.raises(DataError, match=r"no split 'test'; it has train, dev|no split 'test'; it has dev, train"):
        of(str(tmp_path / "shards"), split="test")


def test_folders_that_are_not_clear(tmp_path):
    write(tmp_path / "two" / "train.jsonl", 1)
    write(tmp_path / "two" / "train.jsonl.gz", 1)
    with pytest.raises(DataError, match=r"train\.jsonl and train\.jsonl\.gz both are the split train"):
        of(str(tmp_path / "two"))
    write(tmp_path / "kinds" / "a.jsonl", 1)
    (tmp_path / "kinds" / "b.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match=r"a\.jsonl and .*b\.csv differ in format"):
        of(str(tmp_path / "kinds"))


# ---- splits ----------------------------------------------------------------------------------------------------------

SLICES = """train train[:10%] train[10%:] train[-10%:] train[:-5] train[-5:] train[3:8] train[8:3] train[:999] train[999:]
    train[33%:66%] train[:1_0] train[10:50%] train[:0] train[:] train[:100%] train[:-100%] train+test test+train[:2]
    train[:2]+test[-1:]+train[90%:]"""


@pytest.mark.parametrize("sizes", [(37, 3), (200, 1)])
def test_slices_and_sums_are_those_of_datasets(sizes):
    from datasets import ReadInstruction

    stored = {
        name: [Row(f"{name}:{index}", {}) for index in range(size)] for name, size in zip(("train", "test"), sizes, strict=True)
    }
    for text in SLICES.split():
        expected = [
            f"{one.splitname}:{index}"
            for one in ReadInstruction.from_spec(text).to_absolute({name: len(rows) for name, rows in stored.items()})
            for index in range(one.from_, one.to)
        ]
        found = splits.read(text, lambda name: splits.SequentialReader(lambda: iter(stored[name])))
        assert [row.where for row in found] == expected, text


def test_splits_of_files_folders_and_tables(tmp_path):
    from datasets import Dataset, DatasetDict

    file, folder = write(tmp_path / "train.jsonl", 10), tmp_path
    write(folder / "test.jsonl", 4)
    halves = DataConfig(path=file, split="train[:50%]", eval_split="train[50%:]")
    assert [row.where for row in load_rows(halves)] == [f"{file}:{line}" for line in range(1, 6)]
    assert [row.where for row in load_rows(halves, "eval")] == [f"{file}:{line}" for line in range(6, 11)]
    assert of(str(folder), split="test[:1]+train[-1:]") == ["test.jsonl 0", "train.jsonl 9"]
    # Held-out rows of their own are not sliced like the training rows.
    assert len(of(file, "eval", split="train[:1]", eval_path=str(folder / "test.jsonl"))) == 4
    tables = {name: Dataset.from_list([{"text": f"{name} {index}"} for index in range(10)]) for name in ("train", "dev")}
    DatasetDict(tables).save_to_disk(tmp_path / "disk")
    found = load_rows(DataConfig(path=str(tmp_path / "disk"), split="dev[90%:]+train[2:4]"))
    assert [row.where for row in found] == [f"{tmp_path}/disk[dev]:9", f"{tmp_path}/disk[train]:2", f"{tmp_path}/disk[train]:3"]
    assert texts(found) == ["dev 9", "train 2", "train 3"]


def test_a_slice_of_the_first_rows_reads_no_further(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    assert of(str(tmp_path / "train.jsonl"), split="train[:2]") == ["a", "b"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train+test", r"data\.split: .*train\.jsonl is one split, got train\+test; slice one name, or pass a folder"),
        ("train[:200%]", r"data\.split: a percentage above 100, got 'train\[:200%\]'"),
        ("train[5]", r"data\.split: cannot read 'train\[5\]' at 'train\[5\]'; write train, train\[:1000\]"),
        ("train[:5]+train[4:]", r"data\.split: .* has rows twice; drop train\[4:\]"),
        ("train[20:]", r"data\.split: train\[20:\] has no rows in .*train\.jsonl; take another slice"),
    ],
)
def test_splits_that_cannot_be_read(tmp_path, split, message):
    with pytest.raises((ConfigError, DataError), match=f"^{message}"):
        of(write(tmp_path / "train.jsonl", 10), split=split)


def test_a_streamed_table_is_sliced_by_numbers(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write(tmp_path / "repo" / "train.jsonl", 10)
    config = {"name": str(tmp_path / "repo"), "streaming": True}
    assert texts(load_rows(DataConfig(**config, split="train[3:5]"))) == ["train.jsonl 3", "train.jsonl 4"]
    with pytest.raises(ConfigError, match=r"needs the number of rows; .* data\.streaming=false"):
        load_rows(DataConfig(**config, split="train[:50%]"))


# ---- mixtures --------------------------------------------------------------------------------------------------------


def test_counts_are_in_the_ratio_of_the_weights():
    assert splits.mixture_counts([700, 300], [0.7, 0.3], "first_exhausted") == [700, 300]  # exact, with decimal weights
    assert splits.mixture_counts([1000, 100, 400], [2, 1, 1], "first_exhausted") == [200, 100, 100]
    assert splits.mixture_counts([1000, 100, 400], [2, 1, 1], "all_exhausted") == [1000, 500, 500]
    assert splits.mixture_counts([5, 3], None, "first_exhausted") == [5, 3]
    assert splits.mixture_counts([10, 10], [1000, 1], "first_exhausted") == [10, 1]  # no source disappears


def test_every_stretch_has_the_shares_of_the_whole():
    counts = [600, 300, 100]
    order = splits.mixture_order(counts)
    for stop in range(1, 1001):
        taken = [int((order[:stop] == source).sum()) for source in range(3)]
        # Each source is at most half a row from its place, so three sources are within two rows.
        assert all(abs(number - stop * count / 1000) < 2 for number, count in zip(taken, counts, strict=True))


def mixture(tmp_path, weights=(3, 1), sizes=(40, 10), **config) -> DataConfig:
    paths = [write(tmp_path / f"{name}.jsonl", size) for name, size in zip("ab", sizes, strict=True)]
    return DataConfig(mix=[DataSource(path=path, weight=weight) for path, weight in zip(paths, weights, strict=True)], **config)


def test_a_mixture_is_a_function_of_the_seed(tmp_path, capsys):
    config = mixture(tmp_path)
    found = load_rows(config, seed=1)
    assert capsys.readouterr().out == (
        f"data: a mixture of 40 rows: 30 rows (75.0%) from the 40 of {tmp_path}/a.jsonl, "
        f"10 rows (25.0%) from the 10 of {tmp_path}/b.jsonl\n"
    )
    assert Counter(text[0] for text in texts(found)) == {"a": 30, "b": 10}
    assert texts(found) == texts(load_rows(config, seed=1)) != texts(load_rows(config, seed=2))
    assert len(set(texts(found))) == 40
    # Each source keeps its order, and rows their names.
    for name in "ab":
        lines = [int(row.where.rpartition(":")[2]) for row in found if f"/{name}.jsonl" in row.where]
        assert lines == sorted(lines)
    assert Counter(text[0] for text in texts(load_rows(mixture(tmp_path, limit=8)))) == {"a": 6, "b": 2}


def test_small_sources_are_repeated_on_request(tmp_path):
    found = texts(load_rows(mixture(tmp_path, (1, 1), (40, 9), mix_until="all_exhausted")))
    assert Counter(text[0] for text in found) == {"a": 40, "b": 40}
    assert sorted(Counter(text for text in found if text[0] == "b").values()) == [4] * 5 + [5] * 4
    assert len(load_rows(mixture(tmp_path, (None, None)))) == 50


def test_rows_held_out_of_a_mixture_are_never_trained(tmp_path):
    config = mixture(tmp_path, (1, 1), (40, 10), mix_until="all_exhausted", eval_fraction=0.2)
    train, held = (texts(load_rows(config, which)) for which in ("train", "eval"))
    assert len(held) == len(set(held)) == 10
    assert not set(train) & set(held)
    assert len({*train, *held}) == 50


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mix": []}, r"data\.mix: the list is empty"),
        ({"mix": [{}]}, r"data\.mix\[0\]: needs path or name, got neither"),
        ({"mix": [{"path": "a", "name": "b"}]}, r"data\.mix\[0\]: needs path or name, got both"),
        ({"mix": [{"path": "a", "weight": 0}]}, r"data\.mix\[0\]\.weight must be above 0, got 0"),
        ({"mix": [{"path": "a", "weight": 1}, {"path": "b"}]}, r"data\.mix\[1\]\.weight: give every entry a weight, or none"),
        ({"mix": [{"path": "a", "wieght": 1}]}, r"unknown key 'data\.mix\[0\]\.wieght'\. Did you mean 'weight'\?"),
        ({"mix": [{"path": "a"}], "path": "b"}, r"data\.path: got 'b' together with data\.mix"),
        ({"mix": [{"path": "a"}], "split": "test"}, r"data\.split: got 'test' together with data\.mix"),
        ({"mix": [{"path": "a"}], "eval_split": "test"}, r"data\.eval_split: a mixture has no splits"),
        ({"mix": [{"path": "a"}], "streaming": True}, r"data\.streaming: a streamed mixture needs weights"),
    ],
)
def test_mixtures_that_contradict_themselves(config, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(config, "data", DataConfig)


def test_every_source_has_a_format_and_columns_of_its_own(tmp_path):
    chats, alpaca, pairs = (tmp_path / name for name in ("chats.jsonl", "alpaca.jsonl", "pairs.csv"))
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    chats.write_text(json.dumps({"conversations": turns}) + "\n")
    alpaca.write_text(json.dumps({"instruction": "Add.", "input": "2, 2", "output": "4"}) + "\n" + '{"instruction": "Add."}\n')
    pairs.write_text("q,a\n2+2=,4\n")
    config = DataConfig(
        mix=[
            DataSource(path=str(chats)),
            DataSource(path=str(alpaca), chat=True, system="Be brief."),
            DataSource(path=str(pairs), columns=Columns(prompt="q", completion="a")),
        ]
    )
    found = load_rows(config)
    check_columns("conversations", found, config)
    reader = conversation_reader(found[0], config)

    def read(row):
        return reader(row)[0]

    by_file = {Path(row.where).name: row for row in found}
    assert [one.content for one in read(by_file["chats.jsonl:1"]).messages] == ["2+2?", "4"]
    assert [one.content for one in read(by_file["alpaca.jsonl:1"]).messages] == ["Be brief.", "Add.\n\n2, 2", "4"]
    assert read(by_file["pairs.csv:2"]).response == "4"
    with pytest.raises(DataError, match=rf'^{alpaca}:2: no column "output".* set data\.mix\[1\]\.columns\.output\.'):
        read(by_file["alpaca.jsonl:2"])


@pytest.mark.slow
def test_a_run_on_a_mixture_resumes_exactly(here):  # noqa: F811
    """Interrupted and uninterrupted runs log the same losses and the same rows, and other weights are another run."""
    chat = '{{"messages": [{{"role": "user", "content": "{0}+1="}}, {{"role": "assistant", "content": "{1}"}}]}}\n'
    for name, size in (("a", 24), ("b", 10)):
        Path(f"{name}.jsonl").write_text("".join(chat.format(number, number + 1) for number in range(size)))
    mixed = "data.mix=[{path: a.jsonl, split: train[:20], weight: 2}, {path: b.jsonl, weight: 1}]"
    words = ["recipe=sft", "model=tiny", mixed, "recipe.batch_size=8", "checkpoint.every=1", "eval.every=null"]
    # Rates that do not depend on the number of steps.
    words += ["schedule=constant", "schedule.warmup_ratio=null"]
    assert train(*words, "out=whole", "recipe.steps=4") == 0
    assert train(*words, "out=parts", "recipe.steps=2") == 0
    assert train(*words, "out=parts", "recipe.steps=4") == 0
    whole, parts = (
        [(row["loss"], row["data/rows_crc32"]) for row in rows(name) if "loss" in row] for name in ("whole", "parts")
    )
    assert whole == parts and len(whole) == 4
    other = [mixed.replace("weight: 2", "weight: 1") if word == mixed else word for word in words]
    assert train(*other, "out=parts", "recipe.steps=5") == 2


# ---- the command line and the documentation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.split=train[:10%]", "data.split='train[:10%]'"),
        ("data.split=a+train[-5:]+b[:3]", "data.split='a+train[-5:]+b[:3]'"),
        ("data.eval_split=train[:1],train[:2]", "data.eval_split='train[:1]','train[:2]'"),
        ("data.split='train[:10%]'", "data.split='train[:10%]'"),
        ('data.split="test+train[:10%]"', 'data.split="test+train[:10%]"'),
        ("data.mix=[{path: a.jsonl, split: train[:9]+b}]", "data.mix=[{path: a.jsonl, split: 'train[:9]+b'}]"),
        ("data.split=train+test", "data.split=train+test"),
        ("data.system='see a[1:2]'", "data.system='see a[1:2]'"),
    ],
)
def test_slices_get_the_quotes_that_hydra_needs(word, expected):
    assert shorthand.quoted(word) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    rest_slow(
        [
            (["data=[a.jsonl,b.jsonl]", "data.split=train[:9]"], {"path": ["a.jsonl", "b.jsonl"], "split": "train[:9]"}),
            (["data=chats/*"], {"path": "chats/*", "mix": None}),
            (
                ["data.mix=[{path: a.jsonl, split: train[:9]}]"],
                {"path": None, "mix": [{"path": "a.jsonl", "split": "train[:9]"}]},
            ),
        ]
    ),
)
def test_slices_lists_and_patterns_can_be_typed(here, words, expected):  # noqa: F811
    data = yaml.safe_load(show(ComposeRequest(["recipe=sft", *words]), "job", package="data"))
    assert {key: data[key] for key in expected} == expected


def examples() -> list[tuple[str, str, str]]:
    """The formats of the page: name, ``data.format``, and a row."""
    text = DOCS.read_text(encoding="utf-8")
    return re.findall(r"^\| ([A-Za-z ,+]+?) \| `(\w+)` \| `(\{.*\})` \|", text, re.MULTILINE)


def test_every_row_of_the_page_is_read():
    found = examples()
    assert len(found) >= 7
    for (name, key, text), is_named in itertools.product(found, (False, True)):
        row, config = Row("docs:1", json.loads(text)), DataConfig(format=key if is_named else "auto")
        kind = "preferences" if "chosen" in row.values else "rollouts" if set(row.values) == {"prompt"} else "conversations"
        check_columns(kind, [row], config)
        if kind == "conversations":
            assert conversation_reader(row, config)(row), name


def test_the_mixture_of_the_page_is_a_configuration():
    block = re.search(r"```yaml\n(data:.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert block
    config = build(yaml.safe_load(block[1])["data"], "data", DataConfig)
    assert len(config.mix) == 3 and all(one.weight for one in config.mix)
