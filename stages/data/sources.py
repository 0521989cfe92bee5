"""Row sources: JSONL, Parquet and Hugging Face dataset directories behind one small interface, with slices.

Invariants: a source never holds decoded rows, only offsets (JSONL) or Arrow columns (tables); the order of rows is the
order in the file; a slice follows Python's rules and is applied before anything is filtered or shuffled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from models.disk import open_file
from stages.errors import RowError, SourceError

_SLICED = re.compile(r"(?P<path>.*)@\[(?P<body>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*")
_JSONL = (".jsonl", ".ndjson", ".json")
_FORMATS = "JSONL (.jsonl, .ndjson, .json), Parquet (.parquet) or a Hugging Face dataset directory"


def parse_spec(spec: str) -> tuple[str, slice]:
    """Split `path@[a:b]` into path and slice; without a slice, all rows."""
    matched = _SLICED.fullmatch(spec)
    if matched is None:
        return spec, slice(None)
    bounds = _BOUNDS.fullmatch(matched["body"])
    if bounds is None:
        raise SourceError(
            f"prompt_data {spec!r}: the slice [{matched['body']}] is not of the form [a:b]; "
            "write two integers, each of which may be left out or negative, as in train.jsonl@[0:1000]"
        )
    start, stop = (None if bounds[name] is None else int(bounds[name]) for name in ("start", "stop"))
    return matched["path"], slice(start, stop)


def open_source(spec: str, keys: Sequence[str]) -> Source:
    """Open one entry of `prompt_data`. Of a table only the columns in `keys` are read."""
    path, rows = parse_spec(spec)
    source = _open_path(spec, path, keys)
    total = len(source)
    source.keep(rows)
    if not len(source):
        what = "the file has no rows" if not total else f"the slice of {total} rows is empty"
        raise SourceError(f"prompt_data {spec!r}: {what}; choose a range that holds at least one row")
    return source


def _open_path(spec: str, path: str, keys: Sequence[str]) -> Source:
    where = Path(path).expanduser()
    if where.is_dir():
        return open_dataset(path, where, keys)
    if not where.exists():
        raise SourceError(
            f"prompt_data {spec!r}: there is no file or directory {str(where)!r} (current directory "
            f"{os.getcwd()!r}); give the path of {_FORMATS}"
        )
    suffix = where.suffix.lower()
    if suffix in _JSONL:
        return JsonLines(path, where)
    if suffix in (".parquet", ".pq"):
        return open_parquet(path, where, keys)
    raise SourceError(f"prompt_data {spec!r}: the suffix {suffix!r} names no known format; use {_FORMATS}")


class JsonLines:
    """One JSON value per line, found by byte offset. Blank lines are no rows; a UTF-8 byte order mark is skipped."""

    columns: Sequence[str] | None = None  # each row has its own

    def __init__(self, file: str, path: Path) -> None:
        self.file = file
        self._handle = open_file(path)
        self._places = self._scan()  # [rows, 3]: first byte, end, 1-based line
        self._decoder = msgspec.json.Decoder()

    def _scan(self) -> npt.NDArray[np.int64]:
        places: list[int] = []
        offset = 3 if self._handle.read(3) == b"\xef\xbb\xbf" else 0
        self._handle.seek(offset)
        for number, line in enumerate(self._handle, start=1):
            if not line.isspace():
                places += (offset, offset + len(line), number)
            offset += len(line)
        head = os.pread(self._handle.fileno(), 64, places[0]) if places else b""
        if head.split(b"\n", 1)[0].strip() in (b"[", b"{"):  # what an indented JSON document begins with
            raise SourceError(f"{self.file!r} is one JSON document over several lines; write one JSON object per line")
        return np.array(places, np.int64).reshape(-1, 3)

    def keep(self, rows: slice) -> None:
        """Keep these rows only."""
        self._places = self._places[rows]

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> object:
        """Raises RowError for a row that cannot be read; its siblings stay readable."""
        start, end, _ = self._places[index].tolist()
        # pread has no file position, so that rows may be read from several threads.
        data = os.pread(self._handle.fileno(), end - start, start)
        try:
            row: object = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RowError(f"not valid JSON ({error})") from None
        return row

    def line(self, index: int) -> int:
        """1-based line of the index, for messages."""
        return int(self._places[index, 2])


class Table:
    """Rows of a table, read one at a time, without the nulls that stand for absent fields of structs."""

    def __init__(self, file: str, columns: Sequence[str], rows: int, read: Callable[[int], dict[str, object]]) -> None:
        self.file = file
        self.columns: Sequence[str] | None = tuple(columns)
        self._rows, self._read = range(rows), read

    def keep(self, rows: slice) -> None:
        """Keep these rows only."""
        self._rows = self._rows[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> object:
        return without_nulls(self._read(self._rows[index]))

    def line(self, index: int) -> int:
        return self._rows[index] + 1


Source = JsonLines | Table  # rows by index


def without_nulls(value: object) -> object:
    """The value without null fields at any depth: tables store a missing field of a struct as null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def open_parquet(file: str, path: Path, keys: Sequence[str]) -> Table:
    """The wanted columns of a Parquet file as Arrow memory (compact, no Python objects)."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        columns = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[key for key in keys if key in columns])
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"prompt file {file!r} cannot be read as Parquet ({error}); check file and suffix") from error
    if not table.column_names:
        # A table without columns has no rows: keep one column, so that the missing key is reported and not emptiness.
        table = parquet.read_table(path, columns=columns[:1])
    arrays = {name: table.column(name) for name in table.column_names}
    return Table(file, columns, table.num_rows, lambda index: {n: array[index].as_py() for n, array in arrays.items()})


def open_dataset(file: str, path: Path, keys: Sequence[str]) -> Table:
    """A directory written by `Dataset.save_to_disk`."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "dataset_info.json").exists())
        raise SourceError(
            f"prompt_data {file!r} holds several splits ({', '.join(splits)}); name one, "
            f"as in {file.rstrip('/')}/{splits[0] if splits else 'train'}"
        )
    if not (path / "dataset_info.json").exists():
        raise SourceError(
            f"prompt_data {file!r} is a directory, but not one written by Dataset.save_to_disk (no dataset_info.json); "
            f"give a single file, or {_FORMATS}"
        )
    try:
        import datasets
    except ImportError as error:
        raise SourceError(
            f"prompt_data {file!r} is a Hugging Face dataset directory, which needs the package `datasets`; "
            "install it, or export the data to Parquet"
        ) from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds; all of them mean that the directory is unusable
        raise SourceError(f"prompt_data {file!r} cannot be loaded as a dataset directory ({error})") from error
    columns = list(dataset.column_names)
    chosen = dataset.select_columns([key for key in keys if key in columns] or columns[:1])
    return Table(file, columns, len(chosen), lambda index: dict(chosen[index]))
