"""What a real process says about its own memory, and what it gives back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from rollout.processes.process_memory import (
    STEPS_KEPT,
    FreedMemory,
    give_back_free_memory,
    peak_bytes,
    private_bytes,
    reset_peak,
)
from trainer.cluster.placement import RANK_HEAP, RANK_KERNELS

MIB = 2**20


def test_a_real_process_sees_what_it_holds_and_its_peak() -> None:
    before = private_bytes()
    reset_peak()
    held = np.ones(2**26, dtype=np.uint8)
    during = private_bytes()
    assert 0.9 * held.nbytes < during - before < 1.2 * held.nbytes
    size = held.nbytes
    del held
    peak = peak_bytes()
    assert peak is not None and peak > private_bytes() + 0.8 * size
    # A process that is gone costs nothing and does not raise.
    assert private_bytes([2**22 + 1]) == pytest.approx(private_bytes(), rel=0.05)


def test_memory_that_was_freed_between_what_is_held_is_given_back() -> None:
    blocks = [np.ones(64 * 2**10, dtype=np.uint8) for _ in range(2000)]
    before = private_bytes()
    del blocks[:-1]  # the last one keeps the heap from shrinking
    give_back_free_memory()
    assert before - private_bytes() > 100 * MIB


SHAPES = """
import torch
from rollout.processes.process_memory import private_bytes
torch.set_num_threads(1)
weight, rows, early = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(1200, 64, dtype=torch.bfloat16), 0
for count in range(500, 900):
    torch.mm(rows[:count], weight.t())
    if count == 599:
        early = private_bytes()
print(private_bytes() - early)
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
        before = private_bytes()
        if freed.end_step():
            given.append(step + 1)
            assert before - private_bytes() > 100 * MIB
    assert given == [STEPS_KEPT, 2 * STEPS_KEPT]


GROWS = """
import numpy as np
from rollout.processes.process_memory import FreedMemory, private_bytes
freed = FreedMemory()
ended = [freed.end_step()]
held = np.ones(2 * private_bytes(), dtype=np.uint8)
ended.append(freed.end_step())
del held
print(*ended, freed.end_step())
"""


def test_freed_memory_that_grows_fast_is_given_back_at_once() -> None:
    """In a small process: twice the memory of one that runs tests takes long to fill."""
    run = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False True False\n", run.stderr


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
