"""rollout.exact=true: equal bits over many tokens, the six modes as one, and what a step costs.

    python benchmarks/exact.py [--tokens 1000000] [--smollm2-tokens 8000] [--steps 3]
                               [--only bits|modes|time] [--dtypes float32 bfloat16] [--engine torch|sglang]
                               [--recipe smollm2_grpo]

Prints Markdown, up to three tables:

bits    embedded engine and trainer's scorer in one process, with the demo's model, dense and as a mixture of 16 experts
        (1 in 50 of the tokens), and SmolLM2-135M-Instruct. Batches of 1 to 256 responses to prompts of 1 to 69 tokens,
        some with three responses; a tenth is given up midway and goes on behind what it had. They are scored again in
        micro-batches of other sizes, in another order, with other numbers of threads. "differ": tokens whose two
        log-probs differ in some bit
modes   `parity train arithmetic_grpo` under each mode, two ranks, three steps of one optimizer step each: K3 and the
        digest of the weights at the end
time    `parity train` of --recipe without and with rollout.exact: median seconds of the steps after the first, and the
        largest difference of two log-probs in these steps

--engine is the one of modes and time. bits has the embedded engine; a server is compared by the other two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.collect.requests import make_sample
from rollout.exact.layers import make_exact
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import ExactDecoder
from rollout.types import GenerateRequest, Sample, SamplingParams
from rollout.weights.packed_weights import DTYPES
from trainer.batch.packing import micro_batch
from trainer.config.training import ArithmeticModelConfig
from trainer.models.base_model import build_base_model
from trainer.models.smollm2 import build_smollm2
from trainer.scoring.exact_attention import EXACT_ATTENTION
from trainer.scoring.forward import ScoringModel

MODES = ("recompute", "ppo_is", "vanilla_is", "tis", "mis", "bypass")
COMPANY = ((1, 8, 1), (7, 40, 2), (64, 100, 3), (256, 256, 2))
"""(responses in the engine's batch, responses of a round, threads)."""
TEMPERATURE = 0.8
GIVEN_UP = 0.1
"""Share of the responses that are given up midway."""
FLOAT32 = ("policy.dtype=float32", "rollout.dtype=float32")


@dataclass(slots=True)
class Count:
    """What was compared."""

    tokens: int = 0
    different: int = 0


def requests(draw: random.Random, count: int, *, vocab: int, longest: int) -> list[GenerateRequest]:
    """About `count` requests; a third of the prompts has three responses."""
    found: list[GenerateRequest] = []
    while len(found) < count:
        prompt = [draw.randrange(vocab) for _ in range(draw.randrange(1, 70))]
        for index in range(draw.choice([1, 1, 3])):
            new, seed = draw.randrange(1, longest), draw.randrange(2**30)
            sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=new, seed=seed)
            found.append(
                GenerateRequest(
                    prompt_id=len(found) - index, sample_index=index, prompt_token_ids=prompt, sampling=sampling
                )
            )
    return found


def sample(decoder: ExactDecoder, asked: Sequence[GenerateRequest], draw: random.Random, *, slots: int) -> list[Sample]:
    """The responses, in the order of the requests."""
    given_up = [ticket for ticket in range(len(asked)) if draw.random() < GIVEN_UP]
    found: dict[int, Sample] = {}
    turns = 0
    with torch.inference_mode():
        batch = Batch(decoder, num_slots=slots, policy_version=0)
        batch.add(range(len(asked)), asked)
        while batch.num_active or batch.num_waiting:
            turns += 1
            if turns == 10:
                for ticket, part in batch.abort(given_up):
                    batch.add([ticket], [replace(asked[ticket], resumed=part if part.token_ids else None)])
            for ticket, generation in batch.advance():
                found[ticket] = make_sample(asked[ticket], generation)
    return [found[ticket] for ticket in sorted(found)]


def compare(trainer: ScoringModel, samples: Sequence[Sample], *, size: int, count: Count) -> None:
    """Score `samples`, `size` in a micro-batch."""
    with torch.inference_mode():
        for first in range(0, len(samples), size):
            micro = micro_batch(samples[first : first + size])
            scores = trainer(micro, temperature=TEMPERATURE).logprobs[micro.response_index]
            count.tokens += len(scores)
            count.different += int((scores != micro.rollout_logprobs[micro.response_index]).sum())


def bits(path: Path, dtype: torch.dtype, *, tokens: int, longest: int) -> Count:
    """Sample and score until `tokens` are compared, a quarter of them in each company; a batch of one has less."""
    engine, scorer = (make(path, dtype, attention=attention) for attention in (SLOT_ATTENTION, EXACT_ATTENTION))
    decoder, trainer = ExactDecoder(engine), ScoringModel(scorer, chunk_tokens=300, exact=True)
    draw, total = random.Random(0), Count()  # noqa: S311 - not for keys
    for number, (slots, asked, threads) in enumerate(COMPANY):
        goal = tokens * (0.02 if slots == 1 else (number + 1) / len(COMPANY))
        while total.tokens < goal:
            torch.set_num_threads(threads)
            chosen = requests(draw, asked, vocab=engine.config.vocab_size, longest=longest)
            samples = sample(decoder, chosen, draw, slots=slots)
            torch.set_num_threads(draw.choice([1, 2, 3]))
            draw.shuffle(samples)
            compare(trainer, samples, size=draw.choice([1, 5, 32, len(samples)]), count=total)
    return total


def make(path: Path, dtype: torch.dtype, *, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    make_exact(model)
    return model.eval().requires_grad_(False)


def train(run_dir: Path, *words: str) -> list[dict[str, float]]:
    """The rows of the steps of `parity train`."""
    command = [sys.executable, "-m", "trainer", "train", *words, f"run.dir={run_dir}", "tracking.wandb=disabled"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this interpreter
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


def weights_digest(run_dir: Path) -> str:
    """Of all tensors of the exported policy."""
    out = run_dir / "model"
    command = [sys.executable, "-m", "trainer", "export", str(run_dir), str(out)]
    subprocess.run(command, capture_output=True, check=True)  # noqa: S603 - this interpreter
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:12]


def bits_table(dtypes: Sequence[str], *, tokens: int, smollm2_tokens: int) -> Iterator[str]:
    yield "| model | type | tokens | differ |"
    yield "| --- | --- | --: | --: |"
    demo, mixture = (
        build_base_model(ArithmeticModelConfig(num_experts=number), progress=lambda done, total, detail: None)
        for number in (0, 16)
    )
    for path, name, budget, longest in (
        (demo, "demo", tokens // len(dtypes), 64),
        (mixture, "demo, 16 experts", tokens // 50 // len(dtypes), 64),
        (build_smollm2(), "SmolLM2-135M-Instruct", smollm2_tokens // len(dtypes), 24),
    ):
        for dtype in dtypes:
            found = bits(path, DTYPES[dtype], tokens=budget, longest=longest)
            yield f"| {name} | {dtype} | {found.tokens:,} | {found.different:,} |"


def modes_table(scratch: Path, engine: str) -> Iterator[str]:
    yield "| mode | K3 of the steps | digest of the weights |"
    yield "| --- | --- | --- |"
    for mode in MODES:
        words = ("arithmetic_grpo", f"rollout={engine}", "rollout.exact=true", *FLOAT32, "policy.num_workers=2")
        own = ("run.num_steps=3", "eval.every=0", "batch.mini_batch_prompts=null", f"correction={mode}")
        rows = train(scratch / mode, *words, *own)
        k3 = ", ".join(f"{row['mismatch/k3']:g}" for row in rows)
        yield f"| {mode} | {k3} | {weights_digest(scratch / mode)} |"


def time_table(scratch: Path, dtypes: Sequence[str], *, recipe: str, engine: str, steps: int) -> Iterator[str]:
    yield "| type | rollout.exact | step, s | rollout, s | training, s | K3 | largest difference, of tokens |"
    yield "| --- | --- | --: | --: | --: | --: | --: |"
    for dtype in dtypes:
        medians = []
        for exact in ("false", "true"):
            words = (recipe, f"rollout={engine}", f"policy.dtype={dtype}", f"rollout.dtype={dtype}")
            own = (f"rollout.exact={exact}", f"run.num_steps={steps}", "eval.every=0", "eval.max_prompts=2")
            rows = train(scratch / f"{dtype}_{exact}", *words, *own, "checkpoint.every=0")[1:]
            step, rollout, training = (
                statistics.median(row[name] for row in rows)
                for name in ("time/step_s", "time/rollout_s", "time/train_s")
            )
            medians.append(step)
            k3 = statistics.median(row["mismatch/k3"] for row in rows)
            gap = max(row["mismatch/abs_logdiff_max"] for row in rows)
            tokens = sum(row["mismatch/num_tokens"] for row in rows)
            seconds = f"{step:.1f} | {rollout:.1f} | {training:.1f}"
            yield f"| {dtype} | {exact} | {seconds} | {k3:.1e} | {gap:.1e} of {tokens:,.0f} |"
        yield f"| {dtype} | ratio | {medians[1] / medians[0]:.2f} | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--smollm2-tokens", type=int, default=8_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engine", choices=("torch", "sglang"), default="torch")
    parser.add_argument("--recipe", default="smollm2_grpo")
    parser.add_argument("--only", choices=("bits", "modes", "time"))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tables = {
            "bits": bits_table(arguments.dtypes, tokens=arguments.tokens, smollm2_tokens=arguments.smollm2_tokens),
            "modes": modes_table(Path(scratch), arguments.engine),
            "time": time_table(
                Path(scratch), arguments.dtypes, recipe=arguments.recipe, engine=arguments.engine, steps=arguments.steps
            ),
        }
        for name, lines in tables.items():
            if arguments.only in (None, name):
                for line in lines:
                    sys.stdout.write(f"{line}\n")
                    sys.stdout.flush()
                sys.stdout.write("\n")


if __name__ == "__main__":
    main()
