"""The rollout worker: one engine in a Ray actor; `rollout/group/engine_group.py` is the typed handle over all workers.

Ray runs one method at a time, except methods of CONCURRENCY_GROUPS: the actor accepts requests and returns answers
while another method runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from rollout.engine import EngineError, EngineInfo, EngineSetup, WeightReport
from rollout.processes.inherited import allow_open_files, forget_allocator, forget_launcher
from rollout.processes.process_marks import ProcessMark, mark_processes, wait_for_end
from rollout.processes.process_memory import private_bytes
from rollout.processes.stacks import STACKS_FILE, write_stack_when_asked
from rollout.types import Completion, GenerateRequest, PackedWeights, SharedWeights
from rollout.weights.shared_weights import WeightReader

CONCURRENCY_GROUPS = {"requests": 1, "answers": 1}
"""Concurrency group -> number of actor threads for the methods of the group, besides the thread for other methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostEngine:
    """What an engine that is started anew must know of the one in whose place it is."""

    processes: tuple[ProcessMark, ...]
    cache_tokens: int | None
    """EngineInfo.cache_tokens of the lost engine; None if it was never ready."""


RELEASE_TIMEOUT_S = 60.0
"""Seconds for the processes of a killed engine to end, and so to give back tens of GiB of a GPU."""


class RolloutWorker:
    """One engine behind the methods of the Engine protocol."""

    def __init__(self, setup: EngineSetup) -> None:
        forget_launcher()
        allow_open_files()
        if setup.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpus)
        if setup.sleeps:
            forget_allocator()
        write_stack_when_asked(setup.log_dir / STACKS_FILE)
        self._setup = setup
        self._engine = setup.config.build(setup)
        self._pids: tuple[int, ...] = ()
        self._shared, self._base = WeightReader(), WeightReader()

    def start(self, lost: LostEngine | None = None) -> tuple[EngineInfo, tuple[ProcessMark, ...]]:
        """Start the engine -> (its description, processes to kill if the worker does not answer any more).

        In the place of a `lost` engine it starts when that one's processes have ended: SGLang takes a share of the
        memory that is free then. Raises EngineError if they do not end.
        """
        if lost is not None:
            if left := wait_for_end(lost.processes, timeout_s=RELEASE_TIMEOUT_S):
                raise EngineError(
                    f"engine {self._setup.index} start: processes {left} of the engine before it still run "
                    f"{RELEASE_TIMEOUT_S:.0f} s after SIGKILL, and hold its memory; a driver call may be stuck"
                )
            setup = replace(self._setup, cache_tokens=lost.cache_tokens)
            self._engine = setup.config.build(setup)
        info = self._engine.start(self._setup.model_path)
        self._pids = info.pids
        return info, mark_processes((os.getpid(), *info.pids))

    @ray.method(concurrency_group="requests")
    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        self._engine.submit(tickets, requests)

    @ray.method(concurrency_group="answers")
    def poll(self, timeout_s: float) -> list[Completion]:
        return self._engine.poll(timeout_s)

    @ray.method(concurrency_group="requests")
    def abort(self, tickets: Sequence[int] | None) -> None:
        self._engine.abort(tickets)

    @ray.method(concurrency_group="requests")
    def give_back(self, count: int) -> list[int]:
        return self._engine.give_back(count)

    def sampling_s(self) -> float:
        return self._engine.sampling_s

    def load_weights(self, weights: SharedWeights | PackedWeights, base: PackedWeights | None = None) -> WeightReport:
        """Load weights from the memory of this machine, or from copies sent by another machine, with the `base` of an
        adapter beside them."""
        if isinstance(weights, SharedWeights):
            with ExitStack() as within:
                base = None if weights.base is None else within.enter_context(self._base.opened(weights.base))
                packed = within.enter_context(self._shared.opened(weights))
                report = self._engine.load_weights(replace(packed, base=base))
        else:
            report = self._engine.load_weights(replace(weights, base=base))
        if not (report.in_place and isinstance(weights, SharedWeights)):
            self._shared.release()
            self._base.release()
        return replace(report, private_bytes=private_bytes(self._pids))

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def start_profile(self, directory: Path) -> None:
        self._engine.start_profile(directory)

    def stop_profile(self) -> None:
        self._engine.stop_profile()

    def stop(self) -> None:
        self._engine.stop()
        self._shared.close()
        self._base.close()
