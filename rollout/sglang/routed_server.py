"""Inside the SGLang server: routes are those with which a token was sampled, in one byte for each expert, with the
factors of the experts' outputs if they are asked for.

SGLang records which experts it chose for a token beside the token's keys and values. Where it retracts a request, which
`rollout.pause_mode=retract` does at every sync, these are dropped and computed again, with the new weights: the routes
that come back would be others than those behind the log-probs. So they are kept with the request when it is retracted,
and put in their place in its answer. SGLang records no factors: they stand beside the experts in its memory for these,
which is made twice as wide, as the bits of a float32.

SGLang loads `activate` as a plug-in (entry point `sglang.srt.plugins`) in all its processes. Only SGLang's processes
import SGLang here. Read against SGLang 0.5.23: state_capturer/{base,routed_experts}.py, managers/schedule_batch.py.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rollout.config import Routing
from rollout.sglang.cpu.pinned_memory import ignore_pinned_memory
from rollout.sglang.cpu.platform import PLATFORM_NAME

ACTIVE = "PARITY_SGLANG_ROUTES"
"""Environment variable with the name of what a server returns of routes (`Routing`)."""
_KEPT = "parity_routes"
"""Attribute of a request: [N, L, K] routes of its first tokens, from before it was retracted."""


def activate() -> None:
    """Register the hooks; does nothing in other servers of the user."""
    detail = os.environ.get(ACTIVE)
    if detail not in (Routing.replay.name, Routing.weights.name):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        from sglang.srt.mem_cache.pool_host import common

        ignore_pinned_memory()
        common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory
    results = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register("sglang.srt.managers.schedule_batch.release_req", _keep, HookType.BEFORE)
    HookRegistry.register(f"{results}._maybe_collect_routed_experts", _put_back, HookType.AFTER)
    if detail == Routing.weights.name:
        states = "sglang.srt.state_capturer"
        HookRegistry.register(f"{states}.base.BaseTopkCapturer.__init__", _widen, HookType.BEFORE)
        HookRegistry.register(f"{states}.routed_experts.RoutedExpertsCapturer.capture", _capture, HookType.REPLACE)
        HookRegistry.register("sglang.srt.layers.moe.topk.select_experts", _record_weights, HookType.AFTER)


def _keep(*, req: Any, req_to_token_pool: Any, **_: Any) -> None:
    """Keep the routes of a request that is about to be retracted: of the tokens from which others were sampled."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    if capturer is None or not req.return_routed_experts:
        return
    sampled_from = len(req.origin_input_ids) + len(req.output_ids) - 1
    length = min(sampled_from, req.kv.kv_committed_len)
    rows = capturer.get_topk(req.kv.req_pool_idx, length + 1, req_to_token_pool)
    before = getattr(req, _KEPT, rows[:0])
    setattr(req, _KEPT, torch.cat([before, rows[len(before) :]]))


def _put_back(_result: None, _processor: Any, req: Any, **_: Any) -> None:
    """Put kept routes into the answer of a request, and make them small."""
    rows = req.routed_experts
    if rows is None:
        return
    kept = getattr(req, _KEPT, rows[:0])[req.routed_experts_start_len :][: len(rows)]
    rows[: len(kept)] = kept
    experts, weights = rows, rows.new_zeros(0)
    if os.environ[ACTIVE] == Routing.weights.name:
        experts, weights = rows.chunk(2, dim=-1)
    # On more than 256 experts SGLang's own type stays; the reader infers it from the number of bytes.
    small = experts.to(torch.uint8) if not experts.numel() or experts.max() < 256 else experts
    parts = (small, weights.contiguous().view(torch.float32).half())
    req.routed_experts = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _widen(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make room for factors beside the experts."""
    if options["device_topk_size"] != options["topk_size"]:
        raise ValueError("policy.routing=weights knows no layers whose shared experts SGLang fuses with the others")
    width = 2 * options["topk_size"]
    return arguments, {**options, "topk_size": width, "device_topk_size": width}


def _capture(capturer: Any, layer_id: int, topk_indices: torch.Tensor) -> None:
    """Record experts [T, K] in the first half of their memory."""
    count, per_token = topk_indices.shape
    capturer.device_cache.buffer[:count, layer_id, :per_token] = topk_indices


def _record_weights(
    result: Any, *_arguments: Any, topk_config: Any, layer_id: int | None = None, **_options: Any
) -> None:
    """Record the factors [T, K] that were chosen with the experts of a layer in the second half."""
    from sglang.srt.layers.moe.topk import is_routed_scaling_factor_fused_in_topk
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if (capturer := get_global_experts_capturer()) is None or layer_id is None:
        return
    weights = result.topk_weights.float()
    if not is_routed_scaling_factor_fused_in_topk(topk_config):  # the sum of the outputs is scaled then
        weights = weights * (topk_config.routed_scaling_factor or 1.0)
    count, per_token = weights.shape
    capturer.device_cache.buffer[:count, layer_id, per_token:] = weights.view(torch.int32)
