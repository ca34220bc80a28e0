"""Configuration of what a run measures, saves and records: evaluation, checkpoints, dumps, tracking.

`trainer.config.train` puts it together with `trainer.config.components`. Imports no torch, no Ray and no SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from algorithms.config import Checked, Problem
from algorithms.config.rules import above, at_least, one_of, ruled
from rollout.task_config import is_source

CHECKPOINTS = "checkpoints"
"""Directory in run.dir that `trainer/rundir/checkpoint.py` writes."""
DUMPS = "dumps"
"""Directory in run.dir that `trainer/rundir/dump.py` writes."""
DUMP_BYTES_PER_TOKEN = 41
"""At most: of a response token with pi_old, a reference, a critic and weights of several versions."""

HELDOUT = "heldout"
"""Name of the task's own evaluation set, beside those of eval.sets."""
_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(kw_only=True, slots=True)
class EvalConfig(Checked):
    """Evaluation, greedy and sampled, in training and by `parity eval`. A run evaluates at its first and last step."""

    every: int = ruled(0, at_least(0))
    """Also evaluate after every this many rollout steps; 0 for the first and last only."""
    max_prompts: int = ruled(200, at_least(1))
    """Prompts used of every set, from its beginning."""
    samples: int = ruled(1, at_least(1))
    """Sampled responses per prompt, beside the greedy one: k of avg@k, pass@k and maj@k. Vetted: 32 for AIME."""
    temperature: float | None = ruled(None, above(0), remedy="One greedy response per prompt is always there.")
    """Of the sampled responses; null for sampling.temperature."""
    max_new_tokens: int | None = ruled(None, at_least(1))
    """Upper bound on response tokens; null for sampling.max_new_tokens."""
    sets: dict[str, str] = field(default_factory=dict)
    """More sets beside the held-out one: name -> file or repo[:config]@split, read like data.eval_path."""

    def conflicts(self) -> Iterator[Problem]:
        for name, path in self.sets.items():
            if name == HELDOUT or not _SET_NAME.fullmatch(name):
                rule = f"must be named by letters, digits, _ and -, and not {HELDOUT}, the set of data.eval_path"
                yield Problem(key=f"sets.{name}", rule=rule, value=name)
            if not is_source(path):
                yield Problem(key=f"sets.{name}", rule="must be an existing file, or repo[:config]@split", value=path)


BEST_METRICS = ("eval/accuracy", "eval/accuracy_sampled")
"""Metrics that are measured on the very weights that a checkpoint holds; more is better."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Checked):
    """Checkpoints of weights, optimizer and place in the data, in run.dir/checkpoints."""

    every: int = ruled(0, at_least(0), remedy="0 never saves.")
    """Save after every this many rollout steps, and after the last; 0 never saves."""
    keep: int = ruled(2, at_least(1), remedy="Vetted: 2.")
    """Newest checkpoints that stay on the disk; the one before helps if the last is damaged."""
    best_metric: str | None = ruled(
        None,
        one_of(BEST_METRICS, what="a metric of the saved weights:"),
        remedy="All others describe the weights before the step.",
    )
    """Also keep the checkpoint with the highest eval/accuracy or eval/accuracy_sampled; null keeps the newest only."""
    asynchronous: bool = False
    """Copy to host memory while the step waits and write in the background; otherwise the step waits for the disk."""

    def conflicts(self) -> Iterator[Problem]:
        if self.best_metric is not None and self.every == 0:
            rule = "has no effect: nothing is saved"
            yield Problem(key="best_metric", rule=rule, value=self.best_metric, remedy="Set checkpoint.every.")


@dataclass(kw_only=True, slots=True)
class DumpConfig(Checked):
    """Whole batches with what both engines said about them, in run.dir/dumps: what `parity replay` reads."""

    every: int = ruled(0, at_least(0), remedy="0 never writes one.")
    """Write down the batch of every this many rollout steps; 0 never does."""
    keep: int = ruled(4, at_least(1), remedy="dump.every=0 writes none.")
    """Newest dumps that stay on the disk; 21 to 41 bytes per response token each, 5 per prompt token."""

    def is_due(self, step: int) -> bool:
        """Whether rollout step `step` (1-based) is written down."""
        return self.every > 0 and step % self.every == 0


class WandbMode(Enum):
    """Where W&B rows go; metrics.jsonl is always written."""

    auto = "auto"
    """Online when a key and the network are there, offline otherwise."""
    online = "online"
    """Online; falls back to offline, with a warning, rather than stop a run."""
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class TrackingConfig(Checked):
    """What is recorded besides metrics.jsonl, samples.jsonl and histograms.jsonl."""

    wandb: WandbMode = WandbMode.auto
    """Where W&B rows go."""
    project: str = "parity"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null for the default."""
    wandb_timeout_s: float = ruled(20.0, above(0, "seconds"))
    """Deadline in seconds for reaching W&B before the run goes on offline."""
    samples_per_step: int = ruled(8, at_least(0))
    """Samples written to samples.jsonl per step."""
    token_samples_per_step: int = ruled(4, at_least(0))
    """Of them, samples with the Delta of each token: half the worst by K3. At most 8 KB each, the 256 tokens around the
    worst one."""
    wandb_samples: bool = True
    """Whether these samples also go to W&B, as a table that grows."""
    tensorboard: bool = False
    """Also write the numbers to run.dir/tensorboard; needs the extra parity-rl[tensorboard]."""
