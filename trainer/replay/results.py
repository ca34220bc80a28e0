"""`parity replay`: a dump scored under every requested mode, and its output.

`replay_step` scores, `record` gives JSON values. No Ray and no engine is started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from algorithms.objective import objective, reference_term
from trainer.config.train import TrainConfig
from trainer.replay.modes import RUN, Mode, chosen_modes
from trainer.replay.recorded import RecordedStep, read_step
from trainer.replay.score import MAX_WEIGHT, ModeScore, scored_modes
from trainer.rundir.dump import Dump
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import write_whole
from trainer.rundir.text import counted

RESULT_FILE = "replay.json"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """Comparison of the run's own correction with the logged metrics."""

    against: str
    """Source of the logged values."""
    compared: int
    """Number of metrics in both rows."""
    different: dict[str, tuple[float | None, float | None]]
    """Metric -> (logged, replayed), for metrics that are not equal to the last bit."""

    def line(self) -> str:
        """The comparison as a sentence for people."""
        if not self.compared:
            return f"nothing to compare with: {self.against} has no row of this step"
        if not self.different:
            return f"reproduces {self.compared} of {self.compared} logged metrics to the last bit ({self.against})"
        worst = max(self.different, key=lambda key: _relative(*self.different[key]))
        return (
            f"{len(self.different)} of {self.compared} logged metrics differ ({self.against}), {worst} most, by "
            f"{_relative(*self.different[worst]):.1e} of itself: another device, or more than two ranks, add in "
            "another order"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """A step under every mode."""

    dump: Dump
    config: TrainConfig
    step: RecordedStep
    modes: list[Mode]
    scores: list[ModeScore]
    """Scores of the modes that are not refused, the run's own first."""
    reproduction: Reproduction

    @property
    def refused(self) -> list[Mode]:
        return [mode for mode in self.modes if mode.config is None]

    @property
    def scored(self) -> list[Mode]:
        """The modes of `scores`."""
        return [mode for mode in self.modes if mode.config is not None]

    def facts(self) -> list[str]:
        """Facts about the replayed step, one per line."""
        step, samples = self.dump.description, self.step.samples
        responses, groups = samples.rewards.numel(), samples.group_ids.unique().numel()
        return [
            f"step {step.step}, correction={step.correction}, weights of version {step.policy_version}: "
            f"{responses:,} responses in {groups:,} groups, {int(samples.num_tokens.sum()):,} response tokens, "
            f"{counted(self.step.num_optimizer_steps, 'optimizer step')}, {counted(len(step.ranks), 'rank')}",
            self.reproduction.line(),
        ]


def replay_step(dump: Dump, config: TrainConfig, names: Sequence[str], *, run_dir: Path) -> Replay:
    """Score `dump` under the modes `names` and the run's own, with as many threads as the ranks had."""
    before = torch.get_num_threads()
    torch.set_num_threads(dump.description.ranks[0].num_threads)
    try:
        step = read_step(dump)
        modes = chosen_modes(
            config, names, optimizer_steps=step.num_optimizer_steps, has_old_logprobs=step.has_old_logprobs
        )
        scores = scored_modes(modes, step)
    finally:
        torch.set_num_threads(before)
    return Replay(
        dump=dump,
        config=config,
        step=step,
        modes=modes,
        scores=scores,
        reproduction=_reproduction(scores[0], run_dir, dump.description.step),
    )


def record(replay: Replay) -> dict[str, object]:
    """The whole replay as JSON values."""
    description = replay.dump.description
    configs = {mode.name: mode.config for mode in replay.scored if mode.config is not None}
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
        "modes": [
            {
                "name": score.name,
                "objective": objective_of(configs[score.name]),
                "metrics": {key: _finite(value) for key, value in score.metrics.items()},
            }
            for score in replay.scores
        ],
        "refused": [{"name": mode.name, "reason": mode.refusal} for mode in replay.refused],
    }


def write_record(found: Mapping[str, object], directory: Path) -> Path:
    """Write replay.json atomically; returns its path."""
    path = directory / RESULT_FILE
    write_whole(path, json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def objective_of(config: TrainConfig) -> str:
    """The minimised objective in one line."""
    return objective(config.correction, config.loss) + reference_term(config.reference)


def _reproduction(own: ModeScore, run_dir: Path, step: int) -> Reproduction:
    path = run_dir / "metrics.jsonl"
    logged = _logged_row(path, step)
    mine = {key: _finite(value) for key, value in own.metrics.items() if key in logged}
    different = {key: (logged[key], value) for key, value in mine.items() if logged[key] != value}
    assert own.name == RUN
    return Reproduction(against=path.name, compared=len(mine), different=different)


def _logged_row(path: Path, step: int) -> dict[str, float | None]:
    """The logged row of a step; empty if there is none."""
    if not path.is_file():
        return {}
    of_step = [row for row in read_rows(path) if row.get("step") == step]
    return of_step[-1] if of_step else {}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _relative(logged: float | None, replayed: float | None) -> float:
    if logged is None or replayed is None:
        return math.inf
    return abs(replayed - logged) / max(abs(logged), abs(replayed))
