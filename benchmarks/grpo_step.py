"""One GRPO step, end to end: Parity's own loop against TRL's GRPOTrainer, with the same model on the same cores.

    python benchmarks/grpo_step.py [--rounds 3] [--steps 12] [--sides trl torch sglang] [--regimes equal ragged]
        [--dtype float32] [--size wide]
    python benchmarks/grpo_step.py --size smollm2 --dtype bfloat16 --rounds 1 --steps 4

Needs TRL beside Parity (`pip install --no-deps trl==1.16.0`). The sides take turns, each in a fresh process that has
the machine to itself, so that neither is slowed by the other's idle threads or daemons.

Timed: everything between the end of one step and the end of the next. TRL: sampling with transformers, rewards,
forward, backward, optimizer step, its own bookkeeping; weights need no sync, because one process holds one model.
Parity: Ray calls, sampling, rewards, packing, forward, backward, optimizer step, mismatch diagnosis, weight sync with
digests, and one row of metrics on the disk. Not timed on either side: start, the first steps, saving, evaluation.

Two measures: seconds by the clock, which mean something only on a machine that nobody else uses, and processor seconds
of all processes of a side (Ray's among them), which do not depend on who else waits for the cores. Waiting threads
sleep on both sides (OMP_WAIT_POLICY=PASSIVE), or spinning would count as work, but only after the short while for which
Parity lets its workers spin: TRL gets the same GOMP_SPINCOUNT, which makes it faster too.

Both run in --dtype, which is that of forward and backward: float32 master weights under autocast in TRL, under FSDP2
and in the engine in Parity. TRL's own default is bfloat16. Both have beta=0, one optimizer step per rollout, no
forward for pi_old and one process that trains. --size demo is the step of `make demo`: its network, prompts, group size
and longest response; wide is four times as wide, with half the groups and five times as long responses. The weights are
random, and one row of the head gives the end-of-sequence token the same odds at every position:
    equal    it never comes: every response has the maximal length
    ragged   it comes with a probability of four to its maximum: lengths are geometric, cut there
--size smollm2 is the step of the recipe smollm2_grpo: SmolLM2-135M-Instruct and word problems in its chat template, and
the lengths are the model's own (`own`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trainer.cluster.placement import SPINS
from trainer.models.smollm2 import build_smollm2
from trainer.rundir.rows import read_rows

REWARD_FILE = Path(__file__).with_name("half_rewarded.py").resolve()
WIDTH, LAYERS = 256, 3
REGIMES = ("equal", "ragged")
OWN = "own"
"""The lengths of a model that was trained."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """What both sides compute in a step."""

    prompts: int
    group_size: int
    max_new_tokens: int
    width: int
    trl_batch: int
    """Samples of one forward of TRL: what it is fastest with here."""
    warm_up: int = 4
    """Steps at the start that are not counted."""

    def end_probability(self, regime: str) -> float:
        return 4 / self.max_new_tokens if regime == "ragged" else 0.0


SIZES = {
    "demo": Size(prompts=16, group_size=8, max_new_tokens=24, width=64, trl_batch=128),
    "wide": Size(prompts=8, group_size=8, max_new_tokens=128, width=WIDTH, trl_batch=16),
    "smollm2": Size(prompts=12, group_size=8, max_new_tokens=24, width=576, trl_batch=96, warm_up=1),
}
REAL = "smollm2"
"""Size with a model that was trained; the others have random weights."""


class ProcessorClock:
    """Processor seconds per step of this process and all below it, between the first and the last counted step."""

    def __init__(self, num_steps: int, *, warm_up: int) -> None:
        self._num_steps = num_steps
        self._warm_up = warm_up
        self._marks: list[float] = []

    def mark(self, step: int) -> None:
        """Call at the end of every step, counted from 1."""
        if step in (self._warm_up, self._warm_up + self._num_steps):
            own = psutil.Process()
            times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
            self._marks.append(sum(time.user + time.system for time in times))

    @property
    def per_step(self) -> float:
        first, last = self._marks
        return (last - first) / self._num_steps


@dataclass(kw_only=True)
class Step:
    """One step of either side."""

    seconds: float
    tokens: int
    """Response tokens."""
    processor_s: float = 0.0
    """Mean over the steps of a round."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""


# ---------------------------------------------------------------- the model


def build_model(directory: Path, *, end_probability: float, width: int = WIDTH, layers: int = LAYERS) -> None:
    """The demo's network, wider and untrained; `end_probability` of every token to end the response, 0 for never."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rollout.data.arithmetic import EOS_TOKEN, TOKENS, save_tokenizer

    save_tokenizer(directory)
    torch.manual_seed(SEED)
    eos = TOKENS.index(EOS_TOKEN)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(TOKENS),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            attention_dropout=0.0,
            pad_token_id=0,
            eos_token_id=eos,
            bos_token_id=None,
        )
    )
    odds = end_probability / (1 - end_probability) * (len(TOKENS) - 1)
    with torch.no_grad():
        # Every token carries a constant in the first channel, which the head of the end-of-sequence token reads.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[eos] = 0.0
        model.lm_head.weight[eos, 0] = 1.0
        constant = model.model(torch.arange(2, 12)[None]).last_hidden_state[0, :, 0].mean()
        model.lm_head.weight[eos, 0] = (math.log(odds) if odds else -40.0) / constant
    model.save_pretrained(directory)


# ---------------------------------------------------------------- Parity


def parity_words(args: argparse.Namespace) -> Iterator[str]:
    """What the command line of this run would be."""
    yield f"rollout={args.side}"
    yield f"rollout.dtype={args.dtype}"
    yield f"policy.dtype={args.dtype}"
    yield "policy.num_workers=1"
    if args.side == "torch":
        # One engine per core: the operations of a decoding step are too short to be shared by threads.
        yield f"rollout.num_engines={args.threads}"
    size = SIZES[args.size]
    yield f"run.num_steps={args.steps + size.warm_up + 1}"
    yield f"run.seed={SEED}"
    yield f"batch.prompts_per_step={size.prompts}"
    yield f"batch.group_size={size.group_size}"
    yield f"sampling.max_new_tokens={size.max_new_tokens}"
    if args.size != REAL:
        yield "model=hf"
        yield f"model.path={args.model}"
    else:
        yield "data.instruction=''"  # the questions as TRL gets them, nearly all answered with the longest response
    yield f"reward.function={REWARD_FILE}:rewarded"
    yield "optim.lr=1e-6"
    yield "checkpoint.every=0"
    yield "eval.every=0"
    yield "eval.max_prompts=1"
    yield "tracking.wandb=disabled"
    yield from args.word


def parity_steps(args: argparse.Namespace) -> list[Step]:
    """Run the real loop, from recipe to report, and read what it wrote."""
    from trainer.compose.compose import resolve
    from trainer.run.loop import train
    from trainer.tracking.tracker import Tracker

    warm_up = SIZES[args.size].warm_up
    clock = ProcessorClock(args.steps, warm_up=warm_up)
    log = Tracker.log

    def marked(tracker: Tracker, step: int, *rest: Any) -> None:
        log(tracker, step, *rest)
        clock.mark(step)

    Tracker.log = marked  # type: ignore[method-assign, assignment]
    name = "smollm2_grpo" if args.size == REAL else "arithmetic_grpo"
    recipe = Path(__file__).parents[1] / "recipes" / f"{name}.yaml"
    with tempfile.TemporaryDirectory() as run_dir:
        words = [*parity_words(args), f"run.dir={run_dir}/run"]
        resolution = resolve(recipe, words, own_dir=None, multirun=False)
        if resolution.problems:
            raise RuntimeError("\n".join(map(str, resolution.problems)))
        [run] = resolution.runs
        if run.config is None:
            raise RuntimeError("the recipe gave no config")
        result = train(run.config)
        rows = [row for row in read_rows(result.run_dir / "metrics.jsonl") if row["step"]]
    steps = []
    # The first and the last step also evaluate.
    for row in rows[warm_up:-1]:
        parts = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in row.items()
            if name.startswith("time/") and name != "time/step_s"
        }
        tokens = int(row["rollout/response_tokens"])
        steps.append(Step(seconds=row["time/step_s"], tokens=tokens, processor_s=clock.per_step, parts=parts))
    return steps


# ---------------------------------------------------------------- both


def child(args: argparse.Namespace) -> None:
    """One side in this process; the steps go to standard output as the last line."""
    if args.side == "trl":
        from peer_trl_step import trl_steps

        steps = trl_steps(args)
    else:
        steps = parity_steps(args)
    sys.stdout.write("\n" + json.dumps([asdict(step) for step in steps]) + "\n")


def run_side(args: argparse.Namespace, side: str, model: Path) -> list[Step]:
    """The same script in a fresh process."""
    command = [sys.executable, __file__, "--side", side, "--model", str(model), "--steps", str(args.steps)]
    command += ["--size", args.size, "--threads", str(args.threads), "--dtype", args.dtype]
    for word in args.word:
        command += ["--word", word]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPINS),
        "TOKENIZERS_PARALLELISM": "false",
        # Ray gives its workers a low priority; on a machine of their own that changes nothing.
        "RAY_worker_niceness": "0",
    }
    done = subprocess.run(  # noqa: S603  (this script itself)
        command, capture_output=True, text=True, check=False, env=environment, timeout=3600
    )
    if done.returncode:
        raise RuntimeError(f"{side}: exit {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return [Step(**step) for step in json.loads(done.stdout.splitlines()[-1])]


def table(results: dict[tuple[str, str], list[list[Step]]], args: argparse.Namespace) -> str:
    size = SIZES[args.size]
    lines = [
        f"{size.prompts * size.group_size} samples of at most {size.max_new_tokens} tokens, groups of "
        f"{size.group_size}; width {size.width}; {args.threads} threads; {args.dtype}; {args.rounds} rounds of "
        f"{args.steps} steps; medians, in brackets the range of the rounds. Ratios are of response tokens per second.",
        "",
        "| lengths | side | s / step | processor s / step | tokens / step | times TRL, clock | times TRL, processor "
        "| anatomy, s |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for (regime, side), rounds in results.items():
        peer = results.get((regime, "trl"))
        steps = [step for each in rounds for step in each]
        clocks = [statistics.median(step.seconds for step in each) for each in rounds]
        processors = [each[0].processor_s for each in rounds]
        pairs = [] if peer is None else zip(rates(rounds), rates(peer), strict=True)
        ratios = [f"{mine / theirs:.2f}" for mine, theirs in pairs] or ["-", "-"]
        names = {name: None for step in steps for name in step.parts}
        parts = {name: statistics.median(step.parts.get(name, 0.0) for step in steps) for name in names}
        anatomy = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005)
        lines.append(
            f"| {regime} | {side} | {statistics.median(step.seconds for step in steps):.2f} "
            f"({min(clocks):.2f} - {max(clocks):.2f}) | {statistics.median(processors):.2f} "
            f"({min(processors):.2f} - {max(processors):.2f}) | {statistics.mean(step.tokens for step in steps):.0f} "
            f"| {ratios[0]} | {ratios[1]} | {anatomy} |"
        )
    return "\n".join(lines)


def rates(rounds: list[list[Step]]) -> tuple[float, float]:
    """Response tokens per second of the clock and of the processor, medians of the rounds."""
    tokens = [sum(step.tokens for step in each) for each in rounds]
    clocks = [sum(step.seconds for step in each) for each in rounds]
    processors = [sum(step.processor_s for step in each) for each in rounds]
    return (
        statistics.median(count / spent for count, spent in zip(tokens, clocks, strict=True)),
        statistics.median(count / spent for count, spent in zip(tokens, processors, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    present = [side for side in ("trl", "torch", "sglang") if importlib.util.find_spec(side)]
    parser.add_argument("--sides", nargs="+", default=present)
    parser.add_argument("--regimes", nargs="+", default=REGIMES, choices=REGIMES, help="lengths of a random model")
    parser.add_argument("--size", choices=sorted(SIZES), default="wide")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--word", action="append", default=[], help="one more word for Parity's command line")
    parser.add_argument("--side", help="run this side, in this process")
    parser.add_argument("--model", type=Path, help="model directory of --side")
    args = parser.parse_args()
    if args.side:
        child(args)
        return
    size = SIZES[args.size]
    with tempfile.TemporaryDirectory() as scratch:
        models = {OWN: build_smollm2()} if args.size == REAL else {name: Path(scratch) / name for name in args.regimes}
        for regime, model in models.items():
            if args.size != REAL:
                model.mkdir()
                build_model(model, end_probability=size.end_probability(regime), width=size.width)
        results: dict[tuple[str, str], list[list[Step]]] = {
            (regime, side): [] for regime in models for side in args.sides
        }
        for number in range(args.rounds):
            for regime, side in results:
                steps = run_side(args, side, models[regime])
                results[regime, side].append(steps)
                middle = statistics.median(step.seconds for step in steps)
                sys.stderr.write(f"{number + 1}/{args.rounds} {regime} {side}: {middle:.2f} s per step\n")
    sys.stdout.write(table(results, args) + "\n")


if __name__ == "__main__":
    main()
