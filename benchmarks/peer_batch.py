"""What the peer comparisons share: rows of the table, and one random batch in two layouts.

Peers work on padded tensors [B, L], Parity on packed ones [T]. `Batch` holds the padded form and cuts out the packed
one. B: responses, L: longest response, T: packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from algorithms.aggregate import token_coefficients
from algorithms.config import Aggregation, CorrectionConfig, LossConfig
from algorithms.correction import Correction, correct
from algorithms.loss import policy_loss
from algorithms.tokens import Tokens

AGREES = 1e-5
"""Largest relative difference that float32 rounding explains here."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    case: str
    peer: str
    """Function of the peer, and its number where it differs."""
    parity: str
    """Number of Parity, and who is right where the two differ."""
    holds: bool
    """Whether the numbers of this run bear out what the row says."""
    agrees: bool = False
    """Whether it says that the two are the same."""

    def markdown(self) -> str:
        return f"| {self.case} | {self.peer} | {self.parity} |"


def agreement(case: str, peer: str, difference: float, *, remark: str = "") -> Row:
    """The row of a comparison that should show no more than rounding."""
    holds = difference < AGREES
    said = f"{'same' if holds else 'DIFFERS'}, {shown(difference)}"
    return Row(case=case, peer=peer, parity=f"{said}; {remark}" if remark else said, holds=holds, agrees=True)


def verdicts_agree(case: str, peer: str, differing: int, *, kept: list[int], tokens: int) -> Row:
    """The row of a comparison of rejected tokens. A criterion that keeps all or nothing would agree in any case."""
    said = f"{'DIFFERS' if differing else 'same'}, {differing} different verdicts"
    return Row(
        case=case,
        peer=peer,
        parity=f"{said}; kept {', '.join(map(str, kept))} of {tokens} tokens",
        holds=not differing and all(0 < number < tokens for number in kept),
        agrees=True,
    )


def shown(difference: float) -> str:
    """One digit; an exact 0 as 0."""
    return f"{difference:.0e}" if difference else "0"


def relative_difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest |theirs - ours| over the largest |theirs|; inf where one of the two is not finite."""
    theirs, ours = theirs.detach().double(), ours.detach().double()
    if not bool(torch.isfinite(theirs).all() and torch.isfinite(ours).all()):
        return float("inf")
    largest = theirs.abs().max().item()
    return (theirs - ours).abs().max().item() / (largest or 1.0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Responses with holes (tool outputs) and right padding. Off the mask the log-probs are finite noise."""

    inside: Tensor
    """[B, L] bool, before the padding."""
    mask: Tensor
    """[B, L] bool, the policy's own tokens."""
    rollout: Tensor
    """[B, L] float32, log mu."""
    old: Tensor
    """[B, L] float32, log pi_old."""
    theta: Tensor
    """[B, L] float32, log pi_theta."""
    advantages: Tensor
    """[B, L] float32, one value per response."""

    @classmethod
    def random(cls, *, drift: float, responses: int = 96, longest: int = 40) -> Batch:
        """Half of the responses nearly without mismatch, half with a spread of 0.3 nats and a tail.

        `drift` is the spread of log pi_theta - log pi_old, nats.
        """
        shape = (responses, longest)
        lengths = torch.randint(5, longest + 1, (responses, 1))
        inside = torch.arange(longest) < lengths
        mask = inside & ((torch.rand(shape) > 0.15) | (torch.arange(longest) == 0))
        spread = torch.where(torch.arange(responses) % 2 == 0, 0.005, 0.3).unsqueeze(1)
        tail = torch.where(torch.rand(shape) < 0.03, 6.0, 1.0)
        rollout = -0.05 - 4 * torch.rand(shape)
        old = (rollout + spread * tail * torch.randn(shape)).clamp(max=-1e-3)
        theta = (old + drift * torch.randn(shape) * torch.where(torch.rand(shape) < 0.05, 5.0, 1.0)).clamp(max=-1e-3)
        # A mean away from 0 keeps the loss from cancelling, so that its relative difference means something.
        advantages = (torch.randn(responses, 1) + 0.3).expand(shape).contiguous()
        return cls(inside=inside, mask=mask, rollout=rollout, old=old, theta=theta, advantages=advantages)

    def packed(self, padded: Tensor) -> Tensor:
        """[B, L] -> [T]."""
        return padded[self.inside]

    def padded(self, packed: Tensor) -> Tensor:
        """[T] -> [B, L], 0 in the padding."""
        return packed.new_zeros(self.inside.shape).masked_scatter(self.inside, packed)

    def responses(self, which: Tensor) -> Batch:
        """The responses where `which` [B] bool is True."""
        return Batch(**{item.name: getattr(self, item.name)[which] for item in fields(self)})

    @property
    def cu_seqlens(self) -> Tensor:
        """[B+1] int32."""
        ends = self.inside.sum(1).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).int()

    @property
    def float_mask(self) -> Tensor:
        """[B, L] float32: the form in which peers take a mask."""
        return self.mask.float()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A loss and its gradient with respect to log pi_theta."""

    loss: Tensor
    """Scalar."""
    gradient: Tensor
    """[B, L]."""

    def difference(self, ours: Outcome) -> float:
        """The larger of the relative differences of loss and gradient."""
        return max(relative_difference(self.loss, ours.loss), relative_difference(self.gradient, ours.gradient))


def outcome(batch: Batch, loss_of: Callable[[Tensor], Tensor]) -> Outcome:
    """Loss and gradient of a function of log pi_theta [B, L]."""
    theta = batch.theta.clone().requires_grad_()
    loss = loss_of(theta)
    (gradient,) = torch.autograd.grad(loss, theta)
    return Outcome(loss=loss.detach(), gradient=gradient)


def coefficients(batch: Batch, config: LossConfig, *, mask: Tensor | None = None) -> Tensor:
    """[T] of one optimizer step that is this batch; `mask` [B, L] is that of the denominator."""
    mask = batch.mask if mask is None else mask
    return token_coefficients(
        config.aggregation,
        mask=batch.packed(mask),
        cu_seqlens=batch.cu_seqlens,
        num_tokens=int(mask.sum()),
        num_sequences=int(mask.any(1).sum()),
        fixed_length_tokens=config.fixed_length_tokens if config.aggregation is Aggregation.fixed_length else None,
    )


def uncorrected(batch: Batch) -> Correction:
    """Anchor pi_old, weight 1, every token kept."""
    mask = batch.packed(batch.mask)
    anchor = torch.where(mask, batch.packed(batch.old), 0.0)
    return Correction(anchor=anchor, weight=torch.ones_like(anchor), keep=mask)


def parity_outcome(
    batch: Batch, config: LossConfig, *, correction: Correction | None = None, denominator: Tensor | None = None
) -> Outcome:
    """`algorithms.loss.policy_loss` on the packed batch."""
    return outcome(
        batch,
        lambda theta: (
            policy_loss(
                batch.packed(theta),
                entropy=None,
                advantages=batch.packed(batch.advantages),
                response_mask=batch.packed(batch.mask),
                cu_seqlens=batch.cu_seqlens,
                correction=uncorrected(batch) if correction is None else correction,
                coefficients=coefficients(batch, config, mask=denominator),
                loss_config=config,
            ).loss
        ),
    )


def corrected(config: CorrectionConfig, batch: Batch, *, trainer: Tensor | None = None) -> Correction:
    """`algorithms.correction.correct` of the packed batch; `trainer` [B, L] stands for pi_old."""
    return correct(
        config.spec(),
        Tokens(
            trainer_logprobs=batch.packed(batch.old if trainer is None else trainer),
            rollout_logprobs=batch.packed(batch.rollout),
            response_mask=batch.packed(batch.mask),
            cu_seqlens=batch.cu_seqlens,
            advantages=batch.packed(batch.advantages),
        ),
    )


def applied(correction: Correction, batch: Batch) -> Tensor:
    """[B, L] weight of each token, 0 where it is rejected."""
    return batch.padded(torch.where(correction.keep, correction.weight, 0.0))
