"""Bias and variance of the policy gradient under every correction, exactly, as a markdown table.

    python benchmarks/bias_by_enumeration.py

All 3^4 responses of four tokens over a vocabulary of three, tabular policies in float64, 30 random problems. mu is
pi_old with normal noise on its logits, and pi_theta = pi_old: the first update of a step. Per noise two numbers, means
over the problems, both relative to the norm of the true gradient of E_pi[A]:

    bias   |E_mu[g] - true gradient|
    sd     sqrt(E_mu |g|^2 - |E_mu g|^2), g the gradient of one sampled response; n responses divide it by sqrt(n)

Nothing is sampled but the problems; 0 is below 1e-12. The segment level is shown with two turns of two tokens; all
other levels have the same numbers with one turn and with two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# The problems are those of the tests, which are no package: one builder, so that table and tests cannot disagree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "algorithms"))

from enumeration_cases import Case, random_case, relative_bias, relative_deviation

from algorithms.config import (
    Bound,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    CustomConfig,
    Level,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectConfig,
    TISConfig,
    VanillaISConfig,
)

NOISES = (0.1, 0.2, 0.5)
NUM_PROBLEMS = 30
LENGTH = 4
TURNS = (2, 2)
GEOMETRIC_BOUNDS = [0.9, 1.1]

CORRECTIONS: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    **{f"vanilla_is, {level.name}": VanillaISConfig(level=level) for level in Level},
    **{f"tis, {level.name}, cap 2": TISConfig(level=level) for level in Level},
    **{f"mis, {level.name}, mask [0.5, 2]": MISConfig(level=level) for level in Level},
    "custom, token, clip [0.5, 2]": CustomConfig(level=Level.token, bound=Bound.clip, low=0.5, high=2.0),
    "custom, token, cap 2, geometric_ratio [0.9, 1.1]": CustomConfig(
        level=Level.token, bound=Bound.truncate, high=2.0, reject=RejectConfig(geometric_ratio=GEOMETRIC_BOUNDS)
    ),
    "bypass, ppo_clip": BypassConfig(),
    **{
        f"bypass, reinforce, {level.name}, cap 2": BypassConfig(loss=BypassLoss.reinforce, level=level)
        for level in (Level.token, Level.sequence, Level.prefix)
    },
}


def problems(config: CorrectionConfig, noise: float) -> list[Case]:
    """The random problems, with two turns where the level of the weight sees them."""
    weight = config.spec().weight
    turns = TURNS if weight is not None and weight.level is Level.segment else None
    return [random_case(seed, noise=noise, length=LENGTH, turns=turns) for seed in range(NUM_PROBLEMS)]


def row(name: str, config: CorrectionConfig) -> str:
    """One line of the table."""
    cells = [name]
    for noise in NOISES:
        cases = problems(config, noise)
        bias = sum(relative_bias(case, config) for case in cases) / len(cases)
        deviation = sum(relative_deviation(case, config) for case in cases) / len(cases)
        cells += ["0" if bias < 1e-12 else f"{bias:.3f}" if bias >= 0.001 else f"{bias:.0e}", f"{deviation:.2f}"]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Write the table to stdout."""
    torch.set_num_threads(1)
    titles = ["correction", *(f"{what}, noise {noise}" for noise in NOISES for what in ("bias", "sd"))]
    sys.stdout.write(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}\n")
    for name, config in CORRECTIONS.items():
        sys.stdout.write(row(name, config))


if __name__ == "__main__":
    main()
