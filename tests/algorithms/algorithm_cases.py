"""Batches and configurations that the tests of `algorithms` share.

`Batch` is one packed micro-batch with everything the loss needs; `MODES` holds every correction mode at every level
and bound. T: packed tokens, N: sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.aggregate import token_coefficients
from algorithms.config import (
    PRESETS,
    Bound,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    CustomConfig,
    Level,
    LossConfig,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.combine import resolved_loss
from algorithms.correction import Correction, correct
from algorithms.loss import LossOutput, policy_loss
from algorithms.masked import segment_sum
from algorithms.tokens import Tokens

BYPASS_REINFORCE = BypassConfig(loss=BypassLoss.reinforce)
EVERY_CRITERION = RejectConfig(
    token_ratio=[0.2, 5.0],
    sequence_ratio=[0.1, 10.0],
    geometric_ratio=[0.5, 2.0],
    token_k3=1.5,
    mean_k3=1.0,
    max_k3=1.5,
    veto=1e-2,
    prob_diff=[-0.4, 0.4],
    mult_err=2.5,
    dppo_tv=0.3,
    dppo_kl=0.5,
    opsm=0.5,
)
MODES: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    **{f"vanilla_is-{level.name}": VanillaISConfig(level=level) for level in Level},
    **{f"tis-{level.name}": TISConfig(level=level) for level in Level},
    **{f"mis-{level.name}-{bound.name}": MISConfig(level=level, bound=bound) for level in Level for bound in MISBound},
    "mis-drop": MISConfig(rejected_denominator=RejectedDenominator.drop),
    "bypass": BypassConfig(),
    "bypass-reinforce": BYPASS_REINFORCE,
    "custom-clip": CustomConfig(level=Level.token, bound=Bound.clip, low=0.5, high=2.0),
    "custom-every-criterion": CustomConfig(reject=EVERY_CRITERION),
    **PRESETS,
}
"""Every mode at every level and bound, and every preset."""


def packed(*lengths: int) -> Tensor:
    """Sequence lengths -> cu_seqlens [N+1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass(kw_only=True, slots=True)
class Batch:
    """One micro-batch; index t of every [T] tensor describes token t."""

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def select(self, sequences: list[int]) -> Batch:
        """The batch that holds these sequences, in this order."""
        starts = self.cu_seqlens.tolist()
        tokens = [t for n in sequences for t in range(starts[n], starts[n + 1])]
        index = torch.tensor(tokens, dtype=torch.long)
        return Batch(
            logprobs=self.logprobs[index],
            old_logprobs=self.old_logprobs[index],
            rollout_logprobs=self.rollout_logprobs[index],
            advantages=self.advantages[index],
            entropy=self.entropy[index],
            response_mask=self.response_mask[index],
            cu_seqlens=packed(*[self.lengths[n] for n in sequences]),
        )


def random_batch(seed: int, lengths: list[int], *, noise: float, dtype: torch.dtype = torch.float32) -> Batch:
    """Log-probs around -1 whose three versions differ by `noise` nats; about one token in five is off the mask."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=dtype)

    mask = torch.rand(num_tokens, generator=generator) < 0.8
    rollout = -0.2 - 2 * torch.rand(num_tokens, generator=generator, dtype=dtype)
    old = rollout + noise * normal()
    return Batch(
        logprobs=torch.where(mask, old + 0.2 * normal(), 0.0),
        old_logprobs=torch.where(mask, old, 0.0),
        rollout_logprobs=torch.where(mask, rollout, 0.0),
        advantages=torch.where(mask, normal(), 0.0),
        entropy=torch.rand(num_tokens, generator=generator, dtype=dtype),
        response_mask=mask,
        cu_seqlens=packed(*lengths),
    )


def tokens_of(batch: Batch, advantages: Tensor | None = None) -> Tokens:
    """The record of a batch whose pi_old is known."""
    return Tokens(
        trainer_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
        advantages=advantages,
    )


def corrected(batch: Batch, config: CorrectionConfig) -> Correction:
    """`correct` on a batch whose pi_old is known."""
    return correct(config.spec(), tokens_of(batch, batch.advantages))


def by_response(values: Tensor, cu_seqlens: Tensor) -> list[float]:
    """Sum of values [T] over each response."""
    sums: list[float] = segment_sum(values.double(), cu_seqlens).tolist()
    return sums


def denominator_mask(batch: Batch, config: CorrectionConfig) -> Tensor:
    """The tokens of the denominator, [T] bool."""
    if config.spec().rejected_denominator is RejectedDenominator.drop:
        return batch.response_mask & corrected(batch, config).keep
    return batch.response_mask


def counts(batch: Batch, config: CorrectionConfig) -> tuple[int, int]:
    """Tokens and sequences of the denominator."""
    mask = denominator_mask(batch, config)
    return int(mask.sum()), int((segment_sum(mask.float(), batch.cu_seqlens) > 0).sum())


def backward(
    batch: Batch, config: CorrectionConfig, loss_config: LossConfig, *, totals: tuple[int, int]
) -> tuple[LossOutput, Tensor]:
    """Policy loss of a micro-batch and its gradient with respect to the log-probs [T]."""
    logprobs = batch.logprobs.clone().requires_grad_()
    batch = replace(batch, logprobs=logprobs)
    output = policy_loss(
        logprobs,
        entropy=batch.entropy,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
        correction=corrected(batch, config),
        coefficients=token_coefficients(
            loss_config.aggregation,
            mask=denominator_mask(batch, config),
            cu_seqlens=batch.cu_seqlens,
            num_tokens=totals[0],
            num_sequences=totals[1],
            fixed_length_tokens=loss_config.fixed_length_tokens,
        ),
        loss_config=resolved_loss(config, loss_config),
    )
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad
