"""The list of checks for a bare GPU host, in rising order of what they cost there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gpu_check import attention, basics, collectives, engine, exactness, head, memory, speed, suite, turns, weights
from gpu_check.host import Host
from gpu_check.rows import Row

SHOWN_ON_CPU = "0.5B, 8 ranks"
"""The part that a CPU runs, with a tiny model in place of the named one."""
MEMORY_COSTS_S = {"0.5B, 8 ranks": 20.0, "1.5B, 1 rank": 25.0, "7B, 8 ranks": 90.0, "32B, 64 ranks": 260.0}
SPEED_COSTS_S = {"0.5B, 8 ranks": 30.0, "1.5B, 1 rank": 50.0, "7B, 8 ranks": 110.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check, which runs in a process of its own."""

    number: int
    """What `--checks` selects; several parts may share it."""
    name: str
    cost_s: float
    """Estimated seconds on an H200."""
    run: Callable[[Host], Iterator[Row]]
    cuda_only: bool = False
    """True for parts that differ from another one by their size alone: left out on a CPU."""


def listed() -> list[Check]:
    """All checks, cheapest first."""
    checks = [
        Check(number=0, name="versions and imports", cost_s=10, run=basics.versions),
        Check(number=1, name="ceilings and copies", cost_s=60, run=basics.ceilings),
        Check(number=2, name="log-prob head", cost_s=100, run=head.head),
        Check(number=3, name="attention", cost_s=80, run=attention.attention),
        Check(number=5, name="AdamW", cost_s=15, run=speed.adamw),
        Check(number=6, name="bits", cost_s=60, run=exactness.exactness),
        Check(number=7, name="sleep and wake", cost_s=40, run=partial(turns.turns, expandable=False)),
        Check(number=7, name="sleep and wake, expandable", cost_s=20, run=partial(turns.turns, expandable=True)),
        Check(number=8, name="digest", cost_s=10, run=weights.digest_kernel),
        Check(number=9, name="embedded engine", cost_s=90, run=engine.engine),
        Check(number=10, name="CUDA IPC", cost_s=45, run=weights.cuda_ipc),
        Check(number=11, name="process groups", cost_s=30, run=collectives.collectives),
        Check(number=12, name="tests", cost_s=60, run=suite.suite),
    ]
    for name, cost_s in MEMORY_COSTS_S.items():
        run = partial(memory.rank_memory, name=name)
        checks.append(Check(number=4, name=f"memory, {name}", cost_s=cost_s, run=run, cuda_only=name != SHOWN_ON_CPU))
    for name, cost_s in SPEED_COSTS_S.items():
        run = partial(speed.speed, name=name)
        checks.append(Check(number=5, name=f"speed, {name}", cost_s=cost_s, run=run, cuda_only=name != SHOWN_ON_CPU))
    for name, cost_s in (("0.5B", 20.0), ("7B", 80.0)):
        checks.append(
            Check(
                number=8,
                name=f"publish, {name}",
                cost_s=cost_s,
                run=partial(weights.publish, size=weights.PUBLISHED[name]),
                cuda_only=True,
            )
        )
    checks.append(Check(number=8, name="publish, tiny", cost_s=5, run=partial(weights.publish, size=weights.TINY)))
    return sorted(checks, key=lambda check: (check.cost_s, check.number))
