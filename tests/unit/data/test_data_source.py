"""Reading rows: every kind of source, every mistake in one, and which rows are held out."""

import gzip
import json
import re
from pathlib import Path

import pytest
import zstandard

from cookbook.data import DataConfig, load_rows
from cookbook.data.source import local_files
from cookbook.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Delete the cache of ``datasets`` after the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(count: int):
    return [{"text": f"row {index}"} for index in range(count)]


def texts(rows) -> list[str]:
    return [row.values["text"] for row in rows]


def test_json_lines_keep_their_line_numbers(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('\ufeff{"text": "Grüße"}\n\n   \n{"text": "日本"}', encoding="utf-8")
    rows = load_rows(DataConfig(path=str(file)))
    assert [(row.where, row.values) for row in rows] == [
        (f"{file}:1", {"text": "Grüße"}),
        (f"{file}:4", {"text": "日本"}),
    ]


def test_limit_stops_reading(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\nnot json at all\n')
    assert texts(load_rows(DataConfig(path=str(file), limit=2))) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "broken JSON at column 13"),
        (b"[1, 2]", "a row must be a JSON object with a key per column, got list"),
        (b'{"chosen": "a", "chosen": "b"}', 'the key "chosen" is given twice'),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' * 16 + line + b"\n")
    with pytest.raises(DataError) as error:
        load_rows(DataConfig(path=str(file)))
    assert str(error.value).startswith(f"{file}:17: {message}")
    assert "\n" not in str(error.value)


def test_a_missing_file_suggests_a_similar_name(tmp_path):
    write(tmp_path / "train.jsonl", numbered(1))
    with pytest.raises(DataError, match=r"data\.path: .*trian\.jsonl does not exist.* Did you mean 'train\.jsonl'\?"):
        load_rows(DataConfig(path=str(tmp_path / "trian.jsonl")))
    with pytest.raises(DataError, match=r"data\.eval_path: .* does not exist"):
        load_rows(DataConfig(path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "nothing")), "eval")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match="holds no rows"):
        load_rows(DataConfig(path=str(tmp_path / "train.jsonl")))


def test_no_source_and_an_unknown_kind_of_file(tmp_path):
    with pytest.raises(ConfigError, match=r"pass data\.path=.* or data\.name="):
        load_rows(DataConfig())
    (tmp_path / "train.xlsx").write_text("")
    with pytest.raises(DataError, match=r"cannot read \.xlsx; give one of \.jsonl"):
        load_rows(DataConfig(path=str(tmp_path / "train.xlsx")))


def test_json_arrays_and_json_lines_under_the_same_suffix(tmp_path):
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text(json.dumps(numbered(3), indent=1))
    write(lines, numbered(3))
    rows = load_rows(DataConfig(path=str(array)))
    assert texts(rows) == texts(load_rows(DataConfig(path=str(lines)))) == ["row 0", "row 1", "row 2"]
    assert rows[1].where == f"{array}[1]"
    array.write_text('[\n{"text": "a"},\n{"text" "b"}\n]')
    with pytest.raises(DataError, match=rf"{array}:3: broken JSON at column 9"):
        load_rows(DataConfig(path=str(array)))


def test_parquet(tmp_path):
    from datasets import Dataset

    Dataset.from_list(numbered(4)).to_parquet(tmp_path / "train.parquet")
    rows = load_rows(DataConfig(path=str(tmp_path / "train.parquet"), limit=3))
    assert texts(rows) == ["row 0", "row 1", "row 2"]
    assert rows[2].where == f"{tmp_path / 'train.parquet'}[2]"
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError) as error:
        load_rows(DataConfig(path=str(tmp_path / "broken.parquet")))
    assert str(error.value).startswith(f"{tmp_path / 'broken.parquet'}: ")
    assert "\n" not in str(error.value)


PACKED = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
TEXTS = {
    ".jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in numbered(3000)),
    ".json": json.dumps(numbered(3000)).encode(),
    ".csv": b"text\n" + b"".join(row["text"].encode() + b"\n" for row in numbered(3000)),
    ".tsv": b"text\tnote\n" + b"".join(row["text"].encode() + b"\ta,b\n" for row in numbered(3000)),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", TEXTS)
def test_compressed_files_have_the_rows_of_the_plain_ones(tmp_path, suffix, packed):
    plain, file = tmp_path / f"train{suffix}", tmp_path / f"train{suffix}{packed}"
    plain.write_bytes(TEXTS[suffix])
    # Two members, as after `cat one.gz two.gz`.
    half = len(TEXTS[suffix]) // 2
    file.write_bytes(PACKED[packed](TEXTS[suffix][:half]) + PACKED[packed](TEXTS[suffix][half:]))
    rows, expected = load_rows(DataConfig(path=str(file))), load_rows(DataConfig(path=str(plain)))
    assert [row.values for row in rows] == [row.values for row in expected] and len(rows) == 3000
    assert [row.where for row in rows] == [row.where.replace(str(plain), str(file)) for row in expected]


@pytest.mark.parametrize("packed", PACKED)
def test_a_damaged_compressed_file_is_one_line(tmp_path, packed):
    file, whole = tmp_path / f"train.jsonl{packed}", PACKED[packed](TEXTS[".jsonl"])
    for content in (whole[:-1], whole[: len(whole) // 2], whole + whole[:20], b"not compressed"):
        file.write_bytes(content)
        with pytest.raises(DataError) as error:
            load_rows(DataConfig(path=str(file)))
        assert str(error.value).startswith(f"{file}: cannot be decompressed (")
    parquet = tmp_path / f"train.parquet{packed}"
    parquet.write_bytes(b"")
    with pytest.raises(DataError, match=rf"cannot read \.parquet\{packed}; give one of \.jsonl"):
        load_rows(DataConfig(path=str(parquet)))


def test_every_cell_of_csv_is_text_as_it_is_written(tmp_path):
    file = tmp_path / "train.csv"
    # pandas reads every one of the answers as something else.
    file.write_bytes(b'\xef\xbb\xbfprompt,answer\r\na,72\r\n\r\n"b, ""c""\nd",1.50\n\xc3\xa9,007\ne,NA\nf,\ng,True\n')
    rows = load_rows(DataConfig(path=str(file)))
    assert [row.values["answer"] for row in rows] == ["72", "1.50", "007", "NA", "", "True"]
    assert [row.values["prompt"] for row in rows] == ["a", 'b, "c"\nd', "é", "e", "f", "g"]
    assert [row.where for row in rows][:3] == [f"{file}:2", f"{file}:4", f"{file}:6"]
    assert load_rows(DataConfig(path=str(file), limit=1))[0].values == {"prompt": "a", "answer": "72"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", ":3: 3 cells under 2 column names; quote cells"),
        (b"a,b\n1\n", ":2: 1 cells under 2 column names"),
        (b"a,a\n1,2\n", ":1: two columns are called 'a'"),
        (b"a,b\n1,\xff\n", ":2: not UTF-8 at byte 2"),
        (b'a,b\n1,2\n3,"4\n5,6\n', ":3: broken CSV: unexpected end of data; fix the line"),
        (b'a,b\n1,"2"3\n', ":2: broken CSV: "),
        (b"a,b\n", ": holds no rows"),
    ],
)
def test_mistakes_in_csv_are_named(tmp_path, content, message):
    file = tmp_path / "train.csv"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        load_rows(DataConfig(path=str(file)))
    assert str(error.value).startswith(f"{file}{message}")


def test_a_bad_row_of_csv_is_left_out_on_request(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("text\nrow 0\na,b\nrow 1\n")
    assert texts(load_rows(DataConfig(path=str(file), on_bad_row="skip"))) == ["row 0", "row 1"]


def test_what_arrow_fills_in_is_taken_out_again(tmp_path):
    """Arrow gives every object of a column the same keys: the call of one tool would have the arguments of all."""
    from datasets import Dataset

    calls = [{"city": "Paris"}, {"a": 1, "b": None}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{"arguments": one}]}], "score": None} for one in calls]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    found = [row.values for row in load_rows(DataConfig(path=str(tmp_path / "train.parquet")))]
    assert [row["messages"][0]["tool_calls"][0]["arguments"] for row in found] == [{"city": "Paris"}, {"a": 1}]
    assert "score" in found[0]


def test_images_are_never_decoded(tmp_path):
    from datasets import Dataset, Features, Image, List, Value

    features = Features({"text": Value("string"), "picture": Image(), "more": List(Image())})
    broken = {"bytes": b"not an image", "path": None}
    Dataset.from_list([{"text": "a", "picture": broken, "more": [broken]}], features=features).save_to_disk(tmp_path / "one")
    [row] = load_rows(DataConfig(path=str(tmp_path / "one")))
    assert row.values == {"text": "a", "picture": broken, "more": [broken]}


def test_a_folder_of_split_files(tmp_path):
    write(tmp_path / "train.jsonl", numbered(3))
    write(tmp_path / "test.jsonl", numbered(2))
    config = DataConfig(path=str(tmp_path), eval_split="test")
    assert load_rows(config)[2].where == f"{tmp_path / 'train.jsonl'}:3"
    assert [row.where for row in load_rows(config, "eval")] == [f"{tmp_path / 'test.jsonl'}:{n}" for n in (1, 2)]
    assert len(load_rows(config, "eval", eval_limit=1)) == 1
    with pytest.raises(DataError, match="validation"):
        load_rows(DataConfig(path=str(tmp_path), split="validation"))


def test_the_files_of_a_folder_include_those_of_linked_folders_and_a_readme_may_name_others(tmp_path):
    """They decide whether rows of the cache are stale."""
    for name in ("data/train.jsonl", "elsewhere/deep/more.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    config = DataConfig(path=str(tmp_path / "data"))
    found = local_files(config, "train")
    assert [str(file.relative_to(tmp_path)) for file in found] == ["data/linked/deep/more.jsonl", "data/train.jsonl"]
    (tmp_path / "data" / "README.md").write_text("# Chats\n")
    assert len(local_files(config, "train")) == 3
    (tmp_path / "data" / "README.md").write_text("---\nconfigs:\n- data_files: ../elsewhere/*.jsonl\n---\n")
    assert local_files(config, "train") is None and local_files(DataConfig(path=found[0].as_posix()), "train") == [found[0]]


def test_folders_saved_by_datasets(tmp_path):
    from datasets import Dataset, DatasetDict

    Dataset.from_list(numbered(3)).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(numbered(3)), dev=Dataset.from_list(numbered(1))).save_to_disk(tmp_path / "two")
    assert texts(load_rows(DataConfig(path=str(tmp_path / "one"), limit=2))) == ["row 0", "row 1"]
    config = DataConfig(path=str(tmp_path / "two"), eval_split="dev")
    assert load_rows(config)[0].where == f"{tmp_path / 'two'}[train]:0"
    assert len(load_rows(config, "eval")) == 1
    with pytest.raises(DataError, match="no split 'test'; it has train, dev"):
        load_rows(DataConfig(path=str(tmp_path / "two"), split="test"))


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder laid out like a hub repository; ``load_dataset`` takes its path as a name."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "repository" / "data"
    folder.mkdir(parents=True)
    write(folder / "train-00000-of-00001.jsonl", numbered(5))
    return str(folder.parent)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_by_name(hub_folder, streaming):
    rows = load_rows(DataConfig(name=hub_folder, streaming=streaming, limit=2))
    assert texts(rows) == ["row 0", "row 1"]
    assert rows[1].where == f"{hub_folder}[train]:1"
    with pytest.raises(DataError, match=r"test.*check data\.name or data\.path, data\.subset and data\.split"):
        load_rows(DataConfig(name=hub_folder, streaming=streaming, split="test"))


def test_the_path_goes_before_the_name(hub_folder, tmp_path):
    other = write(tmp_path / "other.jsonl", [{"text": "mine"}])
    assert texts(load_rows(DataConfig(name=hub_folder, path=other))) == ["mine"]


def test_no_network_is_one_line_without_waiting(monkeypatch):
    import huggingface_hub

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"the hub cannot be reached for openai/gsm8k; pass data\.path="):
        load_rows(DataConfig(name="openai/gsm8k", subset="main"))


def test_offline_mode_without_the_dataset_is_one_line(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"no-such/dataset: .*; pass data\.path="):
        load_rows(DataConfig(name="no-such/dataset"))


def test_rows_are_held_out_by_the_seed_and_never_trained(tmp_path):
    config = DataConfig(path=write(tmp_path / "train.jsonl", numbered(100)), eval_fraction=0.1)
    for seed in (0, 1):
        train, held = (texts(load_rows(config, which, seed)) for which in ("train", "eval"))
        assert (len(train), len(held)) == (90, 10)
        assert sorted(train + held) == sorted(texts(load_rows(DataConfig(path=config.path))))
        assert held == texts(load_rows(config, "eval", seed))
    assert texts(load_rows(config, "eval", 0)) != texts(load_rows(config, "eval", 1))
    assert texts(load_rows(config, "eval", eval_limit=3)) == texts(load_rows(config, "eval"))[:3]


def test_a_drawn_row_is_left_for_both_sides(tmp_path):
    path = write(tmp_path / "train.jsonl", numbered(3))
    assert len(load_rows(DataConfig(path=path, eval_fraction=0.001), "eval")) == 1
    assert len(load_rows(DataConfig(path=path, eval_fraction=0.999))) == 1
    with pytest.raises(DataError, match=r"data\.eval_fraction: cannot hold rows out of 1"):
        load_rows(DataConfig(path=path, eval_fraction=0.5, limit=1))


def test_held_out_rows_of_their_own_leave_the_training_rows_whole(tmp_path):
    train, test = write(tmp_path / "train.jsonl", numbered(10)), write(tmp_path / "test.jsonl", numbered(2))
    for config in (
        DataConfig(path=train, eval_path=test, eval_fraction=0.5),
        DataConfig(path=str(tmp_path), eval_split="test", eval_fraction=0.5),
    ):
        assert (len(load_rows(config)), len(load_rows(config, "eval"))) == (10, 2)
    assert load_rows(DataConfig(path=train), "eval") == []
    one_file = DataConfig(path=train, eval_split="test", eval_fraction=0.2)  # a file has no other split
    assert (len(load_rows(one_file)), len(load_rows(one_file, "eval"))) == (8, 2)


@pytest.mark.parametrize(
    ("values", "key"), [({"limit": 0}, "limit"), ({"max_length": 1}, "max_length"), ({"eval_fraction": 1.0}, "fraction")]
)
def test_numbers_out_of_bounds_are_refused(values, key):
    with pytest.raises(ConfigError, match=rf"data\.\w*{key}"):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("split", "eval_split", "part"),
    [
        ("train", "train[:2]", "train[:2]"),
        ("train[:50%]", "train[40%:]", "train[40%:]"),
        ("train[3:]", "validation[-8:]", "validation[-8:]"),  # a file has one split of any name
        ("train[2:]", "train[:2]", None),
        ("train[:50%]", "train[50%:]", None),
    ],
)
def test_held_out_rows_are_not_trained(tmp_path, split, eval_split, part):
    config = DataConfig(path=write(tmp_path / "a.jsonl", numbered(10)), split=split, eval_split=eval_split)
    if part is None:
        assert not {*texts(load_rows(config))} & {*texts(load_rows(config, "eval"))}
        return
    with pytest.raises(
        DataError, match=rf"data.eval_split: {re.escape(part)} is also in data.split={re.escape(split)}, so held"
    ):
        load_rows(config, "eval")


def test_a_split_of_a_folder_may_be_sliced_next_to_another(tmp_path):
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", numbered(4))
    assert len(load_rows(DataConfig(path=str(tmp_path), eval_split="test[:2]"), "eval")) == 2
    with pytest.raises(DataError, match=r"data.eval_split: train\[:2\] is also in data.split=train"):
        load_rows(DataConfig(path=str(tmp_path), eval_split="train[:2]"), "eval")


def test_an_empty_parquet_file_among_others_is_no_error(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "train-00000-of-00002.parquet")
    with pytest.raises(DataError, match=r"holds no rows; give a file with at least one"):
        load_rows(DataConfig(path=str(tmp_path / "train-00000-of-00002.parquet")))
    parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "train-00001-of-00002.parquet")
    for path in (str(tmp_path), str(tmp_path / "*.parquet")):
        assert [row.values["text"] for row in load_rows(DataConfig(path=path))] == ["a", "b"]
