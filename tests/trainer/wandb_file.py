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
        if kind == 0:
            return
        position += FRAGMENT_HEADER
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


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
