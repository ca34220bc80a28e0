"""Mixtures of experts inside vLLM: plain products of the weights that the model shows, and the routes of tokens.

vLLM packs the weights of experts on a CPU, and loads the next ones over the packed ones without unpacking. It returns
routes only from an engine that a CPU cannot run, and no factors. Here every token's route lies at the token's place in
the cache of keys and values, so that it is there for all responses to a shared prompt. Read against vLLM 0.32.

T: tokens of a step, S: places of the cache, L: layers with experts, K: experts of a layer for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from rollout.config import Routing
from rollout.embedded.batch import Response
from rollout.routes import WEIGHT_TYPE, Routes, narrowed


class RouteRecorder:
    """Keeps the routes of what is in vLLM's cache, and gives responses those that they lack."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        """Experts and factors [T, K] of the layers that the step has passed."""
        self._experts: NDArray[np.int16] | None = None
        """[S, L, K], made with the first step."""
        self._weights: NDArray[np.float16]

    def forget(self) -> None:
        """Drop the layers of a step that did not end."""
        self._layers.clear()

    def heed(self, experts: Tensor, weights: Tensor) -> None:
        """Take the choice of the next layer, both [T, K]."""
        self._layers.append((experts, weights))

    def add_routes(self, runner: Any, responses: Sequence[Response], ready: Sequence[int]) -> None:
        """Keep the routes of a step of vLLM's `runner`; give the `ready` ones among `responses` what they lack."""
        batch, starts = runner.input_batch, runner.query_start_loc.np
        table = batch.block_table[0]

        def places(row: int, begin: int, end: int) -> NDArray[np.int64]:
            tokens = np.arange(begin, end)
            found: NDArray[np.int64] = table.block_table.np[row][tokens // table.block_size].astype(np.int64)
            return found * table.block_size + tokens % table.block_size

        read = [int(batch.num_computed_tokens_cpu[row]) for row in range(len(responses))]
        new = [places(row, read[row], read[row] + starts[row + 1] - starts[row]) for row in range(len(responses))]
        experts, weights = (torch.stack(each, dim=1).cpu().numpy() for each in zip(*self._layers, strict=True))
        self._layers.clear()
        if self._experts is None:
            shape = (runner.kv_cache_config.num_blocks * table.block_size, *experts.shape[1:])
            self._experts, self._weights = np.zeros(shape, np.int16), np.zeros(shape, WEIGHT_TYPE)
        at = np.concatenate(new)
        self._experts[at], self._weights[at] = experts[: len(at)], weights[: len(at)]
        # One array for all that share whole blocks of the cache: it is sent to another process once.
        made: dict[tuple[Routing, bytes], Routes] = {}
        for row in ready:
            response = responses[row]
            wanted, length = response.request.sampling.routes, response.length
            known = response.request.first_new_route + sum(map(len, response.routes))
            whole = max(known, length - length % table.block_size)
            for begin, end in ((known, whole), (whole, length)) if wanted is not Routing.live else ():
                if begin < end:
                    at = places(row, begin, end)
                    factors = (self._weights[at],) if wanted is Routing.weights else ()
                    routes = Routes((narrowed(self._experts[at]),), factors)
                    response.routes.append(made.setdefault((wanted, at.tobytes()), routes))


def use_plain_experts(recorder: RouteRecorder | None) -> None:
    """Have the experts of the next model multiply with its own weights; `recorder` is told what each layer chooses."""

    def apply(
        _experts: object,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **others: object,
    ) -> None:
        if (activation := others["activation"]) is not MoEActivation.SILU:
            raise ValueError(f"experts with {activation} are not served")
        if recorder is not None:
            recorder.heed(topk_ids, topk_weights)
        output.zero_()
        for expert in topk_ids.unique().tolist():
            rows, place = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
            found = functional.linear(functional.silu(gate) * up, w2[expert])
            output.index_add_(0, rows, (found * topk_weights[rows, place, None]).to(output.dtype))

    CPUUnquantizedExperts.process_weights_after_loading = lambda _experts, _layer: None
    CPUUnquantizedExperts.apply = apply
