"""What no file of the repository may hold, whatever its kind: see `FORBIDDEN`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_style import ROOT, SOURCE_DIRS

DIRECTORIES = (*SOURCE_DIRS, "configs", "recipes", "tests", "requirements", ".ci")
PLANTED = frozenset({"tests/test_style.py", "tests/test_text.py"})
"""Files that plant what is looked for."""

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.$}>-])/(?:wor[k]|root|home|Users|far[m])/"),
    "a package index": re.compile(r"pythonhoste[d]|pypi\.or[g]/simple|/op[t]/(?:wheels|pypi)"),
    "an open interface": re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])"),
    "remote code": re.compile(r"trust_remote_code\s*[:=]\s*[Tt]rue"),
}


def text_files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for directory in DIRECTORIES:
        found += [path for path in (ROOT / directory).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in PLANTED)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_no_file_holds(name: str) -> None:
    checked = text_files()
    assert {"README.md", "Makefile", "run", "arithmetic_grpo.yaml", "config.py"} <= {path.name for path in checked}
    found = []
    for path in checked:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if FORBIDDEN[name].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {name}: {line.strip()}")
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a path of one machine", 'path = "/home/me/model"'),
        ("a path of one machine", "cd /root/x"),
        ("an open interface", "host: 0.0.0.0"),
        ("remote code", "trust_remote_code: True"),
        ("remote code", "trust_remote_code=true"),
    ],
)
def test_pattern_catches(name: str, line: str) -> None:
    assert FORBIDDEN[name].search(line)


@pytest.mark.parametrize("line", ["outputs/root/x", "/dev/shm/torch_1", "$HOME/work/x", "~/.cache/parity", "1.0.0.0"])
def test_harmless_text_passes(line: str) -> None:
    assert not [name for name, pattern in FORBIDDEN.items() if pattern.search(line)]
