"""Data sources -> rows, each with its place: files and patterns of files, `repo[:config]@split` of the Hugging Face hub
or of a directory, and word problems made here.

This file reads jsonl itself, line by line, so that an error names the broken line; pyarrow reads parquet, and the
`datasets` library the rest.
"""

from __future__ import annotations

import ast
import codecs
import csv
import functools
import glob
import json
import math
import os
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algorithms.config import Problem
from rollout.data.word_problems import NAME as WORD_PROBLEMS
from rollout.data.word_problems import word_problems
from rollout.similar_file import PACKED
from rollout.task_config import HUB_SOURCE, SUFFIXES, CustomData, FileDataConfig, is_pattern, is_saved, matching_files
from rollout.user_code.custom_code import own_line

BATCH_ROWS = 1000
LARGEST_INT = 2**63 - 1
MAX_DEPTH = 100
"""Levels of nesting in a row; JSON libraries that rows go through end at about 250."""
MAX_LINE_BYTES = 2**26
"""Longest line of a jsonl file; a longer line is not kept in memory."""
HEAD_BYTES = 2**16
"""Bytes at the beginning of a file by which text is told from a compressed file."""
PACKED_HEADS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1")
"""First bytes of gzip, bz2, xz, zstd and zip files, and of parquet files, which are no text."""
MEDIUM = {"bytes", "path"}
"""Fields of a picture, or its like, in a column of `datasets`."""
_SHORT_FLOATS: Mapping[str | None, type] = {"float16": np.float16, "float32": np.float32}
"""Type of a column -> type whose text is the shortest that means the number."""
MORE_CELLS = "Length of header or names does not match length of data"
"""What pandas warns of where it drops cells of csv."""
TEXT_CELLS: Mapping[str, Any] = {
    "converters": dict.fromkeys(range(1000), str), "keep_default_na": False, "index_col": False,
    "skipinitialspace": True,
}  # fmt: skip
"""Options for a reader of csv: the cells of every column, by its position, are text. CSV has no types: guessed ones
would turn 007 into 7, NA into null and, beside an empty cell, 42 into 42.0. Where rows have more fields than the header
the first would be an index, and all others move. Some writers put a space behind each comma."""
SHOWN_CHARS = 1000
"""Characters that are kept of a line that cannot be read."""


class DataError(ValueError):
    """The data cannot be used: `problems` name keys, files and rows. Data are read before anything is started."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


class RawRow(NamedTuple):
    """One row of a source, not yet checked."""

    number: int
    """Position of the row in the file, from 1; for jsonl the line number, with blank lines counted."""
    values: dict[str, Any]
    """Column -> value; for a line that could not be read, the text of the line."""
    problem: str = ""
    """Reason why the row could not be read; "" if it could."""
    place: str = ""
    """File and position there of a row of several files, whose `number` counts on over the files; else ""."""


@dataclass(kw_only=True, slots=True)
class BadRow:
    """A row that cannot become a prompt."""

    source: str
    number: int
    problem: str
    place: str = ""
    """As in `RawRow`."""
    values: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int | None = None
    """Number of tokens of a prompt that is too long; None if the row has another problem."""

    @property
    def unit(self) -> str:
        """Unit that `number` counts: "line" or "row"."""
        return row_unit(self.source)

    def __str__(self) -> str:
        return f"{self.place or f'{self.source}, {self.unit} {self.number}'}: {self.problem}"


def row_unit(source: str) -> str:
    """Name of a row of `source` in messages: "line" or "row"."""
    return "line" if Path(source).suffix.lower() == ".jsonl" else "row"


def read_rows(source: str) -> Iterator[RawRow]:
    """All rows of a file, of the files of a pattern, of a hub data set or of word problems, in the order of the source.

    Raises ValueError, with the way out, for a source that cannot be read at all or is of no known kind.
    """
    path = Path(source)
    hub = None if path.is_file() else HUB_SOURCE.fullmatch(source)
    if hub is not None and hub["repo"] == WORD_PROBLEMS:
        return (RawRow(number, row) for number, row in enumerate(word_problems(hub["config"], hub["split"]), start=1))
    if hub is not None:
        return _shallow(_hub_rows(source, repo=hub["repo"], name=hub["config"], split=hub["split"]))
    if is_pattern(source):
        return _rows_of_all(matching_files(source))
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        way_out = ". Unpack it" if suffix in PACKED else ""
        raise ValueError(f"{source}: the suffix must be one of {', '.join(SUFFIXES)}, got {suffix!r}{way_out}")
    of_json = JSON_READERS.get(suffix)
    return _shallow(of_json(path) if of_json is not None else _file_rows(path, suffix))


def _rows_of_all(files: Sequence[str]) -> Iterator[RawRow]:
    """The rows of each file after those of the one before; their numbers count on."""
    before = 0
    for file in files:
        number = 0
        for number, values, problem, _ in read_rows(file):
            yield RawRow(before + number, values, problem, f"{file}, {row_unit(file)} {number}")
        before += number


def rows_of(config: FileDataConfig, source: str) -> Iterator[RawRow]:
    """All rows of a `source` of `config`. Raises ValueError like `read_rows`, and for what a user's source raises."""
    if not isinstance(config, CustomData):
        yield from read_rows(source)
        return
    where = f"{config.source}, rows({source!r})"
    try:
        for number, row in enumerate(config.rows(source), start=1):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {number} is no mapping of columns to values, but {type(row).__name__}")
            yield RawRow(number, dict(row))
    except (Exception, SystemExit) as error:
        line = own_line(traceback.format_exc())
        raise ValueError(f"{where}: {type(error).__name__}: {error}{line}") from error


def on_hub(config: FileDataConfig, sources: Iterable[str]) -> list[str]:
    """Those of the `sources` of `config` of which a start reads no row: they are neither a user's nor on this disk."""
    return [source for source in sources if not isinstance(config, CustomData) and not is_local(source)]


def is_local(source: str) -> bool:
    """True if no network is needed to read `source`."""
    hub = HUB_SOURCE.fullmatch(source)
    if Path(source).is_file() or hub is None:
        return True
    return hub["repo"] == WORD_PROBLEMS or Path(hub["repo"]).is_dir()


def _shallow(rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """The rows; a row that is nested too deep for the code that reads it later is marked as unreadable."""
    for row in rows:
        yield RawRow(row.number, {}, f"is nested more than {MAX_DEPTH} levels deep") if _is_deep(row.values) else row


def _is_deep(value: object) -> bool:
    """True for a value with more than MAX_DEPTH levels; level by level, because recursion has a limit too."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            member
            for one in level
            if isinstance(one, dict | list | tuple)
            for member in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def plain(value: object) -> Any:
    """`value` in JSON types. NaN and infinity become None; dates and other types without a JSON form become text."""
    if isinstance(value, dict):
        return {plain_text(str(key)): plain(member) for key, member in value.items() if not _is_binary(member)}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value if not _is_binary(member)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Larger integers are exact as text only.
        return value if -LARGEST_INT <= value <= LARGEST_INT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain_text(str(value))


def plain_text(text: str) -> str:
    """`text` without halves of surrogate pairs, which no Unicode encoding can represent."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def checked_text(text: str, key: str) -> str:
    """`text`, the value of the column `key`. Raises ValueError if it is no Unicode text: such a row is damaged."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} is not text: half of a surrogate pair at character {error.start + 1}") from error
    return text


_OF_NUMPY = re.compile(
    r"""(?P<value>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\]}])(?:(?:,\s*dtype=[\w.<>']+)?\))?"""
    r"""(?P<apart>\s+(?=['"\[{]|array\())?|(?P<open>['"].*)|\barray\((?=\[)""",
    re.DOTALL,
)
"""A value of a list, with what numpy writes around it: array(['a', 'b'], dtype=object), and ['a' 'b'] without commas,
which are one text to Python. A text that nobody ends is one match, so that its quotes are read once."""


def written_value(text: str) -> Any:
    """The value that `text` writes as JSON, as Python or as numpy does: pandas and `datasets` give cells of csv such.

    None if it is none of them. Nothing is executed.
    """
    python = _OF_NUMPY.sub(
        lambda found: found["open"] or (found["value"] or "") + ("," if found["apart"] else ""), text
    )
    for read, form in ((json.loads, text), (ast.literal_eval, python), (ast.literal_eval, text)):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(form)
    return None


def _is_binary(value: object) -> bool:
    """True for binary values, and pictures and sounds as `datasets` stores them, which Parity does not read."""
    return isinstance(value, bytes | bytearray | memoryview) or (isinstance(value, dict) and value.keys() == MEDIUM)


def _line_rows(path: Path) -> Iterator[RawRow]:
    _refuse_compressed(path)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                while not line.endswith(b"\n") and line:
                    line = file.readline(MAX_LINE_BYTES)
                yield RawRow(number, {}, f"is longer than {MAX_LINE_BYTES:,} bytes")
                continue
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield _line_row(number, content)


def _line_row(number: int, line: bytes) -> RawRow:
    text = {"text": line.decode("utf-8", errors="replace").strip()[:SHOWN_CHARS]}
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawRow(number, text, f"is not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        if error.pos >= len(error.doc.rstrip("\r\n")):
            reason = "the line ends too early: a text, a list or an object is not closed"
        return RawRow(number, text, f"is not JSON: {reason}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return RawRow(number, text, f"is not JSON that can be read: {error}")
    hint = ". A file that is one JSON array ends in .json" if isinstance(values, list) else ""
    return _object_row(number, values, hint)


def _object_row(number: int, values: object, hint: str = "") -> RawRow:
    if isinstance(values, dict):
        return RawRow(number, values)
    text = json.dumps(values, ensure_ascii=False)[:SHOWN_CHARS]
    return RawRow(number, {"text": text}, f"must be a JSON object, got {text:.80}{hint}")


def _array_rows(path: Path) -> Iterator[RawRow]:
    """Rows of a .json file: an array of them, one, or lines as in .jsonl. `datasets` would make dates of texts."""
    _refuse_compressed(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") != "Extra data":  # behind the first of several lines
            raise ValueError(f"{path} could not be read: {error}") from error
        yield from _line_rows(path)
    else:
        rows = values if isinstance(values, list) else [values]
        if isinstance(values, dict) and all(isinstance(each, list) for each in values.values()):
            lengths = {len(each) for each in values.values()}
            if len(values) > 1 and len(lengths) == 1 and lengths != {1}:
                raise ValueError(f"{path} holds a list per column. Write a list of rows, or a row per line as .jsonl.")
        yield from (_object_row(number, each) for number, each in enumerate(rows, start=1))


JSON_READERS = {".jsonl": _line_rows, ".json": _array_rows}
"""Suffix of a file of JSON -> its reader."""


def _file_rows(path: Path, suffix: str) -> Iterator[RawRow]:
    """Rows of a csv or parquet file."""
    _refuse_compressed(path)
    # Imported here because the import takes seconds and the built-in task does not need it.
    import datasets

    if suffix == ".csv":
        _refuse_same_names(path, _csv_names(path))
    # A private cache, so that no stale data are read and no files are left in the user's home.
    with tempfile.TemporaryDirectory(prefix="parity-data-") as cache, _without_bars():
        try:
            if suffix == ".parquet":
                yield from _parquet_rows(path)
                return
            table = datasets.load_dataset(
                "csv",
                data_files=glob.escape(str(path)),  # a "[1]" in the name is no pattern
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **TEXT_CELLS,
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, NotImplementedError) as error:
            raise ValueError(f"{path} could not be read: {_reason(error)}") from error
    yield from _rows_of_dataset(table)


def _reason(error: Exception) -> str:
    found = str(error.__cause__ or error)
    if MORE_CELLS in found:
        return "a row has more cells than the header. Commas part cells: a cell with a comma needs quotes"
    return f"{found}. Unpack it" if "Compression type" in found else found


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    """Rows of a parquet file. `datasets` reads none with a column of maps, which are dicts here, and no empty one."""
    import datasets
    from pyarrow import parquet, schema

    file = parquet.ParquetFile(path)
    written = file.schema_arrow
    _refuse_same_names(path, written.names)
    known = [each for each in written if "map<" not in str(each.type) and "dictionary<" not in str(each.type)]
    features = datasets.Features.from_arrow_schema(schema(known, metadata=written.metadata))
    yield from _table_rows(file.iter_batches(BATCH_ROWS), features)


def _rows_of_dataset(table: Any) -> Iterator[RawRow]:
    """Rows of a Dataset, as arrow has them: whatever format was saved with it, and without opening its pictures."""
    return _table_rows(table.with_format("arrow").iter(batch_size=BATCH_ROWS), table.features)


@contextmanager
def _without_bars(*, hides: bool = True) -> Iterator[None]:
    """Let `datasets` draw no bars in the block if it `hides` them: local files take no time that needs one.

    Where pandas would drop cells of a csv file and warn, it fails.
    """
    import datasets

    hides = hides and not datasets.are_progress_bars_disabled()
    if hides:
        datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=MORE_CELLS)
            yield
    finally:
        if hides:
            datasets.enable_progress_bars()


def _refuse_compressed(path: Path) -> None:
    """Raise ValueError for a compressed file, which `datasets` would unpack into memory, whatever its size then."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    is_right = not head or head.startswith(b"PAR1") if suffix == ".parquet" else not head.startswith(PACKED_HEADS)
    way_out = "Unpack it if it is compressed."
    if is_right and suffix not in (".parquet", ".jsonl"):  # a line of jsonl that is no text is a bad row
        try:
            is_right = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
        except UnicodeDecodeError as error:
            is_right, line = False, head.count(b"\n", 0, error.start) + 1
            encoding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "cp1252"
            way_out = (
                f"Line {line} has another encoding: iconv -f {encoding} -t utf-8 converts files of Windows. {way_out}"
            )
    if not is_right:
        kind = "a parquet file" if suffix == ".parquet" else "UTF-8 text"
        raise ValueError(f"{path} must be {kind}, as its name says, and is not. {way_out}")


def _table_rows(batches: Iterable[Any], features: Mapping[str, Any]) -> Iterator[RawRow]:
    """Rows of a table of arrow, read in batches, because reading row by row is slow; `features` are of `datasets`."""
    convert = _as_written(dict(features))
    rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="lossy"))
    for number, row in enumerate(rows, start=1):
        yield RawRow(number, row if convert is None else convert(row))


def _as_written(kind: Any) -> Callable[[Any], Any] | None:
    """A function of a column's values that gives short floats, labels of classes, and JSON, as they were written; else
    None.

    0.1 in a column of 32 bits is 0.10000000149011612 as a number of 64 bits.
    `kind` is a feature of `datasets`.
    """
    import datasets

    if isinstance(kind, dict):
        members = {name: convert for name, each in kind.items() if (convert := _as_written(each)) is not None}
        if not members:
            return None
        return lambda value: value and {**value, **{name: convert(value[name]) for name, convert in members.items()}}
    if (inner := getattr(kind, "feature", None)) is not None:  # lists, fixed or not
        convert = _as_written(inner)
        return None if convert is None else lambda value: value and [convert(member) for member in value]
    if isinstance(kind, datasets.Json):
        return kind.decode_example
    if isinstance(kind, datasets.ClassLabel):
        names = kind.names
        return lambda value: None if value is None or value < 0 else names[value]
    short = short_float(kind.dtype) if isinstance(kind, datasets.Value) else None
    return None if short is None else lambda value: None if value is None else short(value)


def short_float(dtype: str | None) -> Callable[[float], float] | None:
    """A function of a number from a type of 16 or 32 bits that gives the number as it was written: 0.1 for
    0.10000000149011612. None for another type."""
    short = _SHORT_FLOATS.get(dtype)
    return None if short is None else lambda value: float(str(short(value)))


def _csv_names(path: Path) -> list[str]:
    """The columns of a csv file. Raises ValueError if its first line cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return next(csv.reader(file, skipinitialspace=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} could not be read: {error}") from error


def _refuse_same_names(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError for a file with two columns of one name: a row would hold the last of them."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path} has two columns of the name {', '.join(twice)}. Rename one.")


def _hub_rows(source: str, *, repo: str, name: str | None, split: str) -> Iterator[RawRow]:
    """Rows of a split of a data set on the hub, or of a local directory in the form of one."""
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig
    from huggingface_hub import logging as hub_logging

    from rollout.data.hub import limit_silence

    limit_silence()  # the `datasets` library gives up after seven minutes without an answer
    hub_logging.set_verbosity_error()  # a hub out of reach is one error below, not a warning per try
    directory = Path(repo)
    is_local = directory.is_dir()
    # A downloaded data set is cached; a local directory is read anew, because it may have changed.
    # A download keeps its bars.
    with tempfile.TemporaryDirectory(prefix="parity-data-") as cache, _without_bars(hides=is_local):
        try:
            if is_local and is_saved(directory):
                table = _saved_table(directory, split)
            else:
                if is_local and glob.has_magic(str(directory.resolve())):
                    # `datasets` would take the name for a pattern: its files under a name that is none.
                    link = Path(cache, "named")
                    directory = Path(shutil.copytree(directory.resolve(), link, copy_function=os.symlink))
                find = functools.partial(
                    datasets.load_dataset_builder,
                    str(directory) if is_local else repo,
                    name,
                    cache_dir=cache if is_local else None,
                )
                builder = find()
                if is_local and (lines := _json_files(builder, split)):
                    yield from _rows_of_all([str(Path(line).resolve()) for line in lines])
                    return
                # Only a data set that declares types has them.
                if isinstance(builder.config, CsvConfig) and builder.info.features is None:
                    builder = find(**TEXT_CELLS)
                builder.download_and_prepare()
                table = builder.as_dataset(split=split)
        except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
            raise ValueError(
                f"{source}: {error}. If this machine cannot reach the hub, run `hf download {repo} --repo-type dataset "
                f"--local-dir DIR` where one can, bring DIR here, and use DIR{f':{name}' if name else ''}@{split}; "
                "for a private or gated data set, `hf auth login` first."
            ) from error
        except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:  # a script is the last
            raise ValueError(f"{source} could not be read: {_reason(error)}") from error
        yield from _rows_of_dataset(table)


def _json_files(builder: Any, split: str) -> Sequence[str]:
    """The files of a split that are JSON of no declared types, which this file reads; else none.

    `datasets` makes dates of texts, and rounds whole numbers that are large or stand beside fractions.
    """
    from datasets.packaged_modules.json.json import JsonConfig

    if not isinstance(builder.config, JsonConfig) or builder.info.features is not None:
        return ()
    files: Sequence[str] = (builder.config.data_files or {}).get(split, ())
    return files if all(Path(file).suffix.lower() in JSON_READERS for file in files) else ()


def _saved_table(directory: Path, split: str) -> Any:
    """The rows of a split that save_to_disk() of `datasets` wrote. Raises ValueError for a split that is not there."""
    import datasets

    saved = datasets.load_from_disk(str(directory))
    splits = saved if isinstance(saved, dict) else {str(saved.split or split): saved}
    if split not in splits:
        raise ValueError(f"it has {', '.join(f'{directory}@{name}' for name in splits)}")
    return splits[split]
