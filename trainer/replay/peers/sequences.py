"""Rows with lists over the whole sequence, prompt included: NeMo-RL and prime-rl write these, under different names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.replay.peers.jsonl import Row
from trainer.replay.peers.rows import Problems, Response, sampled_part


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The keys under which a trainer writes what every sequence needs."""

    mask: str
    rollout_logprobs: str
    old_logprobs: str

    def missing(self, row: Row, problems: Problems) -> bool:
        """True if `row` lacks a required key; notes each missing key in `problems`, with what it means."""
        wanted = {
            self.mask: "which tokens the model sampled is not known",
            self.rollout_logprobs: "there are no log-probs of the engine",
            self.old_logprobs: "there are no log-probs of the trainer",
        }
        return row.lack(wanted, problems)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeSequence:
    """The lists of one row. S: tokens of the sequence, with prompt and padding."""

    sampled: Tensor
    """[S] bool, by the trainer's mask."""
    rollout_logprobs: Tensor
    """[S] float32, of the token at the same place."""
    old_logprobs: Tensor
    """[S] float32."""
    advantages: Tensor | None
    """[S] float32."""
    token_ids: Tensor | None
    """[S] int32."""

    def response(self, counts: Tensor, *, reward: float | None = None) -> Response:
        """The response in it; `counts` [S] bool: a sampled token may still be one that does not count."""
        part = sampled_part(self.sampled)
        return Response(
            rollout_logprobs=self.rollout_logprobs[part],
            old_logprobs=self.old_logprobs[part],
            mask=(self.sampled & counts)[part],
            advantages=None if self.advantages is None else self.advantages[part],
            token_ids=None if self.token_ids is None else self.token_ids[part],
            reward=reward,
        )


def sequence_of(row: Row, names: Names, problems: Problems) -> WholeSequence | None:
    """The lists of `row`; None if one is missing, or no list of numbers, or not as long as the others. All is noted."""
    if names.missing(row, problems):
        return None
    mask = row.floats(names.mask, problems)
    rollout = row.floats(names.rollout_logprobs, problems)
    old = row.floats(names.old_logprobs, problems)
    advantages, token_ids = row.floats("advantages", problems), row.integers("token_ids", problems)
    if mask is None or rollout is None or old is None:
        return None
    found = {
        names.mask: mask,
        names.rollout_logprobs: rollout,
        names.old_logprobs: old,
        "advantages": advantages,
        "token_ids": token_ids,
    }
    lengths = {name: len(each) for name, each in found.items() if each is not None}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        problems.add(f"the lists are not of one length: {told}", place=row.place)
        return None
    return WholeSequence(
        sampled=mask != 0, rollout_logprobs=rollout, old_logprobs=old, advantages=advantages, token_ids=token_ids
    )
