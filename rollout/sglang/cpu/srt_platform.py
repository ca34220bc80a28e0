"""The SGLang platform class behind `platform.activate`: attention in batches, and a seed for every sample.

Only SGLang loads this file, inside the server's processes. The file uses SGLang's own extension points: the out-of-tree
platform, `register_attention_backend`, `register_sampler_backend` and the plugin hook registry. SGLang's own files are
not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from algorithms.truncation import kept_tokens
from rollout.seeded_draw import draw
from rollout.sglang.cpu.platform import ATTENTION_BACKEND, EXACT_ATTENTION_BACKEND, PLATFORM_NAME

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_SEED_HOOK_TARGET = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_SHARED_EXPERT_HOOK_TARGET = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"
_LAST_SLOT_HOOK_TARGET = "sglang.srt.mem_cache.allocation.get_last_loc"


class ParityCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Plain torch operators on any CPU: no AMX, no kernel package, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The in-tree pool; only models with plain multi-head attention are supported."""
        if kind != "mha":
            return None
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        allocator: type = PagedTokenToKVPoolAllocator
        return allocator

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return torch.profiler.ProfilerActivity.CPU.name

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Install hooks, attention and sampler; SGLang calls this once per worker, after the hooks of plugins."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        register_attention_backend(ATTENTION_BACKEND)(_make_attention)
        HookRegistry.register(_SHARED_EXPERT_HOOK_TARGET, gate_shared_expert, HookType.REPLACE, source=_source())
        install_exact()


def install_exact() -> None:
    """Register the exact attention, the seeded sampler and its hooks. On a GPU `rollout/sglang/launch.py` calls it for
    rollout.exact=true, in every process of the server: not yet run on a GPU."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(EXACT_ATTENTION_BACKEND)(_make_exact_attention)
    # SGLang forces sampling_backend=pytorch on a CPU, so the seeded sampler is registered under that name.
    _register_sampler()
    HookRegistry.register(_SEED_HOOK_TARGET, attach_seeds, HookType.AFTER, source=_source())
    HookRegistry.register(_LAST_SLOT_HOOK_TARGET, last_slots, HookType.REPLACE, source=_source())
    HookRegistry.apply_hooks()


def _source() -> Any:
    """Whose hooks these are, for SGLang's log."""
    from sglang.srt.plugins.hook_registry import HookSource

    return HookSource(plugin_name=PLATFORM_NAME, dist_name="parity-rl")


def attach_seeds(info: SamplingBatchInfo, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any) -> None:
    """Give every request of a new batch its `sampling_seed`; SGLang fills the field only in deterministic mode.

    SGLang keeps the field when it filters and merges batches.
    """
    info.sampling_seed = torch.tensor(
        [request.sampling_params.sampling_seed or 0 for request in batch.reqs], dtype=torch.int64, device=batch.device
    )


def gate_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """Write what the shared expert of a layer adds, [T, H], to `output`, or add it: sigmoid(hidden states @ gate) times
    `shared_output`, in float32. SGLang has a Triton kernel for it alone."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())[:, None]
    gated = gate * shared_output.float()
    output.copy_(gated + output if do_add else gated)


def last_slots(req_to_token: torch.Tensor, requests: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """[B] slot of the last token before each extension, -1 without such a token.

    SGLang's own function starts a Triton kernel for every attention backend whose name it does not know.
    """
    found = req_to_token[requests, (prefix_lens - 1).clamp(min=0)].to(prefix_lens.dtype)
    return torch.where(prefix_lens > 0, found, torch.full_like(prefix_lens, -1))


def use_exact_logprobs(
    logits_output: Any, scaled: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None
) -> None:
    """Replace the log-probs of drawn tokens [B] in SGLang's output with the exact ones.

    `scaled` [B, V] are the logits, divided by the temperature; `rows` [M] the requests that get their supports.
    """
    from rollout.sglang.cpu.exact import exact_logprobs, exact_support_logprobs

    logits_output.next_token_logprobs = exact_logprobs(scaled, tokens)
    if rows is not None:
        mask = logits_output.sampling_mask_output
        mask.selected_logprobs = exact_support_logprobs(scaled[rows], tokens[rows], mask.token_ids, mask.lengths)


def _make_attention(model_runner: Any) -> Any:
    """Make the attention backend; SGLang calls this once per worker when the cache exists."""
    from rollout.sglang.cpu.attention import BatchedAttention

    return BatchedAttention(model_runner)


def _make_exact_attention(model_runner: Any) -> Any:
    """The same for `rollout.exact`; the model computes in exact arithmetic from then on."""
    from rollout.sglang.cpu.exact import ExactAttention

    return ExactAttention(model_runner)


def _register_sampler() -> None:
    from sglang.srt.layers.sampler import Sampler, _SamplingMaskCapture, get_exec, register_sampler_backend

    class SeededSampler(Sampler):  # type: ignore[misc]
        """SGLang's sampler with the draw itself replaced; temperature and log-probs are SGLang's, if not exact."""

        def forward(
            self, logits_output: Any, sampling_info: SamplingBatchInfo, return_logprob: bool, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            is_exact = get_exec().kernel.attention_backend == EXACT_ATTENTION_BACKEND
            scaled = None
            if is_exact and return_logprob and not sampling_info.is_all_greedy:
                scaled = logits_output.next_token_logits.float() / sampling_info.temperatures  # SGLang overwrites them
            tokens: torch.Tensor = super().forward(logits_output, sampling_info, return_logprob, *args, **kwargs)
            if scaled is not None:
                use_exact_logprobs(logits_output, scaled, tokens, sampling_info.sampling_mask_batch_indices)
            return tokens

        def _sample_from_probs(
            self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
        ) -> tuple[torch.Tensor, _SamplingMaskCapture | None]:
            if not simple_sampling_case:
                limits = {"top_k": sampling_info.top_ks, "top_p": sampling_info.top_ps, "min_p": sampling_info.min_ps}
                # Not in place: SGLang takes the log-probs of the whole vocabulary from `probs`.
                probs = probs.masked_fill(~kept_tokens(probs, **limits), 0.0)
            tokens = draw(probs, seeds=sampling_info.sampling_seed, positions=positions).to(torch.int32)
            rows = sampling_info.sampling_mask_batch_indices
            if rows is None:
                return tokens, None
            # What has a weight is the support. Without ids SGLang would put thousands of weights of every row in order.
            captured = probs if len(rows) == len(probs) else probs[rows]
            weights, token_ids = captured.topk(int((captured > 0).sum(-1).max()))
            return tokens, _SamplingMaskCapture(
                weights=weights, token_ids=token_ids.to(torch.int32), selected_weight=None, batch_rows=rows
            )

    register_sampler_backend("pytorch", SeededSampler)
