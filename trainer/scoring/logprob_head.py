"""Hidden states -> log-probs and entropy of the tokens, without the full-vocabulary logits of all of them.

With z = (W h + b) / T for a hidden state h, token y, p = softmax(z) and m = max z:

    log p(y) = z_y - m - log S,   S = sum_j exp(z_j - m)
    H = log S - sum_j p_j (z_j - m)
    d log p(y) / d z_j = [j = y] - p_j
    d H / d z_j = -p_j (log p_j + H)

Truncated sampling draws from the support S of a token, so z_j is replaced with CUT_LOGIT outside S: p_j is then 0, and
all formulas hold over S (`algorithms/truncation.py`).

The logits of `chunk_tokens` tokens exist at a time, in one buffer of the head's dtype. The softmax runs in float32
on blocks of rows of that buffer that stay in the cache, so it needs no second buffer of that size. The backward
pass needs m, S and H only: it computes the logits of a chunk once more, replaces them block by block with their
gradient, and multiplies. The forward leaves the logits of its last chunk behind, and the backward starts there: the
logits of a batch of at most `chunk_tokens` tokens are computed once.

On a GPU the kernels of `trainer/scoring/head_kernels.py` take the softmax of a whole chunk, if Triton is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from algorithms.truncation import CUT_LOGIT
from rollout.exact.layers import row_sums
from rollout.exact.products import product
from trainer.batch.train_batch import TokenSupports

CPU_BLOCK_ELEMENTS = 2**19
"""Logits per block of the softmax on a CPU: 2 MiB in float32, about what a core's cache holds."""
GPU_BLOCK_ELEMENTS = 2**24
"""Logits per block elsewhere: 64 MiB in float32, large against the cost of a kernel launch."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that the kernels read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Options with which the head is applied."""

    temperature: float
    """Divides the logits, > 0."""
    chunk_tokens: int
    """Tokens whose full-vocabulary logits exist at a time, >= 1."""
    entropy_grad: bool = False
    """True if the entropy has a gradient."""
    float32: bool = False
    """Head product in float32 whatever the dtype of the hidden states; holds a float32 copy of the weight meanwhile."""
    exact: bool = False
    """Head product in tiles, as the engine takes it with rollout.exact=true."""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    supports: TokenSupports | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token: ([N], [N]) float32, nats (float64 for float64 inputs).

    With `supports` [N] both are those of a softmax over the support of each token, and p_j = 0 outside.

    Args:
        hidden: [N, H] hidden states from which the targets are predicted, any float dtype.
        targets: [N] int64, token ids in [0, V).
        weight: [V, H] of the dtype of `hidden`.
        bias: [V] or None.

    The gradient of the weight is summed over chunks in float32 and rounded once. On a CPU the product of a chunk of
    16-bit tensors is rounded before that. Differentiable once.
    Nothing is read on the host, but for the sizes of supports; N = 0 gives empty outputs and zero gradients.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, targets, weight, bias, options, supports)
    return logprobs, entropy


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_kernels(hidden: Tensor, dtype: torch.dtype) -> bool:
    """True if kernels take the softmax of logits of `dtype` made of `hidden`."""
    return hidden.is_cuda and dtype in KERNEL_DTYPES and _has_triton()


def _slices(num_rows: int, size: int) -> list[slice]:
    """`num_rows` rows, at most `size` at a time."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def cut_outside(logits: Tensor, supports: TokenSupports) -> None:
    """Replace the logits [C, V] outside the support of each row with CUT_LOGIT; a support of size 0 keeps its row."""
    sizes, token_ids = supports
    rows = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=len(token_ids))
    kept = (rows, token_ids.long())
    values = logits[kept]
    logits.masked_fill_((sizes > 0)[:, None], CUT_LOGIT)
    logits[kept] = values


def _by_chunk(supports: TokenSupports, chunks: Sequence[slice]) -> dict[int, TokenSupports]:
    """First row of each chunk -> the supports of its rows. Reads one number per chunk on the host."""
    ends = supports.sizes.cumsum(0)[[chunk.stop - 1 for chunk in chunks]].tolist()
    return {
        chunk.start: TokenSupports(supports.sizes[chunk], supports.token_ids[begin:end])
        for chunk, begin, end in zip(chunks, [0, *ends], ends, strict=False)
    }


class _Head:
    """The head's product in one dtype, chunk by chunk into one buffer."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        supports: TokenSupports | None,
    ) -> None:
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.dtype = self.wide if options.float32 else hidden.dtype
        self.weight = weight.to(self.dtype)
        self._hidden = hidden
        self._bias = None if bias is None else bias.to(self.dtype)
        self.chunks = _slices(hidden.shape[0], options.chunk_tokens)
        """The rows of each chunk."""
        self._supports = {} if supports is None else _by_chunk(supports, self.chunks)
        vocab, num_rows = weight.shape[0], min(options.chunk_tokens, hidden.shape[0])
        self._shape = (num_rows, vocab)
        self._temperature = options.temperature
        self._is_exact = options.exact
        # The kernels add up in another order than the engine.
        self._has_kernels = takes_kernels(hidden, self.dtype) and not options.exact
        block = CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else GPU_BLOCK_ELEMENTS
        self._block_rows = max(1, block // vocab)
        scratch_rows = 0 if self._has_kernels else min(self._block_rows, num_rows)
        self._scratch = hidden.new_empty((2, scratch_rows, vocab), dtype=self.wide)
        """Two blocks of logits: allocating them anew for every block costs more than what is done with them."""
        self.buffer: Tensor | None = None
        """Holds the logits of the chunk that was computed last."""

    def hidden(self, chunk: slice) -> Tensor:
        """[C, H] in the head's dtype."""
        return self._hidden[chunk].to(self.dtype)

    def logits(self, chunk: slice) -> Tensor:
        """[C, V] before the temperature, CUT_LOGIT outside the supports, in the buffer."""
        if self.buffer is None:
            self.buffer = self._hidden.new_empty(self._shape, dtype=self.dtype)
        out = self.buffer[: chunk.stop - chunk.start]
        if self._is_exact:
            product(self.hidden(chunk), self.weight, self._bias, out=out)
        elif self._bias is None:
            torch.mm(self.hidden(chunk), self.weight.T, out=out)
        else:
            torch.addmm(self._bias, self.hidden(chunk), self.weight.T, out=out)
        if self._supports:
            cut_outside(out, self._supports[chunk.start])
        return out

    def score(self, logits: Tensor, targets: Tensor, statistics: Tensor) -> Tensor:
        """Fill the `statistics` [3, C, 1] of a chunk's logits [C, V]; return the log-probs [C, 1] of targets [C, 1]."""
        if self._has_kernels:
            from trainer.scoring.head_kernels import score_rows

            return score_rows(logits, targets, statistics, temperature=self._temperature)
        logprobs = torch.empty_like(statistics[0])
        for rows in _slices(len(logits), self._block_rows):
            logprobs[rows] = _score_block(
                logits[rows],
                targets[rows],
                statistics[:, rows],
                temperature=self._temperature,
                scratch=self._scratch,
            )
        return logprobs

    def differentiate(
        self, logits: Tensor, targets: Tensor, statistics: Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> None:
        """Replace a chunk's logits [C, V] with the gradient of the loss by them; those of the outputs are [C, 1]."""
        if self._has_kernels:
            from trainer.scoring.head_kernels import differentiate_rows

            differentiate_rows(logits, targets, statistics, by_logprob, by_entropy, temperature=self._temperature)
            return
        for rows in _slices(len(logits), self._block_rows):
            _differentiate_block(
                logits[rows],
                targets[rows],
                statistics[:, rows],
                by_logprob[rows],
                None if by_entropy is None else by_entropy[rows],
                temperature=self._temperature,
                scratch=self._scratch,
            )


def _score_block(logits: Tensor, targets: Tensor, statistics: Tensor, *, temperature: float, scratch: Tensor) -> Tensor:
    """Fill the `statistics` [3, R, 1] (m, S, H) of logits [R, V]; return the log-probs [R, 1] of targets [R, 1]."""
    maximum, total, entropy = statistics
    z, exps = scratch[:, : logits.shape[0]].unbind()
    z.copy_(logits)
    if temperature != 1:
        # On a GPU torch multiplies with the reciprocal of a Python number; the engine divides by a tensor.
        z.div_(torch.full((), temperature, dtype=z.dtype, device=z.device) if z.is_cuda else temperature)
    torch.amax(z, dim=-1, keepdim=True, out=maximum)
    z.sub_(maximum)
    torch.exp(z, out=exps)
    total.copy_(row_sums(exps))
    log_total = total.log()
    logprobs = z.gather(-1, targets) - log_total
    torch.sum(exps.mul_(z), dim=-1, keepdim=True, out=entropy)
    entropy.div_(total).neg_().add_(log_total)
    return logprobs


def _differentiate_block(
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    scratch: Tensor,
) -> None:
    """Replace logits [R, V] with the gradient of the loss by them; those of the outputs are [R, 1]."""
    maximum, total, entropy = statistics
    # exp(z - m) / S is p; the division, the temperature and the sign are folded into factors of a row.
    scale = (total * temperature).reciprocal_()
    first, second = scratch[:, : logits.shape[0]].unbind()
    z = logits if logits.dtype == scratch.dtype else first.copy_(logits)
    if temperature != 1:
        z.div_(temperature)
    z.sub_(maximum)
    factor = -grad_logprobs * scale
    if grad_entropy is not None:
        slope = grad_entropy * scale
        # -p (log p + H) = -p (z - m + H - log S)
        offset = factor - slope * (entropy - total.log())
        factor = torch.addcmul(offset, z, slope, value=-1, out=second)
    z.exp_().mul_(factor)
    z.scatter_add_(-1, targets, grad_logprobs / temperature)
    if z is not logits:
        logits.copy_(z)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += left [V, C] @ right [C, H], the sum of the product in the dtype of `total` where torch can.

    The way for 16-bit types on a GPU is not yet run on a GPU.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # cuBLAS adds 16-bit products up in float32; otherwise every chunk would be rounded once
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


class _TokenLogprobs(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        supports: TokenSupports | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, options, supports)
        statistics = hidden.new_empty((3, hidden.shape[0], 1), dtype=head.wide)  # m, S, H
        logprobs = torch.empty_like(statistics[0])
        for chunk in head.chunks:
            logprobs[chunk] = head.score(head.logits(chunk), targets[chunk, None], statistics[:, chunk])
        entropy = statistics[2].squeeze(-1).clone()
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, targets, weight, bias)
            ctx.statistics, ctx.options, ctx.supports, ctx.last_logits = statistics, options, supports, head.buffer
        return logprobs.squeeze(-1), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        hidden, targets, weight, bias = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.options, ctx.supports)
        head.buffer, ctx.last_logits = ctx.last_logits, None  # overwritten here: a second backward starts anew
        is_computed = head.buffer is not None
        # Summed over chunks; what nobody needs is never allocated.
        of_hidden, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        by_hidden = torch.empty_like(hidden, dtype=head.dtype) if of_hidden else None
        is_summed = of_weight and len(head.chunks) != 1
        by_weight = torch.zeros_like(weight, dtype=head.wide) if is_summed else None
        by_bias = weight.new_zeros(weight.shape[0], dtype=head.wide) if of_bias else None
        for chunk in reversed(head.chunks):
            logits = head.buffer[: chunk.stop - chunk.start] if is_computed else head.logits(chunk)
            is_computed = False
            by_entropy = grad_entropy[chunk, None] if ctx.options.entropy_grad else None
            head.differentiate(
                logits, targets[chunk, None], ctx.statistics[:, chunk], grad_logprobs[chunk, None], by_entropy
            )
            if by_hidden is not None:
                torch.mm(logits, head.weight, out=by_hidden[chunk])
            if by_weight is not None:
                _add_product(by_weight, logits.T, head.hidden(chunk))
            elif of_weight:
                by_weight = logits.T @ head.hidden(chunk)
            if by_bias is not None:
                by_bias.add_(logits.sum(0, dtype=by_bias.dtype))
        by_weight, by_bias = (None if sums is None else sums.to(weight.dtype) for sums in (by_weight, by_bias))
        return None if by_hidden is None else by_hidden.to(hidden.dtype), None, by_weight, by_bias, None, None
