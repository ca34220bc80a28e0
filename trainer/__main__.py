"""The command `parity`, also `python -m trainer`: words -> exit code. See trainer/cli/commands.py."""

from __future__ import annotations

import sys

from trainer.cli.commands import run


def main() -> int:
    """Entry point of the console script: 0 done, 1 the run failed, 2 nothing was started, 130 interrupted, 143 terminated."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
