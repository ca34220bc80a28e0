"""Packages that were built for CPUs are refused where a run wants the GPUs of this machine, before anything starts."""

from __future__ import annotations

import pytest
from compose_cases import resolved

from trainer.limits.machine import Machine
from trainer.run import start
from trainer.run.start import gpu_package_problems

CPU_TORCH = "torch 2.13.0+cpu is a build without CUDA"


@pytest.fixture(autouse=True)
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, torch for CPUs, and an SGLang that lacks what only an engine that sleeps needs."""
    monkeypatch.setattr(start, "this_machine", lambda: Machine(cpus=2, gpus=1, memory=2**40))
    monkeypatch.setattr(start, "gpu_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr(start, "torch_without_cuda", lambda: CPU_TORCH)
    monkeypatch.setattr(start, "cuda_problem", lambda *, sleeps: f"SGLang lacks a part, sleeps={sleeps}")
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda name: object())


def told(*words: str, trains: bool = True) -> list[str]:
    [run] = resolved(*words).runs
    assert run.config is not None, run.problems
    return [str(problem).split(". ")[0] for problem in gpu_package_problems(run.config, trains=trains)]


def test_a_run_on_the_cpu_needs_nothing() -> None:
    assert told("rollout=sglang") == told("rollout=torch") == []


def test_rank_and_engine_are_told_apart() -> None:
    rank = f"policy.gpus_per_worker must be 0 in this environment: {CPU_TORCH}, got 0.5"
    engine = "rollout.gpus_per_engine must be 0 in this environment: {}, got 0.5"
    shared = ["policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "policy.num_workers=1"]
    assert told("rollout=torch", *shared) == [rank, engine.format(CPU_TORCH)]
    for residency, sleeps in (("always", True), ("never", False)):
        words = ["rollout=sglang", *shared, f"cluster.residency={residency}"]
        assert told(*words) == [rank, engine.format(f"SGLang lacks a part, sleeps={sleeps}")]
    assert told("rollout=sglang", *shared, trains=False) == [engine.format("SGLang lacks a part, sleeps=False")]


def test_a_cluster_elsewhere_and_a_machine_without_gpus_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rollout=sglang", "rollout.gpus_per_engine=1", "policy.gpus_per_worker=1"]
    assert told(*words, "cluster.address=10.0.0.1:6379") == []
    monkeypatch.setattr(start, "this_machine", lambda: Machine(cpus=2, gpus=0, memory=2**40))
    assert told(*words) == []


def test_the_start_of_a_run_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rollout=torch", "policy.gpus_per_worker=1", "run.seed=1,2"]
    problems = start.start_problems(resolved(*words, multirun=True))
    assert [problem.key for problem in problems if CPU_TORCH in str(problem)] == ["policy.gpus_per_worker"]
