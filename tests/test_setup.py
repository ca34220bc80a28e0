"""What requirements/install.sh says while it installs, with a pip that only makes directories."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[1] / "requirements" / "install.sh"
PYTHON = """#!/bin/bash
# Replaces one package, adds two; the list names two of the three.
case "$*" in
    *"pip install"*--editable*) echo "Installing collected packages: parity-rl" ;;
    *"pip install"*)
        echo "Collecting one==2"
        {nap} 0.5
        echo "Installing collected packages: one, torch, brought-along"
        rm -r "$VENV/lib/python3/site-packages/one-1.dist-info"
        for name in one-2 torch-1 brought_along-3; do
            mkdir "$VENV/lib/python3/site-packages/$name.dist-info"
            {nap} 0.5
        done ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_progress_counts_what_pip_installs_and_not_what_the_list_names(tmp_path: Path) -> None:
    nap = shutil.which("sleep")
    if nap is None or shutil.which("bash") is None:
        pytest.skip("no bash")
    executable(tmp_path / "requirements" / "install.sh", INSTALL.read_text(encoding="utf-8"))
    (tmp_path / "requirements" / "cpu.txt").write_text("# not==counted\none==2\ntorch==1\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").touch()
    executable(tmp_path / "venv" / "bin" / "python", PYTHON.format(nap=nap))
    for there in ("pip-1", "one-1"):
        (tmp_path / "venv" / "lib" / "python3" / "site-packages" / f"{there}.dist-info").mkdir(parents=True)
    # A line every fifth of a second instead of every five.
    executable(tmp_path / "bin" / "sleep", f"#!/bin/bash\nexec {nap} 0.2\n")
    environment = {"VENV": str(tmp_path / "venv"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [str(tmp_path / "requirements" / "install.sh"), "core"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "[setup] core: 2 packages of requirements/cpu.txt, and what torch brings along\n" in shown
    assert "Collecting one==2\n" in shown
    counted = re.findall(r"installed (\d+) of (\d+)\n", shown)
    assert {total for _, total in counted} == {"3"}, shown
    done = [int(number) for number, _ in counted]
    assert done == sorted(done) and done[-1] == 3, shown
