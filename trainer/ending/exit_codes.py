"""Exit codes of all commands, and the report of problems behind code 2. Imports no large package."""

from __future__ import annotations

from collections.abc import Sequence

from algorithms.config import Problem
from trainer.text.plain import to_stderr

DONE, FAILED, REFUSED, STOPPED_BY_GUARD, GO_ON, INTERRUPTED = 0, 1, 2, 3, 75, 130
"""Exit codes: done; the run failed; nothing was started because of the command line; the guard ended the run; the run
saved and left because its time ran out, and the same command goes on (EX_TEMPFAIL); ended by Ctrl-C."""

NOTHING_STARTED = "nothing was started"
"""End of the first line of a refusal."""


def refuse(command: str, key: str, rule: str, value: object, remedy: str = "") -> int:
    """Report one Problem; return the exit code of a refused command."""
    return report([Problem(key=key, rule=rule, value=value, remedy=remedy)], command=command)


def report(problems: Sequence[Problem | str], *, command: str) -> int:
    """Write every problem to stderr; return the exit code of a refused command."""
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    lines = [f"{command}: {count}, {NOTHING_STARTED}", *(f"  - {problem}" for problem in problems)]
    to_stderr("\n".join(lines) + "\n")
    return REFUSED
