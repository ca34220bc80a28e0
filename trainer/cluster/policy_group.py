"""PolicyGroup: a typed handle over the FSDP workers. One method per verb of `trainer/policy/worker.py`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from torch import Tensor

from rollout.engine import EngineError, WeightSyncError
from rollout.group.actor_calls import GRACE_S, LostWorkerError, WorkerError, WorkerProcess, gather, run_on
from rollout.group.group_member import Published
from rollout.group.residency import SharedGpu
from rollout.processes.process_marks import kill_processes
from rollout.types import SharedWeights, WeightLayout
from trainer.batch.train_batch import MicroBatch, TrainBatch
from trainer.limits.ceilings import Ceilings
from trainer.limits.floors import GroupLengths
from trainer.policy.checkpoint_shards import ShardReport, file_shares
from trainer.policy.dry_run import DryRunReport
from trainer.policy.train_report import TrainReport
from trainer.policy.worker import PolicyInfo
from trainer.rundir.sealed_directory import FileRecord, SealError

logger = logging.getLogger(__name__)

CEILINGS_TIMEOUT_S = 60.0
"""Deadline in seconds of measuring what the hardware can do; it takes one or two."""


class PolicyGroup:
    """All FSDP ranks as one. Collectives inside the verbs need every rank: each call goes to all of them."""

    def __init__(
        self,
        workers: Sequence[ActorHandle[Any]],
        *,
        nodes: Sequence[str],
        memory_note: str,
        start_timeout_s: float,
        step_timeout_s: float,
        meets_at_port: bool = False,
        shared_gpu: SharedGpu | None = None,
    ) -> None:
        """`nodes` are the Ray node ids of the ranks; `meets_at_port` is True if the ranks meet at the store of rank 0.

        `memory_note` is said if Ray ends a rank because the memory is used up. `shared_gpu` is given if the engines use
        the same GPUs.
        """
        self._workers = list(workers)
        self._nodes = list(nodes)
        self.node = nodes[0]
        """Ray node id of rank 0, which sends the weights to machines without a rank."""
        self._memory_note = memory_note
        self._names = [f"policy {rank}" for rank in range(len(self._workers))]
        self._start_timeout_s = start_timeout_s
        ports: list[int] = []
        if meets_at_port:
            opened = [self._workers[0].open_store.remote()]
            ports = gather(opened, names=self._names[:1], phase="policy start", deadline_s=start_timeout_s)
        self._starting = [worker.setup.remote(*ports) for worker in self._workers]
        self._step_timeout_s = step_timeout_s
        self._shared_gpu = shared_gpu or SharedGpu()
        self.processes: list[WorkerProcess] = []
        """The process of every rank, once they are ready."""
        self.num_answers = 0
        """Number of calls that every rank has answered."""
        self.is_whole = True
        """False once a call has failed on a rank: what the ranks hold then is not to be saved."""
        self._given_up = ""
        """Reason for which the watchdog has ended a rank; "" if it has ended none."""
        self._have_base: set[int] = set()
        """Ranks that have published weights, and so the frozen ones of an adapter."""

    def __len__(self) -> int:
        return len(self._workers)

    def wait_ready(self) -> list[PolicyInfo]:
        """Return when every rank has loaded and sharded the model; they began when the group was made."""
        infos: list[PolicyInfo] = self._gather(self._starting, phase="policy start", deadline_s=self._start_timeout_s)
        marks = [info.process for info in infos]
        self.processes = [WorkerProcess(*rank) for rank in zip(self._names, self._nodes, marks, strict=True)]
        return infos

    def train(self, batch: TrainBatch, *, step: int, dump_dir: Path | None = None) -> TrainReport:
        """One rollout step on all ranks. Every rank writes what it trained on to `dump_dir`, if there is one."""
        refs = [
            worker.train.remote(mini_batches, batch.samples, step, dump_dir)
            for worker, mini_batches in zip(self._workers, batch.ranks, strict=True)
        ]
        report = TrainReport(self._gather(refs, phase="train"))
        skipped = report.metrics["optim/skipped_steps"]
        if skipped:
            norm, kept = report.metrics["optim/grad_norm"], report.metrics["mismatch/kept_frac"]
            text = "step %d: %d optimizer steps skipped on every rank; gradient norm %s, share of tokens kept %s%s"
            keys = ", ".join(f"{prompt}/{index}" for prompt, index in report.bad_samples)
            bad = f"; the loss is not finite in the micro-batches of prompt/sample {keys}" if keys else ""
            logger.warning(text, step, skipped, norm, kept, bad)
        return report

    def dry_run(self, groups: Sequence[GroupLengths]) -> DryRunReport:
        """Forward and backward of a micro-batch of groups of these lengths on every rank; the highest peak."""
        reports: list[DryRunReport] = self._all("dry_run", list(groups), phase="dry run")
        return max(reports, key=lambda report: report.peak_bytes)

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float | None = None, adapter_factor: float = 1.0
    ) -> list[Tensor]:
        """Trainer log-probs [T] of each micro-batch under the current weights, at `sampling.temperature` or another.

        With `adapter_factor` times the adapter: 0 leaves it out.
        """
        arguments = (list(micro_batches), temperature, adapter_factor)
        answers: list[list[Tensor]] = self._all("logprobs", *arguments, phase="logprobs")
        return answers[0]

    def begin_adapter_probe(self, *, seed: int, size: float) -> None:
        """Put random numbers in the place of the adapter on all ranks, until `end_adapter_probe`."""
        self._all("begin_adapter_probe", seed, size, phase="adapter probe")

    def end_adapter_probe(self) -> None:
        """Take the adapter back that was there before."""
        self._all("end_adapter_probe", phase="adapter probe")

    def ceilings(self) -> tuple[Ceilings | None, Ceilings | None]:
        """Return the ceilings of one rank and one engine, as rank 0 measures them while the other ranks rest."""
        refs = [self._workers[0].ceilings.remote()]
        [found] = gather(refs, names=self._names[:1], phase="ceilings", deadline_s=CEILINGS_TIMEOUT_S)
        of_rank, of_engine = found
        return of_rank, of_engine

    def publish_weights(
        self,
        *,
        policy_version: int,
        nodes: Collection[str] = (),
        layouts: tuple[WeightLayout, ...] = (),
    ) -> Published:
        """Gather all weights into memory of rank 0's machine and of each of `nodes` that has a rank.

        The gather gives every rank all weights, so the first rank of a machine publishes them there. What engines of
        these `layouts` must report of the weights goes with them. Raises WeightSyncError if another rank gathered other
        bytes than rank 0.
        """
        first = {node: rank for rank, node in reversed(list(enumerate(self._nodes)))}
        publishing = {0} | {rank for node, rank in first.items() if node in nodes}
        with_base = not publishing <= self._have_base
        refs = [
            worker.publish_weights.remote(policy_version, rank in publishing, with_base, () if rank else layouts)
            for rank, worker in enumerate(self._workers)
        ]
        answers: list[SharedWeights | None] = self._gather(refs, phase="weight gather")
        self._have_base |= publishing
        (_, shared), *others = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
        by_ranks = {self._nodes[rank]: _same_weights(shared, there, rank) for rank, there in others}
        return Published(shared=shared, node=self.node, by_ranks=by_ranks)

    def resident(self) -> AbstractContextManager[None]:
        """Have the ranks on their GPUs for the block."""
        return self._shared_gpu.resident(self)

    def sleep(self) -> None:
        """For `SharedGpu` only: move everything to the host. Checkpoints can be saved meanwhile."""
        self._all("sleep", phase="policy sleep")

    def wake(self) -> None:
        """For `SharedGpu` only: move everything back."""
        self._all("wake", phase="policy wake")

    def start_profile(self, directory: Path) -> None:
        """Record what every rank computes until `stop_profile`, which writes rank_<N>.json.gz to `directory`."""
        self._all("start_profile", directory, phase="profile")

    def stop_profile(self) -> None:
        """Write the traces of the ranks."""
        self._all("stop_profile", phase="profile")

    def save_checkpoint(self, path: Path, *, asynchronous: bool) -> None:
        """Write all that the ranks hold to the directory `path`; if `asynchronous`, only copy it before returning."""
        self._all("save_checkpoint", path, asynchronous, phase="checkpoint save")

    def saved_checkpoint(self, *, wait: bool) -> list[ShardReport] | None:
        """Return every rank's report of the last save; None while a rank is still writing, unless `wait`."""
        reports = self._all("saved_checkpoint", wait, phase="checkpoint save")
        return None if None in reports else reports

    def compare_files(self, checkpoint: Path, records: Mapping[str, FileRecord]) -> None:
        """Have the ranks compare the files of a checkpoint, each its share; returns when every rank has answered.

        No rank loads anything: what one of them finds counts for all. Raises SealError with the damage that they found.
        """
        shares = file_shares(records, num_ranks=len(self))
        refs = [
            worker.compare_files.remote(checkpoint.resolve(), share)
            for worker, share in zip(self._workers, shares, strict=True)
        ]
        found = [damage for damage in self._gather(refs, phase="checkpoint comparison") if damage is not None]
        if found:
            raise SealError("; ".join(found))

    def load_checkpoint(self, path: Path, *, step: int) -> bool:
        """Go on with what is in `path`, the state after `step`, which any number of ranks may have written.

        False if the random number generators were seeded anew, because another number of ranks wrote it.
        """
        return all(self._all("load_checkpoint", path, step, phase="checkpoint load"))

    def give_up(self, rank: WorkerProcess, reason: str) -> None:
        """Kill a rank that cannot answer any more; the call that waits for it raises with this reason."""
        self._given_up = reason
        run_on(rank.node, kill_processes, [rank.mark])

    def stop(self) -> None:
        """End every rank: it is killed, for it holds nothing that would have to be given back."""
        for worker in self._workers:
            ray.kill(worker)
        # A suspended process does not hear Ray.
        for node in set(self._nodes):
            run_on(node, kill_processes, [rank.mark for rank in self.processes if rank.node == node])

    def _all(self, verb: str, *arguments: object, phase: str) -> list[Any]:
        """Call a verb of every rank with the same arguments -> the answers, within policy.step_timeout_s."""
        return self._gather([getattr(worker, verb).remote(*arguments) for worker in self._workers], phase=phase)

    def _gather(self, refs: Sequence[ray.ObjectRef[Any]], *, phase: str, deadline_s: float | None = None) -> list[Any]:
        limit_s = (self._step_timeout_s if deadline_s is None else deadline_s) + GRACE_S
        try:
            answers = gather(refs, names=self._names, phase=phase, deadline_s=limit_s, memory_note=self._memory_note)
        except (WorkerError, EngineError) as error:
            self.is_whole = False
            if self._given_up:
                raise LostWorkerError(f"phase {phase}: {self._given_up}") from error
            raise
        self.num_answers += 1
        return answers


def _same_weights(shared: SharedWeights, there: SharedWeights, rank: int) -> SharedWeights:
    """`shared` as `rank` has it in the memory of its machine; raises WeightSyncError if that are other bytes."""
    for spec, other in zip(shared.tensors, there.tensors, strict=True):
        if spec != other:
            raise WeightSyncError(
                f"phase weight gather: policy version {shared.policy_version}: rank {rank} has other bytes of "
                f"{spec.name} than rank 0 after the gather"
            )
    base = None
    if shared.base is not None and there.base is not None:
        base = _same_weights(shared.base, there.base, rank)
    return replace(shared, address=there.address, base=base)
