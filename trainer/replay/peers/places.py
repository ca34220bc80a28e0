"""Which files of a directory are those of one step. Imports no torch, so that the command line can ask before it does.

prime-rl writes `rank_<rank>.jsonl` into a directory per step, miles and earlier versions of slime
`<rollout>_<rank>.pt` into one directory for all steps.
"""

from __future__ import annotations

import re
from pathlib import Path

JSONL_OF_RANK = re.compile(r"rank_\d+\.jsonl")
TORCH_OF_RANK = re.compile(r"(\d+)_\d+\.pt")


def rank_files(directory: Path) -> list[Path]:
    """The files of ranks in `directory`, sorted; [] if it is no directory, or has none."""
    if not directory.is_dir():
        return []
    names = (JSONL_OF_RANK, TORCH_OF_RANK)
    return sorted(path for path in directory.iterdir() if any(name.fullmatch(path.name) for name in names))


def rollout_of(path: Path) -> int | None:
    """The rollout in the name of a torch file of a rank; None for any other file."""
    match = TORCH_OF_RANK.fullmatch(path.name)
    return None if match is None else int(match[1])
