"""verl's part of `bundle_peers.py`: a step of its own trainer writes a bundle, with the lines of docs/bundle.md.

`PPOTrainer._compute_advantage` of verl 0.9.1 runs as it is, with these lines put in at the place that the page names:
rollout correction, metrics and GRPO advantages are verl's. Stand-ins: the transfer queue is a dictionary, and the
log-probs are random numbers, because there is neither an engine nor an actor.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from bundle_rows import Case, block, documented, step_metrics, tis_weights
from omegaconf import OmegaConf
from peer_batch import Batch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from torch import Tensor

from trainer.replay.bundle import read_bundle

ABSENT = ("transfer_queue", "torchdata", "torchdata.stateful_dataloader", "cachetools")
"""Modules that verl's trainer imports, and that nothing here calls."""
PLACE = "# 4. write nested advantages and returns back to TransferQueue"
METRICS = {
    "kl": "mismatch/k1",
    "k3_kl": "mismatch/k3",
    "chi2_token": "mismatch/chi2_token",
    "chi2_seq": "mismatch/chi2_seq",
    "training_ppl": "mismatch/ppl/train",
    "rollout_ppl": "mismatch/ppl/rollout",
    "ppl_ratio": "mismatch/ppl/ratio",
    "rollout_is_mean": "mismatch/is/applied_mean",
    "rollout_is_eff_sample_size": "mismatch/ess/applied_token",
}
"""Metric of verl's `rollout_corr/` -> metric of Parity."""


class _StandIn(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _verl_trainer() -> ModuleType:
    """The module of verl's trainers. The stand-ins are there while it is imported: others would take them for real."""
    absent = [name for name in ABSENT if name not in sys.modules]
    sys.modules.update({name: _StandIn(name) for name in absent})
    try:
        return importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    finally:
        for name in absent:
            del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """What the method reads of a batch in the transfer queue."""

    keys: list[str]
    partition_id: str = "train"

    def __len__(self) -> int:
        return len(self.keys)


def cases(place: Path, batch: Batch) -> list[Case]:
    """What verl logged of the step, and what Parity reads out of its bundle, written to `place`."""
    path = place / "verl.safetensors"
    logged, weights = _step(batch, path)
    found = step_metrics(path, "tis")
    rows = [
        Case(peer="verl 0.9.1", name=f"`rollout_corr/{name}`", metric=metric, theirs=theirs, ours=found[metric])
        for name, metric in METRICS.items()
        for theirs in [logged[f"rollout_corr/{name}"]]
    ]
    largest = (weights - tis_weights(read_bundle(path), cap=2.0)).abs().max().item()
    return [*rows, Case(peer="verl 0.9.1", name="`rollout_is_weights`, token by token", largest=largest)]


def _step(batch: Batch, path: Path) -> tuple[dict[str, float], Tensor]:
    """(what verl logs, its weights of the sampled tokens) of its `_compute_advantage` on `batch`."""
    trainer_base = _verl_trainer()
    responses = len(batch.mask)
    lengths = batch.inside.sum(1).tolist()

    def nested(padded: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    scores = torch.zeros_like(batch.rollout)
    scores[:, 0] = (torch.arange(responses) % 3 == 0).float()
    store = TensorDict(
        {
            "response_mask": nested(batch.mask.long()),
            "rm_scores": nested(scores),
            "rollout_log_probs": nested(batch.rollout),
            "old_log_probs": nested(batch.old),
        },
        batch_size=responses,
    )
    store["uid"] = NonTensorStack(*[f"prompt-{number // 8}" for number in range(responses)])
    written: dict[str, Tensor] = {}

    def put(*, fields: TensorDict, **_: Any) -> Any:
        written.update(fields.items())
        return meta

    meta = _Meta(keys=[f"{number // 8}_{number}_0" for number in range(responses)])
    namespace = dict(vars(trainer_base))
    namespace["tq"] = SimpleNamespace(kv_batch_get=lambda **_: store.copy(), kv_batch_put=put)
    namespace |= documented("def write_padded")
    source = textwrap.dedent(inspect.getsource(trainer_base.PPOTrainer._compute_advantage))
    lines = textwrap.indent(textwrap.dedent(_lines(path)), "    ")
    assert source.count(PLACE) == 1, "the place that docs/bundle.md names is not there"
    exec(source.replace(f"    {PLACE}", f"{lines}\n    {PLACE}"), namespace)  # noqa: S102 - verl's own code
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "bypass_mode": False}
    algorithm = {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0}
    config = {
        "algorithm": algorithm | {"rollout_correction": correction},
        "actor_rollout_ref": {"rollout": {"n": 8}},
    }
    trainer = SimpleNamespace(config=OmegaConf.create(config), global_steps=12)
    logged: dict[str, float] = {}
    namespace["_compute_advantage"](trainer, meta, logged)
    return logged, written["rollout_is_weights"].values()[batch.packed(batch.mask)]


def _lines(path: Path) -> str:
    """The lines of the page, which write to `path`."""
    found = block('if "rollout_log_probs" in data.batch')
    return found.replace('f"bundles/step_{self.global_steps}.safetensors"', repr(str(path)))
