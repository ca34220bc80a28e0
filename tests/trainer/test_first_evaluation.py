"""What the console calls the time between the start of a run and its first step."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.run.loop as loop
from trainer.tracking.console import Console

LOG: Any = None
"""No evaluation here measures its seconds."""
START = "starting Ray, the policy and the rollout engines"


def run_with(console: Console) -> Any:
    """As much of a Run as the evaluation before a step takes; its evaluation is shown and written nowhere."""
    return SimpleNamespace(tracker=SimpleNamespace(console=console, log_evaluation=console.evaluation))


def test_a_first_evaluation_that_fails_is_named_and_the_start_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> dict[str, float | None]:
        raise RuntimeError("no answer")

    monkeypatch.setattr(loop, "evaluate_policy", fails)
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="no answer"), Console(4, stream=stream) as console:
        console.phase(START)
        loop.evaluate_before_step(run_with(console), LOG, 1)
    lines = [line.rpartition(" in ")[0] or line for line in stream.getvalue().splitlines()]
    start = [f"{START} ...", f"{START}: done"]
    assert lines == [*start, "evaluating before step 1 ...", "evaluating before step 1: stopped"]


def test_the_first_evaluation_ends_with_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "evaluate_policy", lambda *_, **__: {"eval/accuracy": 0.5})
    stream = io.StringIO()
    with Console(4, stream=stream) as console:
        console.phase(START)
        loop.evaluate_before_step(run_with(console), LOG, 3)
    *_, ended, _ = stream.getvalue().splitlines()
    assert ended.startswith("evaluating before step 3: done in ")


def test_steps_end_the_start_without_an_evaluation() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Console(4, stream=stream) as console:
        console.phase(START)
        console.training()
        raise RuntimeError("in the rollout of a resumed run")
    assert stream.getvalue().splitlines()[-1].startswith(f"{START}: done in ")
