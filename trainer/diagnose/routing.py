"""The part of K3 that is there because engine and trainer choose other experts for a token of a mixture.

The same tokens are scored with the experts that the engine chose and with those that the trainer chooses itself, both
in the definition. The change of each log-prob is put to the trainer's own, or taken from it: so K3 with the other
choice is known, whichever the run used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.diagnose.evidence import k3_between
from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.diagnose.scoring import Scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingPart:
    """K3 of the same tokens with either choice of experts."""

    is_replayed: bool
    """True if the trainer used the engine's experts: then the part is not in K3."""
    is_recorded: bool
    """False if nobody wrote the engine's choice down: it is then that of a replay of what the engine is said to do."""
    k3_live: float
    """With the trainer's own experts, nats per token."""
    k3_replayed: float
    """With the engine's."""
    tokens_rerouted: float
    """Share of the response tokens for which the two choose other experts in some layer."""

    @property
    def k3(self) -> float:
        """What the choice makes of K3, nats per token; negative if it hides a part of another cause."""
        return self.k3_live - self.k3_replayed

    @property
    def share(self) -> float:
        """Of `k3_live`."""
        return self.k3 / self.k3_live if self.k3_live else 0.0


def routing_change(scorer: LogprobScorer, base: Scoring) -> Tensor:
    """[R] float64, nats: what the engine's experts change of the log-probs under `base`."""
    own, given = scorer.score([base.with_body(replays=False), base.with_body(replays=True)])
    return given - own


def routing_part(scorer: LogprobScorer, base: Scoring, *, is_replayed: bool, is_recorded: bool) -> RoutingPart:
    """Score the tokens with either choice. `base` is the definition."""
    evidence, change = scorer.evidence, routing_change(scorer, base)
    other = evidence.trainer + (-change if is_replayed else change)
    live, replayed = (other, evidence.trainer) if is_replayed else (evidence.trainer, other)
    changed = []
    assert evidence.routes is not None
    for own, routes, prompt, length in zip(
        scorer.chosen(base.body), evidence.routes, evidence.prompts, evidence.lengths, strict=True
    ):
        # The token before it decides a token's log-prob.
        read = slice(len(prompt) - 1, min(len(prompt) - 1 + length, len(routes)))
        if len(routes):
            given = torch.from_numpy(routes.whole().astype("int64")).sort(dim=-1).values
            changed.append((given[read] != own[read]).flatten(1).any(dim=1))
    return RoutingPart(
        is_replayed=is_replayed,
        is_recorded=is_recorded,
        k3_live=k3_between(evidence.engine, live, evidence.mask),
        k3_replayed=k3_between(evidence.engine, replayed, evidence.mask),
        tokens_rerouted=float(torch.cat(changed).double().mean()) if changed else 0.0,
    )
