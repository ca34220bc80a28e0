"""Plan of forwards in which sequences share the computation of their prompt. Does not import torch.

Sequences with the same prompt cost least in one micro-batch, where the decoder computes the prompt once. A group that
does not fit into a micro-batch is cut into parts, each with the prompt. With several ranks whole groups may be too few
or too uneven to occupy all of them: then groups are cut in finer parts, as long as this makes the slowest ranks faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.batch.planner import SequenceCost, plan

GAIN = 0.99
"""Finer parts must lower the pace to this share of it: every part computes its prompt again, in memory too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGroup:
    """Sequences with the same prompt, which share a micro-batch. All lengths are in tokens."""

    prompt: int
    """Tokens of the prompt."""
    samples: tuple[int, ...]
    """Numbers of the sequences in their mini-batch."""
    rests: tuple[int, ...]
    """Tokens of each sequence after the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the decoder computes."""
        return self.prompt + sum(self.rests)

    def cost(self, cost: SequenceCost) -> float:
        """Estimated cost of the forward of these sequences."""
        return cost.of(self.prompt) + sum(cost.of(rest, prefix=self.prompt) for rest in self.rests)

    def parts(self, count: int, *, cap: int) -> list[PromptGroup]:
        """At least `count` groups of these sequences, as few as have at most `cap` tokens each.

        The sequences are dealt in order of their length, so that the parts cost alike. A sequence that is longer than
        `cap` stays a group of its own; the planner refuses it.
        """
        for number in range(min(count, len(self.samples)), len(self.samples) + 1):
            dealt = sorted(range(len(self.samples)), key=lambda i: (-self.rests[i], i))
            parts = [self._only(sorted(dealt[part::number])) for part in range(number)]
            if all(part.num_tokens <= cap for part in parts):
                break
        return parts

    def _only(self, members: Sequence[int]) -> PromptGroup:
        return PromptGroup(
            prompt=self.prompt,
            samples=tuple(self.samples[i] for i in members),
            rests=tuple(self.rests[i] for i in members),
        )


def plan_groups(
    groups: Sequence[PromptGroup], *, cap: int, num_ranks: int, cost: SequenceCost
) -> list[list[list[PromptGroup]]]:
    """[num_ranks][micro-batches] groups, or parts of groups: every sequence once, equally many micro-batches per rank.

    Args:
        groups: sequences by prompt.
        cap: maximum of tokens that the decoder computes in a micro-batch.
        num_ranks: data-parallel ranks.
        cost: estimate that is evened out over the ranks.

    Raises:
        ValueError: one sequence alone exceeds the cap; names its length.
    """
    chosen: list[list[list[PromptGroup]]] = [[] for _ in range(num_ranks)]
    least = float("inf")
    for count in _counts(groups, num_ranks):
        parts = [part for group in groups for part in group.parts(count, cap=cap)]
        costs = [part.cost(cost) for part in parts]
        ranks = plan([part.num_tokens for part in parts], costs, cap=cap, num_ranks=num_ranks)
        rounds = zip(*([sum(costs[i] for i in indices) for indices in bins] for bins in ranks), strict=True)
        pace = sum(max(round_costs) for round_costs in rounds)
        if pace < GAIN * least:
            # Parts of one group that meet again in a micro-batch stand side by side and share the prompt again.
            chosen, least = [[[parts[i] for i in sorted(indices)] for indices in bins] for bins in ranks], pace
    return chosen


def _counts(groups: Sequence[PromptGroup], num_ranks: int) -> Iterator[int]:
    """Numbers of parts to try: 1, and with several ranks 2, 4, ... up to single sequences."""
    count, most = 1, max((len(group.samples) for group in groups), default=1)
    yield count
    while num_ranks > 1 and count < most:
        count = min(2 * count, most)
        yield count
