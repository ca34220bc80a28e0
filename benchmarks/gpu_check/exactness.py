"""Check 6: what the guarantees say of bits: the same step twice, offload, activation checkpointing, packing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM

from gpu_check.host import Host
from gpu_check.models import TINY, hf_config
from gpu_check.ranks import Setting, bits, lone_rank, run_config, training_data
from gpu_check.rows import Row, judged
from rollout.config import DType
from trainer.batch.packing import chosen_sequences
from trainer.config.training import Offload
from trainer.limits.floors import GroupLengths
from trainer.policy.model import full_tensors

GROUPS = [GroupLengths(16, (48, 31, 20), 99), GroupLengths(9, (40,), 40)]
BASE = Setting(size=TINY, prompt_tokens=16, response_tokens=48, cap=256, prompts_per_step=8, group_size=4)
GRADIENT_BOUNDS = {DType.float32: 1e-4, DType.bfloat16: 3e-2}
"""Largest difference between gradients of two ways to compute the same, relative to their norm."""

FLOAT64_BOUND = 1e-4
"""Nats by which a log-prob in float32 may miss that of float64."""


def exactness(host: Host) -> Iterator[Row]:
    """Weights after a step, and gradients, of one rank on a tiny model."""
    for dtype in (DType.float32, DType.bfloat16):
        base = replace(BASE, dtype=dtype)
        weights, gradient = _after_step(host, base), _gradient(host, base, parts=1)
        others = {
            "the same again": base,
            "activation_checkpoint_every=1": replace(base, checkpoint_every=1),
            "offload=optimizer": replace(base, offload=Offload.optimizer),
        }
        for name, setting in others.items():
            yield _same_bits(f"weights after a step, {dtype.value}: {name}", weights, _after_step(host, setting))
        again = _gradient(host, replace(base, offload=Offload.parameters), parts=1)
        # AdamW runs on the host then, so its weights have other last bits; its gradients have not.
        yield _same_bits(f"gradient, {dtype.value}: offload=parameters", gradient, again)
        yield _close(f"gradient, {dtype.value}: two micro-batches against one", gradient, host, base)
    yield _against_float64(host)


def _after_step(host: Host, setting: Setting) -> torch.Tensor:
    """The rank's weights after two optimizer steps, as bytes."""
    config = run_config(setting, host)
    with lone_rank(config, host) as worker:
        mini, samples = training_data(config, GROUPS, vocab=TINY.vocab, num_micro_batches=2)
        for step in (1, 2):
            worker.train([mini], samples, step)
        return bits(worker)


def _gradient(host: Host, setting: Setting, *, parts: int) -> torch.Tensor:
    """The gradient of the sum of all log-probs of GROUPS, computed in `parts` micro-batches, as bytes of float32."""
    config = run_config(setting, host)
    with lone_rank(config, host) as worker:
        policy = worker._policy
        policy.zero_grad()
        mini, _ = training_data(config, GROUPS, vocab=TINY.vocab, num_micro_batches=1)
        whole = mini.micro_batches[0].to(worker._device)
        numbers = list(range(len(whole.sample_keys)))
        for part in range(parts):
            micro = whole if parts == 1 else chosen_sequences(whole, numbers[part::parts])
            policy.backward(policy.model(micro, temperature=1.0).logprobs.sum())
        return bits(worker, gradients=True)


def _same_bits(what: str, one: torch.Tensor, other: torch.Tensor) -> Row:
    differing = int((one.view(torch.int32) != other.view(torch.int32)).sum())
    return judged(
        "6",
        what,
        expected="0 numbers differ",
        measured=f"{differing} of {one.numel() // 4} differ",
        ok=differing == 0,
        reason="not bit for bit",
    )


def _close(what: str, gradient: torch.Tensor, host: Host, setting: Setting) -> Row:
    """A gradient as bytes against that of two micro-batches, in which no prompt is shared."""
    other = _gradient(host, setting, parts=2).view(torch.float32)
    one = gradient.view(torch.float32)
    error, bound = float((one - other).norm() / one.norm()), GRADIENT_BOUNDS[setting.dtype]
    return judged(
        "6",
        what,
        expected=f"within {bound:g} of the norm",
        measured=f"{error:.2g}",
        ok=error <= bound,
        reason="packing changes the result",
    )


def _against_float64(host: Host) -> Row:
    """Log-probs of a rank in float32 against transformers in float64 on the CPU, sequence by sequence."""
    config = run_config(replace(BASE, dtype=DType.float32), host)
    with lone_rank(config, host) as worker:
        mini, _ = training_data(config, GROUPS, vocab=TINY.vocab, num_micro_batches=1)
        micro = mini.micro_batches[0]
        [found] = worker.logprobs([micro], temperature=1.0)
        weights = {name: tensor.detach().cpu().double() for name, tensor in full_tensors(worker._policy.model)}
    model = AutoModelForCausalLM.from_config(hf_config(TINY), dtype=torch.float64).eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    bounds, worst = micro.cu_seqlens.tolist(), 0.0
    for start, end in pairwise(bounds):
        tokens, mask = micro.token_ids[start:end], micro.response_mask[start:end]
        with torch.no_grad():
            scores = torch.log_softmax(model(tokens[None]).logits[0], dim=-1)
        wanted = scores[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        worst = max(worst, float((found[start:end][1:] - wanted)[mask[1:]].abs().max()))
    return judged(
        "6",
        "log-probs of a rank in float32 against transformers in float64",
        expected=f"within {FLOAT64_BOUND:g} nats",
        measured=f"{worst:.2g} nats",
        ok=worst <= FLOAT64_BOUND,
        reason="the forward is wrong, or TF32 is on",
    )
