"""Collects one rank's part of a recorded step and writes the part to a safetensors file, one file per rank.

    <optimizer step>/<micro-batch>/<name>     the tensors of a micro-batch: `OF_SCORES` and, in the first pass over the
                                              rollout, `OF_BATCH`, token_ids [T] int32, cu_seqlens [N+1] int32,
                                              response_mask [T] bool, sample_keys [N, 2] int64 of (prompt_id,
                                              sample_index), sample_numbers [N] int64
    <optimizer step>/<micro-batch>/support_*  support_sizes [R] int32 and support_ids [K] int32 of TokenSupports, in the
                                              first pass over a rollout of truncated sampling
    <optimizer step>/<micro-batch>/route*     see `trainer/batch/route_tensors.py`, in the first pass of a run that
                                              replays routes
    samples/<name>                            StepSamples, in the file of rank 0

Micro-batches keep their boundaries and their order, so sums over the micro-batches, made again, are the same to the
last bit. Tensors that are 0 off the response mask are stored for response tokens only. Used by
`trainer/policy/step.py`; `trainer/replay/recorded.py` reads the file. T: packed tokens, R: response tokens, N:
sequences, S: samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.batch.route_tensors import route_tensors
from trainer.batch.train_batch import RankMiniBatch, StepSamples, TokenScores
from trainer.rundir.dump import OptimizerStep, RankFile
from trainer.rundir.sealed_directory import FileRecord, describe_file

OF_BATCH = ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "old_values", "returns", "token_lags")
"""[R] float32 (token_lags int32), as in MicroBatch; those that the run did not have are absent."""
OF_SCORES = ("logprobs", "entropy")
"""[R] float32, as in TokenScores: pi_theta of the optimizer step that the micro-batch belongs to."""
SAMPLES = ("rewards", "group_ids", "num_tokens", "lags")
"""[S], as in StepSamples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpReport:
    """Outcome of writing one rank's part of a dump."""

    rank_file: RankFile | None
    """None after an error, as `record`."""
    record: FileRecord | None
    error: str | None
    write_s: float


class StepRecorder:
    """Collects the micro-batches of a step while they are trained on, on the host."""

    def __init__(self, samples: StepSamples, *, rank: int) -> None:
        self._rank = rank
        self._steps: list[OptimizerStep] = []
        self._first: dict[int, int] = {}
        """Identity of a mini-batch -> optimizer step of the first pass over it."""
        self._device = samples.rewards.device.type
        self._tensors: dict[str, Tensor] = {}
        if rank == 0:
            self._tensors = {f"samples/{name}": getattr(samples, name).cpu().contiguous() for name in SAMPLES}

    def add(self, mini: RankMiniBatch, position: int, scores: TokenScores) -> None:
        """Keep micro-batch `position` of `mini` as it enters the loss; the first one begins an optimizer step."""
        if position == 0:
            self._begin(mini)
        micro, again = mini.micro_batches[position], self._steps[-1].again is not None
        found = {name: getattr(scores, name).detach() for name in OF_SCORES}
        found |= {} if again else {name: getattr(micro, name) for name in OF_BATCH}
        tensors = {name: value[micro.response_index] for name, value in found.items() if value is not None}
        if "token_lags" in tensors:
            tensors["token_lags"] = tensors["token_lags"].to(torch.int32)
        if not again:
            tensors |= {
                "token_ids": micro.token_ids.to(torch.int32),
                "cu_seqlens": micro.cu_seqlens,
                "response_mask": micro.response_mask,
                "sample_keys": torch.tensor(micro.sample_keys, dtype=torch.int64).reshape(len(micro.sample_keys), 2),
                "sample_numbers": micro.sample_numbers,
            }
        if not again and micro.supports is not None:
            tensors |= {"support_sizes": micro.supports.sizes, "support_ids": micro.supports.token_ids}
        if not again and micro.routes is not None:
            tensors |= route_tensors(micro.routes)
        # A tensor that shares its memory with another one is refused by safetensors, so each is a copy.
        self._tensors |= {
            f"{len(self._steps) - 1}/{position}/{name}": value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()
        }

    def _begin(self, mini: RankMiniBatch) -> None:
        step = OptimizerStep(
            num_response_tokens=mini.num_response_tokens,
            num_sequences=mini.num_sequences,
            num_micro_batches=len(mini.micro_batches),
            again=self._first.get(id(mini)),
        )
        self._first.setdefault(id(mini), len(self._steps))
        self._steps.append(step)

    def write(self, directory: Path) -> DumpReport:
        """Write this rank's file to `directory`. What the disk does not take is in the report: no error gets past."""
        started = time.perf_counter()
        path = directory / f"rank_{self._rank:05d}.safetensors"
        try:
            save_file(self._tensors, path)
            record = describe_file(path)
        except (OSError, SafetensorError) as error:
            problem = f"rank {self._rank}: {error}"
            return DumpReport(rank_file=None, record=None, error=problem, write_s=time.perf_counter() - started)
        written = RankFile(
            file=path.name,
            optimizer_steps=tuple(self._steps),
            num_threads=torch.get_num_threads(),
            device=self._device,
        )
        return DumpReport(rank_file=written, record=record, error=None, write_s=time.perf_counter() - started)
