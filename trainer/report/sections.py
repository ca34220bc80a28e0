"""What a report shows: charts by section, each a list of metrics. `charts.py` draws them.

Nothing here knows Bokeh. A chart with `each` shows every metric whose name begins so, beside its `series`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or one layer of a stack."""

    key: str
    """Metric."""
    label: str
    slot: int
    """Colour 0..7 of the page."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: what it shows and how."""

    id: str
    title: str
    series: tuple[Series, ...]
    unit: str = ""
    form: str = "number"
    """Of axis and values: number, percent or exponent."""
    log: bool = False
    from_zero: bool = False
    """Whether the axis starts at 0."""
    stacked: bool = False
    source: str = "rows"
    """"rows" (every step) or "evaluations"."""
    wide: bool = False
    each: str = ""
    """Beginning of further metrics to show, one line or layer for each that the run has."""
    each_label: str = ""
    """Stands before the rest of their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    text: str
    charts: tuple[Chart, ...] = field(default_factory=tuple)


_PHASES = ("rollout", "reward", "pack", "train", "sync", "log", "unattributed", "eval")
"""Layers of the time chart from the bottom up. Evaluation is on top: hiding it leaves no gap."""

SECTIONS: tuple[Section, ...] = (
    Section(
        title="Learning",
        text="Does the policy get better, on the prompts it trains on and on problems it never sees?",
        charts=(
            Chart(
                id="heldout", title="Held-out accuracy", form="percent", source="evaluations", from_zero=True,
                series=(
                    Series(key="eval/accuracy", label="greedy", slot=0),
                    Series(key="eval/accuracy_sampled", label="sampled", slot=1),
                ),
            ),
            Chart(
                id="reward", title="Reward of the training samples",
                series=(
                    Series(key="reward/mean", label="mean reward", slot=0),
                    Series(key="reward/accuracy", label="share correct", slot=2),
                ),
            ),
        ),
    ),
    Section(
        title="Rollout-training mismatch",
        text="How far the trainer's probabilities are from those of the engine that sampled the tokens. K3 estimates "
        "KL(rollout\u00a0\u2016\u00a0trainer) per response token; the floor is what the rounding of the output head "
        "alone gives.",
        charts=(
            Chart(
                id="k3", title="Mismatch K3", unit="nats per token", form="exponent", log=True,
                series=(
                    Series(key="mismatch/k3", label="K3", slot=0),
                    Series(key="mismatch/k3_floor", label="floor", slot=6, dashed=True),
                ),
            ),
            Chart(
                id="worst", title="Worst token", form="exponent", log=True,
                series=(
                    Series(key="mismatch/k3_max", label="largest K3", slot=1),
                    Series(key="mismatch/prob_diff_max", label="largest probability difference", slot=3),
                ),
            ),
            Chart(
                id="delta", title="Log-ratio per token", form="exponent", log=True, unit="nats",
                series=(Series(key="mismatch/abs_logdiff_mean", label="mean |log-ratio|", slot=4),),
            ),
            Chart(
                id="ess", title="Effective sample size", form="percent",
                series=(
                    Series(key="mismatch/ess/raw_token", label="raw weights", slot=0),
                    Series(key="mismatch/ess/applied_token", label="applied weights", slot=2),
                    Series(key="mismatch/kept_frac", label="tokens kept", slot=1),
                ),
            ),
            Chart(
                id="weights", title="Tokens whose weight was cut", form="percent", from_zero=True,
                series=(Series(key="mismatch/is/clip_frac_hi", label="cut", slot=3),),
            ),
        ),
    ),
    Section(
        title="Optimisation",
        text="Entropy that falls to zero means the policy has stopped exploring; jumps of the gradient norm come "
        "before most collapses.",
        charts=(
            Chart(
                id="entropy", title="Policy entropy", unit="nats per token", from_zero=True,
                series=(Series(key="policy/entropy", label="entropy", slot=2),),
            ),
            Chart(
                id="grad", title="Gradient norm", from_zero=True,
                series=(Series(key="optim/grad_norm", label="before clipping", slot=4),),
            ),
            Chart(
                id="clip", title="Tokens at the PPO clip", form="percent", from_zero=True,
                series=(
                    Series(key="loss/clip_frac_high", label="above", slot=1),
                    Series(key="loss/clip_frac_low", label="below", slot=0),
                ),
            ),
            Chart(id="loss", title="Policy loss", series=(Series(key="loss/policy", label="loss", slot=5),)),
            Chart(
                id="lr", title="Learning rate", form="exponent", from_zero=True,
                series=(Series(key="optim/lr", label="learning rate", slot=6),),
            ),
        ),
    ),
    Section(
        title="Critic",
        text="How much of the returns the critic knew before each step: 1 is everything, 0 no more than their mean.",
        charts=(
            Chart(
                id="explained", title="Explained variance of the returns", form="percent",
                series=(Series(key="critic/explained_variance", label="explained", slot=2),),
            ),
            Chart(
                id="values", title="Values and returns", unit="reward",
                series=(
                    Series(key="critic/value_mean", label="mean value", slot=0),
                    Series(key="critic/returns_mean", label="mean return", slot=6, dashed=True),
                ),
            ),
            Chart(id="value_loss", title="Value loss", series=(Series(key="critic/loss", label="loss", slot=5),)),
        ),
    ),
    Section(
        title="Where the time goes",
        text="Wall-clock seconds of each step by phase. What no phase accounts for is shown as unattributed.",
        charts=(
            Chart(
                id="time", title="Seconds per step", unit="s", stacked=True, from_zero=True, wide=True,
                series=tuple(
                    Series(key=f"time/{name}_s", label=name, slot=slot)
                    for name, slot in zip(_PHASES, (0, 3, 7, 1, 2, 5, 6, 4), strict=True)
                ),
            ),
            Chart(
                id="limits", title="Share of the hardware's limit", form="percent", from_zero=True, wide=True,
                series=(
                    Series(key="perf/step_floor_frac", label="step", slot=6, dashed=True),
                    Series(key="perf/rollout_floor_frac", label="rollout", slot=0),
                    Series(key="perf/train_floor_frac", label="train", slot=1),
                    Series(key="perf/sync_floor_frac", label="sync", slot=2),
                    Series(key="perf/mfu", label="MFU", slot=4),
                ),
            ),
            Chart(
                id="speed", title="Speed", unit="tokens/s", from_zero=True,
                series=(
                    Series(key="rollout/tokens_per_s", label="rollout", slot=0),
                    Series(key="perf/train_tokens_per_s", label="train", slot=1),
                ),
            ),
            Chart(
                id="sync", title="Weight sync", unit="GB/s", from_zero=True,
                series=(Series(key="sync/gb_per_s", label="GB/s", slot=2),),
            ),
            Chart(
                id="memory", title="Memory of each process", unit="GiB", from_zero=True, wide=True,
                series=(Series(key="perf/train_peak_gib", label="rank 0, peak while training", slot=6, dashed=True),),
                each="perf/memory_gib/",
            ),
        ),
    ),
    Section(
        title="Rollouts",
        text="What was sampled, and what of it was kept for training.",
        charts=(
            Chart(
                id="length", title="Response length", unit="tokens", from_zero=True,
                series=(Series(key="rollout/response_tokens_mean", label="mean", slot=0),),
            ),
            Chart(
                id="truncated", title="Truncated responses", form="percent", from_zero=True,
                series=(Series(key="rollout/truncated_frac", label="truncated", slot=3),),
            ),
            Chart(
                id="groups", title="Groups sampled", stacked=True, from_zero=True, wide=True,
                series=(Series(key="rollout/groups_kept", label="kept", slot=2),),
                each="rollout/groups_dropped/", each_label="dropped: ",
            ),
        ),
    ),
)  # fmt: skip
"""Everything that a report can show; what the run has no numbers for is left out."""
