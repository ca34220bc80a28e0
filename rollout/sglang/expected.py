"""Digests that SGLang must report after a sync, made while the weights pass by, on the device that holds them.

`trainer/policy/worker.py` makes them once per sync for each layout in which an engine of the run holds the weights, and
sends them with the announcement. `rollout/sglang/weight_update.py` compares them with what the server reports, and
makes them itself if they were not made for its layout.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from rollout.config import Quantization
from rollout.engine import WeightSyncError
from rollout.sglang.fusing import DIGESTS, Fusion, Share, finished, plan_fusion, raw_bytes
from rollout.sglang.quantized import held_pieces, parts_of, plan_quantized
from rollout.types import WeightLayout
from rollout.weights.adapter import A_SENT, B_SENT
from rollout.weights.packed_weights import listed, num_threads


def fusion_of(layout: WeightLayout, *, sent: Iterable[str]) -> Fusion:
    """The tensors among `sent` that make up each parameter of an engine; raises FusionError."""
    if layout.quantization is Quantization.none:
        return plan_fusion(layout.parameters, sent=sent)
    return plan_quantized(layout.parameters, sent=sent, quantization=layout.quantization)


def part_of(layout: WeightLayout, *, adapter: bool) -> WeightLayout:
    """The layout of the adapter alone, or that of the other weights: each is sent, and verified, without the other."""
    own = tuple(name for name in layout.parameters if name.endswith((A_SENT, B_SENT)) is adapter)
    return replace(layout, parameters=own)


class ExpectedDigests:
    """The digests of all parameters of an engine, for every rank of its tensor parallelism."""

    def __init__(self, layout: WeightLayout, *, sent: Iterable[str]) -> None:
        """`sent` are the names of the tensors that will come. Raises FusionError if they do not make up `layout`."""
        self.fusion = fusion_of(layout, sent=sent)
        self._layout = layout
        self._shares = [
            Share(rank=rank, size=layout.num_ranks, num_kv_heads=layout.num_kv_heads)
            for rank in range(layout.num_ranks)
        ]
        self._parts = {name: parts_of(sources, layout) for name, sources in self.fusion.sources.items()}
        self._owners = {part: name for name, parts in self._parts.items() for part in parts}
        self._incomplete: dict[str, dict[str, Tensor]] = {}
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="digests")
        self._on_host: list[dict[str, Future[str]]] = [{} for _ in self._shares]
        self._on_device: list[dict[str, Tensor]] = [{} for _ in self._shares]

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the tensor `name` as it is sent; it must not change before `result`. Raises FusionError."""
        if name not in self._owners:
            return  # a tied head, which the engine does not hold
        parameter = self._owners[name]
        parts = self._incomplete.setdefault(parameter, {})
        parts[name] = tensor
        if len(parts) < len(self._parts[parameter]):
            return
        del self._incomplete[parameter]
        for share, on_host, on_device in zip(self._shares, self._on_host, self._on_device, strict=True):
            pieces = held_pieces(self.fusion.sources[parameter], parts, layout=self._layout, share=share)
            if self._layout.device == "cuda" and pieces[0].is_cuda and has_triton():
                from rollout.sglang.hash_kernel import tile_sum

                on_device[parameter] = tile_sum(pieces)
            else:
                on_host[parameter] = self._pool.submit(_host_result, self._layout.device, pieces)

    def result(self) -> list[dict[str, str]]:
        """Rank -> parameter -> digest, 16 hex digits. Raises WeightSyncError if a tensor has not come."""
        self._pool.shutdown()
        if absent := self._parts.keys() - self._on_host[0].keys() - self._on_device[0].keys():
            raise WeightSyncError(f"not all tensors of these parameters of the engine came: {listed(absent)}")
        digests = []
        for on_host, on_device in zip(self._on_host, self._on_device, strict=True):
            # One copy to the host for all, after the last kernel.
            sums = torch.stack(list(on_device.values())).tolist() if on_device else []
            found = {name: digest.result() for name, digest in on_host.items()}
            digests.append(found | dict(zip(on_device, map(finished, sums), strict=True)))
        return digests


@functools.cache
def has_triton() -> bool:
    """True if kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


def _host_result(device: str, pieces: Sequence[Tensor]) -> str:
    return DIGESTS[device]([raw_bytes(piece.cpu()) for piece in pieces])
