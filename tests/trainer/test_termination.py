"""Requests to end a run: signals, and what a run that was asked to end writes."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from resume_cases import make

from trainer.ending import termination as termination_module
from trainer.ending.termination import REQUESTS, RunTerminated, requests_held, termination_requests
from trainer.tracking.tracker import Tracker


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_ends(
    first: signal.Signals, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination_module, "ECHO_S", 0.0)
    before = [signal.getsignal(number) for number in REQUESTS]
    for second, last in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with pytest.raises(RunTerminated) as caught, termination_requests() as termination:
            termination.then, termination.step = "the running step is finished", 3
            os.kill(os.getpid(), first)
            assert (termination.request, termination.at_once) == (first, False)
            assert f"{first.name}: the running step is finished; the next signal" in capfd.readouterr().err
            os.kill(os.getpid(), second)
            pytest.fail("the second signal did not interrupt")
        assert (caught.value.exit_code, str(caught.value)) == (last, f"asked to end ({second.name}), after step 3")
        assert f"{second.name}: ends at once" in capfd.readouterr().err
    assert RunTerminated(first, step=0).exit_code == code
    assert [signal.getsignal(number) for number in REQUESTS] == before


def test_a_run_outside_of_the_main_thread_which_hears_no_signal_can_fail() -> None:
    failed: list[ZeroDivisionError] = []

    def run() -> None:
        try:
            with termination_requests() as termination, termination.named():
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert failed


def test_two_signals_in_a_moment_are_one_request(capfd: pytest.CaptureFixture[str]) -> None:
    """GNU timeout sends SIGTERM to the process, and then to its group."""
    with termination_requests() as termination:
        termination.then = "the running step is finished"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not termination.at_once
    assert capfd.readouterr().err.count("SIGTERM") == 1


def test_a_request_before_the_first_step_ends_at_once_and_one_in_a_rollout_interrupts_it() -> None:
    with pytest.raises(RunTerminated, match="before the first step"), termination_requests():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("nothing was interrupted")
    with termination_requests() as termination:
        termination.then = "step 1 is finished"
        with pytest.raises(KeyboardInterrupt), termination.interruptible("the rollout is given up"):
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the rollout was not interrupted")
        assert not termination.at_once
        with pytest.raises(KeyboardInterrupt), termination.interruptible("the next is not begun"):
            pytest.fail("a rollout began after the request")


@pytest.mark.parametrize("sent", REQUESTS)
def test_a_request_that_is_held_ends_the_run_after_the_block(sent: signal.Signals) -> None:
    done = []
    with (
        pytest.raises(RunTerminated, match=rf"asked to end \({sent.name}\), before the first step"),
        termination_requests(),
    ):
        with requests_held():
            os.kill(os.getpid(), sent)
            done.append("the rest of the block")
        done.append("what follows it")
    assert done == ["the rest of the block"]


def test_a_run_in_a_thread_hears_no_signals() -> None:
    heard: list[object] = []

    def run() -> None:
        with termination_requests() as termination:
            heard.append(termination.request)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert heard == [None]


def test_a_run_that_was_asked_to_end_is_interrupted_not_failed(tmp_path: Path) -> None:
    with pytest.raises(RunTerminated), Tracker(make(tmp_path), run_dir=tmp_path / "run"):
        raise RunTerminated(signal.SIGTERM, step=1)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "interrupted"
