"""The critic of a run (PPO): values before the step -> advantages per token (GAE) -> its own optimizer steps.

    values  V before the first update, in a forward of its own    ValueModel
    GAE     reward on the last response token, minus the KL to the reference of each token -> returns, advantages
    whiten  advantages, over the response tokens of the step, all ranks
    update  one optimizer step per mini-batch, towards the returns of all response tokens

The end of a response is terminal, also where it was cut at sampling.max_new_tokens: the limit belongs to the task, and
the reward of a response that was cut has been given. What the correction weighs or rejects concerns the policy only:
values are those of the policy that sampled. Used by `trainer/policy/training_step.py`; every method contains
collectives, so all ranks call it together. T: packed tokens, R: response tokens, N: sequences, H: width of the decoder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from algorithms.aggregate import token_coefficients
from algorithms.config import BaselineScope
from algorithms.masked import segment_expand, segment_sum
from algorithms.returns import Moments, gae, moments, token_rewards, whiten
from algorithms.value import ValueLossOutput, ValueStats, value_loss
from rollout.hf.transformers import PreTrainedModel
from trainer.batch.train_batch import MicroBatch, MiniBatch, StepSamples
from trainer.config.components import Offload
from trainer.config.train import TrainConfig
from trainer.policy.forward import states_before
from trainer.policy.micro_loss import kept_tokens, kl_in_reward
from trainer.policy.model import checkpoint_activations, shard, shard_exactly
from trainer.policy.model_load import empty_causal_lm, load_rows
from trainer.policy.optim import learning_rate
from trainer.policy.optimizer_state import StateDict, Trainable


class ValueModel(nn.Module):
    """A decoder with one output instead of a vocabulary: the value of the state before each response token.

    The output starts at 0, a critic that knows nothing, the same on every rank. It is computed in float32 whatever
    the type of the decoder: in bfloat16 neighbouring values around 1 lie 0.008 apart.
    """

    decoder: nn.Module

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Take the decoder of `causal_lm`; its head is not kept."""
        super().__init__()
        width = causal_lm.get_output_embeddings().weight.shape[1]
        self.decoder = causal_lm.get_decoder()
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """V [T] float32 in units of reward, 0 off the response mask; index t is the state before token t."""
        hidden = states_before(self.decoder, micro)
        values = self.output(hidden.float()).squeeze(-1)
        zeros = torch.zeros(micro.token_ids.shape, dtype=torch.float32, device=values.device)
        # The sums of nothing keep an empty micro-batch attached to both parts: backward runs on every rank.
        anchor = zeros + (hidden.sum().float() + values.sum()) * 0
        return anchor.index_put((micro.response_index,), values)


def load_value_model(path: Path, mesh: DeviceMesh, config: TrainConfig, device: torch.device) -> ValueModel:
    """The critic that starts from the model in `path`, sharded like the policy; its output is a unit in float32."""
    policy, causal_lm = config.policy, empty_causal_lm(path)
    model = ValueModel(causal_lm)
    on_host = policy.offload is Offload.parameters
    place = torch.device("cpu") if on_host else device
    model.output.to(place)
    model.eval()  # no dropout, as in the policy
    checkpoint_activations(model.decoder, every=policy.activation_checkpoint_every)
    shard_exactly(model.output, mesh, on_host=on_host)
    shard(model, model.decoder, mesh, policy.dtype, on_host=on_host)
    load_rows(model.decoder, path, device=place, prefix=f"{causal_lm.base_model_prefix}.")
    return model


class Critic:
    """Values of a run: what they were before a step, what the step makes of them."""

    def __init__(self, model: ValueModel, config: TrainConfig) -> None:
        """`model` is sharded already."""
        self._config = config
        self._values = Trainable(
            model, config.critic.optim, name="critic", dtype=config.policy.dtype, offload=config.policy.offload
        )

    def train(
        self, minis: Sequence[MiniBatch], samples: StepSamples, *, step: int, config: TrainConfig | None = None
    ) -> dict[str, float | None]:
        """Set old_values, returns and advantages of every micro-batch, then take one optimizer step per mini-batch.

        Needs pi_old and the log-probs of the reference in every micro-batch if there is a KL in the reward, and
        pi_old if the baseline is that of what is kept. Returns the metrics of the step, global: `critic/*`.
        """
        started = time.perf_counter()
        micros = [micro for mini in minis for micro in mini.micro_batches]
        self._set_old_values(micros)
        spread = set_token_advantages(config or self._config, micros, samples)
        rate = learning_rate(self._config.critic.optim, step=step, num_steps=self._config.run.num_steps)
        self._values.set_learning_rate(rate)
        parts = [self._optimizer_step(mini) for mini in minis]
        stats = parts[0][0]
        for other, _, _ in parts[1:]:
            stats = stats.merge(other)
        dist.all_reduce(stats.sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(stats.maxes, op=dist.ReduceOp.MAX)
        metrics = stats.metrics(optimizer_steps=len(parts))
        norms = [norm for _, norm, _ in parts if norm is not None]
        metrics["critic/grad_norm"] = sum(norms) / len(norms) if norms else None
        metrics["critic/skipped_steps"] = float(sum(not taken for _, _, taken in parts))
        metrics["critic/lr"] = rate
        metrics["critic/advantage_mean"] = spread.mean.item()
        metrics["critic/advantage_std"] = spread.variance.sqrt().item()
        metrics["perf/worker_critic_s"] = time.perf_counter() - started
        return metrics

    def state_dict(self) -> StateDict:
        """Weights and optimizer, sharded: what a checkpoint holds."""
        return self._values.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Take what `state_dict` returned, filled by torch.distributed.checkpoint."""
        self._values.load_state_dict(state)

    def sleep(self) -> None:
        """Move everything to the host; safe to call twice."""
        self._values.sleep()

    def wake(self) -> None:
        """Move everything back; safe to call twice."""
        self._values.wake()

    def _set_old_values(self, micros: Sequence[MicroBatch]) -> None:
        """Values with the weights at the start of the step, in a forward of their own."""
        with torch.no_grad():
            for micro in micros:
                micro.old_values = self._values.model(micro)
        if isinstance(self._values.model, FSDPModule):
            self._values.model.reshard()  # no backward has followed: the root still holds its gathered weights

    def _optimizer_step(self, mini: MiniBatch) -> tuple[ValueStats, float | None, bool]:
        """Forward, backward and update of one mini-batch: statistics of this rank, gradient norm, whether taken.

        The norm is None where float16 overflowed.
        """
        self._values.zero_grad()
        stats: ValueStats | None = None
        for position, micro in enumerate(mini.micro_batches):
            part = micro_value_loss(self._config, micro, self._values.model(micro), mini=mini)
            self._values.backward(part.loss, last=position == len(mini.micro_batches) - 1)
            stats = part.stats if stats is None else stats.merge(part.stats)
        if stats is None:
            raise RuntimeError("no micro-batch was trained on")
        norm = self._values.gradient_norm(1.0)
        overflowed = self._values.overflowed(norm)
        return stats, None if overflowed else norm, self._values.update(norm)


def set_token_advantages(config: TrainConfig, micros: Sequence[MicroBatch], samples: StepSamples) -> Moments:
    """Rewards and old_values -> returns and whitened advantages of `micros`, those of this rank.

    Returns the moments of the advantages before whitening, over the tokens of all ranks that whitening counts: all
    response tokens, or with baseline_scope=kept those of the samples that the correction keeps. A collective.
    """
    spread: Moments | None = None
    for micro in micros:
        if micro.old_values is None:
            raise RuntimeError("advantages of tokens need the values before the first update")
        rewards = token_rewards(
            samples.rewards[micro.sample_numbers],
            penalty=kl_in_reward(config, micro),
            response_mask=micro.response_mask,
            cu_seqlens=micro.cu_seqlens,
        )
        micro.advantages, micro.returns = gae(
            rewards,
            micro.old_values,
            response_mask=micro.response_mask,
            cu_seqlens=micro.cu_seqlens,
            gamma=config.advantage.gamma,
            gae_lambda=config.advantage.gae_lambda,
        )
        part = moments(micro.advantages, _whitened_tokens(config, micro))
        spread = part if spread is None else spread.merge(part)
    if spread is None:
        raise RuntimeError("no micro-batch has advantages to set")
    dist.all_reduce(spread.sums, op=dist.ReduceOp.SUM)
    for micro in micros:
        micro.advantages = whiten(micro.advantages, micro.response_mask, epsilon=config.advantage.epsilon, over=spread)
    return spread


def micro_value_loss(config: TrainConfig, micro: MicroBatch, values: Tensor, *, mini: MiniBatch) -> ValueLossOutput:
    """The loss of `values` [T] of one micro-batch of `mini`, a sum; its denominators are those of the mini-batch."""
    if micro.old_values is None or micro.returns is None:
        raise RuntimeError("the critic learns from returns, which need the values before the first update")
    coefficients = token_coefficients(
        config.critic.aggregation,
        mask=micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        num_tokens=mini.num_response_tokens,
        num_sequences=mini.num_sequences,
        fixed_length_tokens=None,
    )
    return value_loss(
        values,
        old_values=micro.old_values,
        returns=micro.returns,
        response_mask=micro.response_mask,
        coefficients=coefficients,
        clip=config.critic.value_clip,
    )


def _whitened_tokens(config: TrainConfig, micro: MicroBatch) -> Tensor:
    """The tokens [T] bool whose mean and standard deviation whiten the advantages."""
    finite = micro.response_mask & torch.isfinite(micro.advantages)
    if config.advantage.baseline_scope is BaselineScope.all:
        return finite
    kept = segment_sum(kept_tokens(config, micro).double(), micro.cu_seqlens) > 0
    return finite & segment_expand(kept, micro.cu_seqlens, num_tokens=micro.num_tokens)
