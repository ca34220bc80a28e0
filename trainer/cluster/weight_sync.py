"""Policy -> engines: all weights after every step, verified. The receipt is printed and logged.

The ranks gather the weights, over NCCL where they have GPUs. On every machine that has ranks and engines the first rank
writes them into shared memory, with a digest per tensor, and the engines of the machine read them there. To machines
without a rank they go as Ray objects, once per machine. Every engine proves that what it holds is bitwise what rank 0
published; what SGLang's own digests must be, rank 0 computes once for all engines. A wrong byte, name or version ends
the run with the tensor's name. Of a run that trains an adapter the engines get the frozen weights once, and then the
adapter alone, in the same way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollout.engine import WeightSyncError
from rollout.group.engine_group import EngineGroup
from rollout.types import QuantizationReport
from trainer.cluster.policy_group import PolicyGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The receipt of one weight sync."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    """Bytes of one copy of what was sent: with the first adapter the frozen weights too."""
    num_engines: int
    num_mapped: int
    """Engines on machines of ranks, which read the weights in shared memory; what is left was sent copies."""
    seconds: float
    """From the first gather to the last verified engine."""
    gather_s: float
    """Seconds in which the ranks gathered, and rank 0 cast and digested, for SGLang too."""
    load_s: float
    """Seconds of the slowest engine's load."""
    verify_s: float
    """Seconds of the slowest engine's verification."""
    is_adapter: bool = False
    """True if an adapter was sent, not all weights."""
    quantization: QuantizationReport | None = None
    """Error of the weights that the engines hold, if the engines are quantised."""

    @property
    def gb_per_s(self) -> float:
        """Bytes delivered to all engines / seconds, in 1e9 bytes per second."""
        return self.num_bytes * self.num_engines / self.seconds / 1e9

    def metrics(self) -> dict[str, float | None]:
        return {
            "sync/seconds": self.seconds,
            "sync/bytes": float(self.num_bytes),
            "sync/gb_per_s": self.gb_per_s,
            "sync/gather_s": self.gather_s,
            "sync/load_s": self.load_s,
            "sync/verify_s": self.verify_s,
        } | ({} if self.quantization is None else self.quantization.metrics())

    @property
    def transport(self) -> str:
        """Ways in which the weights reached the engines, with the number of engines of each way."""
        counts = {"shared memory": self.num_mapped, "Ray objects": self.num_engines - self.num_mapped}
        return " and ".join(f"{way} ({count})" for way, count in counts.items() if count)

    def __str__(self) -> str:
        grid = "" if self.quantization is None else f"; the engines hold {self.quantization}"
        return (
            f"{'adapter' if self.is_adapter else 'weights'} verified: version {self.policy_version}, "
            f"{self.num_tensors} tensors, "
            f"{self.num_bytes / 2**20:.1f} MiB to {self.num_engines} engine(s) through {self.transport} "
            f"in {self.seconds:.2f} s, digests equal{grid}"
        )


def sync_weights(policy: PolicyGroup, engines: EngineGroup, *, policy_version: int) -> SyncReport:
    """Give every engine the policy's weights and verify them; raises WeightSyncError with names and versions."""
    started = time.perf_counter()
    with policy.resident():
        published = policy.publish_weights(
            policy_version=policy_version, nodes=engines.nodes, layouts=engines.layouts()
        )
    shared = published.shared
    gathered = time.perf_counter()
    with engines.resident():
        by_engine = engines.load_weights(published)
    for index, report in by_engine.items():
        if report.policy_version != policy_version or report.num_tensors != len(shared.tensors):
            raise WeightSyncError(
                f"phase weight sync: engine {index} holds version {report.policy_version} with "
                f"{report.num_tensors} tensors; expected version {policy_version} with {len(shared.tensors)}"
            )
    # An engine that is being started anew gets the weights when it is ready.
    reports = list(by_engine.values())
    return SyncReport(
        policy_version=policy_version,
        num_tensors=reports[0].num_tensors,
        num_bytes=reports[0].num_bytes,
        num_engines=len(reports),
        num_mapped=engines.num_mapped,
        seconds=time.perf_counter() - started,
        gather_s=gathered - started,
        load_s=max(report.load_s for report in reports),
        verify_s=max(report.verify_s for report in reports),
        is_adapter=shared.base is not None,
        quantization=shared.quantization,
    )
