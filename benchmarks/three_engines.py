"""The engines of `rollout=` against one trainer: K3 by probability and by position, and tokens per second.

    python benchmarks/three_engines.py [MODEL ...] [--engines sglang vllm torch] [--dtypes bfloat16 float32]
                                       [--prompts 24] [--group 8] [--tokens 24] [--threads 2] [--out DIRECTORY]

The prompts and the first weights are those of `smollm2_grpo`. Each MODEL is a directory with weights of later steps of
one training, from `parity export`; every engine gets them by `load_weights`, as in a run. Each engine runs in a process
of its own, one after the other, and answers the same prompts with the same seeds. Engines that draw the same tokens
are compared on the same tokens; the share of responses that equal those of the first engine is printed. K3 can only be
estimated on tokens that the engine sampled itself. The trainer's forward scores them in the engine's type, and once
more in float32.

Markdown goes to standard output. With --out also three_engines.svg, and a bundle per row for `parity diagnose`.
Without --engines all that are installed are compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from planted_faults import bundle_of
from torch import Tensor

from algorithms.histograms import Bins, MismatchHistograms, mismatch_histograms
from algorithms.kl import k3
from rollout.collect.requests import SeedSource, make_sample
from rollout.config import DType
from rollout.engine import EngineSetup
from rollout.group.engines import ENGINES
from rollout.types import GenerateRequest, Generation, Sample, SamplingParams
from rollout.weights.packed_weights import DTYPES, TensorShape, stored_state
from rollout.weights.shared_weights import WeightPublisher, WeightReader
from trainer.batch.packing import micro_batch
from trainer.compose.compose import resolve
from trainer.config.paths import recipe_dir
from trainer.policy.model import load_causal_lm
from trainer.replay.bundle import write_bundle
from trainer.run.task import Task, load_task
from trainer.scoring.forward import ScoringModel

Answer = tuple[list[Generation], float, float]  # responses, seconds, processor seconds of all processes
RECIPE = "smollm2_grpo"
PER_FORWARD = 32  # responses that are scored at a time
TEMPERATURE = 1.0
MIN_TOKENS = 30  # of a bin that is drawn
COLORS = {"sglang": "#1f77b4", "vllm": "#d62728", "torch": "#2ca02c"}


class Row(NamedTuple):
    """One engine, one type, one model. `rollout`, `trainer` and `exact` [R] float64 are the log-probs of the response
    tokens from the engine, from the trainer in the engine's type, and from the trainer in float32."""

    engine: str
    dtype: DType
    model: str
    generations: list[Generation]
    seconds: float
    processor_s: float
    rollout: Tensor
    trainer: Tensor
    exact: Tensor
    histograms: MismatchHistograms

    def cells(self, first: Row) -> tuple[str, ...]:
        """Cells of the table; its responses are compared with those of `first`."""
        pairs = zip(self.generations, first.generations, strict=True)
        return (
            f"{self.engine}, {self.dtype.name}",
            self.model,
            f"{len(self.rollout):,}",
            f"{k3(self.trainer - self.rollout).mean():.2e}",
            f"{k3(self.exact - self.rollout).mean():.2e}",
            f"{(self.trainer - self.rollout).abs().mean():.1e}",
            f"{(self.trainer.exp() - self.rollout.exp()).abs().max():.3f}",
            f"{statistics.mean(mine.token_ids == other.token_ids for mine, other in pairs):.0%}",
            f"{len(self.rollout) / self.seconds:.0f}",
            f"{len(self.rollout) / self.processor_s:.0f}",
        )


TITLES = (
    "engine, type", "weights", "tokens", "K3", "K3 against float32", "mean distance, nats",
    "largest probability difference", "same responses as the first", "tokens / s", "tokens / processor s",
)  # fmt: skip


def requests_of(task: Task, arguments: argparse.Namespace) -> list[GenerateRequest]:
    """Groups of --group samples, each with a seed of its own."""
    seeds = SeedSource(0, step=1)
    return [
        GenerateRequest(
            prompt_id=number, sample_index=index, prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=arguments.tokens, seed=seeds.draw(number, index),
                stop_token_ids=task.stop_token_ids,
            ),
        )
        for number, prompt in enumerate(task.dataset.train[: arguments.prompts])
        for index in range(arguments.group)
    ]  # fmt: skip


def sampled(setup: EngineSetup, models: Sequence[Path], requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Start the engine on the first model, give it the others in turn -> an answer per model."""
    torch.set_num_threads(setup.num_threads)
    engine, answers = setup.config.build(setup), []
    try:
        engine.start(models[0])
        engine.generate(requests[:PER_FORWARD])  # what is compiled at the first requests is not counted
        for version, path in enumerate(models):
            if version:
                named = list(stored_state(load_causal_lm(path)))
                shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
                publisher = WeightPublisher(shapes, dtype=DTYPES[setup.config.dtype.name])
                with WeightReader().opened(publisher.publish(named, policy_version=version)) as weights:
                    engine.load_weights(weights)
            begin, processor = time.perf_counter(), processor_seconds()
            generations = engine.generate(requests)
            answers.append((generations, time.perf_counter() - begin, processor_seconds() - processor))
    finally:
        engine.stop()
    return answers


def processor_seconds() -> float:
    """Those of this process and of all that it started."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


@torch.inference_mode()
def scored(path: Path, dtype: DType, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, MismatchHistograms]:
    """Log-probs [R] of the trainer's forward and of the engine, float64, and the histograms of both."""
    model = ScoringModel(load_causal_lm(path, dtype=DTYPES[dtype.name]).eval(), chunk_tokens=512)
    trainer, engine, histograms = [], [], []
    for start in range(0, len(samples), PER_FORWARD):
        micro = micro_batch(samples[start : start + PER_FORWARD])
        logprobs = model(micro, temperature=TEMPERATURE).logprobs
        histograms.append(mismatch_histograms(micro.tokens(logprobs)))
        trainer.append(logprobs[micro.response_index].double())
        engine.append(micro.rollout_logprobs[micro.response_index].double())
    return torch.cat(trainer), torch.cat(engine), reduce(MismatchHistograms.merge, histograms)


def rows_of(engine: str, dtype: DType, models: Sequence[Path], task: Task, arguments: argparse.Namespace) -> list[Row]:
    """Sample in a process that ends with the engine, then score."""
    requests, rows = requests_of(task, arguments), []
    with tempfile.TemporaryDirectory() as scratch:
        setup = EngineSetup(
            config=ENGINES[engine](dtype=dtype), index=0, seed=0, device="cpu", num_threads=arguments.threads,
            log_dir=Path(scratch), model_path=models[0],
        )  # fmt: skip
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            answers = pool.submit(sampled, setup, models, requests).result()
    for path, (generations, seconds, processor_s) in zip(models, answers, strict=True):
        samples = [make_sample(*pair) for pair in zip(requests, generations, strict=True)]
        trainer, rollout, histograms = scored(path, dtype, samples)
        exact = trainer if dtype is DType.float32 else scored(path, DType.float32, samples)[0]
        name = "first" if path == models[0] else path.name
        rows.append(Row(engine, dtype, name, generations, seconds, processor_s, rollout, trainer, exact, histograms))
        if arguments.out is not None:
            bundle = bundle_of(samples, rollout, trainer, (dtype, dtype), TEMPERATURE)
            write_bundle(bundle, arguments.out / f"{engine}-{dtype.name}-{name}.safetensors")
        sys.stderr.write(f"{' | '.join(rows[-1].cells(rows[-1]))}\n")
    return rows


def picture(rows: Sequence[Row]) -> str:
    """SVG: mean K3 by bin, on a logarithmic axis, of all weights together; a line per engine and type."""
    lines = {}
    for engine, dtype in dict.fromkeys((row.engine, row.dtype) for row in rows):
        found = [row.histograms for row in rows if (row.engine, row.dtype) == (engine, dtype)]
        arrays = reduce(MismatchHistograms.merge, found).arrays()
        lines[engine, dtype] = (points(arrays.by_probability), points(arrays.by_position))
    values = [math.log10(value) for both in lines.values() for line in both for _, value in line] or [0.0]
    low, high = math.floor(min(values)), math.floor(max(values)) + 1
    frame = 'width="900" height="360"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-size="12"><rect {frame} fill="white"/>']

    def height(exponent: float) -> float:
        return 300 - 260 * (exponent - low) / (high - low)

    for panel, title in enumerate(
        ("K3 by probability of the token: above 1/2, 1/4, ...", "K3 by position: 1, 2-3, 4-7, ...")
    ):
        left, last = 60 + 440 * panel, max([1, *(place for both in lines.values() for place, _ in both[panel])])
        parts.append(f'<text x="{left}" y="20">{title}</text>')
        for decade in range(low, high + 1):
            parts.append(f'<path d="M{left} {height(decade):.1f}h380" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 45}" y="{height(decade) + 4:.1f}">1e{decade}</text>')
        for (engine, dtype), both in lines.items():
            path = " ".join(f"{left + 380 * at / last:.1f},{height(math.log10(k)):.1f}" for at, k in both[panel])
            dash = ' stroke-dasharray="5 4"' if dtype is DType.float32 else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[engine]}" stroke-width="2"{dash}/>')
    for number, (engine, dtype) in enumerate(lines):
        parts.append(f'<text x="{60 + 140 * number}" y="345" fill="{COLORS[engine]}">{engine}, {dtype.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def points(bins: Bins) -> list[tuple[int, float]]:
    """(number of the bin, mean K3) where enough tokens are, and their K3 is not 0."""
    means = enumerate(zip(bins.counts, bins.k3, strict=True))
    return [(number, mean) for number, (count, mean) in means if count >= MIN_TOKENS and mean]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    installed = [name for name, kind in ENGINES.items() if kind.missing_package() is None]
    for name, choices in (("engines", installed), ("dtypes", ["bfloat16", "float32"])):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=choices)
    for name, default in (("prompts", 24), ("group", 8), ("tokens", 24), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    resolution = resolve(recipe_dir() / f"{RECIPE}.yaml", ["rollout=torch"], own_dir=None, multirun=False)
    config = resolution.runs[0].config
    if config is None:
        raise SystemExit(f"{RECIPE}: {resolution.problems}")
    task = load_task(config, progress=lambda done, total, detail: None)
    rows: list[Row] = []
    for dtype, engine in product(map(DType, arguments.dtypes), arguments.engines):
        rows += rows_of(engine, dtype, [task.model_path, *arguments.models], task, arguments)
    sys.stdout.write(f"| {' | '.join(TITLES)} |\n|---|---|{'--:|' * (len(TITLES) - 2)}\n")
    for row in rows:
        first = next(each for each in rows if (each.dtype, each.model) == (row.dtype, row.model))
        sys.stdout.write(f"| {' | '.join(row.cells(first))} |\n")
    if arguments.out is not None:
        (arguments.out / "three_engines.svg").write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
