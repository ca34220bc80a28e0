"""A trace of torch's profiler -> how long each operator took, and how the time divides: for the report of a run.

The time of an operator is its own: that of the operators which it calls is theirs.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

TABLE, DRIVER = "operations.json", "driver.json.gz"
LISTED = 12
"""Operators that a table lists, the longest first."""
KINDS = {
    "messages": re.compile(r"c10d|gloo|nccl|all_?gather|reduce_?scatter|all_?reduce|broadcast"),
    "products": re.compile(r"(::|_)(mm|addmm|bmm|baddbmm|mv|linear|dot)$|linear_|gemm|matmul|cutlass|attention|flash"),
    "copies": re.compile(r"copy|cat$|stack$|index|gather|scatter|clone|contiguous|embedding|[mM]emcpy|[mM]emset"),
}
"""Kind of work -> its operators, by their names; every other operator is elementwise or a reduction."""
OTHER, IDLE = "other operators", "no operator"
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what a GPU does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """What a process computed while it was recorded."""

    process: str
    """File of its trace without the endings: rank_0, engine_1-sglang-TP-0."""
    seconds: float
    """Seconds of the step."""
    shares: dict[str, float]
    """Kind of work -> seconds per second, the threads added up; IDLE: in which no thread had an operator. Of a GPU's
    kernels if there are any, else of the operators on the CPU."""
    operations: list[tuple[str, float, int]]
    """(name, seconds, calls) of the LISTED longest."""


def read_operations(trace: Path, *, begin_ns: int, end_ns: int) -> Operations:
    """Read what a trace, <name>.json.gz, has between two times of day. Raises ValueError if it is none."""
    try:
        record = orjson.loads(gzip.decompress(trace.read_bytes()))
        base = record["baseTimeNanoseconds"]
        begin, end = (begin_ns - base) / 1e3, (end_ns - base) / 1e3
        spans = [each for each in record["traceEvents"] if each.get("ph") == "X" and begin <= each["ts"] < end]
        on_device = [each for each in spans if each.get("cat") in DEVICE]
        chosen = on_device or [each for each in spans if each.get("cat") == "cpu_op"]
        seconds, calls, busy = _own_seconds(chosen)
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{trace} is no trace of torch: {error}") from error
    total = max((end_ns - begin_ns) / 1e9, busy, 1e-9)
    shares: dict[str, float] = defaultdict(float)
    for name, own in seconds.items():
        shares[kind_of(name)] += own / total
    names = sorted(seconds, key=lambda name: -seconds[name])[:LISTED]
    return Operations(
        process=trace.name.removesuffix(".json.gz").removesuffix(".trace"),
        seconds=total,
        shares={**shares, IDLE: 1 - busy / total},
        operations=[(name, seconds[name], calls[name]) for name in names],
    )


def kind_of(name: str) -> str:
    """Kind of work of an operator or a kernel."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def _own_seconds(spans: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, int], float]:
    """(own seconds by name, calls by name, seconds in which any of the spans lasted).

    Spans of one thread lie inside each other or apart; times are microseconds.
    """
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    open_spans: dict[object, list[tuple[float, str]]] = defaultdict(list)
    busy, busy_until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        begin, duration, name = span["ts"], span["dur"], span["name"]
        stack = open_spans[span["tid"]]
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if stack:
            seconds[stack[-1][1]] -= duration / 1e6
        stack.append((begin + duration, name))
        seconds[name] += duration / 1e6
        calls[name] += 1
        busy += max(0.0, begin + duration - max(begin, busy_until)) / 1e6
        busy_until = max(busy_until, begin + duration)
    return seconds, calls, busy


def write_operations(directory: Path, *, begin_ns: int, end_ns: int) -> None:
    """Write the Operations of every trace in `directory` to operations.json there. Raises OSError and ValueError."""
    traces = sorted(path for path in directory.glob("*.json.gz") if path.name != DRIVER)
    found = [asdict(read_operations(trace, begin_ns=begin_ns, end_ns=end_ns)) for trace in traces]
    (directory / TABLE).write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))


def load_operations(directory: Path) -> list[Operations]:
    """What `write_operations` wrote to `directory`. Raises ValueError, or OSError, if it cannot be read."""
    try:
        found = [Operations(**each) for each in orjson.loads((directory / TABLE).read_bytes())]
        numbers = [
            x for each in found for x in (*each.shares.values(), *(seconds for _, seconds, _ in each.operations))
        ]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError("a number is missing")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{directory / TABLE} has no table of operators: {error}") from error
    return found
