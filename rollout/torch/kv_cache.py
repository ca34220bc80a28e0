"""Keys and values of the sequences being decoded, and attention over them: for any Hugging Face decoder.

A slot is a row of memory for one sequence: column t holds its token t, so slots have no padding and sequences of
different lengths are decoded together. The active slots are always the first slots; memory grows with the longest
sequence. The model calls `slot_attention` by the name SLOT_ATTENTION; a `Prefill` or a `Step` in the call says which
tokens to read.

S: slots, N: active slots, U: distinct prompts, P: padded prompt length, H: heads, K: key/value heads, C: columns, D:
size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollout.model.limits import check_attention

SLOT_ATTENTION = "parity_slots"
"""Value of `attn_implementation` that selects this attention."""

FIRST_COLUMNS = 64
"""Additional columns after the first prompts; the memory doubles when all columns are used."""


class KVSlots:
    """Keys and values of every layer. The memory of a layer is allocated with its first prompt."""

    def __init__(self, *, num_slots: int, max_columns: int) -> None:
        """`max_columns` is the length of the longest sequence that will be stored; `resize` raises both."""
        self._num_slots = num_slots
        self._max_columns = max_columns
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def resize(self, *, num_slots: int, most_slots: int, max_columns: int) -> None:
        """Make room for more slots or longer sequences; stored values stay. Never shrinks.

        Slots double, up to `most_slots`, so that room is not made again for every sequence.
        """
        if num_slots > self._num_slots:
            self._num_slots = max(num_slots, min(2 * self._num_slots, most_slots))
        self._max_columns = max(self._max_columns, max_columns)

    def reserve(self, index: int, *like: Tensor, columns: int) -> tuple[Tensor, ...]:
        """Keys and values of a layer, each [S, K, C, D], with room for `columns`.

        `like`, new keys and values [.., K, .., D], give shapes, dtype and device.
        """
        held = self._layers.get(index)
        slots, room = (0, 0) if held is None else (held[0].shape[0], held[0].shape[2])
        if held is not None and slots >= self._num_slots and room >= columns:
            return held
        if held is None:
            room = max(columns, min(columns + FIRST_COLUMNS, self._max_columns))
        elif room < columns:
            room = max(columns, min(2 * room, self._max_columns))
        # Zeros: unwritten columns are masked, but a NaN in uninitialised memory would pass through the mask.
        grown = tuple(each.new_zeros(self._num_slots, each.shape[1], room, each.shape[3]) for each in like)
        if held is not None:
            for new, old in zip(grown, held, strict=True):
                new[: old.shape[0], :, : old.shape[2]] = old
        self._layers[index] = grown
        return grown

    def move(self, source: Tensor, target: Tensor, *, columns: int) -> None:
        """Copy the first `columns` columns of slots `source` to slots `target`, both [M] int64 and disjoint."""
        for layer in self._layers.values():
            for memory in layer:
                memory[target, :, :columns] = memory[source, :, :columns]


class Prefill:
    """Reads and stores prompts: prompt `prompt_of_slot[i]` in slot `first_slot + i`."""

    def __init__(self, slots: KVSlots, *, first_slot: int, prompt_of_slot: Tensor, longest: int) -> None:
        """`longest` is the length of the longest prompt."""
        self._slots = slots
        self._target = slice(first_slot, first_slot + len(prompt_of_slot))
        self._prompt_of_slot = prompt_of_slot
        self.longest = longest

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Store the prompts and attend: query [U, H, P, D], key and value [U, K, P, D] -> [U, H, P, D]."""
        for memory, new in zip(self._slots.reserve(index, key, value, columns=self.longest), (key, value), strict=True):
            memory[self._target, :, : self.longest] = new[self._prompt_of_slot]
        return self.attention(query, key, value, scaling)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Causal attention within each prompt, of the shapes of `attend`.

        Prompts are padded on the right: no token of a prompt sees padding behind it.
        """
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)


class Step:
    """Gives each of the first N slots one token, at its own position."""

    def __init__(self, slots: KVSlots, *, positions: Tensor, longest: int, dtype: torch.dtype) -> None:
        """`positions` [N] int64, column of the new token; `longest` is their maximum plus one; `dtype` of the model."""
        self._slots = slots
        self.positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self.longest = longest
        # On a CPU torch copies bfloat16 matrices with gaps between them before it multiplies them, and slowly. Widening
        # them first takes less time, loses nothing, and the stored values keep half the bytes.
        self._dtype = torch.float32 if positions.device.type == "cpu" else dtype
        self._mask: Tensor | None = None
        if int(positions.min()) + 1 < longest:
            behind = torch.arange(longest, device=positions.device) > positions[:, None]
            mask = torch.zeros(behind.shape, dtype=self._dtype, device=positions.device)
            self._mask = mask.masked_fill_(behind, -torch.inf)[:, None]

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Store the new token and attend to the whole sequence: query [N, H, 1, D], key and value [N, K, 1, D]."""
        memories = self._slots.reserve(index, key, value, columns=self.columns(self.longest))
        for memory, new in zip(memories, (key, value), strict=True):
            memory[self._rows, :, self.positions] = new[:, :, 0]
        keys, values = (memory[: len(query)] for memory in memories)
        return self.attention(query, keys, values, scaling)

    def columns(self, longest: int) -> int:
        """Columns that attention reads if the longest sequence has `longest` tokens."""
        return longest

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """query [N, H, 1, D], keys and values [N, K, C, D] with columns to spare -> [N, H, 1, D]."""
        count, num_heads, _, size = query.shape
        num_kv = keys.shape[1]
        # [N * K, C, D], without a further copy: active slots are adjacent. Batched products beat the fused attention of
        # torch 2.13 two to three times on a CPU when there is one query per sequence.
        keys, values = (states[:, :, : self.longest].to(self._dtype).flatten(0, 1) for states in (keys, values))
        scale = size**-0.5 if scaling is None else scaling
        queries = query.reshape(count * num_kv, num_heads // num_kv, size).to(self._dtype) * scale
        if self._mask is None:
            scores = torch.bmm(queries, keys.transpose(1, 2))
        else:
            if len(self._mask) != count * num_kv:
                # Computed once for all layers.
                self._mask = self._mask.expand(count, num_kv, self.longest).reshape(-1, 1, self.longest)
            scores = torch.baddbmm(self._mask, queries, keys.transpose(1, 2))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self._dtype)
        return torch.bmm(weights, values).view(count, num_heads, 1, -1).to(query.dtype)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: [B, H, T, D] -> [B, T, H, D]. Needs `forward_kind` as a keyword argument of
    the model's forward: a Prefill or a Step.
    """
    kind = kwargs["forward_kind"]
    if not isinstance(kind, Prefill | Step):
        raise TypeError("slot attention needs a Prefill or a Step")
    check_attention(kwargs, longest=kind.longest, name="slot")
    index = module.layer_idx
    if not isinstance(index, int):
        raise TypeError(f"{type(module).__name__} has no layer_idx")
    return kind.attend(index, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
