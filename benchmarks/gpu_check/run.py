"""Run the checks and write rows.jsonl, one line as soon as a row is known, and at the end table.md.

    PYTHONPATH=.:benchmarks python -m gpu_check [--checks 0,2,4] [--device cpu] [--limit-seconds 1500] [--out DIR]
    PYTHONPATH=.:benchmarks python -m gpu_check --full ...      on a host with SGLang

Each check has a process of its own: one that crashes, hangs or fills the memory of the GPU costs the others nothing. On
a CPU it is forked, which saves the imports; on a GPU it is started anew, because an import may have touched the driver,
and then CUDA does not work in a forked process. The exit status is 0 unless the kit itself breaks; that an
expectation fails is a result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gpu_check.checks import Check, listed
from gpu_check.host import Host
from gpu_check.rows import NotRunError, Row, Verdict, append, judged, not_run, read, summary, table

ROWS, TABLE = "rows.jsonl", "table.md"
LEAST_SECONDS = 5.0
"""Time below which no further check is begun."""
COST_MARGIN = 4.0
"""A check may take so many times its estimate, and at least MIN_LIMIT_S, before it is ended."""
MIN_LIMIT_S = 120.0
BROKEN_STATUS = 3
START_METHODS = {"cpu": "fork", "cuda": "spawn"}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--checks", type=_numbers, help="numbers, such as 0,2,4; all without")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where nvidia-smi is, else cpu")
    parser.add_argument("--limit-seconds", type=float, default=1500.0, help="no check runs longer than what is left")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="directory of rows and table")
    parser.add_argument("--full", action="store_true", help="the list for a host with SGLang instead")
    return parser.parse_args(words)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"numbers separated by commas are wanted, got {text!r}") from error


def main(words: Sequence[str] | None = None) -> int:
    """Run the chosen checks one after the other."""
    chosen = arguments(words)
    device = chosen.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if device == "cuda" and torch.version.cuda is None:
        sys.stderr.write(
            f"--device cuda: torch {torch.__version__} of {sys.executable} is a build without CUDA; "
            "run the kit with a Python whose torch has it, or give --device cpu\n"
        )
        return 2
    checks = _chosen_checks(chosen, device)
    known = sorted({check.number for check in checks})
    if chosen.checks is not None and (unknown := sorted(set(chosen.checks) - set(known))):
        sys.stderr.write(f"--checks: there is no check {unknown} here; there are {known}\n")
        return 2
    if chosen.checks is not None:
        checks = [check for check in checks if check.number in chosen.checks]
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    rows_file = out / ROWS
    rows_file.unlink(missing_ok=True)
    deadline = time.monotonic() + chosen.limit_seconds
    started = time.monotonic()
    broken = False
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        for position, check in enumerate(checks, start=1):
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                append(rows_file, not_run(str(check.number), check.name, reason="no time was left"))
                continue
            _say(f"{position} of {len(checks)}: {check.number} {check.name}")
            limit = min(left, max(MIN_LIMIT_S, COST_MARGIN * check.cost_s))
            broken |= not run_apart(check, device=device, out=out, scratch=Path(scratch), limit_s=limit)
    rows = read(rows_file)
    text = heading(device, time.monotonic() - started) + "\n" + table(rows)
    (out / TABLE).write_text(text, encoding="utf-8")
    _say(f"{summary(rows)}; {rows_file}, {out / TABLE}")
    return BROKEN_STATUS if broken else 0


def _chosen_checks(chosen: argparse.Namespace, device: str) -> list[Check]:
    if chosen.full:
        from gpu_check.full import listed as listed_full

        return listed_full()
    return [check for check in listed() if device == "cuda" or not check.cuda_only]


def run_apart(check: Check, *, device: str, out: Path, scratch: Path, limit_s: float) -> bool:
    """Run a check in a process that is ended after `limit_s`; False if not even a row could be had of it."""
    before = len(read(out / ROWS))
    context: Any = multiprocessing.get_context(START_METHODS[device])
    process = context.Process(target=_run, args=(check, device, out, scratch))
    started = time.monotonic()
    process.start()
    process.join(limit_s)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    _say(f"  {time.monotonic() - started:.0f} s")
    if late or process.exitcode:
        ending = f"no end within {limit_s:.0f} s" if late else f"the process ended with {process.exitcode}"
        row = Row(
            check=str(check.number),
            what=check.name,
            expected="an end",
            measured=ending,
            verdict=Verdict.fails,
            reason="the rest of this check is missing",
        )
        append(out / ROWS, row)
    return len(read(out / ROWS)) > before


def _run(check: Check, device: str, out: Path, scratch: Path) -> None:
    """In the process of a check: write the rows of a check as they come."""
    own = Path(tempfile.mkdtemp(dir=scratch))
    try:
        try:
            host = open_host(device, out=out, scratch=own)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"[:300]
            row = judged(str(check.number), check.name, expected="a device", measured=text, ok=False, reason="none")
            append(out / ROWS, row)
            return
        rows_of(check, host=host)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def open_host(device: str, *, out: Path, scratch: Path) -> Host:
    """The host of this process; on a GPU this is what first touches the device."""
    threads = len(os.sched_getaffinity(0))
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(threads)
        return Host(device=torch.device("cpu"), out=out, scratch=scratch, threads=threads)
    torch.cuda.set_device(0)
    return Host(device=torch.device("cuda", 0), out=out, scratch=scratch, threads=threads)


def rows_of(check: Check, *, host: Host) -> list[Row]:
    """Run a check in this process and append its rows; what it cannot do, and every error, becomes a row."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        append(host.out / ROWS, row)

    try:
        for row in check.run(host):
            keep(row)
    except NotRunError as error:
        keep(not_run(str(check.number), check.name, reason=str(error)))
    except Exception as error:  # an error of one check is a result of it; the traceback goes to a file
        log = host.out / f"error_{check.number}.txt"
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{check.name}\n{traceback.format_exc()}\n")
        text = f"{type(error).__name__}: {error}"[:300]
        keep(
            Row(
                check=str(check.number),
                what=check.name,
                expected="no error",
                measured=text,
                verdict=Verdict.fails,
                reason=f"see {log.name}",
            )
        )
    return rows


def heading(device: str, seconds: float) -> str:
    """Date, machine and versions above the table."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, device {device}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, {seconds:.0f} s.\n"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"[gpu-check] {text}\n")
    sys.stdout.flush()
