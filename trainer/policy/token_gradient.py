"""The gradient of the loss by the log-probs of a few tokens, while their logits still exist.

Where the loss of a token reads no other token's log-prob of the running forward, the head need not wait for the
whole micro-batch: `trainer/policy/logprob_head.py` asks for the gradient of each chunk, turns the chunk's logits into
their gradient at once, and never computes them again. The loss itself is computed afterwards as always
(`trainer/policy/micro_loss.py`), and its backward checks that it asks for the gradient that was given here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config.combine import is_token_local
from algorithms.correction import Correction
from trainer.batch.train_batch import MicroBatch, MiniBatch, TokenScores
from trainer.config.train import TrainConfig
from trainer.policy.logprob_head import TokenGradient
from trainer.policy.micro_loss import loss_coefficients, micro_correction, weighted_loss


def token_gradient(
    config: TrainConfig, micro: MicroBatch, *, mini: MiniBatch, factor: float, known: Correction | None
) -> TokenGradient | None:
    """What the head needs to differentiate while it scores; None if it must wait for the whole micro-batch.

    `factor` multiplies the loss before its backward; `known` is the `stored_correction` of `micro`.
    """
    if micro.response_index.numel() <= config.policy.logprob_chunk_tokens:
        return None  # the head has one chunk, whose logits it keeps: it would not ask
    if not is_token_local(config.correction, config.policy_loss, is_corrected=known is not None):
        return None
    coefficients = loss_coefficients(config, micro, mini=mini, keep=None if known is None else known.keep)

    def gradient_of(chunk: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        index = micro.response_index[chunk]
        tokens = micro.select(index)
        scores = TokenScores(logprobs=logprobs.requires_grad_(), entropy=entropy.requires_grad_(), floor_delta=None)
        correction = _correction_of(config, tokens, known=known, index=index, logprobs=logprobs.detach())
        with torch.enable_grad():
            loss, _ = weighted_loss(config, tokens, scores, correction, coefficients=coefficients[index])
            by_logprobs, by_entropy = torch.autograd.grad(
                loss * factor, [scores.logprobs, scores.entropy], allow_unused=True, materialize_grads=True
            )
        return by_logprobs, by_entropy if config.loss.entropy_coef > 0 else None

    return gradient_of


def _correction_of(
    config: TrainConfig, tokens: MicroBatch, *, known: Correction | None, index: Tensor, logprobs: Tensor
) -> Correction:
    """The correction of the tokens at `index`: what is known of the whole micro-batch, or from their own log-probs."""
    if known is None:
        return micro_correction(config, tokens, logprobs)
    return Correction(anchor=known.anchor[index], weight=known.weight[index], keep=known.keep[index])
