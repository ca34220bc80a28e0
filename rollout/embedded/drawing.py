"""What is drawn from logits, for the engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms.truncation import CUT_LOGIT, kept_tokens
from rollout.embedded.batch import Response
from rollout.seeded_draw import draw
from rollout.types import SamplingParams


class Truncation(NamedTuple):
    """What of the distribution of each row is drawn from, as `algorithms.truncation.kept_tokens` takes it; each [B]."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Drawn(NamedTuple):
    """The tokens of one draw. B: rows, V: vocabulary."""

    tokens: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] float32, nats, of the distribution that was drawn from; of the whole one for greedy rows."""
    kept: Tensor | None
    """[B, V] bool, the support of each token; None without truncation."""

    def rows(self, chosen: Tensor) -> Drawn:
        """Those of some rows, [C] int64."""
        return Drawn(self.tokens[chosen], self.logprobs[chosen], None if self.kept is None else self.kept[chosen])


def float32_log_softmax(logits: Tensor) -> Tensor:
    """[B, V] float32 -> [B, V]."""
    return torch.log_softmax(logits, dim=-1)


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    truncation: Truncation | None = None,
    log_softmax: Callable[[Tensor], Tensor] = float32_log_softmax,
) -> Drawn:
    """Draw one token per row, of what truncation keeps.

    logits [B, V]; temperature [B] float32, 0 for greedy; seeds and positions [B] int64, as `draw` takes them. The
    log-probs are log_softmax(logits / temperature) over the kept tokens, for greedy rows of the untempered
    distribution. A row with a NaN logit yields a NaN log-prob.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = log_softmax(scaled)
    kept = None
    if truncation is not None:
        kept = kept_tokens(logprobs.exp(), **truncation._asdict()) | greedy[:, None]
        # The trainer's head cuts in the same way, so that both have the same bits in exact arithmetic.
        logprobs = log_softmax(scaled.masked_fill(~kept, CUT_LOGIT))
    tokens = torch.where(greedy, scaled.argmax(dim=-1), draw(logprobs.exp(), seeds=seeds, positions=positions))
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), kept)


def truncation_of(params: Sequence[SamplingParams], logits: Tensor) -> Truncation | None:
    """What is drawn from for every row of `logits` [B, V]; None if that is the whole vocabulary for all of them."""
    if not any(each.is_truncated for each in params):
        return None
    # Greedy rows take the most probable token anyway: few tokens have to be put in order for them.
    vocab, device = logits.shape[-1], logits.device
    limits = [1 if each.temperature == 0 else vocab if each.top_k == -1 else each.top_k for each in params]
    return Truncation(
        top_k=torch.tensor(limits, device=device),
        top_p=torch.tensor([each.top_p for each in params], device=device),
        min_p=torch.tensor([each.min_p for each in params], device=device),
    )


def add_drawn(drawn: Drawn, responses: Sequence[Response], *, policy_version: int) -> None:
    """Append the token of each row, its log-prob, its version and its support to the response of the row."""
    for response, token, logprob in zip(responses, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
        response.tokens.append(token)
        response.logprobs.append(logprob)
        response.versions.append(policy_version)
    asking = [number for number, each in enumerate(responses) if each.request.sampling.with_supports]
    if drawn.kept is None or not asking:
        return
    rows = drawn.kept[asking]
    token_ids = rows.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    for number, support in zip(asking, np.split(token_ids, rows.sum(-1).cumsum(0)[:-1].cpu().numpy()), strict=True):
        responses[number].supports.append(support)
