"""`parity replay`: a dump scored under every requested mode, as replay.json and replay.html.

No Ray and no engine is started. The page has no script and opens offline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from algorithms.objective import objective, reference_term
from rollout.processes.custom_class import own_choices
from trainer.config.train import TrainConfig
from trainer.replay.modes import Mode, RefusedMode, chosen_modes
from trainer.replay.recorded import RecordedStep, read_step
from trainer.replay.score import MAX_WEIGHT, ModeScore, scored_modes
from trainer.report.frame import render_tables, write_results
from trainer.rundir.dump import Dump
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import METRICS_FILE
from trainer.text.plain import counted

NAME = "replay"
"""Of the files replay.json and replay.html."""
FORMAT = 2
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
class Replay:
    """A step under every mode."""

    dump: Dump
    step: RecordedStep
    modes: list[Mode]
    """Modes that can be used on the step, the run's own first."""
    scores: list[ModeScore]
    """A score for each of `modes`."""
    refused: list[RefusedMode]
    reproduction: Reproduction

    def facts(self) -> list[str]:
        """Facts about the replayed step, one per line."""
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


def replay_step(dump: Dump, config: TrainConfig, names: Sequence[str], *, run_dir: Path) -> Replay:
    """Score `dump` under the modes `names` and the run's own, with as many threads as the ranks had."""
    before = torch.get_num_threads()
    torch.set_num_threads(dump.description.ranks[0].num_threads)
    try:
        step = read_step(dump)
        modes, refused = chosen_modes(
            config, names, optimizer_steps=step.num_optimizer_steps, has_old_logprobs=step.has_old_logprobs
        )
        scores = scored_modes(modes, step)
    finally:
        torch.set_num_threads(before)
    yours = tuple(choice.source for choice in own_choices(config))
    reproduction = _reproduction(scores[0], run_dir / METRICS_FILE, dump.description.step, yours=yours)
    return Replay(dump=dump, step=step, modes=modes, scores=scores, refused=refused, reproduction=reproduction)


def record(replay: Replay) -> dict[str, object]:
    """The whole replay as JSON values."""
    description = replay.dump.description
    return {
        "format": FORMAT,
        "step": description.step,
        "policy_version": description.policy_version,
        "correction": description.correction,
        "dump": str(replay.dump.path),
        "num_ranks": len(description.ranks),
        "optimizer_steps": replay.step.num_optimizer_steps,
        "num_responses": replay.step.samples.rewards.numel(),
        "num_response_tokens": int(replay.step.samples.num_tokens.sum()),
        "reproduction": asdict(replay.reproduction),
        **mode_record(replay.modes, replay.scores, replay.refused),
    }


def mode_record(
    modes: Sequence[Mode], scores: Sequence[ModeScore], refused: Sequence[RefusedMode]
) -> dict[str, object]:
    """The modes with their scores, and the refused ones, as JSON values."""
    return {
        "modes": [
            {
                "name": score.name,
                "objective": objective_of(mode.config),
                "metrics": {key: finite(value) for key, value in score.metrics.items()},
            }
            for mode, score in zip(modes, scores, strict=True)
        ],
        "refused": [{"name": mode.name, "reason": mode.refusal} for mode in refused],
    }


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


def finite(value: float | None) -> float | None:
    """The number as JSON has it: None for what is not finite."""
    return value if value is None or math.isfinite(value) else None


def _relative(logged: float | None, replayed: float | None) -> float:
    if logged is None or replayed is None:
        return math.inf
    return abs(replayed - logged) / max(abs(logged), abs(replayed))


def write_replay(replay: Replay, directory: Path) -> tuple[Path, Path]:
    """Write replay.json and replay.html, each atomically; returns their paths."""
    refused = [(mode.name, mode.refusal) for mode in replay.refused]
    page = render_tables(
        f"replay of step {replay.dump.description.step}",
        facts=replay.facts(),
        parts=[
            ("Modes", mode_table(replay.scores), 1, HOW_TO_READ),
            ("Refused", [("mode", "reason"), *refused], 2, ""),
            ("What each mode minimises", objective_table(replay.modes), 2, ""),
        ],
        numbers=f"{NAME}.json beside this page",
    )
    return write_results(directory, NAME, record(replay), page)


def mode_table(scores: Sequence[ModeScore], *, hidden: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The table of modes as text, titles first; the columns `hidden` have dashes."""
    rows: list[tuple[str, ...]] = [("mode", *COLUMNS)]
    for score in scores:
        cells = (None if title in hidden else score.metrics.get(key) for title, key in COLUMNS.items())
        rows.append((score.name, *map(shown, cells)))
    return rows


def objective_table(modes: Sequence[Mode]) -> list[tuple[str, ...]]:
    """Mode and objective as text, titles first."""
    return [("mode", "objective"), *((mode.name, objective_of(mode.config)) for mode in modes)]


def shown(value: float | None) -> str:
    """A number in at most eight characters; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"
