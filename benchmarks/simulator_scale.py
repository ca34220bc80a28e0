"""How five ways to collect would scale: a 7B model on H200s, 1 to 1,024 engines, simulated.

    python benchmarks/simulator_scale.py [--engines 1 8 64 1024] [--steps 8] [--laws log_normal bimodal]

Nothing is run but the simulator; the efficiencies are assumptions, not measurements: decoding at 0.5 of its floor plus
0.5 ms per decode step, training at 0.4 of its floor, sync at its floor, 1 s of a step for everything else. The batch
grows with the engines: 8 prompts of 8 responses per engine and step, and one rank per engine, on devices of their own.
Responses of at most 16,384 tokens: log-normal with median 2,048 and sigma 1, or bimodal, 80 % around 1,024 and 20 %
around 8,192; lengths within a group are correlated by 0.5. Prints Markdown, the seconds of processor time that each row
took among it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rollout.simulate.simulated_schedules import Schedule, prompts_needed, simulate
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig
from trainer.limits.model_shape import ModelShape
from trainer.simulate.simulation import (
    DEVICES,
    Efficiencies,
    LengthLaw,
    Scaling,
    SimulateConfig,
    build_plant,
    draw_work,
)

QWEN_7B = ModelShape(
    num_parameters=7_615_616_512,
    layer_parameters=233_057_792,
    num_layers=28,
    vocab_size=152_064,
    hidden_size=3584,
    attention_size=3584,
    kv_size=1024,
    is_tied=False,
    is_dense=True,
)
"""Sizes of Qwen2.5-7B, from its files."""
ASSUMED = Efficiencies(decode=0.5, step_overhead_s=5e-4, train=0.4, sync_s=None, other_s=1.0)
WORDS = (
    "rollout=torch",
    "rollout.max_batch_size=256",
    "policy.num_workers=1",
    "policy.dtype=bfloat16",
    "batch.prompts_per_step=8",
    "batch.group_size=8",
    "batch.max_tokens_per_microbatch=32768",
    "sampling.max_new_tokens=16384",
)


def config() -> TrainConfig:
    """A recipe of the project for its batch and its types; its model takes no part."""
    recipe = find_recipe("arithmetic_grpo", own_dir=None)
    assert isinstance(recipe, Path)
    [run] = resolve(recipe, WORDS, own_dir=None, multirun=False).runs
    assert run.config is not None, [str(problem) for problem in run.problems]
    return run.config


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--steps", type=int, default=8)
    laws = [LengthLaw.log_normal.name, LengthLaw.bimodal.name]
    parser.add_argument("--laws", nargs="+", choices=laws, default=laws)
    arguments = parser.parse_args()
    recipe, device = config(), DEVICES["h200"]
    lines = [
        "| lengths | engines | schedule | step s | rollout s | wait s | slots busy % | running | tail % | wasted % "
        "| length bias | mean lag | times synchronous | simulated in, s |",
        "|---|--:|---|" + "--:|" * 11,
    ]
    for law in arguments.laws:
        bimodal = law == LengthLaw.bimodal.name
        assumed = SimulateConfig(
            steps=arguments.steps,
            scaling=Scaling.weak,
            lengths=LengthLaw[law],
            median_tokens=1024 if bimodal else 2048,
            sigma=1.0,
            prompt_tokens=512,
            max_staleness=2,
        )
        for count in arguments.engines:
            plant = build_plant(
                recipe, assumed, QWEN_7B, engine=device, rank=device, efficiencies=ASSUMED, num_engines=count
            )
            needed = max(prompts_needed(each, plant, num_steps=assumed.steps) for each in Schedule)
            work = draw_work(recipe, assumed, None, num_prompts=needed)
            speed = 0.0
            for schedule in Schedule:
                began = time.process_time()
                made = simulate(schedule, work, plant, num_steps=assumed.steps)
                took = time.process_time() - began
                speed = speed or made.tokens_per_s
                cells = [law, str(count), schedule.name]
                cells += [f"{seconds:.1f}" for seconds in (made.step_s, made.rollout_s, made.wait_s)]
                cells += [f"{100 * made.slots_busy_frac:.1f}", f"{made.running_mean:.1f}"]
                cells += [f"{100 * share:.1f}" for share in (made.tail_frac, made.wasted_frac)]
                cells += [f"{value:.2f}" for value in (made.length_bias, made.mean_lag, made.tokens_per_s / speed)]
                lines.append(f"| {' | '.join(cells)} | {took:.1f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
