"""Truncated sampling: the tokens that top-k, top-p and min-p keep, and log-probs among them.

A truncated sampler draws from mu(y) = p(y) / sum_{j in S} p(j) on S, the tokens that it keeps: the *support* of the
token that is drawn. Its log-probs are those of a softmax over the logits in S. A policy that is scored on the same S
for the same token is the policy that sampled, so truncated sampling is on-policy; S is a constant of the gradient,
because it changes at single points of the weights only. A policy that is scored on the whole vocabulary is another
one: its log-probs lack -log sum_{j in S} p(j), and its gradient is biased.

Sources: the support in training ("Keep Sampling Mask"), DeepSeek-V3.2, arXiv:2512.02556, section 3.1; top-k, Fan et
al., arXiv:1805.04833, section 5.2; top-p, Holtzman et al., arXiv:1904.09751, section 3.1; min-p, Nguyen et al.,
arXiv:2407.01082, section 3. B: rows, V: vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

CUT_LOGIT: Final = -3e4
"""Logit of a token outside the support. exp(CUT_LOGIT - m) is 0, also in float16, and 0 * CUT_LOGIT is no NaN."""
_FIRST_DEPTH: Final = 256
"""Number of tokens among which the kept ones are looked for first: sorting a whole vocabulary takes far longer."""
_GROWTH: Final = 8


def kept_tokens(probs: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B, V] bool: the support of each row. A row depends on its own numbers alone.

    A token is kept if fewer than top_k tokens are more probable, if these have at most the mass top_p, and if its
    probability is at least min_p times the largest one. Of equal probabilities the lower token id comes first. The
    most probable token is always kept; of a row with a NaN every token is kept.

    Args:
        probs: [B, V] probabilities, float.
        top_k: [B] integers >= 1; V or more keeps all, 1 is greedy.
        top_p: [B] in (0, 1]; 1 keeps all.
        min_p: [B] in [0, 1]; 0 keeps all.
    """
    top_p = torch.where(top_p < 1, top_p, torch.inf)  # the sum of all probabilities may be rounded to more than 1
    ordered = _most_probable(probs, top_k=top_k, top_p=top_p, min_p=min_p)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(ordered.shape[-1], device=probs.device)
    # Each rule keeps a first part of the ordered tokens, so the last kept one says which others are kept.
    kept = (rank < top_k[:, None]) & (before <= top_p[:, None]) & (ordered >= ordered[:, :1] * min_p[:, None])
    count = kept.sum(-1, keepdim=True).clamp_min(1)
    least = ordered.gather(-1, count - 1)
    found = (probs > least) | least.isnan()
    room = count[:, 0] - (ordered > least).sum(-1)
    row, token = (probs == least).nonzero().unbind(-1)  # few, and the lower ids of a row come first
    place = torch.arange(len(row), device=probs.device) - torch.searchsorted(row, row)
    fits = place < room[row]
    found[row[fits], token[fits]] = True
    return found


def _most_probable(probs: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B, D] falling: so many of the largest probabilities that no row keeps a token beyond. Reads the device."""
    longest = min(int(top_k.max()), probs.shape[-1])
    depth = min(_FIRST_DEPTH, longest)
    while True:
        ordered = probs.topk(depth).values
        keeps_more = (top_k > depth) & (ordered.cumsum(-1)[:, -1] <= top_p)
        keeps_more &= ordered[:, -1] >= ordered[:, 0] * min_p
        if depth == longest or not bool(keeps_more.any()):
            return ordered
        depth = min(_GROWTH * depth, longest)
