"""The command `parity`, also `python -m trainer`: words -> exit code. See trainer/cli/commands.py."""

from __future__ import annotations

import sys

from trainer.cli.commands import run


def main() -> int:
    """Entry point of the console script; returns the exit code, see `parity --help`."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
