"""Hidden states -> log-probs and entropy of the tokens, without the full-vocabulary logits of all of them.

With z = (W h + b) / T for a hidden state h, token y, p = softmax(z) and m = max z:

    log p(y) = z_y - m - log S,   S = sum_j exp(z_j - m)
    H = log S - sum_j p_j (z_j - m)
    d log p(y) / d z_j = [j = y] - p_j
    d H / d z_j = -p_j (log p_j + H)

The logits of `chunk_tokens` tokens exist at a time, in one buffer of the head's dtype. The softmax runs in float32
on blocks of rows of that buffer that stay in the cache, so it needs no second buffer of that size. The backward
pass needs m, S and H only: it computes the logits of a chunk once more, replaces them block by block with their
gradient, and multiplies. The forward leaves the logits of its last chunk behind, and the backward starts there: the
logits of a batch of at most `chunk_tokens` tokens are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_BLOCK_ELEMENTS = 2**19
"""Logits per block of the softmax on a CPU: 2 MiB in float32, about what a core's cache holds."""
GPU_BLOCK_ELEMENTS = 2**24
"""Logits per block elsewhere: 64 MiB in float32, large against the cost of a kernel launch."""


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


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token: ([N], [N]) float32, nats (float64 for float64 inputs).

    Args:
        hidden: [N, H] hidden states from which the targets are predicted, any float dtype.
        targets: [N] int64, token ids in [0, V).
        weight: [V, H] of the dtype of `hidden`.
        bias: [V] or None.

    The gradient of the weight is summed over chunks in float32 and rounded once. Differentiable once.
    Nothing is read on the host; N = 0 gives empty outputs and zero gradients.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, targets, weight, bias, options)
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Statistics of the softmax of every row: [N, 1] each, float32."""

    maximum: Tensor
    total: Tensor
    """S >= 1, the sum of exp(z - m)."""
    entropy: Tensor

    @classmethod
    def empty(cls, num_rows: int, like: Tensor) -> _Statistics:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls(*(torch.empty(num_rows, 1, dtype=dtype, device=like.device) for _ in range(3)))

    def rows(self, where: slice) -> _Statistics:
        return _Statistics(self.maximum[where], self.total[where], self.entropy[where])


class _Head:
    """The head's product in one dtype, chunk by chunk into one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32) if options.float32 else hidden.dtype
        self.inputs = (hidden, weight)
        self.temperature = options.temperature
        self.weight = weight.to(self.dtype)
        self._hidden = hidden
        self._bias = None if bias is None else bias.to(self.dtype)
        self._chunk_tokens = options.chunk_tokens
        num_rows, vocab = min(options.chunk_tokens, hidden.shape[0]), weight.shape[0]
        self._shape = (num_rows, vocab)
        block = CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else GPU_BLOCK_ELEMENTS
        self._block_rows = max(1, block // vocab)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.scratch = hidden.new_empty((2, min(self._block_rows, num_rows), vocab), dtype=wide)
        """Two blocks of logits: allocating them anew for every block costs more than what is done with them."""
        self.buffer: Tensor | None = None
        """Holds the logits of the chunk that was computed last."""

    def chunks(self) -> list[slice]:
        """The rows of each chunk."""
        num_rows = self._hidden.shape[0]
        starts = range(0, num_rows, self._chunk_tokens)
        return [slice(start, min(start + self._chunk_tokens, num_rows)) for start in starts]

    def hidden(self, chunk: slice) -> Tensor:
        """[C, H] in the head's dtype."""
        return self._hidden[chunk].to(self.dtype)

    def logits(self, chunk: slice) -> Tensor:
        """[C, V] before the temperature, in the buffer."""
        if self.buffer is None:
            self.buffer = self._hidden.new_empty(self._shape, dtype=self.dtype)
        out = self.buffer[: chunk.stop - chunk.start]
        if self._bias is None:
            return torch.mm(self.hidden(chunk), self.weight.T, out=out)
        return torch.addmm(self._bias, self.hidden(chunk), self.weight.T, out=out)

    def blocks(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """Rows of each block: in the chunk's logits, and among all tokens."""
        for start in range(chunk.start, chunk.stop, self._block_rows):
            stop = min(start + self._block_rows, chunk.stop)
            yield slice(start - chunk.start, stop - chunk.start), slice(start, stop)


def _score_block(logits: Tensor, targets: Tensor, *, temperature: float, out: _Statistics, scratch: Tensor) -> Tensor:
    """Fill `out` from logits [R, V] and return the log-probs [R, 1] of targets [R, 1]."""
    z, exps = scratch[:, : logits.shape[0]].unbind()
    z.copy_(logits)
    if temperature != 1:
        z.div_(temperature)
    torch.amax(z, dim=-1, keepdim=True, out=out.maximum)
    z.sub_(out.maximum)
    torch.exp(z, out=exps)
    torch.sum(exps, dim=-1, keepdim=True, out=out.total)
    log_total = out.total.log()
    logprobs = z.gather(-1, targets) - log_total
    torch.sum(exps.mul_(z), dim=-1, keepdim=True, out=out.entropy)
    out.entropy.div_(out.total).neg_().add_(log_total)
    return logprobs


def _differentiate_block(
    logits: Tensor,
    targets: Tensor,
    statistics: _Statistics,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    scratch: Tensor,
) -> None:
    """Replace logits [R, V] with the gradient of the loss by them; gradients of the outputs are [R, 1] or None."""
    # exp(z - m) / S is p; the division, the temperature and the sign are folded into factors of a row.
    scale = (statistics.total * temperature).reciprocal_()
    first, second = scratch[:, : logits.shape[0]].unbind()
    z = logits if logits.dtype == scratch.dtype else first.copy_(logits)
    if temperature != 1:
        z.div_(temperature)
    z.sub_(statistics.maximum)
    factor = torch.zeros_like(scale) if grad_logprobs is None else -grad_logprobs * scale
    if grad_entropy is not None:
        slope = grad_entropy * scale
        # -p (log p + H) = -p (z - m + H - log S)
        offset = factor - slope * (statistics.entropy - statistics.total.log())
        factor = torch.addcmul(offset, z, slope, value=-1, out=second)
    z.exp_().mul_(factor)
    if grad_logprobs is not None:
        z.scatter_add_(-1, targets, grad_logprobs / temperature)
    if z is not logits:
        logits.copy_(z)


class _Gradients:
    """Gradients of the head's inputs, summed over chunks; those that nobody needs are never allocated."""

    def __init__(self, head: _Head, statistics: _Statistics, targets: Tensor, needed: tuple[bool, ...]) -> None:
        self._head = head
        self._statistics = statistics
        self._targets = targets
        wide = torch.promote_types(head.dtype, torch.float32)
        hidden, weight = head.inputs
        self._hidden = torch.empty_like(hidden, dtype=head.dtype) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=wide) if needed[2] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=wide) if needed[3] else None

    def add(self, chunk: slice, logits: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> None:
        """Replace the logits [C, V] of `chunk` with their gradient and add what comes of it; the others are [C, 1]."""
        for rows, tokens in self._head.blocks(chunk):
            _differentiate_block(
                logits[rows],
                self._targets[tokens, None],
                self._statistics.rows(tokens),
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                temperature=self._head.temperature,
                scratch=self._head.scratch,
            )
        if self._hidden is not None:
            torch.mm(logits, self._head.weight, out=self._hidden[chunk])
        if self._weight is not None:
            hidden = self._head.hidden(chunk)
            if self._weight.dtype == hidden.dtype:
                self._weight.addmm_(logits.T, hidden)
            else:
                self._weight.add_(logits.T @ hidden)
        if self._bias is not None:
            self._bias.add_(logits.sum(0, dtype=self._bias.dtype))

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden states, weight and bias, in their dtypes."""
        hidden, weight = self._head.inputs
        found = ((self._hidden, hidden), (self._weight, weight), (self._bias, weight))
        by_hidden, by_weight, by_bias = (None if sums is None else sums.to(like.dtype) for sums, like in found)
        return by_hidden, by_weight, by_bias


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
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, options)
        statistics = _Statistics.empty(hidden.shape[0], hidden)
        logprobs = torch.empty_like(statistics.total)
        for chunk in head.chunks():
            logits = head.logits(chunk)
            for rows, tokens in head.blocks(chunk):
                logprobs[tokens] = _score_block(
                    logits[rows],
                    targets[tokens, None],
                    temperature=options.temperature,
                    out=statistics.rows(tokens),
                    scratch=head.scratch,
                )
        entropy = statistics.entropy.squeeze(-1).clone()
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(hidden, targets, weight, bias)
            ctx.statistics, ctx.options, ctx.last_logits = statistics, options, head.buffer
        return logprobs.squeeze(-1), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        hidden, targets, weight, bias = ctx.saved_tensors
        grad_logprobs = None if grad_logprobs is None else grad_logprobs[:, None]
        grad_entropy = None if grad_entropy is None or not ctx.options.entropy_grad else grad_entropy[:, None]
        head = _Head(hidden, weight, bias, ctx.options)
        head.buffer, ctx.last_logits = ctx.last_logits, None  # overwritten here: a second backward starts anew
        is_computed = head.buffer is not None
        gradients = _Gradients(head, ctx.statistics, targets, ctx.needs_input_grad)
        for chunk in reversed(head.chunks()):
            logits = head.buffer[: chunk.stop - chunk.start] if is_computed else head.logits(chunk)
            is_computed = False
            gradients.add(
                chunk,
                logits,
                None if grad_logprobs is None else grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )
        by_hidden, by_weight, by_bias = gradients.result()
        return by_hidden, None, by_weight, by_bias, None
