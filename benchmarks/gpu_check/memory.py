"""Check 4: the memory of one rank among many against the memory plan, with one and with four micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu_check.host import Host, gib
from gpu_check.models import QWEN_05B, QWEN_7B, QWEN_15B, QWEN_32B, TINY
from gpu_check.ranks import Setting, fake_rank, lone_rank, run_config, training_data, unsharded_gradient_bytes
from gpu_check.rows import Row, judged, noted
from trainer.config.train import TrainConfig
from trainer.limits.device_memory import read_peak, start_peak
from trainer.limits.estimate import largest_micro_batch
from trainer.limits.floors import GroupLengths
from trainer.limits.memory_plan import memory_plan
from trainer.policy.worker import PolicyWorker
from trainer.text.plain import counted

PLAN_TOLERANCE = 0.10
"""Share by which a peak may differ from the memory plan."""
MICRO_BATCHES = (1, 4)

RECIPES = {
    "0.5B, 8 ranks": Setting(
        size=QWEN_05B, prompt_tokens=1024, response_tokens=1024, cap=8192, num_workers=8, mini_batch_prompts=64
    ),
    "7B, 8 ranks": Setting(
        size=QWEN_7B,
        prompt_tokens=2048,
        response_tokens=20480,
        cap=22528,
        num_workers=8,
        group_size=16,
        mini_batch_prompts=32,
        checkpoint_every=1,
    ),
    "32B, 64 ranks": Setting(
        size=QWEN_32B,
        prompt_tokens=2048,
        response_tokens=20480,
        cap=22528,
        num_workers=64,
        prompts_per_step=512,
        group_size=16,
        mini_batch_prompts=32,
        checkpoint_every=1,
    ),
    "1.5B, 1 rank": Setting(size=QWEN_15B, prompt_tokens=1024, response_tokens=1024, cap=8192, checkpoint_every=1),
}
"""Ranks on a GPU: the numbers of gsm8k_grpo_qwen2.5_0.5b (on 8 ranks), dapo_qwen2.5_7b and dapo_qwen2.5_32b, and one
rank that is not a fake."""
SMALL = Setting(
    size=TINY, prompt_tokens=16, response_tokens=48, cap=128, num_workers=4, prompts_per_step=8, group_size=2
)
"""The rank on a CPU."""


def rank_memory(host: Host, name: str) -> Iterator[Row]:
    """Memory of the rank `name` of RECIPES; on a CPU of a tiny one."""
    setting = RECIPES[name] if host.is_cuda else SMALL
    config = run_config(setting, host)
    check = f"4 {name if host.is_cuda else 'tiny, 4 ranks'}"
    groups = largest_micro_batch(config)
    started = time.perf_counter()
    with (lone_rank if config.policy.num_workers == 1 else fake_rank)(config, host) as worker:
        host.wait()
        took = time.perf_counter() - started
        held = start_peak(host.device)
        yield noted(check, "setup(): seconds, memory held", measured=f"{took:.1f} s, {gib(held)}")
        yield _dry_run(check, worker, groups, host)
        yield _kept_gradients(check, worker, config, groups, vocab=setting.size.vocab)
        mini, samples = training_data(config, groups, vocab=setting.size.vocab, num_micro_batches=1)
        worker.train([mini], samples, 1)  # makes the states of the optimizer
        for number in MICRO_BATCHES:
            yield _peak(check, worker, config, groups, vocab=setting.size.vocab, number=number, host=host)
        del worker


def _dry_run(check: str, worker: PolicyWorker, groups: list[GroupLengths], host: Host) -> Row:
    """The trial that every run starts with, against what it says was planned."""
    worker.dry_run(groups)  # the first one also loads kernels
    report = worker.dry_run(groups)
    planned = report.planned_bytes or 0
    measured = f"{gib(report.peak_bytes)} of {gib(planned)} planned, {report.seconds:.2f} s"
    if not host.is_cuda:
        reason = "resident memory of a small process says nothing about a plan of tensors"
        return noted(check, "dry run: peak above weights", expected="the plan", measured=measured, reason=reason)
    return judged(
        check,
        "dry run: peak above weights",
        expected="at most 10 % above the plan",
        measured=measured,
        ok=report.peak_bytes <= planned * (1 + PLAN_TOLERANCE),
        reason="the plan promises less",
    )


def _kept_gradients(
    check: str, worker: PolicyWorker, config: TrainConfig, groups: list[GroupLengths], *, vocab: int
) -> Row:
    """Whole gradients that a rank keeps after a micro-batch; the plan has none."""
    policy = worker._policy
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    mini, _ = training_data(config, groups, vocab=vocab, num_micro_batches=1)
    micro = mini.micro_batches[0].to(worker._device)
    policy.zero_grad()
    policy.backward(policy.model(micro, temperature=1.0).logprobs.sum())
    kept = unsharded_gradient_bytes(worker) / parameters
    policy.zero_grad()
    return judged(
        check,
        "whole gradients kept between micro-batches, bytes per parameter",
        expected="0",
        measured=f"{kept:.2f}",
        ok=kept == 0,
        reason="every rank holds a float32 gradient of the whole model",
    )


def _peak(
    check: str,
    worker: PolicyWorker,
    config: TrainConfig,
    groups: list[GroupLengths],
    *,
    vocab: int,
    number: int,
    host: Host,
) -> Row:
    """The highest memory of an optimizer step, optimizer included."""
    mini, samples = training_data(config, groups, vocab=vocab, num_micro_batches=number)
    start_peak(host.device)
    report = worker.train([mini], samples, 2)
    peak = read_peak(host.device) or 0
    planned = memory_plan(config, device_bytes=None).rank
    wanted = planned.on_device if planned is not None else 0
    what = f"train with {counted(number, 'micro-batch', 'micro-batches')}: peak of the rank"
    measured = f"{gib(peak)} of {gib(wanted)} planned, {report.metrics['perf/worker_train_s'] or 0:.2f} s"
    if report.num_optimizer_steps != 1:
        return judged(check, what, expected="one optimizer step", measured="none", ok=False, reason="it was skipped")
    if not host.is_cuda:
        reason = "resident memory of a small process says nothing about a plan of tensors"
        return noted(check, what, expected="the plan", measured=measured, reason=reason)
    return judged(
        check,
        what,
        expected="within 10 % of the plan",
        measured=measured,
        ok=abs(peak - wanted) <= PLAN_TOLERANCE * wanted,
        reason="the plan is wrong",
    )
