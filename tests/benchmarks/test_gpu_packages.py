"""The job with the packages for GPUs: a step that fails, or skips what it is there for, fails the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from gpu_check import packages


@pytest.fixture(autouse=True)
def own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of the tests, and its packages, in the place of those of .venv-gpu."""
    for name, value in {"SHOWN": ("torch",), "ROOT": tmp_path, "OUT": tmp_path / "out"}.items():
        monkeypatch.setattr(packages, name, value)


STEPS = {
    "good": "import sys; print('1 passed | in 2 s'); print('WARNING', file=sys.stderr)",
    "tests": "print('3 passed, 1 skipped in 1 s')",
    "plans": "print('3 passed, 1 skipped in 1 s')",
    "imports": "import not_there",
}
HOLDS = ["good", "tests"]


def job(monkeypatch: pytest.MonkeyPatch, steps: dict[str, str]) -> tuple[int, dict[str, str]]:
    """(exit status, step -> result in the table)"""
    monkeypatch.setattr(packages, "STEPS", {step: ("-c", code) for step, code in steps.items()})
    monkeypatch.setattr(sys, "argv", ["packages", "--steps", ",".join(steps)])
    status = packages.main()
    rows = [line.split(" | ") for line in (packages.OUT / "table.md").read_text("utf-8").splitlines()[4:]]
    assert all(len(row) == 3 for row in rows)
    return status, {row[0].removeprefix("| "): row[1] for row in rows}


def test_a_step_that_fails_or_skips_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    status, results = job(monkeypatch, STEPS)
    assert status == 1 and list(results) == list(STEPS)
    assert [step for step, result in results.items() if result.startswith("holds")] == HOLDS
    assert results["good"].endswith("1 passed / in 2 s")
    assert "not_there" in results["imports"] and "exit status 1" in results["imports"]


def test_a_step_without_an_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LIMIT_S", 1.0)
    status, results = job(monkeypatch, {"endless": "import time; time.sleep(300)"})
    assert status == 1 and "no end within 1 s" in results["endless"]


def test_all_steps_that_hold_are_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job(monkeypatch, {step: STEPS[step] for step in HOLDS})[0] == 0


def test_the_steps_name_files_that_are_there() -> None:
    words = [word for command in packages.STEPS.values() for word in command]
    paths = [word for word in words if word.startswith("tests/")]
    assert len(paths) > 5 and all((ROOT / path).exists() for path in paths)
