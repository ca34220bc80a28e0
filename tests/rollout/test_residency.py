"""Turns on a shared GPU: the order of sleeping and waking, nothing twice, nothing lost after an error."""

from __future__ import annotations

import pytest

from rollout.group.residency import SharedGpu


class Recorder:
    """A side that writes down what it is asked, and fails where it is told to."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.fails_in = name, calls, ""

    def sleep(self) -> None:
        self._called("sleep")

    def wake(self) -> None:
        self._called("wake")

    def _called(self, verb: str) -> None:
        if self.fails_in == verb:
            self.fails_in = ""
            raise OSError(f"{self.name} cannot {verb}")
        self.calls.append(f"{self.name} {verb}")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def sides(calls: list[str]) -> tuple[SharedGpu, Recorder, Recorder]:
    shared_gpu, policy, engines = SharedGpu(), Recorder("policy", calls), Recorder("engines", calls)
    shared_gpu.enable(awake=engines)
    return shared_gpu, policy, engines


def test_the_other_side_sleeps_first_and_nobody_moves_twice(
    sides: tuple[SharedGpu, Recorder, Recorder], calls: list[str]
) -> None:
    shared_gpu, policy, engines = sides
    for _ in range(2):
        with shared_gpu.resident(engines):
            assert calls == []
    with shared_gpu.resident(policy):
        assert calls == ["engines sleep", "policy wake"]
        with shared_gpu.resident(policy):
            pass
    with shared_gpu.resident(policy):
        pass
    with shared_gpu.resident(engines):
        assert calls == ["engines sleep", "policy wake", "policy sleep", "engines wake"]
    seconds = shared_gpu.metrics()["perf/gpu_swap_s"]
    assert seconds is not None and seconds > 0
    assert shared_gpu.metrics() == {"perf/gpu_swap_s": 0.0}


def test_without_turns_nothing_moves(calls: list[str]) -> None:
    shared_gpu, policy, engines = SharedGpu(), Recorder("policy", calls), Recorder("engines", calls)
    with shared_gpu.resident(policy), shared_gpu.resident(engines):
        pass
    assert calls == [] and shared_gpu.metrics() == {}


def test_an_error_in_the_block_leaves_the_side_awake_and_usable(
    sides: tuple[SharedGpu, Recorder, Recorder], calls: list[str]
) -> None:
    shared_gpu, policy, engines = sides
    with pytest.raises(KeyError), shared_gpu.resident(policy):
        raise KeyError("inside")
    with shared_gpu.resident(policy):
        pass
    with shared_gpu.resident(engines):
        assert calls == ["engines sleep", "policy wake", "policy sleep", "engines wake"]


def test_a_side_that_could_not_sleep_is_asked_again(
    sides: tuple[SharedGpu, Recorder, Recorder], calls: list[str]
) -> None:
    shared_gpu, policy, engines = sides
    engines.fails_in = "sleep"
    with pytest.raises(OSError, match="engines cannot sleep"), shared_gpu.resident(policy):
        pass
    assert calls == []
    with shared_gpu.resident(engines):  # it never left
        assert calls == []
    with shared_gpu.resident(policy):
        assert calls == ["engines sleep", "policy wake"]


def test_a_side_that_could_not_wake_is_asked_again(
    sides: tuple[SharedGpu, Recorder, Recorder], calls: list[str]
) -> None:
    shared_gpu, policy, engines = sides
    policy.fails_in = "wake"
    with pytest.raises(OSError, match="policy cannot wake"), shared_gpu.resident(policy):
        pass
    with shared_gpu.resident(engines):
        assert calls == ["engines sleep", "engines wake"]
    with shared_gpu.resident(policy):
        assert calls[2:] == ["engines sleep", "policy wake"]


def test_a_block_of_the_other_side_inside_is_refused(sides: tuple[SharedGpu, Recorder, Recorder]) -> None:
    shared_gpu, policy, engines = sides
    with (
        pytest.raises(RuntimeError, match="leave the block of one"),
        shared_gpu.resident(policy),
        shared_gpu.resident(engines),
    ):
        pass
    with shared_gpu.resident(engines):
        pass
