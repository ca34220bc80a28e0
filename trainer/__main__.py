"""The command `parity`, also `python -m trainer`: words -> exit code. See trainer/cli/commands.py."""

from __future__ import annotations

import os
import sys

from trainer.cli.commands import run
from trainer.cluster.deadline import is_call_unanswered
from trainer.ending.termination import REQUESTS


def main() -> int:
    """Entry point of the console script; returns the exit code, see `parity --help`."""
    code = run(sys.argv[1:])
    if code - 128 in REQUESTS or is_call_unanswered():
        # Everything is ended and written. Code in C that a signal interrupted, or that still waits for Ray, may crash
        # at the interpreter's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
