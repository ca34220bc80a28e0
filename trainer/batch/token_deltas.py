"""Delta of every token of a few samples, for display: the worst samples by K3, and others for comparison.

Each rank chooses among its own samples and copies their tokens only, at the end of a rollout step; during training it
keeps references to tensors that it computed anyway. Delta is log pi_old - log mu, nats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from algorithms.tokens import Tokens
from trainer.batch.train_batch import MicroBatch

MAX_TOKENS: Final = 256
"""Maximum of tokens of one sample: the tokens around its largest |Delta|."""

SampleNumber = int
"""Position of a sample in its step. A prompt may come twice in a step, so that its samples have equal indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDeltas:
    """Consecutive tokens of one sample. M: at most MAX_TOKENS, from the response and the tokens between its turns."""

    first: int
    """Index of the first of these tokens in the sample, prompt included."""
    token_ids: list[int]
    """[M], token ids."""
    rollout_logprobs: list[float | None]
    """[M] log mu, nats; None where the model did not sample the token, or a log-prob is not valid."""
    deltas: list[float | None]
    """[M] log pi_old - log mu, nats; None as in `rollout_logprobs`."""


def worst_and_others(
    scored: Iterable[tuple[MicroBatch, Tokens]], sample_k3: Mapping[SampleNumber, float], *, count: int
) -> dict[SampleNumber, TokenDeltas]:
    """The tokens of at most `count` of the `scored` samples, picked by `choose`; reads the device.

    The trainer_logprobs of the Tokens are log pi_old.
    """
    wanted = set(choose(sample_k3, count=count))
    return {
        number: _tokens_of(micro, tokens, place)
        for micro, tokens in scored
        for place, number in enumerate(micro.numbers())
        if number in wanted
    }


def choose(sample_k3: Mapping[SampleNumber, float], *, count: int) -> list[SampleNumber]:
    """Keys of `count` samples: half, rounded up, by the largest K3, the rest by a hash, equal in every repetition."""
    ordered = sorted(sample_k3, key=lambda key: sample_k3[key] if math.isfinite(sample_k3[key]) else -1.0, reverse=True)
    num_worst = count - count // 2
    others = sorted(ordered[num_worst:], key=lambda key: zlib.crc32(repr((key, sample_k3[key])).encode()))
    return ordered[:num_worst] + others[: count // 2]


def merge_ranks(
    by_rank: Iterable[Mapping[SampleNumber, TokenDeltas]], sample_k3: Mapping[SampleNumber, float]
) -> dict[SampleNumber, TokenDeltas]:
    """As many samples as the largest rank has, chosen from the samples of all ranks; worst first."""
    ranks = list(by_rank)
    found = {key: tokens for rank in ranks for key, tokens in rank.items()}
    count = max((len(rank) for rank in ranks), default=0)
    return {key: found[key] for key in choose({key: sample_k3[key] for key in found}, count=count)}


def _tokens_of(micro: MicroBatch, tokens: Tokens, number: int) -> TokenDeltas:
    """The tokens of sequence `number` around its largest |Delta|."""
    start, end = micro.cu_seqlens[number : number + 2].tolist()
    part = slice(start, end)
    rollout, valid, deltas = (values[part].cpu() for values in (tokens.rollout, tokens.valid, tokens.delta))
    first = int(micro.response_mask[part].cpu().int().argmax())
    begin = int(deltas.abs().argmax()) - MAX_TOKENS // 2
    begin = max(first, min(begin, end - start - MAX_TOKENS))
    shown = slice(begin, begin + MAX_TOKENS)
    return TokenDeltas(
        first=begin,
        token_ids=micro.token_ids[part][shown].tolist(),
        rollout_logprobs=_where(valid[shown], rollout[shown].tolist()),
        deltas=_where(valid[shown], deltas[shown].tolist()),
    )


def _where(valid: Tensor, values: Sequence[float]) -> list[float | None]:
    return [value if on else None for value, on in zip(values, valid.tolist(), strict=True)]
