"""The storm's user code and its servers: each fault strikes one call, once, and costs nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from fault_storm import PLACE, USER_CODE, Service

from rollout.user_code.pool import Ended, Failure, Repeated
from tests.rollout.reward_calls import pool_of_function


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv(PLACE, str(tmp_path))
    service = Service("judge", tmp_path)
    yield service
    service.go_away()


def scored(judge: Service, wrong: str) -> tuple[list[float], set[Failure | None]]:
    """(scores of 24 responses, failures of the calls that were made again) while something goes wrong once."""
    found, failures = {}, set()
    with closing(pool_of_function(f"{USER_CODE}:reward", timeout_s=3.0, retry_pause_s=0.1, outage_wait_s=60.0)) as pool:
        if wrong == "away":
            judge.go_away()
        elif wrong:
            (judge.place / f"judge_{wrong}").touch()
        for key in range(24):
            pool.submit(key, {"response": chr(97 + key), "answer": "", "prompt": ""})
        end = time.monotonic() + 120
        while len(found) < 24:
            assert time.monotonic() < end, sorted(found)
            for event in pool.poll(1.0):
                if isinstance(event, Ended):
                    found[event.key] = event.outcome.value.score
                elif isinstance(event, Repeated):
                    failures.add(event.failure)
                    judge.come_back()
    return [found[key] for key in range(24)], failures


@pytest.mark.scenario(41)
@pytest.mark.parametrize(
    ("wrong", "failure"),
    [
        ("hang", Failure.timeout),
        ("raise", Failure.error),
        ("exit", Failure.crash),
        ("flood", Failure.crash),
        ("away", Failure.error),
    ],
)
def test_a_fault_is_survived_and_every_score_is_that_of_a_quiet_judge(
    judge: Service, wrong: str, failure: Failure
) -> None:
    scores, failures = scored(judge, wrong)
    assert failure in failures
    assert not (judge.place / f"judge_{wrong}").exists()
    assert (scores, set()) == scored(judge, "") and set(scores) == {0.5, 1.0}
