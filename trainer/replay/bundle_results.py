"""`parity replay <bundle>`: the mismatch of a step of any trainer, and its step under every correction.

Writes replay.json and replay.html, as for a run. No model, no Ray and no engine is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from algorithms.config import PPOClipConfig, TISConfig
from algorithms.histograms import Bins, HistogramArrays, MismatchHistograms, mismatch_histograms
from rollout.task_config import ArithmeticDataConfig
from trainer.config.guard import MismatchGuardConfig, Reading
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, BatchConfig
from trainer.policy.step import compared_logprobs
from trainer.replay.bundle import Bundle
from trainer.replay.bundle_step import step_of
from trainer.replay.modes import RUN, Mode, RefusedMode, chosen_modes
from trainer.replay.recorded import RecordedStep
from trainer.replay.results import (
    HOW_TO_READ,
    NAME,
    finite,
    mode_record,
    mode_table,
    objective_table,
    shown,
)
from trainer.replay.score import ModeScore, scored_modes
from trainer.report.frame import render_tables, write_results

PLAIN = "recompute"
"""The mode that compares with pi_old and corrects nothing."""
NUM_THREADS = 1
"""Threads of torch. Where a training is running beside it, several would mostly wait for each other."""
FORMAT = 1
"""Version of replay.json for a bundle."""
NUMBERS = {
    "K3": ("mismatch/k3", "KL(engine | trainer) by the estimator k3, nats per token"),
    "k1": ("mismatch/k1", "the estimator k1, nats per token"),
    "largest |difference|": ("mismatch/abs_logdiff_max", "of a log-prob, nats"),
    "mean |difference|": ("mismatch/abs_logdiff_mean", "of a log-prob, nats"),
    "mean |probability difference|": ("mismatch/prob_diff_mean", ""),
    "largest probability difference": ("mismatch/prob_diff_max", ""),
    "mean raw weight": ("mismatch/is/raw_mean", "of pi_old / mu; 1 where nothing but the mismatch is in it"),
    "ESS of tokens": ("mismatch/ess/raw_token", "share of the tokens that count with these weights"),
    "ESS of responses": ("mismatch/ess/raw_seq", "the same of whole responses"),
    "tail index": ("mismatch/khat/token", "Pareto k of the weights; above 0.7 their mean is not to be trusted"),
    "invalid tokens": ("mismatch/invalid_tokens", "without a log-prob on both sides"),
}
"""Title -> (metric, what it is), in the order of the table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BundleReplay:
    """A bundle under every correction."""

    bundle: Bundle
    step: RecordedStep
    modes: list[Mode]
    scores: list[ModeScore]
    refused: list[RefusedMode]
    metrics: dict[str, float | None]
    """Metrics of the mismatch: between old_logprobs and the engine, without a correction."""
    histograms: HistogramArrays

    def facts(self) -> Iterator[str]:
        """Yield what is to be known of the bundle, a line each."""
        bundle, samples = self.bundle, self.step.samples
        known = ", ".join(f"{name} {text}" for name, text in bundle.metadata.items() if name != "producer")
        yield (
            f"{len(samples.rewards):,} responses, {int(samples.num_tokens.sum()):,} response tokens, written by "
            f"{bundle.metadata.get('producer', 'an unnamed trainer')}{f' ({known})' if known else ''}"
        )
        if bundle.advantages is None:
            yield "the bundle has no advantages: loss and learning rates are not known (-)"
        if bundle.logprobs is not None:
            names = [mode.name for mode in self.modes if not mode.config.needs_old_logprobs]
            if names:
                yield f"{', '.join(names)}: the weights have no pi_old, so they hold the optimizer steps before too"
        yield guard_line(MismatchGuardConfig().readings(self.metrics))


def replay_bundle(bundle: Bundle, names: Sequence[str]) -> BundleReplay:
    """Score `bundle` under the modes `names`, with their defaults."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        return _replayed(bundle, names)
    finally:
        torch.set_num_threads(before)


def _replayed(bundle: Bundle, names: Sequence[str]) -> BundleReplay:
    step, config = step_of(bundle), judged_config(after_steps=bundle.logprobs is not None)
    modes, refused = chosen_modes(config, [*names, PLAIN], optimizer_steps=1, has_old_logprobs=True)
    modes = [mode for mode in modes if mode.name != RUN]
    scores = scored_modes(modes, step)
    [metrics] = [score.metrics for score in scores if score.name == PLAIN]
    modes = [mode for mode in modes if mode.name in names]
    scores = [score for score in scores if score.name in names]
    histograms: MismatchHistograms | None = None
    [recorded] = step.ranks[0]
    for micro, score in zip(recorded.mini.micro_batches, recorded.scores, strict=True):
        found = mismatch_histograms(micro.tokens(compared_logprobs(micro, score)))
        histograms = found if histograms is None else histograms.merge(found)
    assert histograms is not None, "a bundle has a response"
    return BundleReplay(
        bundle=bundle,
        step=step,
        modes=modes,
        scores=scores,
        refused=refused,
        metrics=metrics,
        histograms=histograms.arrays(),
    )


def judged_config(*, after_steps: bool) -> TrainConfig:
    """The config in which corrections are put: the defaults. Model, data and engine have no part in it.

    `after_steps`: optimizer steps lie between pi_old and the policy in the loss.
    """
    return TrainConfig(
        batch=BatchConfig(prompts_per_step=2, mini_batch_prompts=1 if after_steps else None),
        model=ArithmeticModelConfig(),
        data=ArithmeticDataConfig(),
        correction=TISConfig(),
        loss=PPOClipConfig(),
    )


def guard_line(found: Sequence[Reading]) -> str:
    """What guard=mismatch would say of this step."""
    beyond = [
        f"{each.name} {shown(each.value)} is {'above' if each.is_upper else 'below'} {each.bound:g}"
        for each in found
        if each.is_beyond
    ]
    if beyond:
        return f"guard=mismatch counts this step as bad: {', '.join(beyond)}"
    return "guard=mismatch finds nothing in this step"


def record(replay: BundleReplay) -> dict[str, object]:
    """The whole replay as JSON values."""
    return {
        "format": FORMAT,
        "metadata": dict(replay.bundle.metadata),
        "num_responses": len(replay.step.samples.rewards),
        "num_response_tokens": int(replay.step.samples.num_tokens.sum()),
        "mismatch": {metric: finite(replay.metrics.get(metric)) for metric, _ in NUMBERS.values()},
        "by_probability": asdict(replay.histograms.by_probability),
        "by_position": {
            name: [finite(each) for each in values] for name, values in asdict(replay.histograms.by_position).items()
        },
        **mode_record(replay.modes, replay.scores, replay.refused),
    }


def write_bundle_replay(replay: BundleReplay, directory: Path) -> tuple[Path, Path]:
    """Write replay.json and replay.html to `directory`, each atomically; returns their paths."""
    return write_results(
        directory, NAME, record(replay), render_bundle(replay, numbers=f"{NAME}.json beside this page")
    )


def render_bundle(replay: BundleReplay, *, numbers: str) -> str:
    """The page as HTML; `numbers` says where its numbers are."""
    parts = [
        ("Mismatch", mismatch_rows(replay), 1, ""),
        ("By probability of the token", bin_rows(replay.histograms.by_probability, "engine's probability"), 1, ""),
        ("By position in the response", bin_rows(replay.histograms.by_position, "response tokens before"), 1, ""),
        ("Modes", mode_rows(replay), 1, HOW_TO_READ),
        ("What each mode minimises", objective_table(replay.modes), 2, ""),
    ]
    title = f"replay of a step of {replay.bundle.metadata.get('producer', 'an unnamed trainer')}"
    return render_tables(title, facts=list(replay.facts()), parts=parts, numbers=numbers)


def mismatch_rows(replay: BundleReplay) -> list[tuple[str, ...]]:
    """The table of the mismatch, titles first."""
    rows: list[tuple[str, ...]] = [("number", "value", "what it is")]
    return rows + [(name, shown(replay.metrics.get(metric)), what) for name, (metric, what) in NUMBERS.items()]


def mode_rows(replay: BundleReplay) -> list[tuple[str, ...]]:
    """The table of the corrections, titles first; without advantages no loss is known."""
    hidden = () if replay.bundle.advantages is not None else ("loss", "lr A>0", "lr A<0")
    return mode_table(replay.scores, hidden=hidden)


def bin_rows(bins: Bins, title: str) -> list[tuple[str, ...]]:
    """Where the mismatch is, along one axis: tokens, mean |difference|, and the share of all of K3."""
    sums = [count * (mean or 0.0) for count, mean in zip(bins.counts, bins.k3, strict=True)]
    total = math.fsum(sums)
    rows: list[tuple[str, ...]] = [(title, "tokens", "mean |difference|", "K3", "share of K3")]
    for number, count in enumerate(bins.counts):
        if count:
            low, high = sorted(bins.edges[number : number + 2])
            share = f"{sums[number] / total:.1%}" if total > 0 else "-"
            where = f"{low:.3g} to {high:.3g}"
            rows.append((where, f"{int(count):,}", shown(bins.abs_logdiff[number]), shown(bins.k3[number]), share))
    return rows
