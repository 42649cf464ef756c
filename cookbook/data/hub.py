"""Rows through the ``datasets`` library: the hub, Parquet files, folders of any layout it knows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook import hub
from cookbook.data.rows import Row
from cookbook.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def read_table(path: Path, limit: int | None) -> Iterator[Row]:
    """A ``.parquet`` file."""
    from datasets import load_dataset

    with _one_line(str(path)):
        table = load_dataset("parquet", data_files=str(path), split="train")
    yield from _rows(table, str(path), "[{}]", limit)


def read_folder(path: Path, subset: str | None, split: str, limit: int | None) -> Iterator[Row]:
    """A folder written by ``save_to_disk``, or laid out like a dataset repository.

    Raises:
        DataError: no such split, or nothing ``datasets`` can read.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    with _one_line(str(path)):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            table = load_from_disk(str(path))
            if isinstance(table, DatasetDict):
                if split not in table:
                    raise DataError(f"{path}: no split {split!r}; it has {', '.join(table)}")
                table = table[split]
        else:
            table = load_dataset(str(path), name=subset, split=split)
    yield from _rows(table, f"{path}[{split}]", ":{}", limit)


def read_hub(name: str, subset: str | None, split: str, streaming: bool, limit: int | None) -> Iterator[Row]:
    """A dataset of the Hugging Face hub, from the local cache when it is there and ``HF_HUB_OFFLINE`` is set.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset, subset or split.
    """
    from datasets import load_dataset

    if not os.environ.get("HF_DATASETS_OFFLINE") and not hub.answers():
        raise DataError(
            f"data.name: the hub cannot be reached for {name}; pass data.path=<file or folder with the data>, "
            "or set HF_HUB_OFFLINE=1 if it was downloaded before"
        )
    with _one_line(name):
        table = load_dataset(name, name=subset, split=split, streaming=streaming)
    yield from _rows(table, f"{name}[{split}]", ":{}", limit)


def _rows(table: Dataset | IterableDataset, name: str, index: str, limit: int | None) -> Iterator[Row]:
    """``index`` counts from 0, as in ``dataset[index]``."""
    with _one_line(name):
        for number, values in enumerate(islice(_undecoded(table), limit)):
            yield Row(name + index.format(number), {column: _without_fill(value) for column, value in values.items()})


def _undecoded(table: Any) -> Any:
    """Images, sound and videos as files: a row with them is refused, and decoding them needs other packages."""
    for column, feature in (table.features or {}).items():
        if (plain := _plain_feature(feature)) != feature:
            table = table.cast_column(column, plain)
    return table


def _plain_feature(feature: Any) -> Any:
    from datasets import Audio, Image, LargeList, List, Video

    if isinstance(feature, Audio | Image | Video):
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, List | LargeList):
        return dataclasses.replace(feature, feature=_plain_feature(feature.feature))
    return {name: _plain_feature(part) for name, part in feature.items()} if isinstance(feature, dict) else feature


def _without_fill(value: Any) -> Any:
    """``value`` without the nulls by which Arrow gives all objects of a column the same keys: arguments of other tools."""
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        return {key: _without_fill(part) for key, part in value.items() if part is not None}
    return [_without_fill(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    """What ``datasets`` and the libraries under it raise about data, as one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        cause = error.__cause__ or error  # a DatasetGenerationError says nothing; what it wraps does
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        if Path(where).is_dir():
            remedy = f"pass one of its files, or {_advice(error)}"
            raise DataError(f"{where}: cannot read the folder as a dataset ({lines[0].rstrip('.')}); {remedy}") from error
        raise DataError(f"{where}: {lines[0]}; {_advice(error)}") from error


def _advice(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "pass data.path=<file or folder with the data>"
    return "check data.name or data.path, data.subset and data.split"
