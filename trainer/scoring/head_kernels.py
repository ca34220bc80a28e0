"""The softmax of the log-prob head on GPUs: one read of the logits for the scores, one read and write for the gradient.

`trainer/scoring/logprob_head.py` says what is computed and has the same in plain torch, which is the reference and runs
everywhere else. A chunk of logits [C, V] is read 4 times and written 3 times there; here once, and once more with its
gradient. The sums are taken block by block with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). For a larger maximum m' and d = m - m', with S and A the sums over j of exp(z_j - m)
and of exp(z_j - m) (z_j - m):

    S' = exp(d) S,    A' = exp(d) (A + d S),    H = log S - A / S

Imported only where Triton is installed. Run by Triton's interpreter on a CPU (tests); not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor as Block

SCORE_BLOCK = tl.constexpr(4096)
"""Logits of a row that one program reads at a time."""
GRADIENT_BLOCK = tl.constexpr(2048)
"""Logits of a row that one program replaces."""
NUM_WARPS = 8


@triton.jit
def _score_kernel(
    logits: Block,
    targets: Block,
    logprobs: Block,
    statistics: Block,
    plane: int,
    vocab: int,
    temperature: float,
) -> None:
    """One row of logits; m, S and H of a row lie `plane` numbers apart in `statistics`."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    a = tl.zeros((), tl.float32)
    for start in range(0, vocab, SCORE_BLOCK):
        columns = start + tl.arange(0, SCORE_BLOCK)
        z = tl.load(base + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32) / temperature
        larger = tl.maximum(m, tl.max(z, 0))
        # The first block has nothing before it, and 0 * inf would be NaN; so would be the columns behind the last.
        down = tl.where(s > 0, m - larger, 0.0)
        z = z - larger
        exps = tl.exp(z)
        a = tl.exp(down) * (a + down * s) + tl.sum(tl.where(exps > 0, exps * z, 0.0), 0)
        s = tl.exp(down) * s + tl.sum(exps, 0)
        m = larger
    log_total = tl.log(s)
    own = tl.load(base + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(statistics + row, m)
    tl.store(statistics + plane + row, s)
    tl.store(statistics + 2 * plane + row, log_total - a / s)
    tl.store(logprobs + row, own - m - log_total)


@triton.jit
def _gradient_kernel(
    logits: Block, targets: Block, upstream: Block, statistics: Block, plane: int, vocab: int, temperature: float,
    HAS_ENTROPY: tl.constexpr,
) -> None:  # fmt: skip
    """A block of a row of logits; `upstream` holds the gradients by the log-probs, then those by the entropies."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * GRADIENT_BLOCK + tl.arange(0, GRADIENT_BLOCK)
    places = logits + row * vocab + columns
    m, s = tl.load(statistics + row), tl.load(statistics + plane + row)
    z = tl.load(places, mask=columns < vocab, other=float("-inf")).to(tl.float32) / temperature - m
    p = tl.exp(z) / s
    is_target = columns == tl.load(targets + row)
    gradient = tl.load(upstream + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if HAS_ENTROPY:
        slope = z - tl.log(s) + tl.load(statistics + 2 * plane + row)
        gradient -= tl.load(upstream + tl.num_programs(0) + row) * tl.where(p > 0, p * slope, 0.0)
    tl.store(places, (gradient / temperature).to(logits.dtype.element_ty), mask=columns < vocab)


def score_rows(logits: Tensor, targets: Tensor, statistics: Tensor, *, temperature: float) -> Tensor:
    """Fill the `statistics` [3, C, 1] (m, S, H; float32) of logits [C, V]; return the log-probs [C, 1], float32.

    Args:
        logits: contiguous, float32 or 16 bits.
        targets: [C, 1] int64, contiguous.
        statistics: a slice of a contiguous [3, N, 1].
        temperature: divides the logits.
    """
    num_rows, vocab = logits.shape
    logprobs = torch.empty_like(statistics[0])
    plane = statistics.stride(0)
    _score_kernel[(num_rows,)](logits, targets, logprobs, statistics, plane, vocab, temperature, num_warps=NUM_WARPS)
    return logprobs


def differentiate_rows(
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    *,
    temperature: float,
) -> None:
    """Replace logits [C, V] with the gradient of the loss by them.

    `by_logprob` and `by_entropy` [C, 1], float32, are the gradients of the loss by the outputs; None is zero. The other
    arguments are those of `score_rows`, with the statistics that it has filled.
    """
    num_rows, vocab = logits.shape
    upstream = torch.stack([by_logprob] if by_entropy is None else [by_logprob, by_entropy])
    grid = (num_rows, triton.cdiv(vocab, GRADIENT_BLOCK.value))
    plane, has_entropy = statistics.stride(0), by_entropy is not None
    _gradient_kernel[grid](
        logits, targets, upstream, statistics, plane, vocab, temperature, HAS_ENTROPY=has_entropy, num_warps=NUM_WARPS
    )
