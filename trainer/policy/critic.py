"""The critic of a run (PPO): values before the step, then, with the returns of the step, its own optimizer steps.

    values  V before the first update, in a forward of its own    ValueModel
    GAE     returns and advantages of each token                  `trainer/policy/advantages.py`
    update  one optimizer step per pass and mini-batch, towards the returns of all response tokens

The end of a response is terminal, also where it was cut at sampling.max_new_tokens: the limit belongs to the task, and
the reward of a response that was cut has been given. What the correction weighs or rejects concerns the policy only:
values are those of the policy that sampled. Used by `trainer/policy/step.py`; every method contains
collectives, so all ranks call it together. T: packed tokens, R: response tokens, N: sequences, H: width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from algorithms.aggregate import token_coefficients
from algorithms.config import Aggregation
from algorithms.returns import Moments
from algorithms.stats import mean_or_none, merged
from algorithms.value import ValueLossOutput, ValueStats, value_loss
from trainer.batch.train_batch import MicroBatch, RankMiniBatch, pass_order, present
from trainer.config.train import TrainConfig
from trainer.config.training import Offload
from trainer.policy.model import checkpoint_activations, compile_layers, empty_causal_lm, load_rows, shard
from trainer.policy.trainable import Trainable
from trainer.scoring.forward import states_before


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
        anchor = zeros + (hidden[:1].sum(dtype=torch.float32) + values.sum()) * 0
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
    if policy.torch_compile:
        compile_layers(model.decoder)
    shard(model, model.decoder, mesh, policy.dtype, on_host=on_host, exact=[model.output])
    load_rows(model.decoder, path, device=place, prefix=f"{causal_lm.base_model_prefix}.")
    return model


class Critic:
    """Values of a run: what they were before a step, what the step makes of them."""

    def __init__(self, model: ValueModel, config: TrainConfig) -> None:
        """`model` is sharded already."""
        self._config = config
        self.trainable = Trainable(
            model, config.critic_optim, name="critic", dtype=config.policy.dtype, offload=config.policy.offload
        )

    def train(self, minis: Sequence[RankMiniBatch], *, unwhitened: Moments, step: int) -> dict[str, float | None]:
        """One optimizer step per pass and mini-batch, towards `returns` -> the metrics of the step, global: `critic/*`.

        `unwhitened`: moments of the advantages before they were whitened.
        """
        run, passes = self._config.run, self._config.batch.passes
        rate = self.trainable.set_learning_rate(step=step, num_steps=run.num_steps)
        parts: list[tuple[ValueStats, float | None, bool]] = []
        usable = minis
        for number in range(passes):
            order = pass_order(usable, number=number, seed=run.seed, step=step)
            done = [self._optimizer_step(mini) for mini in order]
            usable = [mini for mini, (_, _, taken) in zip(order, done, strict=True) if taken]
            parts += done
        stats = merged([stats for stats, _, _ in parts])
        dist.all_reduce(stats.sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(stats.maxes, op=dist.ReduceOp.MAX)
        metrics = stats.metrics(optimizer_steps=len(parts))
        norms = [norm for _, norm, _ in parts if norm is not None]
        metrics["critic/grad_norm"] = mean_or_none(sum(norms), len(norms))
        metrics["critic/skipped_steps"] = float(len(minis) * passes - sum(taken for _, _, taken in parts))
        metrics["critic/lr"] = rate
        metrics["critic/advantage_mean"] = unwhitened.mean.item()
        metrics["critic/advantage_std"] = unwhitened.variance.sqrt().item()
        return metrics

    def fill_old_values(self, minis: Sequence[RankMiniBatch]) -> None:
        """Set the values of every token with the weights at the start of the step, in a forward of their own."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    micro.old_values = self.trainable.model(micro)
        if isinstance(self.trainable.model, FSDPModule):
            self.trainable.model.reshard()  # no backward has followed: the root still holds its gathered weights

    def _optimizer_step(self, mini: RankMiniBatch) -> tuple[ValueStats, float | None, bool]:
        """Forward, backward and update of one mini-batch: statistics of this rank, gradient norm, and True if it
        was taken.

        The norm is None where float16 overflowed.
        """
        self.trainable.zero_grad()
        stats: list[ValueStats] = []
        for micro in mini.micro_batches:
            part = micro_value_loss(self._config, micro, self.trainable.model(micro), mini=mini)
            self.trainable.backward(part.loss)
            stats.append(part.stats)
        norm = self.trainable.scale_and_clip(1.0)
        overflowed = self.trainable.overflowed(norm)
        return merged(stats), None if overflowed else norm, self.trainable.update(norm)


def micro_value_loss(config: TrainConfig, micro: MicroBatch, values: Tensor, *, mini: RankMiniBatch) -> ValueLossOutput:
    """The loss of `values` [T] of one micro-batch of `mini`, a sum; its denominators are those of the mini-batch."""
    coefficients = token_coefficients(
        Aggregation.token_mean,  # as in verl and OpenRLHF
        mask=micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        num_tokens=mini.num_response_tokens,
        num_sequences=mini.num_sequences,
        fixed_length_tokens=None,
    )
    return value_loss(
        values,
        old_values=present(micro.old_values, "old_values"),
        returns=present(micro.returns, "returns"),
        response_mask=micro.response_mask,
        coefficients=coefficients,
        clip=config.critic.value_clip,
    )
