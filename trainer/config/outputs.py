"""Configuration of evaluation, checkpoints, dumps and tracking.

`trainer.config.train` composes these configs with `trainer.config.training`. Imports no torch, no Ray and no SGLang.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from algorithms.config import Checked, Custom, CustomMetric, Problem
from algorithms.config.home import PathText
from algorithms.config.rules import above, at_least, one_of, ruled
from rollout.config import MIN_P, TOP_K, TOP_P

CHECKPOINTS = "checkpoints"
"""Directory in run.dir that `trainer/rundir/checkpoint.py` writes."""
DUMPS = "dumps"
"""Directory in run.dir that `trainer/rundir/dump.py` writes."""
DUMP_BYTES_PER_TOKEN = 41
"""Largest number of bytes per response token: with pi_old, a reference, a critic and weights of several versions."""
SCORE_BYTES_PER_TOKEN = 8
"""Number of those bytes that a later pass over the rollout adds: log-prob and entropy."""

HELDOUT = "heldout"
"""Name of the evaluation set from data.eval_path; the sets of eval.sets have other names."""
_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(kw_only=True, slots=True)
class EvalConfig(Checked):
    """Evaluation, greedy and sampled, in training and in `parity eval`. A run evaluates before its first step and after
    its last."""

    every: int = ruled(0, at_least(0))
    """Number of steps between further evaluations; 0 evaluates before the first step and after the last one only."""
    max_prompts: int | None = ruled(200, at_least(1))
    """Largest number of prompts used from every set, counted from the beginning of the set; null means all."""
    samples: int = ruled(1, at_least(1))
    """Number of sampled responses per prompt, the k of avg@k, pass@k and maj@k; one greedy response is added. Vetted:
    32 for AIME."""
    temperature: float | None = ruled(None, above(0), remedy="One greedy response per prompt is always there.")
    """Temperature of the sampled responses, divisor of the logits; null means sampling.temperature."""
    max_new_tokens: int | None = ruled(None, at_least(1))
    """Upper bound on the tokens of a response; null means sampling.max_new_tokens."""
    top_p: float | None = ruled(None, TOP_P)
    """Tokens are drawn from the most probable ones, up to this mass; null means sampling.top_p. DAPO: 0.7."""
    top_k: int | None = ruled(None, TOP_K)
    """Tokens are drawn from so many of the most probable ones, -1 for all; null means sampling.top_k."""
    min_p: float | None = ruled(None, MIN_P)
    """Smallest probability of a token that is drawn, as a share of the largest one; null means sampling.min_p."""
    sets: dict[str, PathText] = field(default_factory=dict)
    """Further evaluation sets besides the held-out set: name -> file or repo[:config]@split, read as data.eval_path
    is."""

    def conflicts(self) -> Iterator[Problem]:
        for name in self.sets:
            if name == HELDOUT or not _SET_NAME.fullmatch(name):
                rule = f"must be named by letters, digits, _ and -, and not {HELDOUT}, the set of data.eval_path"
                yield Problem(key=f"sets.{name}", rule=rule, value=name)


BEST_METRICS = ("eval/accuracy", "eval/accuracy_sampled")
"""Metrics that are measured on exactly the weights of a checkpoint; larger is better."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Checked):
    """Checkpoints of weights, optimizer and position in the data, in run.dir/checkpoints."""

    every: int = ruled(0, at_least(0), remedy="0 never saves.")
    """Number of rollout steps between checkpoints; the last step is saved too; 0 never saves."""
    keep: int = ruled(2, at_least(1), remedy="Vetted: 2.")
    """Number of newest checkpoints kept on disk; an older checkpoint replaces a damaged newest checkpoint."""
    best_metric: str | None = ruled(
        None,
        one_of(BEST_METRICS, what="a metric of the saved weights:"),
        remedy="All others describe the weights before the step.",
    )
    """Metric whose best checkpoint is kept too, eval/accuracy or eval/accuracy_sampled; null keeps the newest
    checkpoints only."""
    asynchronous: bool = False
    """Write checkpoints in the background: the step waits only for the copy to host memory. With false the step waits
    for the disk."""

    def conflicts(self) -> Iterator[Problem]:
        if self.best_metric is not None and self.every == 0:
            rule = "has no effect: nothing is saved"
            yield self.broken("best_metric", rule, "Set checkpoint.every.")


@dataclass(kw_only=True, slots=True)
class DumpConfig(Checked):
    """Dumps of whole batches with log-probs of engine and trainer, in run.dir/dumps, for `parity replay`."""

    every: int = ruled(0, at_least(0), remedy="0 never writes one.")
    """Number of rollout steps between dumps of a batch; 0 writes no dump."""
    keep: int = ruled(4, at_least(1), remedy="dump.every=0 writes none.")
    """Number of newest dumps kept on disk; a dump takes 21 to 41 bytes per response token, 5 bytes per prompt token
    and, with truncated sampling, 4 bytes more per response token and per kept token. A mixture that replays routes adds
    1 byte per layer and expert of each token, 3 with policy.routing=weights."""

    def is_due(self, step: int) -> bool:
        """True if the batch of rollout step `step` (1-based) is dumped."""
        return self.every > 0 and step % self.every == 0


WANDB_RUN_ID, WANDB_NAME, WANDB_RUN_GROUP = "WANDB_RUN_ID", "WANDB_NAME", "WANDB_RUN_GROUP"
"""Variables of W&B: id of a run that has none yet, its name, its group."""


class WandbMode(Enum):
    """Mode of Weights & Biases (W&B); metrics.jsonl is written in every mode."""

    auto = "auto"
    """Online if a key and the network are available, offline otherwise."""
    online = "online"
    """Online; a failure causes a warning and a fall-back to offline, and does not stop the run."""
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class CustomSink(Custom):
    """A tracker of a user. Its methods run in a thread of their own, one after the other; a failure is a warning."""

    def start(self, run_dir: Path, config: Mapping[str, object], *, last_step: int | None) -> None:
        """Begin, in the run directory, with the config as sections of plain values without secrets.

        A run that goes on after `last_step` writes the later steps again.
        """

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row of metrics: each finite number, by its name; step 0 is the evaluation before training."""
        raise NotImplementedError

    def log_event(self, step: int, kind: str, text: str) -> None:
        """What happened beside the numbers, for example a warning of the guard."""

    def close(self, status: str) -> None:
        """The end of the run: completed, interrupted, stopped or failed."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig(Checked):
    """Recording in W&B and TensorBoard, and the number of samples in samples.jsonl."""

    wandb: WandbMode = WandbMode.auto
    """Mode of W&B: auto, online, offline or disabled."""
    project: str | None = None
    """Name of the W&B project; null means $WANDB_PROJECT, or parity."""
    entity: str | None = None
    """W&B user or team; null means $WANDB_ENTITY, or the default of the W&B account."""
    name: str | None = None
    """Name of the run in W&B; null means $WANDB_NAME, or recipe and directory, in a sweep recipe, number and the
    overrides that differ. TensorBoard names a run after its directory."""
    group: str | None = None
    """W&B group of the run; null means $WANDB_RUN_GROUP; without it the runs of a sweep or a study share a group."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in W&B, 1 to 64 characters each; an empty list means $WANDB_TAGS."""
    notes: str | None = None
    """Free text about the run in W&B; null means $WANDB_NOTES."""
    samples_per_step: int = ruled(8, at_least(0))
    """Number of samples written to samples.jsonl per step."""
    wandb_samples: bool = True
    """Also write the samples of samples.jsonl to W&B, as a growing table."""
    tensorboard: bool = False
    """Also write the metrics to run.dir/tensorboard; needs the extra parity-rl[tensorboard]."""
    sinks: list[CustomSink] = field(default_factory=list)
    """Trackers of your own, each path/to/file.py:Name, or {use: path/to/file.py:Name, key: value}."""
    metrics: list[CustomMetric] = field(default_factory=list)
    """Metrics of your own over the tokens of a step, each path/to/file.py:Name, or {use: ..., key: value}."""

    def conflicts(self) -> Iterator[Problem]:
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            yield Problem(key="metrics", rule="must have metrics of different names", value=names)
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                yield Problem(key="tags", rule="must be texts of 1 to 64 characters, which W&B takes", value=tag)
