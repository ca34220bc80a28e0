"""What ranks and engines on the GPUs of this machine lack is told before anything starts, each lack once."""

from __future__ import annotations

import pytest
from compose_cases import resolved

from rollout.processes.gpu_host import Lack
from rollout.sglang import cuda_host
from trainer.limits.machine import Machine
from trainer.start import checks as start
from trainer.start.checks import gpu_host_problems

CPU_TORCH = Lack("torch 2.13.0+cpu is a build without CUDA", "Install another.")
NO_COMPILER = Lack("there is no C compiler", "Install one.")


@pytest.fixture(autouse=True)
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, torch for CPUs, no compiler, and an SGLang that lacks a part."""
    monkeypatch.setattr(start, "this_machine", lambda: Machine(cpus=2, gpus=1, memory=2**40))
    monkeypatch.setattr(start, "gpu_bytes", lambda: 80 * 2**30)
    shared = [CPU_TORCH, NO_COMPILER]
    monkeypatch.setattr(start, "torch_lacks", lambda: [CPU_TORCH])
    monkeypatch.setattr(start, "rank_lacks", lambda: shared)
    part = "SGLang lacks a part, sleeps="
    monkeypatch.setattr(cuda_host, "engine_lacks", lambda *, sleeps: [*shared, Lack(f"{part}{sleeps}", "Install it.")])


def told(*words: str, trains: bool = True) -> list[tuple[str, str]]:
    [run] = resolved(*words).runs
    assert run.config is not None, run.problems
    problems = list(gpu_host_problems(run.config, trains=trains))
    assert all(problem.remedy.startswith("Install") for problem in problems)
    return [(problem.key, problem.rule.partition(": ")[2]) for problem in problems]


def test_a_run_on_the_cpu_needs_nothing() -> None:
    assert told("rollout=sglang") == told("rollout=torch") == []


def test_rank_and_engine_are_told_apart_and_what_both_lack_once() -> None:
    rank, engine = "policy.gpus_per_worker", "rollout.gpus_per_engine"
    shared = ["policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "policy.num_workers=1"]
    of_both = [CPU_TORCH.what, NO_COMPILER.what]
    assert sorted(told("rollout=torch", *shared)) == sorted((rank, what) for what in of_both)
    for residency, sleeps in (("always", True), ("never", False)):
        found = told("rollout=sglang", *shared, f"cluster.residency={residency}")
        part = f"SGLang lacks a part, sleeps={sleeps}"
        assert sorted(found) == sorted([*((rank, what) for what in of_both), (engine, part)])
    of_engine = [*of_both, "SGLang lacks a part, sleeps=False"]
    assert told("rollout=sglang", *shared, trains=False) == [(engine, what) for what in of_engine]
    assert told("rollout=torch", *shared, trains=False) == [(engine, CPU_TORCH.what)]


def test_a_cluster_elsewhere_and_a_machine_without_gpus_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rollout=sglang", "rollout.gpus_per_engine=1", "policy.gpus_per_worker=1"]
    assert told(*words, "cluster.address=10.0.0.1:6379") == []
    monkeypatch.setattr(start, "this_machine", lambda: Machine(cpus=2, gpus=0, memory=2**40))
    assert told(*words) == []


def test_the_start_of_a_run_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rollout=torch", "policy.gpus_per_worker=1", "run.seed=1,2"]
    problems = start.start_problems(resolved(*words, multirun=True))
    for lack in (CPU_TORCH, NO_COMPILER):
        assert [problem.key for problem in problems if lack.what in str(problem)] == ["policy.gpus_per_worker"]
