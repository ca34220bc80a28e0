"""Nanoseconds per token that the driver spends on a step, apart from engines, rewards and ranks.

    python benchmarks/driver_cost.py [--samples 64] [--response 8192] [--prompt 128] [--group 8] [--repeats 5]

The driver is one process, and nobody trains while it packs. Random tokens and log-probs of one length go the way that
they go in a step, through the functions that the loop calls:

receive     Completions as an engine's worker sends them -> Completions
check       Completions -> what of them is valid (`rollout/collect/filters.py`)
sample      Completions -> Samples (`rollout/collect/requests.py`)
statistics  Samples -> metrics of the collection (`rollout/collect/collect_stats.py`)
pack        Samples -> TrainBatch (`trainer/batch/packing.py`)
send        TrainBatch -> what the rank gets
rows        Samples -> rows of the sample log (`trainer/tracking/tracker.py`)

Medians. Prints Markdown.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rollout.collect.collect_stats import CollectStats
from rollout.collect.filters import invalid_reason
from rollout.collect.requests import make_sample, sampling_params
from rollout.config import SamplingConfig
from rollout.types import Completion, FinishReason, GenerateRequest, Generation, Prompt, Sample, SampleGroup
from trainer.batch.packing import pack
from trainer.tracking.samples import sample_rows

VOCABULARY = 150_000
VERSION = 3
PROTOCOL = 5
"""Of pickle, which Ray uses too."""


def make_requests(args: argparse.Namespace) -> list[GenerateRequest]:
    params = sampling_params(SamplingConfig(max_new_tokens=args.response), seed=0, stop_token_ids=(0,))
    return [
        GenerateRequest(
            prompt_id=number // args.group,
            sample_index=number % args.group,
            prompt_token_ids=[1] * args.prompt,
            sampling=params,
        )
        for number in range(args.samples)
    ]


def make_completions(args: argparse.Namespace) -> list[Completion]:
    draw = random.Random(0)  # noqa: S311  (made-up tokens)
    return [
        Completion(
            ticket,
            Generation(
                token_ids=[draw.randrange(VOCABULARY) for _ in range(args.response)],
                logprobs=[-draw.random() for _ in range(args.response)],
                token_versions=[VERSION] * args.response,
                finish_reason=FinishReason.length,
            ),
        )
        for ticket in range(args.samples)
    ]


def grouped(samples: list[Sample], group_size: int) -> list[SampleGroup]:
    for sample in samples:
        sample.reward = float(sample.sample_index % 2)
        sample.correct = sample.reward > 0
    return [
        SampleGroup(
            prompt=Prompt(prompt_id=first // group_size, token_ids=[], text="", answer=""),
            samples=samples[first : first + group_size],
        )
        for first in range(0, len(samples), group_size)
    ]


def stages(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """By name; each works on what the one before has made."""
    requests, sent = make_requests(args), pickle.dumps(make_completions(args), PROTOCOL)
    completions: list[Completion] = pickle.loads(sent)  # noqa: S301  (made above)
    pairs = [(request, completion.generation) for request, completion in zip(requests, completions, strict=True)]
    samples = [make_sample(*pair) for pair in pairs]
    groups = grouped(samples, args.group)

    def packed() -> Any:
        cap = args.prompt + args.response
        return pack([groups], num_ranks=1, max_tokens=cap, policy_version=VERSION)

    batch = packed()
    return {
        "receive": lambda: pickle.loads(sent),  # noqa: S301  (made above)
        "check": lambda: [invalid_reason(*pair, policy_version=VERSION) for pair in pairs],
        "sample": lambda: [make_sample(*pair) for pair in pairs],
        "statistics": lambda: CollectStats(policy_version=VERSION, kept=groups).metrics(),
        "pack": packed,
        "send": lambda: pickle.loads(pickle.dumps(batch, PROTOCOL)),  # noqa: S301  (made above)
        "rows": lambda: sample_rows(groups),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("samples", 64), ("response", 8192), ("prompt", 128), ("group", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    num_tokens, total = args.samples * args.response, 0.0
    lines = ["| stage | ns per response token | seconds for 8,192 responses of 4,096 tokens |", "|---|--:|--:|"]
    for name, stage in stages(args).items():
        found = []
        for _ in range(args.repeats):
            started = time.process_time()
            stage()
            found.append(time.process_time() - started)
        each = statistics.median(found) / num_tokens
        total += each
        lines.append(f"| {name} | {each * 1e9:.1f} | {each * 2**25:.1f} |")
    lines.append(f"| together | {total * 1e9:.1f} | {total * 2**25:.1f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
