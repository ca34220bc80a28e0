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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.config import Quantization
from rollout.engine import WeightSyncError
from rollout.sglang.fusing import DIGESTS, Share, finished, raw_bytes
from rollout.sglang.quantized import held_pieces, parts_of, plan_quantized
from rollout.types import Digester, WeightLayout
from rollout.weights.adapter import A_SENT, B_SENT
from rollout.weights.fusion import Fusion, plan_fusion
from rollout.weights.packed_weights import listed, num_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangLayout(WeightLayout):
    """How a server holds the weights."""

    parameters: tuple[str, ...]
    """Names of the engine's parameters, the same on every rank."""
    num_ranks: int
    """Ranks of the engine's tensor parallelism."""
    num_kv_heads: int
    """Key/value heads of the model."""
    dtype: str
    """torch dtype of what is not quantised, without the prefix."""
    device: str
    """"cpu" or "cuda": SGLang digests with different functions."""
    quantization: Quantization
    """Format in which the engine itself holds projections."""

    def expected(self, *, sent: Iterable[str], of_adapter: bool) -> ExpectedDigests:
        return ExpectedDigests(self.part(of_adapter=of_adapter), sent=sent)

    def part(self, *, of_adapter: bool) -> SGLangLayout:
        """The layout of the adapter, or that of the other weights: each is sent, and verified, without the other."""
        own = tuple(name for name in self.parameters if name.endswith((A_SENT, B_SENT)) is of_adapter)
        return replace(self, parameters=own)

    def fusion(self, *, sent: Iterable[str]) -> Fusion:
        """The tensors among `sent` that make up each parameter of the engine. Raises LayoutError."""
        if self.quantization is Quantization.none:
            return plan_fusion(self.parameters, sent=sent)
        return plan_quantized(self.parameters, sent=sent, quantization=self.quantization)


class ExpectedDigests(Digester):
    """The digests of all parameters of an engine, for every rank of its tensor parallelism."""

    def __init__(self, layout: SGLangLayout, *, sent: Iterable[str]) -> None:
        """`sent` are the names of the tensors that will come. Raises LayoutError if they do not make up `layout`."""
        self.fusion = layout.fusion(sent=sent)
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
