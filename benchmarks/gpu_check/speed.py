"""Check 5: tokens per second and model FLOP utilisation of training steps, what fills the time, and AdamW's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_check.host import NEEDS_CUDA, Host, gib, milliseconds
from gpu_check.memory import RECIPES, SMALL
from gpu_check.ranks import Setting, fake_rank, lone_rank, run_config, training_data
from gpu_check.rows import Row, judged, not_run, noted
from rollout.config import DType
from trainer.limits.ceilings import measure
from trainer.limits.estimate import largest_micro_batch, model_shape
from trainer.limits.floors import sequence_flops
from trainer.policy.host_copy import local_part

PROFILE_ROWS = 20
ADAMW_NUMBERS = 2**28
"""Parameters of the comparison of AdamW's kernels: a gibibyte of float32."""
COMPILED_BOUND = 1.5
"""Largest error of the gradients of compiled layers, in errors of plain layers of the same dtype."""
LONGEST = 8192
"""Cap of a micro-batch here: longer ones are a matter of memory, which check 4 measures."""


def speed(host: Host, name: str) -> Iterator[Row]:
    """Steps of the rank `name` of `memory.RECIPES`: with and without activation checkpointing, two sizes of chunk, and
    with compiled layers; what fills a step."""
    base = replace(RECIPES[name], prompt_tokens=1024, response_tokens=1024, cap=LONGEST) if host.is_cuda else SMALL
    check = f"5 {name if host.is_cuda else 'tiny, 4 ranks'}"
    found = measure(host.device.type, num_threads=host.threads)
    flops = found.flops(DType.bfloat16)
    chunks = host.pick((512, 4096), (64,))
    for every in (0, 1):
        for chunk in chunks:
            yield _step(check, host, replace(base, checkpoint_every=every), chunk, flops)
    yield from _inside(check, host, base)
    for every in (0, 1):  # last, for a compiler can fail in ways of its own
        yield _step(check, host, replace(base, checkpoint_every=every, torch_compile=True), chunks[-1], flops)
    if host.is_cuda:
        yield compiled_gradients(check, host, base)


def compiled_gradients(check: str, host: Host, base: Setting) -> Row:
    """Distance of the gradients in bfloat16 from those in float32, plain and compiled: same weights, same samples."""
    exact, plain, compiled = (
        _gradients(host, replace(base, checkpoint_every=1, dtype=dtype, torch_compile=compiles))
        for dtype, compiles in ((DType.float32, False), (DType.bfloat16, False), (DType.bfloat16, True))
    )
    usual, error = (float((found - exact).norm() / exact.norm()) for found in (plain, compiled))
    return judged(
        check,
        "gradients with policy.torch_compile against float32",
        expected=f"at most {COMPILED_BOUND:g} times as far as without: {usual:.2g}",
        measured=f"{error:.2g}",
        ok=error <= COMPILED_BOUND * usual,
        reason="larger than the rounding of bfloat16: leave policy.torch_compile off",
    )


def _gradients(host: Host, setting: Setting) -> Tensor:
    """The rank's gradients after one micro-batch, as one tensor [n] float32 on the host."""
    config = run_config(setting, host)
    groups = largest_micro_batch(config)
    mini, samples = training_data(config, groups, vocab=setting.size.vocab, num_micro_batches=1)
    with (lone_rank if setting.num_workers == 1 else fake_rank)(config, host) as worker:
        worker.train([mini], samples, 1)
        grads = [p.grad for p in worker._policy.model.parameters() if p.grad is not None]
        return torch.cat([local_part(grad).detach().flatten().float().cpu() for grad in grads])


def _step(check: str, host: Host, setting: Setting, chunk: int, flops_per_s: float) -> Row:
    """Median seconds of a step of two micro-batches; FLOPs as `trainer/limits/floors.py` counts them."""
    what = f"step, activation_checkpoint_every={setting.checkpoint_every}, head in chunks of {chunk}"
    if setting.torch_compile:
        what += ", torch_compile"
        if not host.is_cuda:
            return not_run(check, what, reason=NEEDS_CUDA)
    config = run_config(setting, host)
    groups = largest_micro_batch(config)
    mini, samples = training_data(config, groups, vocab=setting.size.vocab, num_micro_batches=2)
    try:
        with (lone_rank if setting.num_workers == 1 else fake_rank)(config, host) as worker:
            worker._policy.model.chunk_tokens = chunk
            _, first = host.once(lambda: worker.train([mini], samples, 1))
            seconds = host.seconds(lambda: worker.train([mini], samples, 1), repeats=3)
    except torch.OutOfMemoryError as error:
        return not_run(check, what, reason=f"out of memory: {error}"[:200])
    flops = 2 * config.forwards_per_token * sequence_flops(model_shape(config), groups)
    tokens = 2 * sum(group.num_tokens for group in groups)
    utilisation = flops / seconds / flops_per_s
    return noted(
        check,
        what,
        expected="estimates: 7B 33-48 %, 1.5B 25-40 %, 0.5B 15-20 % of the ceiling" if host.is_cuda else "",
        measured=f"{tokens / seconds:,.0f} tokens/s, {utilisation:.1%} of the ceiling, first step {first:.1f} s",
        reason="" if setting.num_workers == 1 else "compute of one rank; communication takes no time here",
    )


def _inside(check: str, host: Host, setting: Setting) -> Iterator[Row]:
    """The kernels of a step, written to a file, and how often the host waits for the device."""
    if not host.is_cuda:
        yield not_run(check, "kernels of a step, waits of the host", reason=NEEDS_CUDA)
        return
    config = run_config(replace(setting, checkpoint_every=1), host)
    mini, samples = training_data(config, largest_micro_batch(config), vocab=setting.size.vocab, num_micro_batches=2)
    with (lone_rank if setting.num_workers == 1 else fake_rank)(config, host) as worker:
        worker.train([mini], samples, 1)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            worker.train([mini], samples, 2)
            host.wait()
        table = recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=PROFILE_ROWS)
        file = host.out / f"profile_{setting.size.name}.txt"
        file.write_text(table, encoding="utf-8")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                worker.train([mini], samples, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        places = sorted({f"{warning.filename}:{warning.lineno}" for warning in caught})
        waits = host.out / f"waits_{setting.size.name}.txt"
        waits.write_text("\n".join(places) + "\n", encoding="utf-8")
    yield noted(check, "kernels of a step", measured=f"in {file.name}")
    yield noted(check, "waits of the host in a step", measured=f"{len(caught)} from {len(places)} lines: {waits.name}")


def adamw(host: Host) -> Iterator[Row]:
    """An update of AdamW with torch's kernels."""
    numbers = host.pick(ADAMW_NUMBERS, 2**16)
    for kernel in ("foreach", "fused"):
        parameters = [torch.nn.Parameter(torch.ones(numbers // 16, device=host.device)) for _ in range(16)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=kernel == "foreach", fused=kernel == "fused")
        optimizer.step()
        seconds = host.seconds(optimizer.step, repeats=5)
        text = f"{milliseconds(seconds)}, {gib(host.peak(optimizer.step))} for a while"
        yield noted("5 AdamW", f"{kernel}, {numbers:,} parameters", measured=text)
        del optimizer, parameters
