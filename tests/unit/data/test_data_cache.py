"""The cache of rows and tokens: the same datums with and without it, keys, damage, killed writers, several processes."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from children import in_child, limit_files
from marks import rest_slow
from runtools import ROOT, SMALL, bits, checkpoint, here, timeless, train  # noqa: F401
from tiny import byte_tokenizer

from cookbook.cli.app import run
from cookbook.config.typed import construct
from cookbook.data import (
    DataConfig,
    RejectedRows,
    Renderer,
    Row,
    cache,
    cached_rows,
    conversation_datums,
    load_rows,
    preference_datums,
    prompts,
    render,
    row_table,
)
from cookbook.data.datum_table import Pairs
from cookbook.data.row_table import RowTable, as_table, rows_digest, select
from cookbook.errors import DataError

SKIP = {"on_bad_row": "skip", "on_empty": "skip", "on_long": "skip"}
BATCH = 256


def asked(number: int) -> dict[str, object]:
    return {"role": "user", "content": f"What is {number} é?\n"}


def said(number: int, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": f"It is {number * number}.", **more}


def chat(number: int) -> dict[str, object]:
    """A conversation; some have two answers, weights, fields that the template does not print, no answer, or a wrong shape."""
    messages = [asked(number), said(number)]
    if number % 5 == 0:
        messages += [asked(number + 1), said(number + 1, weight=0.5)]
    if number % 50 == 7:
        messages = messages[:1]
    if number % 90 == 11:
        messages[0] = {"role": "user"}
    if number % 70 == 3:
        messages[1] = said(10**60)
    return {"messages": messages, "id": number, "score": number / 7}


def pair(number: int) -> dict[str, object]:
    side = {"chosen": [said(number)], "rejected": [said(number + 1)]} if number % 40 else {"chosen": "same", "rejected": "same"}
    return {"prompt": [asked(number)], **side}


def text(number: int) -> dict[str, object]:
    return {"prompt": f"{number} + 1 = ", "completion": f"{number + 1}\ud83d" if number == 200 else f"{number + 1}"}


# The digest of each case was computed at commit be6ab5a, which had no cache.
# `PYTHONPATH=tests/support python tests/unit/data/test_data_cache.py` prints them.
CASES = {
    "messages": (chat, DataConfig(max_length=90, **SKIP), conversation_datums, "de8d1b74db4f07a3"),
    "last_answer": (
        chat,
        DataConfig(max_length=90, train_on="last_assistant", **SKIP),
        conversation_datums,
        "14e92d4ad451089d",
    ),
    "each_answer": (
        chat,
        DataConfig(max_length=90, train_on="each_assistant", **SKIP),
        conversation_datums,
        "6a4b114daf89ef89",
    ),
    "all_cut": (
        chat,
        DataConfig(max_length=70, train_on="all", system="Be brief.", **{**SKIP, "on_long": "truncate"}),
        conversation_datums,
        "fb838782e751be34",
    ),
    "plain": (text, DataConfig(**SKIP), conversation_datums, "b6e6f4944850fc64"),
    "completion_as_chat": (text, DataConfig(chat=True, **SKIP), conversation_datums, "8d17c8412676a70d"),
    "text": (lambda number: {"text": f"A text, number {number}."}, DataConfig(), conversation_datums, "9af45d667e553181"),
    "preference": (pair, DataConfig(**SKIP), preference_datums, "aa4c89670cdaee8b"),
    "prompts": (chat, DataConfig(max_length=50, **SKIP), prompts, "43232846bb136535"),
    "plain_prompts": (text, DataConfig(format="prompt", **SKIP), prompts, "68ba411e65a5b6cd"),
}


def rows_of(make, count: int = 300) -> list[Row]:
    return [Row(f"some/train.jsonl:{number + 1}", make(number)) for number in range(count)]


def content(items, refusals: RejectedRows) -> str:
    """Return a digest of every bit of the datums or prompts, and of the rejected rows."""
    sha = hashlib.sha256()
    for one in items:
        if hasattr(one, "row"):
            sha.update(
                repr((one.tokens, one.row.where, one.row.values, one.text, one.question)).encode("utf-8", "surrogatepass")
            )
            continue
        arrays = {name: tensor.array for name, tensor in one.loss_fn_inputs.items()}
        described = {name: (str(array.dtype), array.shape, array.tobytes().hex()) for name, array in arrays.items()}
        sha.update(repr((one.model_input.tokens, described, one.where, one.question)).encode("utf-8", "surrogatepass"))
    sha.update(repr((len(items), refusals.found, list(refusals.unused))).encode("utf-8", "surrogatepass"))
    return sha.hexdigest()[:16]


def measured(rows, config: DataConfig, function) -> str:
    refusals = RejectedRows(config)
    return content(function(rows, Renderer(byte_tokenizer(), 1024), config, refusals=refusals), refusals)


def tables(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A cache of its own, which keeps also few rows of small files."""
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(row_table, "MIN_ROWS", 2)
    monkeypatch.setattr(cached_rows, "MIN_BYTES", 0)
    monkeypatch.setattr(cache, "_said", set())
    return tmp_path / "cache"


@pytest.mark.parametrize("case", rest_slow(CASES, fast=4))
def test_datums_are_the_same_to_the_bit_without_the_cache_written_to_it_and_from_it(case, root):
    make, config, function, golden = CASES[case]
    rows = rows_of(make)
    assert measured(rows, config, function) == golden
    table = as_table(rows, "auto")
    assert measured(table, config, function) == golden
    [name] = [name for name in tables(root) if name.startswith("tokens-")]
    changed_ns = (root / name / "row.bin").stat().st_mtime_ns
    assert measured(table, config, function) == golden
    assert (root / name / "row.bin").stat().st_mtime_ns == changed_ns


def test_prompts_of_a_table_have_the_examples_of_the_rows(root):
    config = DataConfig(**SKIP)
    found = [
        prompts(some, Renderer(byte_tokenizer(), 1024), config)
        for some in (rows_of(chat, 20), as_table(rows_of(chat, 20), "auto"))
    ]
    assert [one.example for one in found[1]] == [one.example for one in found[0]] and all(one.example for one in found[0])


def test_rows_in_a_table_are_the_rows():
    values = [{"a": "\ud83d x", "b": [1, 2.5, -0.0, 1e300, None, True, {"é": "東"}], "c": 10**40}, {}, {"a": float("inf")}]
    rows = [Row(f"é/{number}", value) for number, value in enumerate(values * 200)]
    table = as_table(rows, "off")
    assert isinstance(table, RowTable)
    assert list(table) == rows and [repr(row) for row in table] == [repr(row) for row in rows]
    assert (
        table[-1] == rows[-1]
        and list(table[5:9]) == rows[5:9]
        and [table.place(number) for number in (0, 599)] == ["é/0", "é/599"]
    )
    assert rows_digest(table) == rows_digest(rows)
    some = select(table, range(599, 0, -2))
    assert list(some) == rows[599:0:-2] and rows_digest(some) == rows_digest(rows[599:0:-2])
    with pytest.raises(IndexError):
        table[600]
    assert as_table([*rows, Row("date", {"day": np.datetime64("2026-01-01")})], "off") is None


def test_the_first_row_that_cannot_be_read_is_named_before_one_that_cannot_be_rendered(root):
    """As without a table, where all rows are read before the first is rendered."""
    values = [{"messages": [asked(number), said(number)]} for number in range(2 * BATCH)]
    long, wrong = {"messages": [asked(1), said(10**60)]}, {"messages": [{"role": "user"}]}
    config = DataConfig(max_length=60)
    for broken, named in (({3: long, 500: wrong}, 501), ({3: long, 9: long}, 4), ({2: wrong, 500: wrong}, 3)):
        rows = [Row(f"train.jsonl:{number + 1}", broken.get(number, value)) for number, value in enumerate(values)]
        for some in (rows, as_table(rows, "auto")):
            with pytest.raises(DataError, match=f"^train.jsonl:{named}: "):
                measured(some, config, conversation_datums)
    assert [name for name in tables(root) if name.startswith("tokens-")] == []


def test_what_changes_the_tokens_changes_the_key(root):
    table, config = as_table(rows_of(chat, 20), "auto"), DataConfig(**SKIP)

    def entries_with(tokenizer, config: DataConfig, rows=table, length: int = 1024) -> int:
        conversation_datums(rows, Renderer(tokenizer, length), config)
        return len([name for name in tables(root) if name.startswith("tokens-")])

    assert entries_with(byte_tokenizer(), config) == 1
    assert entries_with(byte_tokenizer(), replace(config, shuffle=False, limit=9, path="elsewhere")) == 1
    other = byte_tokenizer()
    other.chat_template = other.chat_template.replace("'\\n'", "'\\n\\n'")
    assert entries_with(other, config) == 2
    longer = byte_tokenizer()
    longer.add_tokens(["What is"])
    assert entries_with(longer, config) == 3
    assert entries_with(byte_tokenizer(), replace(config, train_on="all")) == 4
    assert entries_with(byte_tokenizer(), replace(config, system="Be brief.")) == 5
    assert entries_with(byte_tokenizer(), config, length=512) == 6
    assert entries_with(byte_tokenizer(), config, as_table(rows_of(chat, 21), "auto")) == 7
    elsewhere = [Row(row.where.replace("some", "other"), row.values) for row in table]
    assert entries_with(byte_tokenizer(), config, as_table(elsewhere, "auto")) == 8


def test_code_and_packages_change_the_key(monkeypatch):
    before = cache.key_of("rows", 1)
    assert cache.key_of("rows", 1) == before != cache.key_of("rows", 2)
    monkeypatch.setattr(cache, "code_version", lambda: "another")
    assert cache.key_of("rows", 1) != before


def test_every_module_of_the_data_changes_the_version_of_the_code(tmp_path, monkeypatch):
    folder = shutil.copytree(Path(cache.__file__).parent, tmp_path / "data")
    monkeypatch.setattr(cache, "__file__", str(folder / "cache.py"))
    version = getattr(cache.code_version, "__wrapped__", cache.code_version)
    versions = {version()}
    modules = sorted(folder.glob("*.py"))
    for module in modules:
        module.write_text(f"{module.read_text()}\n# changed\n")
        versions.add(version())
    assert len(versions) == 1 + len(modules)


def write_rows(path: Path, values) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_rows_of_a_file_are_parsed_once_until_its_content_or_a_key_changes(root, tmp_path, monkeypatch):
    file = tmp_path / "train.jsonl"
    write_rows(file, [chat(number) for number in range(40)])
    file.write_text(file.read_text() + "{broken\n")
    config = DataConfig(path=str(file), eval_fraction=0.25, on_bad_row="skip")
    calls = []
    monkeypatch.setattr(cached_rows, "load_rows", lambda *words: calls.append(words[1]) or load_rows(*words))

    def both(config: DataConfig, seed: int = 0):
        refusals = RejectedRows(config)
        return [list(cached_rows.load(config, which, seed, 5, refusals)) for which in ("train", "eval")], refusals.found

    first = both(config)
    plain = RejectedRows(config)
    assert first == ([list(load_rows(config, which, 0, 5, plain)) for which in ("train", "eval")], plain.found)
    assert len(first[1]) == 1 and calls == ["train", "eval"]
    assert both(config) == first and both(replace(config, max_length=60)) == first and len(calls) == 2
    assert both(config, seed=1) != first and len(calls) == 4
    assert both(replace(config, limit=20)) != first and len(calls) == 6
    write_rows(file, [chat(number) for number in range(1, 41)])
    assert both(config)[0] != first[0] and len(calls) == 8
    assert both(replace(config, cache="off"))[0] != first[0] and len(calls) == 10


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "facts", "empty"])
def test_a_damaged_table_is_rebuilt_and_the_log_reports_it_once(damage, root, caplog):
    config = DataConfig(**SKIP)
    table = as_table(rows_of(chat, 20), "auto")
    right = measured(table, config, conversation_datums)
    [folder] = [path for path in root.iterdir() if path.name.startswith("tokens-")]
    tokens, facts = folder / "tokens.bin", folder / "entry.json"
    raw = tokens.read_bytes()
    match damage:
        case "cut":
            tokens.write_bytes(raw[:-4])
        case "changed":
            tokens.write_bytes(raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
        case "missing":
            tokens.unlink()
        case "facts":
            facts.write_text(facts.read_text()[:-30])
        case "empty":
            facts.unlink()
    with caplog.at_level(logging.WARNING, "cookbook"):
        assert measured(table, config, conversation_datums) == right
        assert measured(table, config, conversation_datums) == right
    lines = [one.message for one in caplog.records if one.message.startswith("cache: ")]
    assert len(lines) == 1 and "is damaged" in lines[0] and str(folder) in lines[0]
    assert tokens.read_bytes() == raw


WRITER = """
import os, sys, time
from pathlib import Path
import numpy as np
from cookbook.data import cache
writer = cache.TableWriter(Path(sys.argv[1]), {"a": "i8"})
writer.append(a=np.arange(1000))
print("open", flush=True)
sys.stdin.readline()
writer.append(a=np.arange(1000))
found = writer.arrays()["a"]
key = cache.key_of("rows", 1)
writer.commit(key, {"rows": 2000, "first": "", "rejected": []})
print(int(found.sum()), int(cache.find(Path(sys.argv[1]), key).arrays["a"].sum()), flush=True)
"""


def writers(root: Path, count: int) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(root)]
    started = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for one in started:
        assert one.stdout is not None and one.stdout.readline() == "open\n"
    return started


def test_two_processes_write_one_table_and_a_killed_third_leaves_none(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    killed, *others = writers(root, 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert cache.entries(root) == [] and len(tables(root)) == 3
    # Age alone does not count: the folders of processes that live are kept.
    monkeypatch.setattr(cache, "ABANDONED_S", -1.0)
    assert cache.clear(root) == [] and len(tables(root)) == 2
    outputs = [one.communicate("\n")[0] for one in others]
    assert outputs == ["999000 999000\n"] * 2
    assert tables(root) == [cache.key_of("rows", 1)] and [entry.facts["rows"] for entry in cache.entries(root)] == [2000]


def test_a_place_that_cannot_be_written_is_named_once_and_all_stays_in_memory(root, tmp_path, caplog):
    make, config, function, golden = CASES["messages"]
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "cookbook"):
        for _ in range(2):
            table = as_table(rows_of(make), str(tmp_path / "file" / "cache"))
            assert measured(table, replace(config, cache=str(tmp_path / "file" / "cache")), function) == golden
    [line] = [one.message for one in caplog.records if one.message.startswith("cache: ")]
    assert "cannot write to" in line and "stay in memory" in line


def test_a_disk_that_fills_up_loses_no_row(root, caplog):
    make, config, function, golden = CASES["messages"]
    rows = rows_of(make)

    def with_full_disk():
        limit_files(20_001)
        with caplog.at_level(logging.WARNING, "cookbook"):
            assert measured(as_table(rows, "auto"), config, function) == golden
        return len([one for one in caplog.records if one.message.startswith("cache: ")])

    assert in_child(with_full_disk) == 1
    assert tables(root) == []


def test_rows_of_a_file_that_changes_while_it_is_read_are_not_stored(root, tmp_path, monkeypatch):
    file = tmp_path / "train.jsonl"
    write_rows(file, [chat(number) for number in range(40)])

    def changing(*words):
        found = load_rows(*words)
        write_rows(file, [chat(number) for number in range(50)])
        return found

    monkeypatch.setattr(cached_rows, "load_rows", changing)
    config = DataConfig(path=str(file))
    assert len(cached_rows.load(config, "train", 0, None, RejectedRows(config))) == 40
    assert [name for name in tables(root) if not name.startswith(cache.TEMPORARY)] == []


@contextlib.contextmanager
def free_files(count: int):
    """Let this process open no more than 0 or 1 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open("rb") as file:
        lowest = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_too_many_open_files_keeps_the_table_and_continues_in_memory(root, caplog):
    values, key = np.arange(9), cache.key_of("rows", 1)
    writer = cache.TableWriter(root, {"a": "i8"})
    writer.append(a=values)
    writer.commit(key, {"rows": 9, "first": ""})
    with caplog.at_level(logging.WARNING, "cookbook"), free_files(0):
        assert cache.find(root, key) is None
    assert cache.find(root, key) is not None and "cannot read" in caplog.text and "Too many open files" in caplog.text
    caplog.clear()
    # The lock of the folder can be opened, a column cannot.
    with caplog.at_level(logging.WARNING, "cookbook"), free_files(1):
        writer = cache.TableWriter(root, {"a": "i8", "b": "i8"})
        writer.append(a=values, b=values)
        assert [array.tolist() for array in writer.arrays().values()] == [values.tolist()] * 2
    writer = cache.TableWriter(root, {"a": "i8"})
    writer.append(a=values)
    with caplog.at_level(logging.WARNING, "cookbook"), free_files(0):
        writer.add_column("b", values)
        assert [array.tolist() for array in writer.arrays().values()] == [values.tolist()] * 2
        writer.commit(cache.key_of("rows", 2), {})
    # The temporary folder is removed with its writer.
    del writer
    assert tables(root) == [key] and caplog.text.count("cannot write to") == 1


def test_a_table_that_cannot_get_its_name_is_reported_and_an_old_one_that_stays_is_no_reason(root, caplog):
    def written(key: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cookbook"):
            writer = cache.TableWriter(root, {"a": "i8"})
            writer.append(a=np.arange(9))
            writer.commit(key, {"rows": 9, "first": ""})
        return [one.message for one in caplog.records]

    first, second, third = (cache.key_of("rows", number) for number in range(3))
    assert written(first) == written(first) == [] and tables(root) == [first]
    (root / second).write_text("")
    [line] = written(second)
    assert line.startswith(f"cache: cannot write to {root} (") and tables(root) == sorted([first, second])
    # Its name is too long for a rename, so that the system refuses to remove it.
    old = root / cache.key_of("a" * 210)
    (root / first).rename(old)
    os.utime(old / "entry.json", (0, 0))
    [line] = written(third)
    assert line.startswith(f"cache: old tables stay ({old} cannot be removed)") and cache.find(root, third) is not None


def test_unused_fields_of_other_data_are_not_stored_with_a_table(root):
    def unused(*makes) -> list[str]:
        refusals, renderer = RejectedRows(DataConfig()), Renderer(byte_tokenizer())
        for make in makes:
            conversation_datums(as_table(rows_of(make, 20), "auto"), renderer, DataConfig(), refusals=refusals)
        return list(refusals.unused)

    def plain(number: int) -> dict[str, object]:
        return {"messages": [asked(number), said(number)]}

    def with_note(number: int) -> dict[str, object]:
        return {"messages": [{**asked(number), "note": "n"}, said(number)]}

    def with_both(number: int) -> dict[str, object]:
        return {"messages": [{**asked(number), "note": "n"}, said(number, mark=str(number))]}

    both = ["note of messages", "mark of messages"]
    assert unused(with_note, plain) == both[:1] and unused(with_note, with_both) == both
    # From the cache.
    assert unused(plain) == [] and unused(with_note, plain) == both[:1] and unused(with_both) == both


def test_a_template_that_prints_the_date_has_a_table_for_each_day(monkeypatch):
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return super().today() + datetime.timedelta(days=1)

    dated = byte_tokenizer()
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}" + dated.chat_template
    before = [Renderer(one).identity() for one in (byte_tokenizer(), dated)]
    monkeypatch.setattr(render.datetime, "date", Tomorrow)
    after = [Renderer(one).identity() for one in (byte_tokenizer(), dated)]
    assert before[0] == after[0] and before[1] != after[1]


def test_rows_before_a_low_limit_are_read_without_a_digest_of_the_file(root, tmp_path):
    file = tmp_path / "train.jsonl"
    write_rows(file, [text(number) for number in range(40)])
    for config, which, eval_limit, kept in (
        (DataConfig(path=str(file), limit=1), "train", None, 0),
        (DataConfig(path=str(file), eval_path=str(file), limit=1), "eval", 1, 0),
        (DataConfig(path=str(file), eval_path=str(file), limit=1), "eval", 9, 1),
        (DataConfig(path=str(file), eval_fraction=0.5), "eval", 1, 2),
    ):
        cached_rows.load(config, which, 0, eval_limit, RejectedRows(config))
        assert len(tables(root)) == kept


def test_a_datum_in_use_keeps_its_identity(root):
    """Its cached reference logprobs are found by identity."""
    pairs = Pairs(preference_datums(as_table(rows_of(pair, 30), "auto"), Renderer(byte_tokenizer()), DataConfig(**SKIP)))
    kept = [datum for pair in pairs for datum in pair]
    assert len(pairs) == 29 and len(kept) == 58
    assert all(pairs[number][side] is kept[2 * number + side] for number in range(29) for side in range(2))
    assert pairs[-1][1] is kept[-1] and [one[0] for one in pairs[27:]] == [kept[54], kept[56]]


def test_the_command_lists_and_clears_the_cache(root, capsys):
    conversation_datums(as_table(rows_of(chat, 20), "auto"), Renderer(byte_tokenizer()), DataConfig(**SKIP))
    [name] = tables(root)
    old = time.time() - 10 * 24 * 3600
    assert run(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["tokens", "18"] and lines[1].endswith("some/train.jsonl:1")
    assert lines[-1].startswith(f"{root}: 1 entry, ")
    assert run(["cache", "clear", "--unused-days", "5"]) == 0 and tables(root) == [name]
    os.utime(root / name / "entry.json", (old, old))
    assert run(["cache", "clear", "--unused-days", "5"]) == 0 and tables(root) == []
    assert run(["cache", "list", "--folder", str(root / "none")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{root / 'none'}: 0 entries, 0.0 MB"


@pytest.mark.parametrize("facts", [None, "{", "[]", '{"facts": {}}'])
def test_a_damaged_table_is_listed_and_cleared_and_a_folder_of_others_stays(facts, root, capsys):
    conversation_datums(as_table(rows_of(chat, 20), "auto"), Renderer(byte_tokenizer()), DataConfig(**SKIP))
    [name] = tables(root)
    (root / name / "entry.json").unlink() if facts is None else (root / name / "entry.json").write_text(facts)
    (root / "judge").mkdir()
    assert run(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["tokens", "damaged"] and lines[-1].startswith(f"{root}: 1 entry, ")
    assert run(["cache", "clear"]) == 0 and tables(root) == ["judge"]


@pytest.mark.parametrize(("words", "named"), [([], "$COOKBOOK_CACHE"), (["--folder", "off"], "--folder")])
def test_a_cache_that_is_off_has_no_list(words, named, monkeypatch, capsys):
    monkeypatch.setenv(cache.CACHE, "off")
    for command in ("list", "clear"):
        assert run(["cache", command, *words]) == 2
        assert capsys.readouterr().err == f"error: cache: {named} is off; name a folder with --folder\n"


def test_a_table_unused_for_a_month_is_removed_by_the_next_write(root):
    config = DataConfig(**SKIP)
    conversation_datums(as_table(rows_of(chat, 20), "auto"), Renderer(byte_tokenizer()), config)
    [name] = tables(root)
    old = time.time() - cache.UNUSED_S - 60
    os.utime(root / name / "entry.json", (old, old))
    conversation_datums(as_table(rows_of(chat, 21), "auto"), Renderer(byte_tokenizer()), config)
    assert len(tables(root)) == 1 and tables(root) != [name]


def test_a_table_that_was_used_this_month_stays(root):
    """Reading is use, and 29 days are no month."""
    table, key = as_table(rows_of(chat, 20), "auto"), cache.key_of("rows", 1)
    table.save(key, [])
    facts = root / key / "entry.json"
    for days in (31, 29):
        old = time.time() - days * 24 * 3600
        os.utime(facts, (old, old))
        if days == 31:
            assert cache.find(root, key) is not None
            assert facts.stat().st_mtime > time.time() - 24 * 3600
    assert cache.clear(root, cache.UNUSED_S) == [] and facts.exists()


def test_the_location_follows_the_key_and_the_environment(monkeypatch):
    monkeypatch.setenv(cache.CACHE, "/a")
    monkeypatch.setenv("HF_HOME", "/h")
    assert cache.location("auto") == Path("/a") and cache.location("/b") == Path("/b") and cache.location("off") is None
    monkeypatch.delenv(cache.CACHE)
    assert cache.location("auto") == Path("/h/cookbook")
    monkeypatch.delenv("HF_HOME")
    default = Path("~/.cache/cookbook").expanduser()
    assert cache.location("auto") == cache.location(True) == default
    for value, place in (("off", None), ("auto", default), ("", default)):
        monkeypatch.setenv(cache.CACHE, value)
        assert cache.location("auto") == place and cache.location("/b") == Path("/b")


def test_yaml_reads_off_as_false(root):
    config = construct(DataConfig, yaml.safe_load("{name: null, cache: off}"), "data")
    assert config.cache is False and cache.location(config.cache) is None
    as_table(rows_of(chat, 20), config.cache)
    assert not root.exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "dpo", "orpo", "grpo"])
def test_runs_with_and_without_the_cache_are_the_same_and_resume_each_other(recipe, root, here):  # noqa: F811
    words = [one for one in SMALL[recipe] if not one.startswith("recipe.steps")]
    assert train(*words, "recipe.steps=3", "data.cache=off", "out=plain") == 0
    assert not root.exists()
    assert train(*words, "recipe.steps=2", "out=cached") == 0
    assert len(tables(root)) >= 3
    made = {path: path.stat().st_mtime_ns for path in root.rglob("*.bin")}
    assert train(*words, "recipe.steps=3", "out=cached") == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.bin")} == made
    assert timeless("plain")[-1] == timeless("cached")[-1] and timeless("plain")[-1]["data/rows_crc32"]
    assert bits(checkpoint("plain")) == bits(checkpoint("cached"))


if __name__ == "__main__":
    for name, (make, config, function, _) in CASES.items():
        print(name, measured(rows_of(make), config, function))
