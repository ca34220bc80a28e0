"""`parity replay`: a step of a run's dump, or a bundle, under every requested mode, as replay.json and replay.html.

No model, no Ray and no engine is started. The page has no script and opens offline.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from algorithms.config import PPOClipConfig, TISConfig
from algorithms.histograms import Bins, HistogramArrays, MismatchHistograms, mismatch_histograms
from algorithms.objective import objective, reference_term
from rollout.task_config import ArithmeticDataConfig
from rollout.user_code.custom_class import own_choices
from trainer.config.guard import MismatchGuardConfig, Reading
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, BatchConfig
from trainer.policy.step import compared_logprobs
from trainer.replay.bundle import Bundle, routes_note
from trainer.replay.bundle_step import step_of
from trainer.replay.modes import RUN, Mode, RefusedMode, chosen_modes
from trainer.replay.recorded import RecordedStep, read_step
from trainer.replay.score import MAX_WEIGHT, ModeScore, scored_modes
from trainer.report.frame import TablePart, finite, write_results
from trainer.rundir.dump import Dump
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import METRICS_FILE
from trainer.text.plain import counted

NAME = "replay"
"""Of the files replay.json and replay.html."""
FORMAT, BUNDLE_FORMAT = 2, 1
"""Versions of replay.json for a run, and for a bundle."""
PLAIN = "recompute"
"""The mode that compares with pi_old and corrects nothing."""
NUM_THREADS = 1
"""Threads of torch for a bundle. Where a training is running beside it, several would mostly wait for each other."""
COLUMNS: Mapping[str, str] = {
    "loss": "loss/policy",
    "weight": "mismatch/is/applied_mean",
    "max": MAX_WEIGHT,
    "ESS raw": "mismatch/ess/raw_token",
    "ESS applied": "mismatch/ess/applied_token",
    "seq raw": "mismatch/ess/raw_seq",
    "seq applied": "mismatch/ess/applied_seq",
    "kept": "mismatch/kept_frac",
    "clip mass": "mismatch/is/clip_mass",
    "lr A>0": "mismatch/eff_lr_pos",
    "lr A<0": "mismatch/eff_lr_neg",
    "K3": "mismatch/k3",
}
"""Column title -> metric."""
HOW_TO_READ = """
loss: what is minimised, with its denominators. weight: mean importance weight of the tokens, 0 where rejected; max: the
largest of a kept token. ESS: share of the tokens (seq: of the responses) that count; raw: of pi_old / mu before any
bound, applied: of the weights in the loss. kept: share of the response tokens in the loss. clip mass: share of the
weight that bounds took off. lr A>0, lr A<0: what is left of the learning rate, sum |w A| / sum |A|. K3: the mismatch,
nats.
"""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """Comparison of the run's own correction with the logged metrics."""

    against: str
    """Source of the logged values."""
    compared: int
    """Number of metrics in both rows."""
    different: dict[str, tuple[float | None, float | None]]
    """Metric -> (logged, replayed), for metrics that are not equal to the last bit."""
    yours: tuple[str, ...]
    """The choices of the user's own, whose files may have changed since."""

    def line(self) -> str:
        """The comparison as a sentence for people."""
        if not self.compared:
            return f"nothing to compare with: {self.against} has no row of this step"
        if not self.different:
            return f"reproduces {self.compared} of {self.compared} logged metrics to the last bit ({self.against})"
        of_yours = f", or {' or '.join(self.yours)} has changed since" if self.yours else ""
        worst = max(self.different, key=lambda key: _relative(*self.different[key]))
        return (
            f"{len(self.different)} of {self.compared} logged metrics differ ({self.against}), {worst} most, by "
            f"{_relative(*self.different[worst]):.1e} of itself: another device, or more than two ranks, add in "
            f"another order{of_yours}"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay(ABC):
    """A step under every mode."""

    step: RecordedStep
    modes: list[Mode]
    """Modes that can be used on the step."""
    scores: list[ModeScore]
    """A score for each of `modes`."""
    refused: list[RefusedMode]

    @property
    @abstractmethod
    def title(self) -> str:
        """Title of the page."""

    @abstractmethod
    def facts(self) -> list[str]:
        """What is to be known of the step, a line each."""

    @abstractmethod
    def described(self) -> dict[str, object]:
        """What replay.json has beside the modes, as JSON values."""

    def measured(self) -> list[TablePart]:
        """Tables before that of the modes."""
        return []

    def mode_rows(self) -> list[tuple[str, ...]]:
        """The table of the modes, titles first; without advantages no loss is known."""
        return mode_table(self.scores)

    def record(self) -> dict[str, object]:
        """The whole replay as JSON values."""
        modes = [
            {
                "name": score.name,
                "objective": objective_of(mode.config),
                "metrics": dict(score.metrics),
            }
            for mode, score in zip(self.modes, self.scores, strict=True)
        ]
        refused = [{"name": mode.name, "reason": mode.refusal} for mode in self.refused]
        return {**self.described(), "modes": modes, "refused": refused}

    def write(self, directory: Path) -> list[Path]:
        """Write replay.json and replay.html; returns their paths."""
        refused = [(mode.name, mode.refusal) for mode in self.refused]
        objectives = [(mode.name, objective_of(mode.config)) for mode in self.modes]
        parts: list[TablePart] = [
            *self.measured(),
            ("Modes", self.mode_rows(), 1, HOW_TO_READ),
            ("Refused", [("mode", "reason"), *refused], 2, ""),
            ("What each mode minimises", [("mode", "objective"), *objectives], 2, ""),
        ]
        return write_results(directory, NAME, self.record(), title=self.title, facts=self.facts(), parts=parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunReplay(Replay):
    """A step of a run, its own mode first."""

    dump: Dump
    reproduction: Reproduction

    @property
    def title(self) -> str:
        return f"replay of step {self.dump.description.step}"

    def facts(self) -> list[str]:
        step, samples = self.dump.description, self.step.samples
        responses, groups = samples.rewards.numel(), samples.group_ids.unique().numel()
        return [
            f"step {step.step}, correction={step.correction}, weights of version {step.policy_version}: "
            f"{responses:,} responses in {groups:,} groups, {int(samples.num_tokens.sum()):,} response tokens, "
            f"{counted(self.step.num_optimizer_steps, 'optimizer step')}, {counted(len(step.ranks), 'rank')}",
            self.reproduction.line(),
            *self._nothing_to_tell_apart(),
            *self._measured_in_part(),
        ]

    def _nothing_to_tell_apart(self) -> Iterator[str]:
        """Yield what a table of zeros and dashes means."""
        metrics = self.scores[0].metrics
        if metrics.get("mismatch/eff_lr") is None:
            yield (
                "every advantage of this step is 0, so the policy loss is 0 under every mode and there is no learning "
                "rate to keep (-): the modes can be told apart in a step whose rewards differ"
            )
        if metrics.get("mismatch/k3") == 0:
            yield "K3 is 0: engine and trainer agree on every token, so there is nothing to correct in this step"

    def _measured_in_part(self) -> Iterator[str]:
        """Yield which rows of the table do not speak of all tokens."""
        total = int(self.step.samples.num_tokens.sum())
        by_tokens: dict[int, list[str]] = {}
        for score in self.scores:
            by_tokens.setdefault(int(score.metrics["mismatch/num_tokens"] or 0), []).append(score.name)
        for measured, names in by_tokens.items():
            if measured < total:
                yield (
                    f"{', '.join(names)}: the weights have no pi_old, so after the first optimizer step they hold the "
                    f"update too; all columns but loss, max and kept are those of the first one, {measured:,} of "
                    f"{total:,} tokens. Do not compare them with other rows"
                )

    def described(self) -> dict[str, object]:
        description = self.dump.description
        return {
            "format": FORMAT,
            "step": description.step,
            "policy_version": description.policy_version,
            "correction": description.correction,
            "dump": str(self.dump.path),
            "num_ranks": len(description.ranks),
            "optimizer_steps": self.step.num_optimizer_steps,
            "num_responses": self.step.samples.rewards.numel(),
            "num_response_tokens": int(self.step.samples.num_tokens.sum()),
            "reproduction": asdict(self.reproduction),
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BundleReplay(Replay):
    """A bundle under every correction."""

    bundle: Bundle
    metrics: dict[str, float | None]
    """Metrics of the mismatch: between old_logprobs and the engine, without a correction."""
    histograms: HistogramArrays

    @property
    def title(self) -> str:
        return f"replay of a step of {self._producer}"

    @property
    def _producer(self) -> str:
        return self.bundle.metadata.get("producer", "an unnamed trainer")

    def facts(self) -> list[str]:
        bundle, samples = self.bundle, self.step.samples
        known = ", ".join(f"{name} {text}" for name, text in bundle.metadata.items() if name != "producer")
        lines = [
            f"{len(samples.rewards):,} responses, {int(samples.num_tokens.sum()):,} response tokens, written by "
            f"{self._producer}{f' ({known})' if known else ''}"
        ]
        if bundle.advantages is None:
            lines.append("the bundle has no advantages: loss and learning rates are not known (-)")
        lines += filter(None, [routes_note(bundle)])
        names = [mode.name for mode in self.modes if not mode.config.needs_old_logprobs]
        if bundle.logprobs is not None and names:
            held = "the weights have no pi_old, so they hold the optimizer steps before too"
            lines.append(f"{', '.join(names)}: {held}")
        return [*lines, guard_line(MismatchGuardConfig().readings(self.metrics))]

    def measured(self) -> list[TablePart]:
        numbers = [(name, shown(self.metrics.get(metric)), what) for name, (metric, what) in NUMBERS.items()]
        by_probability, by_position = self.histograms.by_probability, self.histograms.by_position
        return [
            ("Mismatch", [("number", "value", "what it is"), *numbers], 1, ""),
            ("By probability of the token", bin_rows(by_probability, "engine's probability"), 1, ""),
            ("By position in the response", bin_rows(by_position, "response tokens before"), 1, ""),
        ]

    def mode_rows(self) -> list[tuple[str, ...]]:
        hidden = () if self.bundle.advantages is not None else ("loss", "lr A>0", "lr A<0")
        return mode_table(self.scores, hidden=hidden)

    def described(self) -> dict[str, object]:
        return {
            "format": BUNDLE_FORMAT,
            "metadata": dict(self.bundle.metadata),
            "num_responses": len(self.step.samples.rewards),
            "num_response_tokens": int(self.step.samples.num_tokens.sum()),
            "mismatch": {metric: self.metrics.get(metric) for metric, _ in NUMBERS.values()},
            "by_probability": asdict(self.histograms.by_probability),
            "by_position": asdict(self.histograms.by_position),
        }


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def replay_step(dump: Dump, config: TrainConfig, names: Sequence[str], *, run_dir: Path) -> RunReplay:
    """Score `dump` under the modes `names` and the run's own, with as many threads as the ranks had."""
    with _threads(dump.description.ranks[0].num_threads):
        step = read_step(dump)
        modes, refused = chosen_modes(
            config, names, optimizer_steps=step.num_optimizer_steps, has_old_logprobs=step.has_old_logprobs
        )
        scores = scored_modes(modes, step)
    yours = tuple(choice.source for choice in own_choices(config))
    reproduction = _reproduction(scores[0], run_dir / METRICS_FILE, dump.description.step, yours=yours)
    return RunReplay(dump=dump, step=step, modes=modes, scores=scores, refused=refused, reproduction=reproduction)


def replay_bundle(bundle: Bundle, names: Sequence[str]) -> BundleReplay:
    """Score `bundle` under the modes `names`, with their defaults."""
    with _threads(NUM_THREADS):
        return _replayed(bundle, names)


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


def objective_of(config: TrainConfig) -> str:
    """The minimised objective in one line."""
    return objective(config.correction, config.loss) + reference_term(config.reference)


def _reproduction(own: ModeScore, path: Path, step: int, *, yours: tuple[str, ...]) -> Reproduction:
    """Compare the score of the run's own correction with the logged row of the step, if there is one."""
    rows = read_rows(path) if path.is_file() else []
    of_step = [row for row in rows if row.get("step") == step]
    logged: dict[str, float | None] = {key: value for row in of_step for key, value in row.items()}
    mine = {key: finite(value) for key, value in own.metrics.items() if key in logged}
    different = {key: (logged[key], value) for key, value in mine.items() if logged[key] != value}
    return Reproduction(against=path.name, compared=len(mine), different=different, yours=yours)


def _relative(logged: float | None, replayed: float | None) -> float:
    if logged is None or replayed is None:
        return math.inf
    return abs(replayed - logged) / max(abs(logged), abs(replayed))


def mode_table(scores: Sequence[ModeScore], *, hidden: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The table of modes as text, titles first; the columns `hidden` have dashes."""
    rows: list[tuple[str, ...]] = [("mode", *COLUMNS)]
    for score in scores:
        cells = (None if title in hidden else score.metrics.get(key) for title, key in COLUMNS.items())
        rows.append((score.name, *map(shown, cells)))
    return rows


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


def shown(value: float | None) -> str:
    """A number in at most eight characters; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"
