"""Rows of a data set, whatever holds it: each source answers how many rows it has and one row at a time.

A row is a mapping of JSON types. A source is read lazily and never changes while a run lasts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from streamrl.config import DataConfig
from streamrl.errors import ConfigError, DataError
from streamrl.importing import load_object

Row = dict[str, Any]


class Rows(Protocol):
    """A data set."""

    name: str
    """For error messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`; raises `DataError` when it cannot be read."""
        ...


class JsonlRows:
    """A file with one JSON object in each line; empty lines do not count."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = _existing_file(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = self._index()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = int(self._starts[index])
        line = self._bytes[start : self._line_end(start)]
        try:
            return msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError as error:
            number = self._bytes[:start].count(b"\n") + 1
            raise DataError(
                f"{self._path}, line {number}: not a JSON object ({error}); it begins {line[:60]!r}"
            ) from error

    def _index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        starts: list[int] = []
        start = 0
        while start < len(self._bytes):
            end = self._line_end(start)
            if self._bytes[start:end].strip():
                starts.append(start)
            start = end + 1
        return np.array(starts, dtype=np.int64)

    def _line_end(self, start: int) -> int:
        end = self._bytes.find(b"\n", start)
        return len(self._bytes) if end < 0 else end


class ParquetRows:
    """A Parquet file, held as Arrow columns."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        try:
            self._table = pyarrow.parquet.read_table(_existing_file(path), memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return json_types(self._table.slice(index, 1).to_pylist()[0], where=f"{self.name}, row {index}")


class HfDiskRows:
    """A folder that `datasets.Dataset.save_to_disk` wrote."""

    def __init__(self, path: Path) -> None:
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ConfigError(
                'data.source = "hf_disk" needs the datasets package: pip install "streamrl[datasets]"'
            ) from error
        self.name = str(path)
        if not path.is_dir():
            raise DataError(f"data.path = {str(path)!r}: there is no such folder")
        try:
            loaded = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a folder that datasets.save_to_disk wrote: {error}") from error
        if isinstance(loaded, datasets.DatasetDict):
            raise DataError(f"{path} holds the splits {', '.join(loaded)}: set data.path to one of their folders")
        self._dataset = loaded

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return json_types(self._dataset[index], where=f"{self.name}, row {index}")


class ReasoningGymRows:
    """A task of reasoning-gym; the whole entry is the row, the prompt is its `question`."""

    def __init__(self, task: str, *, size: int, seed: int, args: dict[str, Any]) -> None:
        self.name = f"reasoning-gym task {task}"
        self._dataset = create_reasoning_gym(task, size=size, seed=seed, args=args)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return json_types(dict(self._dataset[index]), where=f"{self.name}, entry {index}")


class PythonRows:
    """A function of the user's, `function(index, seed, **args)`, that answers one row."""

    def __init__(self, spec: str, *, size: int, seed: int, args: dict[str, Any]) -> None:
        self.name = spec
        self._function: Callable[..., Any] = load_object(spec, key="data.path")
        self._size = size
        self._seed = seed
        self._args = args

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        row = self._function(index, self._seed, **self._args)
        if not isinstance(row, dict):
            raise DataError(f"{self.name} answered a {type(row).__name__} for row {index}; it must answer a dict")
        return json_types(row, where=f"{self.name}, row {index}")


def open_rows(config: DataConfig, *, seed: int) -> Rows:
    """The data set that `config` names. Raises `DataError` or `ConfigError` when there is none, or it is empty."""
    match config.source:
        case "jsonl":
            rows: Rows = JsonlRows(Path(config.path))
        case "parquet":
            rows = ParquetRows(Path(config.path))
        case "hf_disk":
            rows = HfDiskRows(Path(config.path))
        case "reasoning_gym":
            rows = ReasoningGymRows(config.path, size=config.size, seed=seed, args=config.args)
        case "python":
            rows = PythonRows(config.path, size=config.size, seed=seed, args=config.args)
    if len(rows) == 0:
        raise DataError(f"{rows.name} has no rows")
    return rows


def create_reasoning_gym(task: str, *, size: int, seed: int, args: dict[str, Any]) -> Any:
    """The reasoning-gym data set of `task`; equal arguments give equal entries in every process."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError('reasoning-gym is not installed: pip install "streamrl[rewards]"') from error
    if task not in DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:10]
        raise ConfigError(f"data.path = {task!r}: reasoning-gym has no such task; near: {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.args do not fit the reasoning-gym task {task}: {error}") from error


def json_types(row: Row, *, where: str) -> Row:
    """`row` in JSON types: tuples become lists, dates strings, NumPy values plain ones."""
    try:
        return msgspec.json.decode(_json.encode(row), type=Row)
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: holds a value that is no JSON type: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"a {type(value).__name__}")


_json = msgspec.json.Encoder(enc_hook=_plain)


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"data.path = {str(path)!r}: there is no such file (working directory: {Path.cwd()})")
    return path
