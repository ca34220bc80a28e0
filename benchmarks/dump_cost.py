"""Bytes and seconds of writing a step down (`dump.every`), and seconds of scoring it again under every mode.

    python benchmarks/dump_cost.py [--samples 256] [--response 256] [--prompt 128] [--micro-tokens 8192] [--repeats 3]

One rank on a CPU with the real recorder (`trainer/policy/recorder.py`) and random tokens and log-probs; no model, since
what is kept does not depend on its size. The medians of the repeats, in seconds of one processor: a disk that is slower
than the processor is not in them.

keep     seconds that the step spends copying its micro-batches to the host, beside its forward and backward
write    seconds from then until the file is written and hashed
replay   seconds of reading it and scoring it under all modes and presets, in one process

Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from algorithms.config import TISConfig
from rollout.config import TorchEngineConfig
from rollout.task_config import ArithmeticDataConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.packing import pack
from trainer.batch.train_batch import TokenScores, TrainBatch
from trainer.config.outputs import DumpConfig
from trainer.config.train import TrainConfig
from trainer.config.training import BatchConfig, HFModelConfig, PolicyConfig
from trainer.policy.recorder import StepRecorder
from trainer.replay.modes import all_names
from trainer.replay.results import replay_step
from trainer.rundir.dump import DumpDescription, begin_dump, commit_dump, open_dump

GROUP_SIZE = 8


def make_batch(arguments: argparse.Namespace) -> TrainBatch:
    """Responses of one length, whose log-probs are those of a policy near the engine's."""
    generator = torch.Generator().manual_seed(0)
    length = arguments.prompt + arguments.response
    samples = []
    for number in range(arguments.samples):
        logprobs = -torch.rand(arguments.response, generator=generator) * 3
        samples.append(
            Sample(
                prompt_id=number // GROUP_SIZE,
                sample_index=number % GROUP_SIZE,
                token_ids=torch.randint(150_000, (length,), generator=generator).numpy(),
                response_mask=np.arange(length) >= arguments.prompt,
                rollout_logprobs=pad(logprobs.double(), (arguments.prompt, 0)).numpy(),
                token_versions=np.zeros(length, dtype=np.int64),
                finish_reason=FinishReason.stop,
                reward=float(number % 2),
            )
        )
    groups = [
        SampleGroup(
            prompt=Prompt(prompt_id=first // GROUP_SIZE, token_ids=[], text="", answer=""),
            samples=samples[first : first + GROUP_SIZE],
        )
        for first in range(0, len(samples), GROUP_SIZE)
    ]
    return pack([groups], num_ranks=1, max_tokens=arguments.micro_tokens, policy_version=0)


def record(batch: TrainBatch, run_dir: Path, config: TrainConfig) -> tuple[float, float, int]:
    """Seconds of keeping and of writing the step, and bytes of its file."""
    generator = torch.Generator().manual_seed(1)
    minis = batch.ranks[0]
    all_scores = []
    for micro in minis[0].micro_batches:
        noise = 0.02 * torch.randn(micro.token_ids.shape, generator=generator)
        logprobs = torch.where(micro.response_mask, micro.rollout_logprobs + noise, 0.0).clamp(max=0)
        all_scores.append(TokenScores(logprobs=logprobs, entropy=-logprobs, floor_delta=None))
    started = time.process_time()
    recorder = StepRecorder(batch.samples, rank=0)
    for position, scores in enumerate(all_scores):
        recorder.add(minis[0], position, scores)
    kept = time.process_time()
    path = begin_dump(run_dir, 1)
    report = recorder.write(path)
    written = time.process_time()
    if report.rank_file is None or report.record is None:
        raise SystemExit(f"the dump failed: {report.error}")
    description = DumpDescription(
        step=1,
        policy_version=0,
        correction=config.correction.mode,
        ranks=(report.rank_file,),
        metrics={},
    )
    commit_dump(path, description, records={report.rank_file.file: report.record}, config_text="", keep=1)
    return kept - started, written - kept, report.record.bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="cost of a dump")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = TrainConfig(
        model=HFModelConfig(path="none"),
        data=ArithmeticDataConfig(),
        rollout=TorchEngineConfig(),
        batch=BatchConfig(prompts_per_step=arguments.samples // GROUP_SIZE, group_size=GROUP_SIZE),
        correction=TISConfig(),
        policy=PolicyConfig(num_workers=1),
        dump=DumpConfig(every=1),
    )
    torch.set_num_threads(1)
    batch = make_batch(arguments)
    found: list[tuple[float, float, int]] = []
    replay_s = []
    with tempfile.TemporaryDirectory(prefix="parity-dump-") as place:
        for _ in range(arguments.repeats):
            found.append(record(batch, Path(place), config))
            started = time.process_time()
            replay_step(open_dump(Path(place), 1), config, all_names(), run_dir=Path(place))
            replay_s.append(time.process_time() - started)
    tokens, responses = batch.stats.num_tokens, arguments.samples * arguments.response
    keep_s, write_s = (statistics.median(values) for values in ([f[0] for f in found], [f[1] for f in found]))
    out = sys.stdout.write
    out(f"{arguments.samples} responses, {tokens:,} tokens, {responses:,} of them sampled, ")
    out(f"{len(batch.ranks[0][0].micro_batches)} micro-batches, {arguments.repeats} repeats, medians\n\n")
    titles = ("MiB", "bytes per token", "keep, s", "write, s", "replay under all modes and presets, s")
    out(f"| {' | '.join(titles)} |\n|{'--:|' * len(titles)}\n")
    out(f"| {found[0][2] / 2**20:.2f} | {found[0][2] / tokens:.1f} | {keep_s:.3f} | {write_s:.3f} | ")
    out(f"{statistics.median(replay_s):.1f} |\n")


if __name__ == "__main__":
    main()
