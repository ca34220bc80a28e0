"""Read the file that W&B leaves on disk: blocks of 32 KiB with (crc32, length, kind) before each fragment."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32768
FILE_HEADER = 7
FRAGMENT_HEADER = 7
FULL, LAST = 1, 4


def records(run_dir: Path) -> Iterator[Any]:
    """Every record of the newest W&B run below `run_dir`."""
    path = sorted(run_dir.glob("wandb/*run-*/run-*.wandb"), key=lambda found: found.stat().st_mtime)[-1]
    data, position, record = path.read_bytes(), FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while position + FRAGMENT_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < FRAGMENT_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or position + FRAGMENT_HEADER + length > len(data):
            return  # the rest is not written yet
        position += FRAGMENT_HEADER
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


def started(run_dir: Path) -> Any:
    """The record of the start of the newest run: id, project, name, group, tags, notes, config."""
    return next(record.run for record in records(run_dir) if record.WhichOneof("record_type") == "run")


def history(run_dir: Path) -> list[dict[str, float]]:
    """The logged rows, without W&B's own columns."""
    rows = []
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def exit_code(run_dir: Path) -> int | None:
    codes = [r.exit.exit_code for r in records(run_dir) if r.WhichOneof("record_type") == "exit"]
    return codes[-1] if codes else None


def summary(run_dir: Path) -> dict[str, object]:
    """What the summary of the run holds in the end; {operation: value} where an operation was asked for."""
    found: dict[str, object] = {}
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found


def alerts(run_dir: Path) -> list[tuple[str, str, str]]:
    """Title, text and level of every alert."""
    return [
        (record.alert.title, record.alert.text, record.alert.level)
        for record in records(run_dir)
        if record.WhichOneof("record_type") == "alert"
    ]


def table_rows(run_dir: Path) -> list[list[object]]:
    """The rows of the increments of the table of samples, in the order in which they were logged."""
    paths = run_dir.glob("wandb/*run-*/files/media/table/samples_*.table.json")
    by_row = sorted(paths, key=lambda path: int(path.name.split("_")[1]))
    return [row for path in by_row for row in json.loads(path.read_text("utf-8"))["data"]]
