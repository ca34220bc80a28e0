"""Calls of Ray actors with deadlines: every answer has a deadline, and every failure names the phase and the worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.engine import EngineError
from rollout.processes.process_marks import ProcessMark, kill_processes
from rollout.types import SharedWeights
from rollout.weights.shared_weights import copy_of

logger = logging.getLogger(__name__)

GRACE_S = 15.0
"""Seconds that a group waits beyond the worker's deadline, so that the worker's own, better error arrives first."""


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the message names phase, worker and cause."""


class LostWorkerError(WorkerError):
    """A worker died, or did not answer in time: the process may still run, but cannot be used any more."""


def gather(refs: Sequence[ray.ObjectRef[Any]], *, names: Sequence[str], phase: str, deadline_s: float) -> list[Any]:
    """Results of `refs` in order; raises at the first failure, without waiting for the other results.

    Waiting for all results would hide the cause: when one FSDP rank dies, the others hang in a collective.
    Raises EngineError as the worker raised it, LostWorkerError for a dead or silent worker, WorkerError for any other
    failure.
    """
    pending = {ref: position for position, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    deadline = time.monotonic() + deadline_s
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            silent = ", ".join(names[position] for position in pending.values())
            raise LostWorkerError(f"phase {phase}: no answer from {silent} within {deadline_s:.0f} s")
        for ref in done:
            position = pending.pop(ref)
            try:
                results[position] = ray.get(ref)
            except RayTaskError as error:
                if isinstance(error.cause, EngineError):
                    raise error.cause from error
                raise WorkerError(
                    f"phase {phase}: {names[position]} raised {type(error.cause).__name__}: {error.cause}"
                ) from error
            except RayActorError as error:
                raise LostWorkerError(f"phase {phase}: {names[position]} died: {error}") from error
            except RayError as error:
                kind = type(error).__name__
                raise WorkerError(f"phase {phase}: {names[position]} could not answer: {kind}: {error}") from error
    return results


def stop_workers(workers: Sequence[ActorHandle[Any]], *, names: Sequence[str]) -> None:
    """Ask every worker to stop, log the workers that failed to stop, and kill all workers; takes at most GRACE_S."""
    refs: list[ray.ObjectRef[Any]] = [worker.stop.remote() for worker in workers]
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    for ref, name in zip(refs, names, strict=True):
        if ref not in done:
            logger.warning("%s did not stop within %.0f s and is killed", name, GRACE_S)
            continue
        try:
            ray.get(ref)
        except RayActorError:
            logger.debug("%s was gone before it was asked to stop", name)
        except RayError as error:
            logger.warning("%s stopped with an error: %s", name, error)
    for worker in workers:
        ray.kill(worker)


def kill_worker(worker: ActorHandle[Any], *, node: str, processes: Sequence[ProcessMark]) -> None:
    """Kill an actor that may not answer, and `processes` on its Ray node; takes at most GRACE_S."""
    ray.kill(worker)
    # Ray asks the process to end itself, and a stopped process (SIGSTOP) does not react.
    if node == ray.get_runtime_context().get_node_id():
        kill_processes(processes)
        return
    done, _ = ray.wait([_call_on(node, kill_processes, list(processes))], timeout=GRACE_S)
    if not done:
        logger.warning("processes %s on another machine may still run", [mark.pid for mark in processes])


def copy_weights(shared: SharedWeights, *, node: str) -> ray.ObjectRef[Any]:
    """Begin to copy weights from the memory of a Ray node into the object store, as PackedWeights."""
    return _call_on(node, copy_of, shared)


def _call_on(node: str, function: Callable[..., Any], *arguments: object) -> ray.ObjectRef[Any]:
    """Call a function in a process of a Ray node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    reference: ray.ObjectRef[Any] = task.remote(*arguments)
    return reference
