"""Calls of Ray actors with deadlines: every answer has a deadline, and every failure names the phase and the worker."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.engine import EngineError
from rollout.processes.process_marks import ProcessMark, kill_processes
from rollout.types import SharedWeights
from rollout.user_code.custom_code import own_line
from rollout.weights.shared_weights import copy_of

logger = logging.getLogger(__name__)

GRACE_S = 15.0
"""Seconds that a group waits beyond the worker's deadline, so that the worker's own, better error arrives first."""
_USED_MEMORY = re.compile(r"was (?P<used>\S+) used / (?P<limit>\S+) limit")
_ENDED_FOR_MEMORY = re.compile(r"pid=(?P<pid>\d+), actual memory used=(?P<held>[^\s,]+)")
"""Parts of Ray's message about processes that it ended because a machine was short of memory."""


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the message names phase, worker and cause."""


class LostWorkerError(WorkerError):
    """A worker died, or did not answer in time: the process may still run, but cannot be used any more."""


class WorkerProcess(NamedTuple):
    """The process of a worker."""

    name: str
    """Name of the worker in messages."""
    node: str
    """Ray node id of its machine."""
    mark: ProcessMark


def gather(
    refs: Sequence[ray.ObjectRef[Any]], *, names: Sequence[str], phase: str, deadline_s: float, memory_note: str = ""
) -> list[Any]:
    """Results of `refs` in order; raises at the first failure, without waiting for the other results.

    Waiting for all results would hide the cause: when one FSDP rank dies, the others hang in a collective.
    `memory_note` ends the message about a worker that Ray ended because the memory was used up.
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
                # The answer is ready; one from another machine is still to be copied.
                results[position] = ray.get(ref, timeout=max(GRACE_S, deadline - time.monotonic()))
            except RayTaskError as error:
                if isinstance(error.cause, EngineError):
                    raise error.cause from error
                where = own_line(str(error))
                raise WorkerError(
                    f"phase {phase}: {names[position]} raised {type(error.cause).__name__}: {error.cause}{where}"
                ) from error
            except (RayActorError, OutOfMemoryError) as error:
                cause = cause_of_death(str(error), memory_note=memory_note)
                raise LostWorkerError(f"phase {phase}: {names[position]} died: {cause}") from error
            except GetTimeoutError as error:
                raise LostWorkerError(f"phase {phase}: the answer of {names[position]} did not arrive") from error
            except RayError as error:
                kind = type(error).__name__
                raise WorkerError(f"phase {phase}: {names[position]} could not answer: {kind}: {error}") from error
    return results


def cause_of_death(message: str, *, memory_note: str = "") -> str:
    """One paragraph out of Ray's `message` about a dead worker, which has up to fifty lines."""
    used, ended = _USED_MEMORY.search(message), list(_ENDED_FOR_MEMORY.finditer(message))
    if used is None or not ended:
        detail = message.partition("Worker exit detail:")[2] or message
        return " ".join(detail.split())
    processes = " and ".join(f"process {each['pid']}, which held {each['held']}" for each in ended)
    return (
        f"the memory of its machine was used up ({used['used']} of {used['limit']}), and Ray ended {processes}. "
        f"{memory_note}"
    ).rstrip()


def stop_workers(workers: Sequence[ActorHandle[Any]], *, names: Sequence[str]) -> None:
    """Ask every worker to stop, log the workers that failed to stop, and kill all workers; takes at most GRACE_S."""
    refs: list[ray.ObjectRef[Any]] = [worker.stop.remote() for worker in workers]
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    for ref, name in zip(refs, names, strict=True):
        if ref not in done:
            logger.warning("%s did not stop within %.0f s and is killed", name, GRACE_S)
            continue
        try:
            ray.get(ref, timeout=GRACE_S)
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
    if not run_on(node, kill_processes, list(processes)):
        logger.warning("processes %s on another machine may still run", [mark.pid for mark in processes])


def is_here(node: str) -> bool:
    """True if the Ray node is the machine of the caller."""
    return bool(node == ray.get_runtime_context().get_node_id())


def run_on(node: str, function: Callable[..., None], *arguments: object) -> bool:
    """Run `function` on the machine of a Ray node; False if it has not ended there within GRACE_S."""
    if is_here(node):
        function(*arguments)
        return True
    done, _ = ray.wait([call_on(node, function, *arguments)], timeout=GRACE_S)
    return bool(done)


def copy_weights(shared: SharedWeights, *, node: str) -> ray.ObjectRef[Any]:
    """Begin to copy weights from the memory of a Ray node into the object store, as PackedWeights."""
    return call_on(node, copy_of, shared)


def call_on(node: str, function: Callable[..., Any], *arguments: object) -> ray.ObjectRef[Any]:
    """Begin to call a function in a process of a Ray node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    reference: ray.ObjectRef[Any] = task.remote(*arguments)
    return reference
