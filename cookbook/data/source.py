"""Loading of rows: those to train on and those held out, from files, folders, the hub, and mixtures of these.

The library ``datasets`` reads Parquet, the folders that it wrote, and the hub.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cookbook import terminal
from cookbook.data import splits
from cookbook.data.files import COMPRESSED, FORMATS, PARQUET, check_same_format, kind_of, places, read_file
from cookbook.data.row_table import RowBuffer, select
from cookbook.data.rows import DataConfig, RejectedRows, Row, RowSource, sources
from cookbook.data.splits import SequentialReader, SplitReader
from cookbook.errors import ConfigError, DataError, first_line
from cookbook.utils import hub, paths

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Makes this draw independent of others with the same seed.
HELD_OUT = b"held out"
# Suffixes of files that describe a folder and hold no rows.
DOCUMENTS = ("", ".md", ".rst")


def load_rows(
    config: DataConfig,
    which: Literal["train", "eval"] = "train",
    seed: int = 0,
    eval_limit: int | None = None,
    refusals: RejectedRows | None = None,
) -> Sequence[Row]:
    """Return the rows to train on, or those held out, in the order of the data.

    Held-out rows come from ``eval_path`` or ``eval_name``; else from ``eval_split`` of the training data, if that has
    splits; else ``eval_fraction`` of the training rows is drawn by ``seed`` and removed from them; else no rows are held out.

    Args:
        seed: seed of the draws of ``eval_fraction`` and ``mix``.
        eval_limit: maximum number of held-out rows; ``config.limit`` is that of the training rows.
        refusals: gets the rows that cannot be read and ``config.on_bad_row`` skips; they do not count for a limit. None: the
            log gets their number.

    Raises:
        DataError: the data has no rows, or a row cannot be read.
    """
    if refusals is None:
        refusals = RejectedRows(config)
        rows = load_rows(config, which, seed, eval_limit, refusals)
        refusals.warn(len(rows) + len(refusals.found))
        return rows
    eval_split, draws = _held_out_split(config)
    if which == "eval" and (config.eval_path or config.eval_name):
        return _read(_Place.held_out(config), eval_limit, refusals)
    if which == "eval" and not draws:
        if eval_split is None:
            return []
        _refuse_overlap(config, eval_split)
        return _read(_Place.of(config, split=eval_split), eval_limit, refusals)
    if config.mix is not None:
        return _mixture(config, which, draws, seed, refusals)[: eval_limit if which == "eval" else None]
    rows = _read(_Place.of(config), config.limit, refusals)
    if draws:
        rows = _side(rows, _drawn(len(rows), config.eval_fraction, seed), which)
    return rows[:eval_limit] if which == "eval" else rows


def stream_rows(config: DataConfig, refusals: RejectedRows) -> Iterator[Row]:
    """Yield the rows to train on in the order of the data, each when it is used. ``data.mix`` alternates between its sources.

    Raises:
        ConfigError: the rows depend on the number of all rows.
        DataError: the data has no rows, or a row cannot be read.
    """
    _held_out_split(config)
    if config.mix is None:
        return islice(_rows_of(_Place.of(config), None, refusals), config.limit)
    parts = [partial(_rows_of, _Place.of(source.config, source), None, refusals) for source in sources(config)]
    weights = [part.weight for part in config.mix if part.weight is not None]
    return islice(splits.interleaved(parts, weights, config.mix_until), config.limit)


def first_rows(config: DataConfig, refusals: RejectedRows) -> Iterator[Iterator[Row]]:
    """Yield the rows of each source that :func:`stream_rows` reads; without a mixture, there is one source."""
    if config.mix is None:
        yield stream_rows(config, refusals)
    for source in sources(config):
        yield _rows_of(_Place.of(source.config, source), None, refusals)


def has_held_out_rows(config: DataConfig) -> bool:
    """Whether ``load_rows(config, "eval")`` has rows."""
    split, draws = _held_out_split(config)
    return bool(config.eval_path or config.eval_name or split or draws)


def _held_out_split(config: DataConfig) -> tuple[str | None, bool]:
    """Return the split of the training data that is held out, if any, and whether rows are drawn by ``eval_fraction`` instead.

    Raises:
        ConfigError: rows would be drawn from a stream, whose number of rows is unknown.
    """
    own_data, split = config.eval_path or config.eval_name, config.eval_split
    if split and not own_data and config.path is not None and _is_one_split(config.path, split):
        split = None
    draws = config.eval_fraction > 0 and not own_data and not split
    if draws and config.streaming:
        raise ConfigError(
            f"data.eval_fraction={config.eval_fraction:g}: the rows of a stream are not counted, so no share of them can be "
            "drawn; set data.eval_fraction=0, and hold rows out with data.eval_path, or with data.eval_split=train[:1000] and "
            "data.split=train[1000:]"
        )
    return split, draws


def _refuse_overlap(config: DataConfig, eval_split: str) -> None:
    """Raise DataError if a held-out row is also a row to train on."""
    is_file = config.path is not None and all(place.is_file() for place in places(config.path, "data.path"))
    # A percentage needs the number of rows; bad rows are recorded when the split is read.
    reader = _Place.of(config).reader(RejectedRows(config, collect=True))
    part = splits.overlap(config.split, eval_split, reader, one_name=is_file, streaming=config.streaming)
    if part is not None:
        raise DataError(
            f"data.eval_split: {part} is also in data.split={config.split}, so held-out rows would be trained; set for example "
            "data.split=train[1000:] data.eval_split=train[:1000], or name the held-out rows with data.eval_path"
        )


def _is_one_split(path: str | Sequence[str], eval_split: str) -> bool:
    """Whether the data has files only, which have no split besides the rows to train on, and ``eval_split`` is no slice."""
    is_slice = any(not part.is_whole for part in splits.parts(eval_split, "data.eval_split"))
    return not is_slice and all(place.is_file() for place in places(path, "data.path"))


def _drawn(count: int, fraction: float, seed: int) -> set[int]:
    """Return the indices of the held-out rows: at least one row is held out, and at least one is left to train on."""
    if count < 2:
        raise DataError(f"data.eval_fraction: cannot hold rows out of {count}; set data.eval_fraction=0 or add rows")
    num_held_out = min(max(1, round(count * fraction)), count - 1)
    return set(np.random.default_rng((seed, *HELD_OUT)).permutation(count)[:num_held_out].tolist())


def _side(rows: Sequence[Row], held_out: set[int], which: str) -> Sequence[Row]:
    return select(rows, [index for index in range(len(rows)) if (index in held_out) == (which == "eval")])


def _mixture(config: DataConfig, which: str, draws: bool, seed: int, refusals: RejectedRows) -> list[Row]:
    """Return the rows of ``data.mix``; held-out rows are drawn before the sources are mixed, and each is held out once."""
    parts = sources(config)
    rows = [_read(_Place.of(source.config, source), None, refusals) for source in parts]
    sizes = [len(part) for part in rows]
    if draws:
        held_out = _drawn(sum(sizes), config.eval_fraction, seed)
        starts = np.cumsum([0, *sizes])
        rows = [
            _side(part, {index - start for index in held_out}, which)
            for part, start in zip(rows, starts.tolist(), strict=False)
        ]
    if which == "eval":
        return splits.mixed([part for part in rows if part], [len(part) for part in rows if part], seed)
    if empty := next((source.key for source, part in zip(parts, rows, strict=True) if not part), None):
        raise DataError(f"{empty}: every row is held out; lower data.eval_fraction or remove the entry")
    weights = [part.weight for part in config.mix or () if part.weight is not None]
    counts = splits.mixture_counts([len(part) for part in rows], weights or None, config.mix_until)
    mixed = splits.mixed(rows, counts, seed)[: config.limit]
    of_each = Counter(row.source.key for row in mixed if row.source)
    shares = [
        f"{number:,} rows ({number / len(mixed):.1%}) from the {len(part):,} of {source_text(source.config)}"
        for source, part in zip(parts, rows, strict=True)
        for number in [of_each[source.key]]
    ]
    terminal.say(f"data: a mixture of {len(mixed):,} rows: {', '.join(shares)}")
    return mixed


def source_text(config: DataConfig) -> str:
    """Return the source of the training rows for messages: a path, or a name with its split."""
    if config.mix is not None:
        return f"a mixture of {', '.join(source_text(source.config) for source in sources(config))}"
    if config.path is None:
        return f"{config.name}[{config.split}]"
    # Files have one split, whose name says nothing.
    return _listed(config.path) + ("" if splits.parts(config.split)[0].is_whole else f"[{config.split}]")


def _listed(path: str | Sequence[str]) -> str:
    first, *others = [path] if isinstance(path, str) else path
    return paths.shown(Path(first)) + (f" and {len(others)} more" if others else "")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where rows are read. ``prefix`` of the keys ``path`` and ``split`` in errors; ``source``: of a mixture."""

    path: str | Sequence[str] | None
    name: str | None
    subset: str | None
    split: str
    streaming: bool
    prefix: str = "data."
    source: RowSource | None = None
    cache: str | bool = "auto"

    @classmethod
    def of(cls, config: DataConfig, source: RowSource | None = None, split: str | None = None) -> _Place:
        prefix = f"{source.key}." if source else "data."
        return cls(
            config.path, config.name, config.subset, split or config.split, config.streaming, prefix, source, config.cache
        )

    @classmethod
    def held_out(cls, config: DataConfig) -> _Place:
        """Return the place of ``eval_path`` or ``eval_name``; by default, its split is the one to train on, unsliced."""
        names = {part.name for part in splits.parts(config.split)}
        if config.eval_split is None and len(names) > 1:
            raise ConfigError(f"data.eval_split: missing, and data.split={config.split} names several; name the held-out one")
        split = config.eval_split or names.pop()
        return cls(config.eval_path, config.eval_name, config.subset, split, config.streaming, "data.eval_", cache=config.cache)

    def reader(self, refusals: RejectedRows) -> Callable[[str], SplitReader]:
        """Return a function from the name of a split to its rows.

        Raises:
            ConfigError: neither a path nor a name is given.
            DataError: a path does not exist, or the files differ in format.
        """
        if self.path is None and self.name is None:
            raise ConfigError("data: no data given; pass data.path=<file or folder> or data.name=<hub id>")
        if self.path is None:
            return lambda split: read_hub(str(self.name), self.subset, split, self.streaming)
        folders = places(self.path, f"{self.prefix}path")
        files = [place for place in folders if place.is_file()]
        names = {part.name for part in splits.parts(self.split, f"{self.prefix}split")}
        if files and len(names) > 1:
            raise DataError(f"{self.prefix}split: {files[0]} is one split, got {self.split}; slice one name, or pass a folder")
        if files:
            check_same_format(files, f"{self.prefix}path")
        return partial(self._split, folders, refusals)

    def _split(self, folders: Sequence[Path], refusals: RejectedRows, split: str) -> SplitReader:
        def one(place: Path) -> SplitReader:
            if place.is_file():
                return _of_file(place, refusals, self.streaming)
            return read_folder(place, self.subset, split, refusals, self.streaming)

        def all_of_them() -> Iterator[Row]:
            for place in folders:
                yield from one(place).between(0, None)

        return one(folders[0]) if len(folders) == 1 else SequentialReader(all_of_them)

    @property
    def shown(self) -> str:
        """The path relative to the current folder, or the name with its split."""
        return _listed(self.path) if self.path else f"{self.name}[{self.split}]"

    def __str__(self) -> str:
        return self.path if isinstance(self.path, str) else self.shown


def _read(place: _Place, limit: int | None, refusals: RejectedRows) -> Sequence[Row]:
    """Return the first ``limit`` rows; the path takes precedence over the name."""
    buffer = RowBuffer(place.cache)
    with terminal.doing(f"reading {place.shown}", noun="rows") as activity:
        for row in _rows_of(place, limit, refusals):
            buffer.append(row)
            activity.count += 1
    return buffer.rows()


def _rows_of(place: _Place, limit: int | None, refusals: RejectedRows) -> Iterator[Row]:
    """Yield the first ``limit`` rows. Raise DataError at the end if the place has none."""
    before, count = len(refusals.found), 0
    rows = splits.read(place.split, place.reader(refusals), f"{place.prefix}split", streaming=place.streaming)
    for row in islice(rows, limit):
        count += 1
        yield row if place.source is None else Row(row.where, row.values, place.source)
    refusals.check_left(before, len(refusals.found) - before, count)
    if not count and any(not part.is_whole for part in splits.parts(place.split)):
        raise DataError(f"{place.prefix}split: {place.split} has no rows in {place}; take another slice")
    if not count and len(refusals.found) == before:
        raise DataError(f"{place}: holds no rows; give a file with at least one")


def local_files(config: DataConfig, which: Literal["train", "eval"]) -> list[Path] | None:
    """Return the files that :func:`load_rows` may read, of a folder all; None if it may read others.

    Data of the hub, mixtures, and folders whose README names files may have files elsewhere.
    """
    path, name = (config.eval_path, config.eval_name) if which == "eval" else (None, None)
    if path is None and name is None:
        path = config.path
    if path is None or config.mix is not None:
        return None
    # Reading the data raises the error.
    try:
        roots = places(path, "data.path")
    except DataError:
        return None
    if any(_card_names_files(place) for place in roots):
        return None
    return [file for place in roots for file in (_files_below(place) if place.is_dir() else [place])]


def _files_below(folder: Path) -> list[Path]:
    """Return all files in a folder, sorted. As for ``datasets``, a link to a folder is a folder."""
    walk = os.walk(folder, followlinks=True)
    return sorted(file for parent, _, names in walk for name in names if (file := Path(parent, name)).is_file())


def _card_names_files(folder: Path) -> bool:
    """Whether the README of a folder has settings for ``datasets``, such as patterns and addresses of files."""
    card = folder / "README.md"
    return card.is_file() and "\nconfigs:" in card.read_text(encoding="utf-8", errors="replace")


class TableReader:
    """The rows of a table of ``datasets``. ``index`` counts from 0, as in ``dataset[index]``."""

    def __init__(self, table: Dataset | IterableDataset, name: str, index: str) -> None:
        with _one_line(name):
            for column, feature in (table.features or {}).items():
                if (plain := _plain_feature(feature)) != feature:
                    table = table.cast_column(column, plain)
        self._table, self._name, self._index = table, name, index

    def count(self) -> int:
        """Return the number of rows. A streamed table has no number; :func:`splits.read` does not ask for it."""
        from datasets import Dataset

        assert isinstance(self._table, Dataset)
        return len(self._table)

    def between(self, start: int, stop: int | None) -> Iterator[Row]:
        with _one_line(self._name):
            for number, values in enumerate(self._part(start, stop), start):
                place = self._name + self._index.format(number)
                yield Row(place, {column: _without_fill(value) for column, value in values.items()})

    def _part(self, start: int, stop: int | None) -> Dataset | IterableDataset:
        from datasets import Dataset

        if (start, stop) == (0, None):
            return self._table
        if isinstance(self._table, Dataset):
            size = len(self._table)
            return self._table.select(range(min(start, size), min(size, size if stop is None else stop)))
        return self._table.skip(start) if stop is None else self._table.skip(start).take(stop - start)


def _load_dataset(path: str, **options: Any) -> Dataset | IterableDataset:
    """Return a split, without the progress bars of ``datasets``: the status line shows the progress of reading."""
    import datasets

    shows_bars = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        table: Dataset | IterableDataset = datasets.load_dataset(path, **options)
        return table
    finally:
        if shows_bars:
            datasets.enable_progress_bars()


def _of_file(path: Path, refusals: RejectedRows, streaming: bool) -> SplitReader:
    """Return the rows of a file. Those of a Parquet file can all be read or none, so that ``refusals`` gets none of them."""
    if path.suffix.lower() != PARQUET:
        return SequentialReader(partial(read_file, path, refusals))
    from pyarrow import parquet  # type: ignore[import-untyped]

    with _one_line(str(path)):
        # `datasets` refuses a file without rows, which may be one of several.
        if not parquet.read_metadata(path).num_rows:
            return SequentialReader(lambda: iter(()))
        table = _load_dataset("parquet", data_files=str(path), split="train", streaming=streaming)
        return TableReader(table, str(path), "[{}]")


def read_folder(path: Path, subset: str | None, split: str, refusals: RejectedRows, streaming: bool) -> SplitReader:
    """Return a split of a folder: ``<split>.jsonl`` (or another suffix), the files that ``datasets`` takes for the split by
    their names, or what ``save_to_disk`` wrote.

    Raises:
        DataError: the split is unknown or has files of several formats, or ``datasets`` cannot read the folder.
    """
    from_disk = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    names = [f"{split}{suffix}{packed}" for suffix in FORMATS for packed in ("", *COMPRESSED)]
    own = [path / name for name in names if not from_disk and (path / name).is_file()]
    if len(own) > 1:
        raise DataError(f"{path}: {own[0].name} and {own[1].name} both are the split {split}; pass one as path")
    if own:
        return _of_file(own[0], refusals, streaming)
    from datasets import DatasetDict, load_from_disk

    with _one_line(str(path)):
        if not from_disk and subset is None and (shards := _shards(path, split)):
            read = partial(_of_file, refusals=refusals, streaming=streaming)
            return SequentialReader(lambda: (row for file in shards for row in read(file).between(0, None)))
        table = (
            load_from_disk(str(path)) if from_disk else _load_dataset(str(path), name=subset, split=split, streaming=streaming)
        )
        if isinstance(table, DatasetDict):
            if split not in table:
                raise DataError(f"{path}: no split {split!r}; it has {', '.join(table)}")
            table = table[split]
    return TableReader(table, f"{path}[{split}]", ":{}")


def _shards(path: Path, split: str) -> list[Path]:
    """Return the sorted files of a split by the rules of ``datasets`` for names; empty if it has to read the folder itself.

    A folder with settings in its README or with other files than rows, such as images, is left to ``datasets``.
    """
    from datasets.data_files import DataFilesList, get_data_patterns

    if _card_names_files(path):
        return []
    patterns = get_data_patterns(str(path))
    files: dict[str, list[Path]] = {}
    for name, split_patterns in patterns.items():
        listed = map(Path, DataFilesList.from_patterns(split_patterns, base_path=str(path)))
        files[str(name)] = sorted(file for file in listed if kind_of(file) not in DOCUMENTS)
    if any(kind_of(file) not in FORMATS for split_files in files.values() for file in split_files) or not any(files.values()):
        return []
    if split not in files:
        raise DataError(f"{path}: no split {split!r}; it has {', '.join(files)}")
    check_same_format(files[split], str(path))
    return files[split]


def read_hub(name: str, subset: str | None, split: str, streaming: bool) -> SplitReader:
    """Return a split of a dataset of the Hugging Face hub, or of its copy in the local cache if ``HF_HUB_OFFLINE`` is set.

    Raises:
        DataError: the hub is unreachable, or the dataset, subset or split is unknown.
    """
    if not os.environ.get("HF_DATASETS_OFFLINE") and not hub.answers():
        raise DataError(
            f"data.name: the hub cannot be reached for {name}; pass data.path=<file or folder with the data>, "
            "or set HF_HUB_OFFLINE=1 if it was downloaded before"
        )
    with _one_line(name):
        table = _load_dataset(name, name=subset, split=split, streaming=streaming)
    return TableReader(table, f"{name}[{split}]", ":{}")


def _plain_feature(feature: object) -> object:
    """Return the feature with images, sound and videos as undecoded files, because decoding needs other packages."""
    from datasets import Audio, Image, LargeList, List, Video

    if isinstance(feature, Audio | Image | Video):
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, List | LargeList):
        return dataclasses.replace(feature, feature=_plain_feature(feature.feature))
    return {name: _plain_feature(part) for name, part in feature.items()} if isinstance(feature, dict) else feature


def _without_fill(value: object) -> object:
    """Return ``value`` without the nulls that Arrow adds to give all objects of a column the same keys."""
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        return {key: _without_fill(part) for key, part in value.items() if part is not None}
    return [_without_fill(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Turn errors of ``datasets`` and its libraries about data into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        # The cause of a DatasetGenerationError has the useful text.
        problem = first_line(error.__cause__ or error)
        is_offline = isinstance(error, ConnectionError)
        remedy = (
            "pass data.path=<file or folder with the data>"
            if is_offline
            else "check data.name or data.path, data.subset and data.split"
        )
        if Path(where).is_dir():
            problem = f"cannot read the folder as a dataset ({problem.rstrip('.')})"
            raise DataError(f"{where}: {problem}; pass one of its files, or {remedy}") from error
        raise DataError(f"{where}: {problem}; {remedy}") from error
