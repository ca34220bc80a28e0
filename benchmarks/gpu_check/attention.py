"""Check 3: packed attention against float64, sequence by sequence; its time, memory and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from gpu_check.attention_fit import fitting_attention
from gpu_check.host import NEEDS_CUDA, Host, gib, milliseconds
from gpu_check.rows import NotRunError, Row, judged, not_run, noted
from trainer.batch.train_batch import Branch
from trainer.scoring.attention import Segments, packed_attention

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative error of output and gradients."""
HEAD_SIZE = 64
SHOWN_KERNELS = 3


def attention(host: Host) -> Iterator[Row]:
    """Exactness with roots alone and with a shared prompt, then costs for three mixes of lengths."""
    with fitting_attention():
        lengths = host.pick([300, 1, 77, 1000], [20, 1, 7])
        shared = Segments(lengths, [Branch(0, lengths[0], 33), Branch(0, lengths[0], 5)])
        for name, segments in (("whole sequences", Segments(lengths)), ("and a shared prompt", shared)):
            for dtype in (torch.bfloat16, torch.float32):
                yield _exactness(host, name, segments, dtype)
        yield from _costs(host, (torch.bfloat16, torch.float32))
        try:
            with flash_attention_4(host):
                yield _exactness(host, "and a shared prompt, FlashAttention 4", shared, torch.bfloat16)
                yield from _costs(host, (torch.bfloat16,), " with FlashAttention 4")
        except NotRunError as error:
            yield not_run("3", "attention with FlashAttention 4", reason=str(error))


@contextmanager
def flash_attention_4(host: Host) -> Iterator[None]:
    """torch's varlen attention with the kernels of FlashAttention 4, which SGLang installs; raises NotRunError."""
    if not host.is_cuda:
        raise NotRunError(NEEDS_CUDA)
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise NotRunError(f"{type(error).__name__}: {error}"[:200]) from error
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def _states(host: Host, tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, H, I, D], key and value [1, H_kv, I, D]."""
    generator = torch.Generator(host.device).manual_seed(0)
    q, k, v = (
        torch.randn(1, number, tokens, HEAD_SIZE, device=host.device, generator=generator).to(dtype).requires_grad_()
        for number in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """[1, I, H, D]: each root and each branch by itself, as the definition says."""
    outs, end = [], 0
    for branch in [*(Branch(0, 0, length) for length in segments.roots), *segments.branches]:
        start, end = end, end + branch.length
        prompt = slice(branch.prompt_start, branch.prompt_start + branch.prompt_length)
        keys, values = (torch.cat([states[:, :, prompt], states[:, :, start:end]], dim=2) for states in (k, v))
        seen = torch.ones(branch.length, keys.shape[2], dtype=torch.bool, device=q.device)
        mask = seen.tril(branch.prompt_length)
        outs.append(scaled_dot_product_attention(q[:, :, start:end], keys, values, attn_mask=mask, enable_gqa=True))
    return torch.cat(outs, dim=2).transpose(1, 2)


def _exactness(host: Host, name: str, segments: Segments, dtype: torch.dtype) -> Row:
    tokens = sum(segments.roots) + sum(branch.length for branch in segments.branches)
    inputs = _states(host, tokens, (4, 2), dtype)
    q, k, v = exact = [states.detach().double().requires_grad_() for states in inputs]
    out, _ = packed_attention(nn.Module(), *inputs, None, segments=segments)
    wanted = _by_sequence(q, k, v, segments)
    weights = torch.randn(wanted.shape, device=host.device, dtype=torch.float64)
    found = [out, *torch.autograd.grad((out.double() * weights).sum(), inputs)]
    right = [wanted, *torch.autograd.grad((wanted * weights).sum(), exact)]
    with torch.no_grad():
        errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]
    bound = BOUNDS[dtype]
    return judged(
        "3",
        f"attention against float64: {name}, {str(dtype).removeprefix('torch.')}",
        expected=f"output and gradients within {bound:g} of their norm",
        measured="out {:.2g}, by q {:.2g}, k {:.2g}, v {:.2g}".format(*errors),
        ok=max(errors) <= bound,
        reason="larger than the rounding of the dtype",
    )


def _costs(host: Host, dtypes: Sequence[torch.dtype], kernel: str = "") -> Iterator[Row]:
    """Forward and backward of one layer of a 7B model in each of `dtypes`."""
    mixes = host.pick(
        {"16 of 1,024": [1024] * 16, "long-tailed": [512] * 16 + [1024] * 4 + [4096], "1 of 16,384": [16384]},
        {"4 of 32": [32] * 4, "1 of 128": [128]},
    )
    heads = host.pick((28, 4), (4, 2))
    for mix, lengths in mixes.items():
        segments = Segments(list(lengths))
        for dtype in dtypes:
            inputs = _states(host, sum(lengths), heads, dtype)

            def work(inputs: tuple[Tensor, Tensor, Tensor] = inputs, segments: Segments = segments) -> object:
                out, _ = packed_attention(nn.Module(), *inputs, None, segments=segments)
                return torch.autograd.grad(out.float().sum(), inputs)

            name = f"attention, {mix} tokens, {str(dtype).removeprefix('torch.')}{kernel}"
            seconds = host.seconds(work, repeats=3)
            yield noted("3", name, measured=f"{milliseconds(seconds)}, {gib(host.peak(work))}")
            if host.is_cuda:
                yield _kernels(name, work, flash=dtype is torch.bfloat16)
    if not host.is_cuda:
        yield not_run("3", "kernels of attention", reason=NEEDS_CUDA)


def _kernels(name: str, work: object, *, flash: bool) -> Row:
    """The kernels that took most of the time; bfloat16 must take flash attention."""
    assert callable(work)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    names = [event.key[:60] for event in events[:SHOWN_KERNELS]]
    if not flash:
        return noted("3", f"kernels of {name}", measured="; ".join(names))
    return judged(
        "3",
        f"kernels of {name}",
        expected="a flash kernel",
        measured="; ".join(names),
        ok=any("flash" in event.key.lower() for event in events),
        reason="no flash kernel ran",
    )
