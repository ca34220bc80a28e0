"""Policy -> engines: all weights after every step, verified. The receipt is printed and logged.

Rank 0 casts the gathered weights into shared memory, with a digest per tensor; engines on its machine read them there,
engines on other machines are sent copies through Ray's object store. Every engine proves that what it holds is bitwise
what was published. A wrong byte, name or version ends the run with the tensor's name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollout.engine import WeightSyncError
from rollout.engine_group import EngineGroup
from rollout.types import QuantizationReport
from trainer.policy_group import PolicyGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The receipt of one weight sync."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    """Bytes of one copy of the weights; the mean where engines hold different ones."""
    num_engines: int
    num_mapped: int
    """Engines that read the weights in shared memory; the others were sent copies."""
    seconds: float
    """From the first gather to the last verified engine."""
    gather_s: float
    """Seconds in which the ranks gathered, and rank 0 cast, digested and, for other machines, copied."""
    load_s: float
    """Seconds of the slowest engine's load."""
    verify_s: float
    """Seconds of the slowest engine's verification."""
    quantization: QuantizationReport | None = None
    """What the weights of quantised engines lost, if there are such engines."""
    num_quantized: int = 0
    """Engines that hold quantised weights."""

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
        """How the weights reached the engines."""
        sent = self.num_engines - self.num_mapped
        ways = [f"shared memory ({self.num_mapped})"] * bool(self.num_mapped) + [f"Ray objects ({sent})"] * bool(sent)
        return " and ".join(ways)

    def __str__(self) -> str:
        return (
            f"weights verified: version {self.policy_version}, {self.num_tensors} tensors, "
            f"{self.num_bytes / 2**20:.1f} MiB to {self.num_engines} engine(s) through {self.transport} "
            f"in {self.seconds:.2f} s ({self.gb_per_s:.3f} GB/s), digests equal{self._grid}"
        )

    @property
    def _grid(self) -> str:
        return "" if self.quantization is None else f"; {self.num_quantized} engine(s) hold {self.quantization}"


def sync_weights(policy: PolicyGroup, engines: EngineGroup, *, policy_version: int) -> SyncReport:
    """Give every engine the policy's weights and verify them; raises WeightSyncError with names and versions."""
    started = time.perf_counter()
    kinds = engines.kinds
    with policy.resident():
        shared = {kind: policy.publish_weights(policy_version=policy_version, quantized=kind) for kind in kinds}
    mapped = {kind: engines.num_on(policy.node, quantized=kind) for kind in kinds}
    copies = {kind: policy.copy_weights(quantized=kind) for kind in kinds if mapped[kind] < engines.num_of(kind)}
    gathered = time.perf_counter()
    with engines.resident():
        by_engine = engines.load_weights(shared, node=policy.node, copies=copies)
    for index, report in by_engine.items():
        sent = shared[index < engines.num_of(True)].num_tensors
        if report.policy_version != policy_version or report.num_tensors != sent:
            raise WeightSyncError(
                f"phase weight sync: engine {index} holds version {report.policy_version} with "
                f"{report.num_tensors} tensors; expected version {policy_version} with {sent}"
            )
    # An engine that is being started anew gets the weights when it is ready.
    reports = list(by_engine.values())
    return SyncReport(
        policy_version=policy_version,
        num_tensors=reports[0].num_tensors,
        num_bytes=sum(report.num_bytes for report in reports) // len(reports),
        num_engines=len(reports),
        num_mapped=min(sum(mapped.values()), len(reports)),
        seconds=time.perf_counter() - started,
        gather_s=gathered - started,
        load_s=max(report.load_s for report in reports),
        verify_s=max(report.verify_s for report in reports),
        quantization=shared[True].quantization if True in shared else None,
        num_quantized=engines.num_of(True),
    )
