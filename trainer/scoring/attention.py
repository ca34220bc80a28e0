"""Causal attention over packed sequences for any Hugging Face decoder, chosen by name instead of by mask.

Transformers recognises packed sequences only in some configurations; with a cache in eval mode it lets packed
sequences attend to each other without a word. Here the boundaries are explicit: `Segments` travel with the call, no
[I, I] mask is ever built, and nothing is padded. Two kinds of segments (`DecoderInputs`): a root attends to itself; a
branch attends to the prompt that it shares with others, and to itself. I: tokens that the decoder computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface

from rollout.model.limits import check_attention
from trainer.batch.train_batch import Branch

PACKED_ATTENTION = "parity_packed"
"""Value of `attn_implementation` that selects this function."""
PlanT = TypeVar("PlanT")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: query [1, H, I, D], key and value [1, H_kv, I, D] -> [1, I, H, D].

    Needs `segments` (Segments) as a keyword argument of the model's forward. Raises ValueError for a mask, dropout, or
    an option of the layer that this attention does not compute.
    """
    segments = kwargs["segments"]
    if not isinstance(segments, Segments):
        raise TypeError("packed attention needs segments (Segments)")
    if attention_mask is not None:
        raise ValueError("packed attention takes segments, not an attention mask")
    if dropout:
        raise ValueError(f"packed attention has no dropout, got {dropout}: put the model into eval mode")
    check_attention(kwargs, longest=segments.longest, name="packed")
    attend = attend_at_once if flash_runs(query, key, value) else attend_by_run
    return attend(query, key, value, segments, scaling=scaling), None


class Run(NamedTuple):
    """Neighbouring segments of one shape, which attend in one call."""

    prompt: int | None
    """Number of the root that the branches attend to; None for roots."""
    length: int
    """Tokens of each."""
    number: int


class Segments:
    """Roots and branches of a micro-batch, as in `DecoderInputs`: the prompt of a branch is a whole root.

    Not a dataclass: FSDP would copy it for every layer, with what it has computed already.
    """

    def __init__(self, roots: list[int], branches: Sequence[Branch] = ()) -> None:
        self.roots = roots
        """Tokens of each root."""
        self.branches = branches
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._plan: Any = None

    def once(self, plan: Callable[[Segments], PlanT]) -> PlanT:
        """`plan(self)`, computed by the first layer and kept for the others; every call names the same function."""
        if self._plan is None:
            self._plan = plan(self)
        found: PlanT = self._plan
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.roots + [branch.prompt_length + branch.length for branch in self.branches])

    @cached_property
    def root_tokens(self) -> int:
        return sum(self.roots)

    @cached_property
    def branch_keys(self) -> NDArray[np.int64]:
        """[K] index of every key of every branch among the I tokens: those of its prompt, then its own."""
        starts = np.cumsum([self.root_tokens, *(branch.length for branch in self.branches)])
        parts = [
            np.r_[branch.prompt_start : branch.prompt_start + branch.prompt_length, start : start + branch.length]
            for branch, start in zip(self.branches, starts[:-1].tolist(), strict=True)
        ]
        return np.concatenate(parts)

    @cached_property
    def runs(self) -> list[Run]:
        """Neighbouring roots of one length, then neighbouring branches of one prompt and one length."""
        number_of = {first: number for number, first in enumerate(accumulate(self.roots, initial=0))}
        segments: list[tuple[int | None, int]] = [(None, length) for length in self.roots]
        segments += [(number_of[branch.prompt_start], branch.length) for branch in self.branches]
        return [Run(*segment, len(list(alike))) for segment, alike in groupby(segments)]

    def mask(self, num_queries: int, num_keys: int, *, like: Tensor) -> Tensor:
        """[queries, keys] of the type and device of `like`: 0 where a token of a branch attends, else -inf.

        Causal, aligned at the end: torch's own causal mask aligns queries and keys at their starts. Every layer and
        every branch of this shape gets the same tensor, which autograd keeps until the backward pass.
        """
        shape = (num_queries, num_keys)
        if shape not in self._masks:
            self._masks[shape] = like.new_full(shape, -torch.inf).triu(num_keys - num_queries + 1)
        return self._masks[shape]


def flash_runs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch's flash attention takes these tensors: float16 or bfloat16 on a GPU, Ampere or newer."""
    if not query.is_cuda:
        return False
    params = SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1])
    return query.shape[3] % 8 == 0 and can_use_flash_attention(params)


class Lengths(NamedTuple):
    """Lengths of N segments, as `varlen_attn` takes them."""

    cu_queries: Tensor
    """[N + 1] int32, first query of every segment, and their number."""
    cu_keys: Tensor
    most_queries: int
    most_keys: int


class FlashPlan(NamedTuple):
    """A micro-batch as flash attention takes it, on its device: a copy in every layer would drain the GPU's queue."""

    roots: Lengths
    branches: Lengths | None = None
    branch_keys: Tensor | None = None


def flash_plan(segments: Segments, device: torch.device) -> FlashPlan:
    """Copy the boundaries of roots and branches to `device`."""

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)

    longest = max(segments.roots)
    begins, branches = starts(segments.roots), segments.branches
    roots = Lengths(begins, begins, longest, longest)
    if not branches:
        return FlashPlan(roots)
    own = [branch.length for branch in branches]
    seen = [branch.prompt_length + branch.length for branch in branches]
    lengths = Lengths(starts(own), starts(seen), max(own), max(seen))
    return FlashPlan(roots, lengths, torch.from_numpy(segments.branch_keys).to(device))


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None = None
) -> Tensor:
    """[1, H, I, D] -> [1, I, H, D]: all roots in one call of flash attention, all branches in another.

    Not yet run on a GPU.
    """
    plan = segments.once(lambda segments: flash_plan(segments, query.device))
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    count = segments.root_tokens
    (q, rest), (k_roots, _), (v_roots, _) = (states.tensor_split([count]) for states in (q, k, v))
    out = flash_attention(q, k_roots, v_roots, plan.roots, scaling=scaling)
    if plan.branches is not None and plan.branch_keys is not None:
        # Keys and values in one gather, because its backward pass sorts the indices. That of an embedding adds in the
        # same order in every run.
        gathered = embedding(plan.branch_keys, torch.stack([k, v], dim=1).flatten(1))
        k, v = gathered.unflatten(1, (2, *k.shape[1:])).unbind(1)
        out = torch.cat([out, flash_attention(rest, k, v, plan.branches, scaling=scaling)])
    return out.unsqueeze(0)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, *, scaling: float | None) -> Tensor:
    """[Q, H, D], [K, H_kv, D] -> [Q, H, D]: the last query of each segment sees all of its keys, the one before it all
    but the last, and so on."""
    out = varlen_attn(
        q,
        k,
        v,
        *lengths,
        scale=scaling,
        window_size=(-1, 0),  # causal, aligned at the end of each segment
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out


def wants_a_key_per_head(query: Tensor) -> bool:
    """True if torch keeps no [length, length] scores only where every head has keys of its own: in float32 on a GPU.

    Its flash attention takes no float32, and its other kernel without scores takes no heads that share keys. Not yet
    run on a GPU.
    """
    return query.is_cuda


def attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None = None
) -> Tensor:
    """[1, H, I, D] -> [1, I, H, D]: neighbours of the same shape in one call, on any device.

    In float32 if the dtype is narrower: on a CPU torch's backward of attention takes three times as long in bfloat16.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (states.to(wide).squeeze(0) for states in (query, key, value))
    if wants_a_key_per_head(q):
        k, v = (states.repeat_interleave(q.shape[0] // states.shape[0], dim=0) for states in (k, v))
    outs: list[Tensor] = []
    roots: list[tuple[Tensor, ...]] = []
    """Keys and values of each root, [H_kv, length, D]."""
    runs = segments.runs
    # A split, whose backward pass is one concatenation: that of a slice writes a tensor as long as the micro-batch.
    pieces = zip(*(states.split([run.number * run.length for run in runs], dim=1) for states in (q, k, v)), strict=True)
    for run, piece in zip(runs, pieces, strict=True):
        # [H, number * length, D] -> [number, H, length, D]
        queries, keys, values = (states.unflatten(1, (run.number, run.length)).transpose(0, 1) for states in piece)
        mask = None
        if run.prompt is not None:
            keys, values = (
                torch.cat([shared.expand(run.number, *shared.shape), own], dim=2)
                for shared, own in zip(roots[run.prompt], (keys, values), strict=True)
            )
            mask = segments.mask(run.length, keys.shape[2], like=q)
        elif segments.branches:
            roots += zip(keys.unbind(), values.unbind(), strict=True)
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).to(query.dtype).unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
