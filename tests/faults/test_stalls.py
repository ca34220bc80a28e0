"""Ranks that are suspended, blocked or short of memory, and a driver that waits for ever: found, named, ended."""

from __future__ import annotations

import math
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from asked_run import Asked
from policy_cases import make_config, make_samples, save_policy
from test_packing import pack_samples

from rollout.group.actor_calls import LostWorkerError, WorkerError
from rollout.group.engine_group import EngineGroup
from rollout.processes.stacks import STACKS_FILE
from rollout.weights.packed_weights import unpack
from rollout.weights.shared_weights import copy_of
from trainer.batch.train_batch import TrainBatch
from trainer.cluster import watchdog
from trainer.cluster.placement import Cluster
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.ray_session import ray_session
from trainer.cluster.watchdog import StalledError, Watchdog, place, suspects

Sides = tuple[PolicyGroup, EngineGroup, Path]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sides(model_path: Path) -> Iterator[Sides]:
    """Two ranks and an engine; the last test of the module ends a rank."""
    with ray_session(None), Cluster(make_config(model_path), log_dir=model_path / "logs") as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        yield policy, engines, model_path / "logs" / STACKS_FILE


@pytest.fixture
def said(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the watchdog, whose periods are short."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.1)
    monkeypatch.setattr(watchdog, "SUSPENDED_S", 2.0)
    monkeypatch.setattr(watchdog, "MARGIN_S", 3.0)
    sides[2].write_text("")
    return []


def watched(sides: Sides, said: list[str], *, longest_s: float) -> Watchdog:
    policy, engines, file = sides
    return Watchdog(policy, engines, file=file, longest_s=longest_s, say=said.append)


def title_lines(file: Path) -> list[str]:
    return [line for line in file.read_text("utf-8").splitlines() if line.startswith("====")]


@pytest.mark.slow
@pytest.mark.scenario(25)
def test_a_loss_that_is_no_number_on_one_of_two_ranks_skips_the_step_on_both(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    policy, _, _ = sides

    def batch(*, is_bad: bool) -> TrainBatch:
        samples = make_samples()
        samples[5].reward = math.nan if is_bad else 1.0  # the reward is the advantage
        return pack_samples([samples], num_ranks=2, max_tokens=20, policy_version=0)

    def weights(version: int) -> torch.Tensor:
        shared = policy.publish_weights(policy_version=version).shared
        return torch.cat([tensor.flatten().clone() for _, tensor in unpack(copy_of(shared))])

    before = weights(1)
    report = policy.train(batch(is_bad=True), step=1)
    assert [rank.num_optimizer_steps for rank in report.ranks] == [0, 0]
    assert [bool(rank.bad_samples) for rank in report.ranks].count(True) == 1
    assert (1, 1) in report.bad_samples and "prompt/sample" in caplog.text and "1/1" in caplog.text
    assert torch.equal(weights(2), before)
    assert policy.train(batch(is_bad=False), step=2).num_optimizer_steps == 1
    assert weights(3).isfinite().all() and not torch.equal(weights(4), before)
    for step in (3, 4):
        policy.train(batch(is_bad=True), step=step)
    with pytest.raises(WorkerError, match=r"3 optimizer steps of the policy in a row .* norm; lower optim\.lr"):
        policy.train(batch(is_bad=True), step=5)


@pytest.mark.slow
@pytest.mark.scenario(28)
def test_a_stall_is_reported_with_the_stacks_and_the_suspect_and_the_run_goes_on(
    sides: Sides, said: list[str], tmp_path: Path
) -> None:
    policy, _, file = sides
    policy.save_checkpoint(tmp_path, asynchronous=False)
    assert policy.saved_checkpoint(wait=True) is not None
    # Rank 1 blocks in the kernel: nobody writes to what it reads.
    blocking = tmp_path / "rng_1.json"
    text = blocking.read_text("utf-8")
    blocking.unlink()
    os.mkfifo(blocking)

    def say(line: str) -> None:
        said.append(line)
        blocking.write_text(text, "utf-8")  # ends the stall

    with Watchdog(policy, sides[1], file=file, longest_s=4.0, say=say):
        assert policy.load_checkpoint(tmp_path, step=1)
    [line] = said
    assert line.startswith("watchdog: no rank and no engine has answered for 2 s. The driver at ")
    assert "waits for policy 1 at trainer/policy/checkpoint_shards.py:" in line
    assert line.endswith("A longer silence than 4 s ends the run.")
    names = [title.split(" (")[0].removeprefix("==== ") for title in title_lines(file)[1:]]
    assert names == ["policy 0", "policy 1", "engine 0", "driver"]
    assert "in load_rng" in file.read_text("utf-8") and "test_stalls.py" in file.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.scenario(28)
def test_a_driver_that_waits_for_ever_is_ended_with_its_place(sides: Sides, said: list[str]) -> None:
    idle = r"waits for itself, for every rank and engine is idle\. The stacks"
    with pytest.raises(StalledError, match=idle), watched(sides, said, longest_s=1.0):
        queue.SimpleQueue[None]().get()
    assert len(said) == 2 and said[1] != said[0]


@pytest.mark.slow
@pytest.mark.scenario(27)
def test_a_suspended_rank_is_named_and_ended_long_before_the_deadline_of_the_step(
    sides: Sides, said: list[str]
) -> None:
    policy, _, file = sides
    suspended = psutil.Process(policy.processes[1].mark.pid)
    suspended.suspend()
    begin = time.monotonic()
    with watched(sides, said, longest_s=1800.0), pytest.raises(LostWorkerError) as caught:
        policy.train(pack_samples([make_samples()], num_ranks=2, max_tokens=100, policy_version=0), step=1)
    assert time.monotonic() - begin < 60
    text = str(caught.value)
    assert text == (
        f"phase train: policy 1 (process {suspended.pid}) was suspended for 2 s (SIGSTOP, or a debugger); the stacks "
        f"of all processes are in {file}"
    )
    suspended.wait(timeout=10)
    assert "in all_reduce" in file.read_text("utf-8") or "torch/distributed" in file.read_text("utf-8")


SHORT = """
import sys
from trainer.cluster import watchdog
watchdog.SUSPENDED_S = 3.0
from trainer.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.scenario(27)
def test_a_whole_run_with_a_suspended_rank_ends_with_its_name_and_the_stacks(asked: Callable[..., Asked]) -> None:
    """The real command, whose watchdog waits for 3 s instead of 30 s."""
    run = asked("policy.num_workers=2", start=("-c", SHORT))
    run.wait_until(lambda: run.steps() >= 1)
    suspended = run.processes("ray::PolicyWorker")[1]
    suspended.suspend()
    assert run.ended_in(45) > 3
    assert run.process.returncode == 1 and run.status() == "failed"
    found = re.search(rf"(policy [01]) \(process {suspended.pid}\) was suspended for 3 s", run.said)
    assert found is not None, run.said
    stacks = (run.run_dir / "logs" / STACKS_FILE).read_text("utf-8")
    for name in ("policy 0", "policy 1", "engine 0", "driver"):
        assert f"==== {name} (process " in stacks
    assert f"{found[1]} (process {suspended.pid}) was suspended" in stacks.partition("==== policy 0")[0]


IDLE = 'Thread 0x1 (most recent call first):\n  File "/x/ray/worker.py", line 1 in main_loop\n'
BUSY = IDLE + '\nThread 0x2 (most recent call first):\n  File "/x/trainer/policy/worker.py", line 9 in train\n'
IN_COLLECTIVE = BUSY.replace("  File", '  File "/x/torch/distributed/c10d.py", line 5 in all_reduce\n  File')


@pytest.mark.parametrize(
    ("stacks", "named"),
    [
        ({"policy 0": IN_COLLECTIVE, "policy 1": BUSY}, ["policy 1"]),
        ({"policy 0": IN_COLLECTIVE, "policy 1": IN_COLLECTIVE}, ["policy 0", "policy 1"]),
        ({"policy 0": BUSY, "policy 1": ""}, ["policy 1"]),
        ({"policy 0": IDLE, "policy 1": IDLE}, []),
        ({"policy 0": IDLE, "policy 1": BUSY}, ["policy 1"]),
    ],
)
def test_the_suspect_is_the_one_for_which_the_others_wait(stacks: dict[str, str], named: list[str]) -> None:
    assert suspects(stacks) == named


def test_the_place_is_the_innermost_frame_of_parity() -> None:
    assert place(IN_COLLECTIVE) == " at trainer/policy/worker.py:9 in train"
    assert place(IDLE) == ""
