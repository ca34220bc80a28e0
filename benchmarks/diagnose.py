"""`parity diagnose` on planted faults: how often the right name comes first, and whether clean bundles stay clean.

    python benchmarks/diagnose.py [--model demo|deep|smollm2] [--seeds 10] [--first-seed 0] [--clean 100] [--pairs 0]
                                  [--dtypes float32 bfloat16] [--faults NAME ...]

The faults are those of benchmarks/planted_faults.py, each with other draws and weights for every seed; the type of the
engine changes from seed to seed. Prints Markdown: of each fault how many were named first, the layer where the fault is
in one, how far the parts are from K3, and the seconds of a diagnosis; then the faults named in clean bundles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from planted_faults import FAULTS, Made, World, clean
from planted_pairs import PAIRS
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config import DType, Quantization
from rollout.data.tokenizer import load_tokenizer
from trainer.compose.compose import resolve
from trainer.config.paths import recipe_dir
from trainer.diagnose.diagnosis import Diagnosis, Part, Settings, diagnose
from trainer.diagnose.evidence import evidence_of
from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.run.task import load_task

RECIPES = {"demo": "arithmetic_grpo", "smollm2": "smollm2_grpo"}
RATES = {"demo": 1e-3, "smollm2": 5e-5}
MAX_TOKENS = 1024


def world_of(model: str, scratch: Path) -> World:
    if model == "deep":
        return deep_world(scratch)
    words = ("rollout=torch", *(["model.num_steps=400"] if model == "demo" else []))  # less sure of every token
    config = resolve(recipe_dir() / f"{RECIPES[model]}.yaml", words, own_dir=None, multirun=False)
    found = config.runs[0].config
    if found is None:
        raise RuntimeError(f"{model}: {config.problems}")
    task = load_task(found, progress=lambda done, total, detail: None)
    tokenizer = load_tokenizer(task.model_path)
    return World(
        path=task.model_path,
        prompts=[prompt.token_ids for prompt in task.dataset.train],
        rate=RATES[model],
        longest=found.sampling.max_new_tokens,
        decode=lambda ids: str(tokenizer.decode(ids)),
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        stop=task.stop_token_ids,
        scratch=scratch,
        responses=48 if model == "demo" else 24,
    )


def deep_world(scratch: Path) -> World:
    """A random model of 12 layers: one rounding changes many behind it, and no replay has what an engine has."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.25, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(scratch / "deep")
    return World(
        path=scratch / "deep", prompts=torch.randint(64, (200, 8)).tolist(), rate=1e-4, longest=24, decode=str,
        encode=lambda text: [], stop=(), scratch=scratch, responses=48,
    )  # fmt: skip


def answer(made: Made) -> tuple[Diagnosis, float]:
    """The diagnosis of a bundle, and its seconds."""
    begin = time.perf_counter()
    bundle = made.bundle
    settings = Settings(
        temperature=bundle.number("temperature"),
        trainer_dtype=DType(bundle.metadata["trainer_dtype"]),
        engine_dtype=DType(bundle.metadata["rollout_dtype"]),
        quantization=Quantization(bundle.metadata.get("quantization", "none")),
    )
    scorer = LogprobScorer([made.models], evidence_of(bundle, max_tokens=MAX_TOKENS))
    found = diagnose(scorer, settings, progress=lambda text: None)
    return found, time.perf_counter() - begin


def shown(found: Diagnosis) -> str:
    parts = "; ".join(
        f"{part.side} {part.name} {part.share:.0%} [{part.low:.0%}, {part.high:.0%}] ({part.what})"
        for part in found.parts
    )
    return f"K3 {found.k3:.1e}: {parts}; left {found.unexplained.k3:.1e} {' '.join(found.notes)}"


@dataclass(slots=True)
class Score:
    """Answers to one planted fault."""

    right: int = 0
    trials: int = 0
    located: int = 0
    places: int = 0
    """Trials whose fault is in one layer."""
    seconds: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    """Sum of the parts over K3."""

    def row(self, name: str) -> str:
        layer = f"{self.located} of {self.places}" if self.places else ""
        return (
            f"| {name} | {self.right} of {self.trials} | {layer} | {min(self.sums):.3f} to {max(self.sums):.3f} "
            f"| {statistics.median(self.seconds):.1f} |"
        )


def faults_table(world: World, arguments: argparse.Namespace) -> Iterator[str]:
    left_out = ["other tokens"] if arguments.model == "demo" else []  # its tokenizer has one token per character
    chosen = arguments.faults or [each for each in FAULTS if each not in left_out]
    scores = {fault: Score() for fault in chosen}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        world.begin(seed)
        for number, fault in enumerate(chosen):
            plant, names = FAULTS[fault]
            made = plant(world, DType(arguments.dtypes[(seed + number) % len(arguments.dtypes)]))
            judge(scores[fault], made, names, title=f"{fault} {seed}")
    yield "| planted | named first | layer right | parts / K3 | seconds |"
    yield "| --- | --: | --: | --: | --: |"
    for fault, score in scores.items():
        yield score.row(fault)
    right, trials = (sum(getattr(each, name) for each in scores.values()) for name in ("right", "trials"))
    yield f"| all | {right} of {trials} | | | |"


def judge(score: Score, made: Made, names: tuple[str, ...], *, title: str) -> None:
    """Ask for the diagnosis, and count whether it is right."""
    found, took = answer(made)
    is_right = bool(found.faults) and found.faults[0].name in names
    score.trials += 1
    score.right += is_right
    score.seconds.append(took)
    score.sums.append(sum(part.k3 for part in found.parts) / found.k3)
    if made.where:
        score.places += 1
        score.located += is_right and made.where in found.faults[0].what
    verdict = "right" if is_right else "WRONG"
    sys.stderr.write(f"{title} {verdict} {made.where} {took:.0f} s {shown(found)}\n")


def pairs_table(world: World, arguments: argparse.Namespace) -> Iterator[str]:
    """How often the interval of a cause holds the share that was planted, and how wide it is."""
    rows: dict[tuple[str, str], list[tuple[float, Part | None]]] = defaultdict(list)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.pairs):
        world.begin(seed)
        for name, plant in PAIRS.items():
            pair = plant(world)
            found, took = answer(pair.made)
            sys.stderr.write(f"{name} {seed} {pair.shares} {took:.0f} s {shown(found)}\n")
            for cause, share in pair.shares.items():
                of_cause = [part for part in found.parts if (part.name, part.side) == (cause, "engine")]
                rows[name, cause].append((share, of_cause[0] if of_cause else None))
    yield "| planted | cause | planted share | found | width of the interval | interval holds it |"
    yield "| --- | --- | --: | --: | --: | --: |"
    held = 0
    for (name, cause), each in rows.items():
        there = [(share, part) for share, part in each if part is not None]
        holds = sum(part.low <= share <= part.high for share, part in there)
        held += holds
        planted, named, width = (
            statistics.median(values)
            for values in (
                [share for share, _ in each],
                [part.share for _, part in there] or [0.0],
                [part.high - part.low for _, part in there] or [0.0],
            )
        )
        yield f"| {name} | {cause} | {planted:.0%} | {named:.0%} | {width:.0%} | {holds} of {len(each)} |"
    yield f"| all | | | | | {held} of {sum(map(len, rows.values()))} |"


def clean_table(world: World, arguments: argparse.Namespace) -> Iterator[str]:
    named = []
    for seed in range(arguments.clean):
        if seed % 10 == 0:
            world.begin(1000 + seed)
        found, _ = answer(clean(world, DType(arguments.dtypes[seed % len(arguments.dtypes)])))
        if found.faults:
            named.append(shown(found))
            sys.stderr.write(f"clean {seed} NAMED {shown(found)}\n")
    yield f"{arguments.clean} clean bundles: faults named in {len(named)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*RECIPES, "deep"), default="demo")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--faults", nargs="*", choices=tuple(FAULTS))
    parser.add_argument("--pairs", type=int, default=0, help="seeds of pairs of causes")
    parser.add_argument("--clean", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        world = world_of(arguments.model, Path(scratch))
        tables = [(faults_table, arguments.seeds), (pairs_table, arguments.pairs), (clean_table, arguments.clean)]
        for lines in (table(world, arguments) for table, trials in tables if trials):
            for line in lines:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
