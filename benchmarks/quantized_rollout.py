"""Quantised rollouts on the arithmetic task: K3 by precision, and what each correction makes of it over several seeds.

    python benchmarks/quantized_rollout.py [--seeds 3] [--steps 40] [--precisions int4,float32,int8] \
        [--dir DIR] [KEY=VALUE ...]

Trains the recipe `arithmetic_grpo` with four optimizer steps per rollout for every precision, correction and seed: one
rank and one torch engine in this process with one thread, without Ray, but otherwise the parts and the order of
`trainer/run/loop.py`. Words KEY=VALUE are added to every run. A run that is in DIR already is not repeated. Prints
Markdown.

K3        mean over the first three steps, whose policy has hardly moved; tis, by seed
final     greedy accuracy on the held-out problems after the last step, of the policy's own weights, not quantised
lowest    least accuracy of the samples of a step after the first ten, as the engine sampled them
gradient  norm before clipping, all optimizer steps of all seeds
drop      largest fall of the accuracy of samples, mean of five steps, below an earlier mean of five; worst seed
best      highest held-out accuracy of a run, measured every five steps
unstable  runs whose final accuracy is more than 0.1 below their best, or that skipped steps
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rollout.collect.collector import Collector, CollectPlan
from rollout.config import EngineConfig, Quantization, TorchEngineConfig
from rollout.data.dataset import PromptStream
from rollout.engine import ABORT_TIMEOUT_S
from rollout.torch.engine import TorchEngine
from rollout.types import Completion, GenerateRequest, Generation, SharedWeights
from rollout.weights.quantization import GRIDS, dequantize, quantize, relative_error, weight_publisher
from rollout.weights.shared_weights import WeightReader
from trainer.batch.planner import DEFAULT_COST
from trainer.compose.compose import resolve
from trainer.config.outputs import HELDOUT
from trainer.config.train import TrainConfig
from trainer.policy.model import full_tensors, tensor_shapes
from trainer.policy.worker import PolicySetup, PolicyWorker
from trainer.run.evaluation import evaluate_sets
from trainer.run.loop import build_batch
from trainer.run.task import Task, load_task

ROOT = Path(__file__).resolve().parents[1]
MODES = ("recompute", "ppo_is", "vanilla_is", "tis", "mis")
PRECISIONS: dict[str, tuple[str, ...]] = {
    "float32": ("rollout.dtype=float32",),
    "bfloat16": ("rollout.dtype=bfloat16",),
    "fp8": ("rollout.dtype=float32", "rollout.quantization=fp8"),
    "int8": ("rollout.dtype=float32", "rollout.quantization=int8"),
    "int4": ("rollout.dtype=float32", "rollout.quantization=int4"),
}
SETTING = (
    "rollout=torch",
    "model.num_steps=300",  # a quarter of the recipe's: what is less certain is moved more by rounding
    "policy.num_workers=1",
    "batch.mini_batch_prompts=4",
    "tracking.wandb=disabled",
)
EVALUATED_EVERY = 5
K3_STEPS = 3
COSTED = "model.layers.0.mlp.up_proj.weight"
DTYPE = torch.bfloat16
WINDOW = 5
UNSTABLE_FALL = 0.1


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    accuracy: list[float]
    """Of the samples of each step, as the engine sampled them."""
    k3: list[float | None]
    entropy: list[float | None]
    gradient: list[float | None]
    skipped: float
    """Optimizer steps."""
    heldout: list[float]
    """Greedy accuracy of the policy's own weights, before the first step and after every EVALUATED_EVERY."""
    seconds: float

    @property
    def lowest(self) -> float:
        return min(self.accuracy[10:] or self.accuracy)

    @property
    def drop(self) -> float:
        means = [statistics.fmean(self.accuracy[at : at + WINDOW]) for at in range(len(self.accuracy) - WINDOW + 1)]
        return max((max(means[: at + 1]) - mean for at, mean in enumerate(means)), default=0.0)

    @property
    def unstable(self) -> bool:
        return self.heldout[-1] < max(self.heldout) - UNSTABLE_FALL or self.skipped > 0


def compose(words: list[str]) -> TrainConfig:
    """The config of one run, as the command line makes it."""
    resolution = resolve(ROOT / "recipes" / "arithmetic_grpo.yaml", words, own_dir=None, multirun=False)
    if resolution.problems:
        raise SystemExit("\n".join(str(problem) for problem in resolution.problems))
    [run] = resolution.runs
    assert run.config is not None
    return run.config


class OneEngine:
    """An engine as the collector wants one: it gives the tickets, as `rollout/group/engine_group.py` does for many."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._next = 0
        self._open: set[int] = set()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return self._engine.generate(requests)

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        tickets = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        self._open.update(tickets)
        self._engine.submit(tickets, requests)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        completions = self._engine.poll(timeout_s)
        self._open.difference_update(completion.ticket for completion in completions)
        return completions

    def abort(self, tickets: Sequence[int] | None) -> None:
        self._engine.abort(tickets)

    @property
    def unfinished(self) -> int:
        return len(self._open)

    @property
    def abort_timeout_s(self) -> float:
        return ABORT_TIMEOUT_S

    def sampling_s(self) -> float:
        return self._engine.sampling_s


class LoadedEngine:
    """An engine in this process that takes weights from shared memory."""

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        if not isinstance(config, TorchEngineConfig):
            raise SystemExit("this benchmark needs rollout=torch")
        self.engine = TorchEngine(config, index=0, device="cpu", num_threads=1)
        self.engine.start(model_path)
        self._reader = WeightReader()

    def load(self, shared: SharedWeights | None) -> None:
        assert shared is not None
        with self._reader.opened(shared) as packed:
            self.engine.load_weights(packed)

    def close(self) -> None:
        self.engine.stop()
        self._reader.close()


class Run:
    """One rank and the engine that samples, in this process; if that is quantised, also a plain one that evaluates."""

    def __init__(self, config: TrainConfig, task: Task, scratch: Path) -> None:
        self.config, self.task = config, task
        setup = PolicySetup(
            config=config,
            model_path=task.model_path,
            log_dir=scratch,
            rank=0,
            init_method=f"file://{scratch / secrets.token_hex(8)}",
            device="cpu",
            num_threads=1,
        )
        self.worker = PolicyWorker(setup)
        self.worker.setup()
        self.version = 0
        plain = replace(config.rollout, quantization=Quantization.none)
        self.sampler = LoadedEngine(config.rollout, task.model_path)
        self.judge = self.sampler if config.rollout == plain else LoadedEngine(plain, task.model_path)
        self._plain_publisher = weight_publisher(tensor_shapes(self.worker._policy.model), plain)
        self.sync()

    def sync(self) -> None:
        """Every engine holds the weights of the policy, verified."""
        self.sampler.load(self.worker.publish_weights(self.version))
        if self.judge is not self.sampler:
            self.judge.load(self.plain_weights())

    def plain_weights(self) -> SharedWeights:
        """The policy's own weights, not quantised."""
        return self._plain_publisher.publish(full_tensors(self.worker._policy.model), policy_version=self.version)

    def collector(self) -> Collector:
        config = self.config
        return Collector(
            sampler=OneEngine(self.sampler.engine),
            prompts=PromptStream(self.task.dataset.train, seed=config.run.seed),
            scorer=self.task.scorer,
            collect=config.collect,
            sampling=config.sampling,
            plan=CollectPlan(
                prompts_per_step=config.batch.prompts_per_step,
                group_size=config.batch.group_size,
                seed=config.run.seed,
                stop_token_ids=self.task.stop_token_ids,
                min_group_size=config.min_group_size,
            ),
        )

    def heldout(self) -> float:
        """Greedy accuracy of the weights as they are, on all held-out problems."""
        return evaluate_sets(self.config, self.task, OneEngine(self.judge.engine))[HELDOUT].accuracy

    def train(self, steps: int) -> Outcome:
        started, collector = time.process_time(), self.collector()
        rows, accuracy, heldout = [], [], [self.heldout()]
        for step in range(1, steps + 1):
            collected = collector.collect(step, self.version)
            batch = build_batch(self.config, collected, self.version, cost=DEFAULT_COST)
            report = self.worker.train(batch.ranks[0], batch.samples, step)
            self.version += report.num_optimizer_steps
            self.sync()
            rows.append(report.metrics)
            accuracy.append(collected.stats.generated_accuracy)
            if step % EVALUATED_EVERY == 0:
                heldout.append(self.heldout())
        return Outcome(
            accuracy=accuracy,
            k3=[row["mismatch/k3"] for row in rows],
            entropy=[row["policy/entropy"] for row in rows],
            gradient=[row["optim/grad_norm"] for row in rows],
            skipped=sum(row["optim/skipped_steps"] or 0.0 for row in rows),
            heldout=heldout,
            seconds=time.process_time() - started,
        )

    def close(self) -> None:
        for loaded in {self.sampler, self.judge}:
            loaded.close()
        dist.destroy_process_group()


def outcome(path: Path, words: Sequence[str], *, steps: int) -> Outcome:
    """The run in the file `path`, trained now unless it was before."""
    if path.is_file():
        return Outcome(**json.loads(path.read_text("utf-8")))
    config = compose([*words, f"run.num_steps={steps}"])
    task = load_task(config, progress=lambda done, total, detail: None)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(config, task, Path(scratch))
        try:
            found = run.train(steps)
        finally:
            run.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)), "utf-8")
    sys.stderr.write(f"{path.stem}: {found.heldout[0]:.2f} -> {found.heldout[-1]:.2f} in {found.seconds:.0f} s\n")
    return found


def k3_table(folder: Path, words: Sequence[str], *, seeds: int) -> None:
    """One short run per precision and seed: K3 of each seed, and the mean over that of bfloat16."""
    found = {
        name: [
            outcome(
                folder / f"k3-{name}-{seed}.json",
                [*SETTING, *precision, "correction=tis", *words, f"run.seed={seed}"],
                steps=K3_STEPS,
            )
            for seed in range(seeds)
        ]
        for name, precision in PRECISIONS.items()
    }
    k3 = {
        name: [statistics.fmean(value for value in run.k3 if value is not None) for run in runs]
        for name, runs in found.items()
    }
    say(f"| engine | {' | '.join(f'seed {seed}' for seed in range(seeds))} | times bfloat16 |")
    say(f"|---|{'--:|' * seeds}--:|")
    for name, values in k3.items():
        times = statistics.fmean(values) / statistics.fmean(k3["bfloat16"])
        say(f"| {name} | {' | '.join(f'{value:.2e}' for value in values)} | {times:.2g} |")
    say("")


def cost_table() -> None:
    """What a sync costs more: processor seconds of one thread for a matrix of Qwen2.5-0.5B's MLP, median of five."""
    matrix = torch.randn(4864, 896, generator=torch.Generator().manual_seed(0)) * 0.02
    say("| grid | ms per million weights | relative error |")
    say("|---|--:|--:|")
    for quantization, grid in GRIDS.items():
        seconds, error = [], 0.0
        for _ in range(5):
            started = time.process_time()
            held = dequantize(quantize(matrix, grid, name=COSTED), grid)
            error = relative_error(held.to(DTYPE), matrix)
            seconds.append(time.process_time() - started)
        cost = statistics.median(seconds) * 1e9 / matrix.numel()
        say(f"| {quantization.name}, tiles of {grid.rows} x {grid.columns or 'all'} | {cost:.0f} | {error:.1e} |")
    say("")


def show(values: Sequence[float]) -> str:
    """Mean, and the range in brackets."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def modes_table(results: dict[tuple[str, str], list[Outcome]]) -> None:
    say(
        "| engine | correction | K3, last ten steps | entropy | best | final | lowest | gradient, median | largest "
        "| drop | unstable |"
    )
    say("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for (precision, mode), runs in results.items():
        norms = [norm for run in runs for norm in run.gradient if norm is not None]
        k3 = statistics.fmean(value for run in runs for value in run.k3[-10:] if value is not None)
        entropy = statistics.fmean(value for run in runs for value in run.entropy[-10:] if value is not None)
        say(
            f"| {precision} | {mode} | {k3:.1e} | {entropy:.3f} "
            f"| {show([max(run.heldout) for run in runs])} | {show([run.heldout[-1] for run in runs])} "
            f"| {show([run.lowest for run in runs])} | {statistics.median(norms):.2f} | {max(norms):.2f} "
            f"| {max(run.drop for run in runs):.2f} | {sum(run.unstable for run in runs)} of {len(runs)} |"
        )
    say("")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precisions", default="int4,float32,int8")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--dir", type=Path, default=ROOT / "outputs" / "quantized_rollout")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost_table()
    k3_table(arguments.dir, arguments.words, seeds=arguments.seeds)
    chosen = [(p, mode) for p in arguments.precisions.split(",") for mode in arguments.modes.split(",")]
    results: dict[tuple[str, str], list[Outcome]] = {pair: [] for pair in chosen}
    for seed in range(arguments.seeds):  # every pair once before any twice: an early end still compares alike
        for precision, mode in chosen:
            words = [*SETTING, *PRECISIONS[precision], f"correction={mode}", *arguments.words, f"run.seed={seed}"]
            path = arguments.dir / f"{precision}-{mode}-{seed}.json"
            results[precision, mode].append(outcome(path, words, steps=arguments.steps))
    modes_table(results)


if __name__ == "__main__":
    main()
