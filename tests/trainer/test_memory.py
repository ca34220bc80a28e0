"""The slope alarm on made-up series, and what a real process says about its own memory."""

from __future__ import annotations

import logging
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from rollout.processes.process_memory import (
    STEPS_KEPT,
    FreedMemory,
    MemoryUse,
    give_back_free_memory,
    memory_use,
    peak_bytes,
    reset_peak,
)
from trainer.cluster.placement import RANK_HEAP, RANK_KERNELS
from trainer.limits.memory import (
    AGAIN,
    MIB,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    MemoryWatch,
    SlopeAlarm,
    low_points,
    theil_sen,
)

AVAILABLE = 10 * 2**30
FULL_WINDOW = WARM_UP_STEPS + STEPS_KEPT + WINDOW_STEPS - 1
"""Steps after which there is a slope."""


def warnings_of(series: Callable[[int], float], num_steps: int) -> list[tuple[int, str]]:
    """(step, warning) of an actor whose memory in MiB follows `series`."""
    alarm = SlopeAlarm("engine 1")
    found = []
    for step in range(num_steps):
        warning = alarm.add(MemoryUse(private=int(series(step) * MIB), available=AVAILABLE))
        if warning is not None:
            found.append((step, warning))
    return found


def noisy(level: Callable[[int], float], size: float) -> Callable[[int], float]:
    noise = random.Random(3)
    return lambda step: level(step) + noise.gauss(0, size)


def test_a_leak_is_told_once_with_name_slope_and_steps_left() -> None:
    [(step, warning)] = warnings_of(noisy(lambda step: 500 + 2.0 * step, 5.0), 240)
    assert step < 2 * FULL_WINDOW
    assert warning.startswith("the memory of engine 1 grows by ")
    slope = float(warning.split()[7])
    assert slope == pytest.approx(2.0, rel=0.1)
    left = int(warning.partition("full in about ")[2].split()[0].replace(",", ""))
    assert left == pytest.approx(AVAILABLE / MIB / 2.0, rel=0.1)


def test_a_leak_that_goes_on_is_told_again_when_the_memory_has_doubled() -> None:
    found = warnings_of(lambda step: 500 + 2.0 * step, 2000)
    assert len(found) == 1 + math.floor(math.log((500 + 4000) / (500 + 2 * found[0][0]), AGAIN))


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(lambda step: 500.0, id="constant"),
        pytest.param(noisy(lambda step: 500.0, 30.0), id="noise"),
        pytest.param(lambda step: 500.0 + 300 * (step >= 100), id="one step up"),
        pytest.param(noisy(lambda step: 500.0 + 300 * (step >= 100), 2.0), id="one step up with noise"),
        pytest.param(lambda step: 500 + 400 * (1 - math.exp(-step / 15)), id="plateau"),
        pytest.param(lambda step: 500 + 100 * (step % 50 == 0), id="spikes"),
        pytest.param(lambda step: 500 + 2.0 * (step % 20), id="saw teeth"),
        pytest.param(lambda step: 350 + (20 + 0.4 * step) * (step % STEPS_KEPT > 0), id="peaks that rise, given back"),
        pytest.param(lambda step: 900 - 2.0 * step, id="shrinking"),
        pytest.param(lambda step: 500 + 0.01 * step, id="too slow to matter"),
    ],
)
def test_what_is_no_leak_is_not_told(series: Callable[[int], float]) -> None:
    assert warnings_of(series, 400) == []


def test_a_second_leak_after_a_rest_is_told() -> None:
    found = warnings_of(lambda step: 5000 + 2.0 * (min(step, 150) + max(0, step - 400)), 600)
    assert len(found) == 2
    assert found[1][0] > 400


def test_theil_sen_against_a_line_with_outliers() -> None:
    values = [3.0 * step for step in range(60)]
    for position in range(0, 60, 5):
        values[position] += 1e6
    slope = theil_sen(values)
    assert slope.median == pytest.approx(3.0)
    assert theil_sen([5.0] * 30).median == 0
    assert theil_sen([5.0] * 30).low == 0


def test_low_points_are_the_smallest_of_every_few_steps_in_a_row() -> None:
    values = [float(abs(step - STEPS_KEPT)) for step in range(2 * STEPS_KEPT)]
    # The smallest value, 0, stands at STEPS_KEPT: the first stretch ends before it, all others hold it.
    assert low_points(values) == [1.0] + [0.0] * STEPS_KEPT
    assert low_points(values[:STEPS_KEPT]) == [1.0]
    assert low_points(values[: STEPS_KEPT - 1]) == []


def test_the_watch_names_metrics_and_logs_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch()
    with caplog.at_level(logging.WARNING):
        for step in range(FULL_WINDOW):
            metrics = watch.metrics(
                {"driver": MemoryUse(2**30, AVAILABLE), "policy 0": MemoryUse(2**30 + 3 * step * MIB, AVAILABLE)}
            )
    assert metrics["perf/memory_gib/driver"] == 1.0
    assert metrics["perf/memory_gib/policy_0"] == pytest.approx(1 + 3 * step / 1024)
    assert metrics["perf/memory_slope_mib"] == pytest.approx(3.0)
    assert [record.message.startswith("the memory of policy 0 grows") for record in caplog.records] == [True]


def test_a_real_leak_is_told_and_real_work_without_one_is_not() -> None:
    leaking, steady, kept = SlopeAlarm("leaking"), SlopeAlarm("steady"), []
    told = []
    for _ in range(FULL_WINDOW):
        kept.append(np.ones(MIB, dtype=np.uint8))
        told.append(leaking.add(memory_use()))
    for _ in range(FULL_WINDOW):
        np.ones(MIB, dtype=np.uint8).sum()
        told.append(steady.add(memory_use()))
    [warning] = [warning for warning in told if warning is not None]
    assert "leaking grows by 1.0" in warning
    assert steady.slope is not None and abs(steady.slope) < 0.1 * MIB
    assert len(kept) == FULL_WINDOW


def test_a_real_process_sees_what_it_holds_and_its_peak() -> None:
    before = memory_use()
    reset_peak()
    held = np.ones(2**26, dtype=np.uint8)
    during = memory_use()
    assert 0.9 * held.nbytes < during.private - before.private < 1.2 * held.nbytes
    assert 0 < during.available < 2**50
    size = held.nbytes
    del held
    peak = peak_bytes()
    assert peak is not None and peak > memory_use().private + 0.8 * size
    # A process that is gone costs nothing and does not raise.
    assert memory_use([2**22 + 1]).private == pytest.approx(memory_use().private, rel=0.05)


def test_memory_that_was_freed_between_what_is_held_is_given_back() -> None:
    blocks = [np.ones(64 * 2**10, dtype=np.uint8) for _ in range(2000)]
    before = memory_use().private
    del blocks[:-1]  # the last one keeps the heap from shrinking
    give_back_free_memory()
    assert before - memory_use().private > 100 * MIB


SHAPES = """
import torch
from rollout.processes.process_memory import memory_use
torch.set_num_threads(1)
weight, rows, early = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(1200, 64, dtype=torch.bfloat16), 0
for count in range(500, 900):
    torch.mm(rows[:count], weight.t())
    if count == 599:
        early = memory_use().private
print(memory_use().private - early)
"""


def test_products_of_ever_new_shapes_do_not_fill_the_memory_of_a_rank() -> None:
    """With torch's own bound it is 190 MiB where the processor multiplies bfloat16 numbers."""
    environment = os.environ | {"LRU_CACHE_CAPACITY": str(RANK_KERNELS), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    run = subprocess.run([sys.executable, "-c", SHAPES], env=environment, capture_output=True, text=True, timeout=120)
    assert int(run.stdout) < 10 * MIB


def test_freed_memory_is_kept_for_the_next_steps_and_then_given_back() -> None:
    freed, held, given = FreedMemory(), [], []
    for step in range(2 * STEPS_KEPT):
        blocks = [np.ones(64 * 2**10, dtype=np.uint8) for _ in range(2000)]
        held.append(blocks.pop())  # keeps the heap from shrinking
        del blocks
        before = memory_use().private
        if freed.end_step():
            given.append(step + 1)
            assert before - memory_use().private > 100 * MIB
    assert given == [STEPS_KEPT, 2 * STEPS_KEPT]


def test_freed_memory_that_grows_fast_is_given_back_at_once() -> None:
    freed = FreedMemory()
    assert not freed.end_step()
    held = np.ones(2 * memory_use().private, dtype=np.uint8)
    assert freed.end_step()
    del held
    assert not freed.end_step()


LARGE = """
import resource, torch
for _ in range(8):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_tensors_of_a_rank_find_the_memory_of_those_before_them() -> None:
    """Of 64 MiB each; on a heap of its own glibc asks the kernel for 16,384 new pages every time."""
    environment = os.environ | {"GLIBC_TUNABLES": RANK_HEAP}
    run = subprocess.run([sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, timeout=120)
    assert int(run.stdout) < 100
