"""The files and commands of docs/extend.md, for tests that run them as a reader would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
MOST_LINES = 40


def files() -> dict[str, str]:
    """Name of a file, its first line -> its text."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def commands() -> list[list[str]]:
    """(recipe, words) of each command of the page."""
    lines = re.findall(r"^parity train (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [shlex.split(line.replace("tests/rollout/", f"{PAGE.parents[1]}/tests/rollout/")) for line in lines]


def write_files(directory: Path) -> None:
    for name, text in files().items():
        (directory / name).write_text(text, "utf-8")
