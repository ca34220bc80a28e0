"""`make bench`: it runs every script of benchmarks/, goes on after a failure, and every table of the docs has one."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_style import ROOT

BENCHMARKS = ROOT / "benchmarks"


def driver(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_driver", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {name.partition(".")[0] for name in names} | set(strings)


def test_every_file_is_run_or_is_part_of_one_that_is() -> None:
    run = {path.name for path in driver(BENCHMARKS / "__main__.py").scripts()}
    assert {"planner.py", "logprob_head.py", "mode_cost.py"} <= run
    files = {path.name for path in BENCHMARKS.glob("*.py")} - {"__main__.py"}
    used = {name for path in BENCHMARKS.glob("*.py") for name in imported(path)}
    parts = files - run
    assert all(name.removesuffix(".py") in used or name in used for name in parts), parts


def test_every_benchmark_of_the_docs_exists() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    script = re.compile(r"benchmarks/((?!test_)\w+\.py)")  # tests/benchmarks/ has the tests of some
    named = {name for path in documents for name in script.findall(path.read_text("utf-8"))}
    assert len(named) > 5
    run = {path.name for path in driver(BENCHMARKS / "__main__.py").scripts()}
    assert named <= run, named - run


def test_make_bench_is_the_driver_in_an_environment_of_its_own() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    command = ["make", "--dry-run", "bench", "BENCH=planner", "ENGINE=sglang", "GPU="]  # not those of an outer make
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "VENV=.venv-bench requirements/install.sh sglang-cpu bench" in shown
    assert ".venv-bench/bin/python benchmarks planner" in shown


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The driver beside scripts of our own."""
    directory = tmp_path / "benchmarks"
    directory.mkdir()
    shutil.copy(BENCHMARKS / "__main__.py", directory)
    guard = '\nif __name__ == "__main__":\n    '
    (directory / "good.py").write_text(f'"""x"""{guard}print("| a table |")\n')
    (directory / "bad.py").write_text(f'"""x"""{guard}raise SystemExit("it broke")\n')
    (directory / "endless.py").write_text(f'"""x"""\nimport time{guard}time.sleep(600)\n')
    (directory / "part.py").write_text("x = 1\n")
    return directory


def test_it_goes_on_after_a_failure_and_says_so_at_the_end(copy: Path) -> None:
    for _ in range(2):  # safe to repeat
        ended = subprocess.run(
            [sys.executable, str(copy), "--timeout", "3"], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 1
        assert "1 of 3 done; failed: bad.py, endless.py" in ended.stdout
        assert "it broke" in ended.stdout and "no end within 3 s" in ended.stdout
    output = copy.parent / "outputs" / "bench"
    assert (output / "good.md").read_text().endswith("| a table |\n")
    assert not (output / "bad.md").exists()


def test_one_can_be_chosen_by_name(copy: Path) -> None:
    ended = subprocess.run([sys.executable, str(copy), "good"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0
    assert "1 of 1 done" in ended.stdout
    wrong = subprocess.run([sys.executable, str(copy), "nothing"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "no benchmark nothing; there are bad, endless, good" in wrong.stderr
