"""Do scales that were measured on the base model still fit after RL, and after supervised training?

    python benchmarks/calibration.py [--seeds 0 1 2] [--steps 40]

An 8-bit engine with a calibration divides each output feature by a scale that was measured once. FlashRL reuses the
scales of the base model for the whole run, and argues that RL moves the weights less than supervised training does.
Here the base model of `arithmetic_grpo` is trained in two ways with one optimizer, AdamW with the recipe's learning
rate: by RL, and on right answers until its loss on the held-out right answers is that of the RL run. Both results are
quantised twice, with scales of their own and with those of the base model. The table has:

- steps: optimizer steps; loss: cross-entropy of the held-out right answers, nats per token
- moved: |W - W_base| / |W_base| over all projections
- error: |quantised - W| / |W| over all projections, with the scales of the base model over that with scales of its own
- KL: KL(quantised || exact model), mean over the tokens of the held-out right answers, by the whole distribution, with
  scales of its own and with those of the base model

Prints Markdown. Each RL run is a `parity train` of its own.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from real_step import place
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rollout.config import Quantization
from rollout.data.arithmetic import Demonstration, arithmetic_problems, demonstrations, work_out
from rollout.data.tokenizer import load_tokenizer
from rollout.weights.quantization import GRIDS, Grid, dequantize, is_projection, quantize, spread
from trainer.config.training import ArithmeticModelConfig
from trainer.run.base_model import BATCH_SIZE, IGNORED, Batch, build_base_model, collate, response_loss

LR = 1e-4
"""Learning rate of `arithmetic_grpo`, for both ways of training."""
MOST_STEPS = 2_000
"""Supervised steps after which the loss of the RL run counts as out of reach."""
FORMATS = (Quantization.int8, Quantization.int4)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model and how it came to be."""

    way: str
    seed: int
    steps: int
    model: Qwen2ForCausalLM


def load(path: Path) -> Qwen2ForCausalLM:
    """The model of a directory, float32."""
    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def by_rl(seed: int, *, steps: int, directory: Path) -> Trained:
    """`steps` steps of the recipe, one optimizer step each."""
    parity = [sys.executable, "-m", "trainer"]
    run, exported = directory / f"run{seed}", directory / f"model{seed}"
    keys = ["rollout=torch", f"run.seed={seed}", f"run.num_steps={steps}", f"run.dir={run}", f"optim.lr={LR}"]
    keys += [f"checkpoint.every={steps}", "eval.every=0", "tracking.wandb=disabled"]
    for command in (["train", "arithmetic_grpo", *keys], ["export", str(run), str(exported)]):
        subprocess.run([*parity, *command], check=True, stdout=sys.stderr, timeout=3600)  # noqa: S603
    return Trained(way="RL", seed=seed, steps=steps, model=load(exported))


@torch.no_grad()
def loss_of(model: Qwen2ForCausalLM, batch: Batch) -> float:
    """Cross-entropy of the response tokens, nats per token."""
    return response_loss(model, batch).item()


def by_supervision(base: Path, *, seed: int, loss: float, heldout: Batch) -> Trained:
    """Train on right answers until the held-out loss is at most `loss`, looked at after every step."""
    model, tokenizer = load(base).train(), load_tokenizer(base)
    stream = demonstrations(wrong_fraction=0.0, seed=seed + 1, calculator=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(1, MOST_STEPS + 1):
        optimizer.zero_grad(set_to_none=True)
        response_loss(model, collate(list(itertools.islice(stream, BATCH_SIZE)), tokenizer)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss_of(model, heldout) <= loss:
            return Trained(way="supervised", seed=seed, steps=step, model=model.eval())
    raise RuntimeError(f"the loss did not reach {loss:.4f} within {MOST_STEPS} supervised steps")


def projections(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    """Name -> weight [O, I] of every projection that an engine quantises."""
    return {name: weight.detach() for name, weight in model.named_parameters() if is_projection(name)}


def rounded(weight: Tensor, grid: Grid, *, name: str, calibrated_on: Tensor) -> Tensor:
    """`weight` on the grid with the scales of `calibrated_on`, both [O, I]; what lies beyond the grid is cut."""
    scale = spread(quantize(calibrated_on, grid, name=name).scales, grid, weight.shape)
    if calibrated_on is weight:
        return dequantize(quantize(weight, grid, name=name), grid)
    return (weight / scale).clamp(-grid.largest, grid.largest).round() * scale


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Frobenius norm of the difference over that of `right`, over all projections."""
    squared = sum((left[name] - right[name]).double().square().sum() for name in right)
    return float((squared / sum(weight.double().square().sum() for weight in right.values())) ** 0.5)


@torch.no_grad()
def distributions(model: Qwen2ForCausalLM, batch: Batch) -> Tensor:
    """Log-probs [tokens, V] float64 at every response token."""
    logits = model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1]
    return logits[batch.labels[:, 1:] != IGNORED].double().log_softmax(-1)


@torch.no_grad()
def divergence(model: Qwen2ForCausalLM, weights: dict[str, Tensor], batch: Batch) -> float:
    """KL(model with `weights` || model), nats per token."""
    exact, kept = distributions(model, batch), {name: weight.clone() for name, weight in projections(model).items()}
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    coarse = distributions(model, batch)
    for name, weight in kept.items():
        parameters[name].copy_(weight)
    return float((coarse.exp() * (coarse - exact)).sum(-1).mean())


def row(trained: Trained, base: dict[str, Tensor], heldout: Batch) -> str:
    """One row of Markdown."""
    own = projections(trained.model)
    cells = [trained.way, str(trained.seed), str(trained.steps), f"{loss_of(trained.model, heldout):.4f}"]
    cells.append(f"{distance(own, base):.4f}")
    for quantization in FORMATS:
        grid = GRIDS[quantization]
        fresh, stale = (
            {name: rounded(weight, grid, name=name, calibrated_on=scales[name]) for name, weight in own.items()}
            for scales in (own, base)
        )
        cells.append(f"{distance(stale, own) / distance(fresh, own):.3f}")
        cells += [f"{divergence(trained.model, weights, heldout):.1e}" for weights in (fresh, stale)]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="steps of each RL run")
    arguments = parser.parse_args()
    base = build_base_model(ArithmeticModelConfig())
    right = [Demonstration(problem, work_out(problem, carries=True)) for problem in arithmetic_problems().heldout]
    heldout = collate(right, load_tokenizer(base))
    start = projections(load(base))
    sys.stdout.write(f"{place()}\n\nLoss of the base model: {loss_of(load(base), heldout):.4f}.\n\n")
    formats = "".join(
        f" {name} error, base / own | {name} KL, own | {name} KL, base |" for name in (f.name for f in FORMATS)
    )
    sys.stdout.write(f"| training | seed | steps | loss | moved |{formats}\n|---|{'--:|' * (4 + 3 * len(FORMATS))}\n")
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            rl = by_rl(seed, steps=arguments.steps, directory=Path(directory))
            supervised = by_supervision(base, seed=seed, loss=loss_of(rl.model, heldout), heldout=heldout)
            for trained in (rl, supervised):
                sys.stdout.write(row(trained, start, heldout))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
