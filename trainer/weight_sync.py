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
from trainer.policy_group import PolicyGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The receipt of one weight sync."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    """Bytes of one copy of the weights."""
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
        }

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
            f"in {self.seconds:.2f} s ({self.gb_per_s:.3f} GB/s), digests equal"
        )


def sync_weights(policy: PolicyGroup, engines: EngineGroup, *, policy_version: int) -> SyncReport:
    """Give every engine the policy's weights and verify them; raises WeightSyncError with names and versions."""
    started = time.perf_counter()
    with policy.resident():
        shared = policy.publish_weights(policy_version=policy_version)
    num_mapped = engines.num_on(policy.node)
    copies = policy.copy_weights() if num_mapped < len(engines) else None
    gathered = time.perf_counter()
    with engines.resident():
        reports = engines.load_weights(shared, node=policy.node, copies=copies)
    for index, report in enumerate(reports):
        if report.policy_version != policy_version or report.num_tensors != reports[0].num_tensors:
            raise WeightSyncError(
                f"phase weight sync: engine {index} holds version {report.policy_version} with "
                f"{report.num_tensors} tensors; expected version {policy_version} with {reports[0].num_tensors}"
            )
    return SyncReport(
        policy_version=policy_version,
        num_tensors=reports[0].num_tensors,
        num_bytes=reports[0].num_bytes,
        num_engines=len(engines),
        num_mapped=num_mapped,
        seconds=time.perf_counter() - started,
        gather_s=gathered - started,
        load_s=max(report.load_s for report in reports),
        verify_s=max(report.verify_s for report in reports),
    )
