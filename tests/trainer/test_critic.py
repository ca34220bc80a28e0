"""The critic through a real FSDP2 rank: values, GAE worked by hand, gradients, warm-up, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_ranks import set_output, two_ranks
from policy_cases import MODES, count_forwards, full_gradient, lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from algorithms.config import (
    AdvantageConfig,
    BaselineScope,
    Estimator,
    KLEstimator,
    KLPlacement,
    MISConfig,
    ReferenceKLConfig,
    RejectConfig,
    RejectedDenominator,
    SelfNormalize,
)
from rollout.types import Sample
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import RankMiniBatch, StepSamples
from trainer.config.train import TrainConfig
from trainer.config.training import CriticConfig
from trainer.models.resolve import resolve_critic
from trainer.policy.advantages import set_token_advantages
from trainer.policy.critic import Critic, ValueModel
from trainer.policy.model import full_tensors
from trainer.policy.train_report import RankReport
from trainer.policy.worker import PolicyWorker
from trainer.rundir.run_dir import StartError
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.forward import states_before


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def ppo_config(
    model_path: Path,
    *,
    critic: CriticConfig | None = None,
    num_workers: int = 1,
    advantage: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainConfig:
    """The tiny policy with a critic; gradients are not clipped."""
    config = make_config(model_path, num_workers=num_workers)
    return replace(
        config,
        advantage=AdvantageConfig(estimator=Estimator.gae, **(advantage or {})),
        critic=critic or CriticConfig(lr=1e-2),
        optim=replace(config.optim, max_grad_norm=1e9),
        **changes,
    )


def rewarded() -> list[Sample]:
    """`make_samples` near the policy, with rewards of 0, 1 and 2; their advantages are the critic's to set."""
    samples = make_samples()
    for number, sample in enumerate(samples):
        sample.reward = float((number * 5) % 3)
        sample.rollout_logprobs = np.where(sample.response_mask, -4.2, 0.0)  # 1/64 is -4.16
    return samples


def critic_of(worker: PolicyWorker, *, weight: float = 0.0, bias: float | None = None) -> Critic:
    """The worker's critic; with a `bias` its output is bias + weight x sum of the hidden state."""
    assert worker._critic is not None
    if bias is not None:
        set_output(worker, weight=weight, bias=bias)
    return worker._critic


def minis_of(samples: Sequence[Sample], *, max_tokens: int = 1000) -> tuple[list[RankMiniBatch], Any]:
    batch = pack_samples([samples], num_ranks=1, max_tokens=max_tokens, policy_version=0)
    return batch.ranks[0], batch.samples


def by_sample(minis: Sequence[RankMiniBatch], name: str) -> dict[tuple[int, int], list[float]]:
    """A per-token tensor of the micro-batches on the response tokens, by sample."""
    found = {}
    for micro in (micro for mini in minis for micro in mini.micro_batches):
        starts = micro.cu_seqlens.tolist()
        for n, key in enumerate(micro.sample_keys):
            part = slice(starts[n], starts[n + 1])
            found[key] = getattr(micro, name)[part][micro.response_mask[part]].tolist()
    return found


def weights_of(worker: PolicyWorker) -> list[Tensor]:
    return [tensor.clone() for _, tensor in full_tensors(worker._policy.model)]


def step_of(worker: PolicyWorker, minis: Sequence[Sequence[Sample]], step: int, *, max_tokens: int = 30) -> RankReport:
    batch = pack_samples(minis, num_ranks=1, max_tokens=max_tokens, policy_version=0)
    return worker.train(batch.ranks[0], batch.samples, step)


def untied() -> ValueModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        attn_implementation=PACKED_ATTENTION,
    )
    model = ValueModel(Qwen2ForCausalLM(config))
    torch.nn.init.normal_(model.output.weight)
    return model


def test_a_sum_that_float16_cannot_hold_spoils_no_value() -> None:
    model = untied()
    model.decoder.half()
    torch.nn.init.constant_(model.decoder.norm.weight, 1e4)  # float16 holds each state: up to 1e4 sqrt(32)
    micro = micro_batch(make_samples())
    assert not torch.isfinite(states_before(model.decoder, micro).sum())
    assert torch.isfinite(model(micro)).all()


def test_a_value_is_that_of_the_state_before_its_token_and_sees_no_neighbour() -> None:
    model, samples = untied(), make_samples()[:3]
    micro = micro_batch(samples)
    with torch.no_grad():
        values = model(micro)
        alone = torch.cat([model(micro_batch([sample])) for sample in samples])
        changed = replace(micro, inputs=micro.inputs._replace(token_ids=micro.inputs.token_ids.clone()))
        first = int(micro.response_index[0])
        changed.inputs.token_ids[micro.inputs.before_response[1]] += 1  # the first token of the first response
        moved = model(changed) != values
    torch.testing.assert_close(values, alone, rtol=1e-5, atol=1e-6)
    assert values.dtype == torch.float32 and (values[~micro.response_mask] == 0).all()
    assert values[micro.response_mask].std() > 0.1
    assert not moved[first] and moved[first + 1] and not moved[int(micro.cu_seqlens[1]) :].any()


def test_the_value_model_keeps_no_head_over_the_vocabulary() -> None:
    names = {name: parameter.shape for name, parameter in untied().named_parameters()}
    assert [name for name, shape in names.items() if 64 in shape and "embed" in name] == ["decoder.embed_tokens.weight"]
    assert not any("lm_head" in name for name in names)
    assert names["output.weight"] == (1, 32)


def test_a_critic_starts_from_the_model_of_the_policy_or_from_its_own(model_path: Path, tmp_path: Path) -> None:
    other = Qwen2ForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        other.model.norm.weight.fill_(3.0)
    other.save_pretrained(tmp_path)
    for critic_path, expected in ((None, 1.0), (tmp_path, 3.0)):
        with lone_worker(ppo_config(model_path), model_path, critic_path=critic_path) as worker:
            for model, value in ((critic_of(worker).trainable.model.decoder, expected), (worker._policy.model, 1.0)):
                weights = dict(model.named_parameters())
                norm = weights.get("norm.weight", weights.get("causal_lm.model.norm.weight"))
                assert isinstance(norm, DTensor) and (norm.full_tensor() == value).all()


def test_a_critic_of_its_own_needs_the_vocabulary_of_the_policy(model_path: Path, tmp_path: Path) -> None:
    tokenizers = []
    for name, word in (("policy", "a"), ("same", "a"), ("other", "b")):
        model = Tokenizer(models.WordLevel({word: 0, "<eos>": 1}, unk_token=word))
        tokenizers.append(PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>"))
        tokenizers[-1].save_pretrained(save_policy(tmp_path / name))
    policy = tmp_path / "policy"
    assert resolve_critic(ppo_config(model_path), policy, tokenizers[0]) == policy
    config = ppo_config(model_path, critic=CriticConfig(path=str(tmp_path / "same")))
    assert resolve_critic(config, policy, tokenizers[0]) == tmp_path / "same"
    config = ppo_config(model_path, critic=CriticConfig(path=str(tmp_path / "other")))
    with pytest.raises(StartError, match=r"critic\.path must have the vocabulary of the policy"):
        resolve_critic(config, policy, tokenizers[0])


def trained(
    critic: Critic, minis: Sequence[RankMiniBatch], samples: StepSamples, *, step: int = 1
) -> dict[str, float | None]:
    """Values, advantages and the critic's optimizer steps, as `TrainingStep` has them in a rollout step."""
    critic.fill_old_values(minis)
    unwhitened = set_token_advantages(critic._config, minis, samples)
    return critic.train(minis, unwhitened=unwhitened, step=step)


def test_gae_by_hand(model_path: Path) -> None:
    # V = 0.25 everywhere: delta is (gamma - 1) V inside a response and r - V at its end.
    gamma, lam, v = 0.9, 0.5, 0.25
    config = ppo_config(model_path, advantage={"gamma": gamma, "gae_lambda": lam})
    samples = rewarded()
    minis, step_samples = minis_of(samples, max_tokens=30)
    with lone_worker(config, model_path) as worker:
        metrics = trained(critic_of(worker, bias=v), minis, step_samples)
    expected: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        assert sample.reward is not None
        advantages = [sample.reward - v]
        for _ in range(sample.num_response_tokens - 1):
            advantages.insert(0, (gamma - 1) * v + gamma * lam * advantages[0])
        expected[sample.prompt_id, sample.sample_index] = advantages
    every = torch.tensor([a for advantages in expected.values() for a in advantages], dtype=torch.float64)
    mean, std = every.mean(), every.std(unbiased=False)
    returns, whitened = by_sample(minis, "returns"), by_sample(minis, "advantages")
    for key, advantages in expected.items():
        assert returns[key] == pytest.approx([a + v for a in advantages], abs=1e-6)
        assert whitened[key] == pytest.approx([float((a - mean) / (std + 1e-6)) for a in advantages], abs=1e-5)
    assert metrics["critic/advantage_mean"] == pytest.approx(float(mean), abs=1e-6)
    assert metrics["critic/advantage_std"] == pytest.approx(float(std), abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(v) and metrics["critic/clip_frac"] == 0
    # The loss is that of V before the step: 0.5 (V - R)^2 = 0.5 A^2, mean over tokens.
    assert metrics["critic/loss"] == pytest.approx(float(every.square().mean()) / 2, rel=1e-6)


def test_a_kl_in_the_reward_is_a_cost_of_each_token(model_path: Path) -> None:
    # V = 0 and lambda = 1: the return of a token is r minus the KL of this token and of those behind it.
    reference = ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward)
    config = ppo_config(model_path, reference=reference)
    samples = rewarded()
    with lone_worker(config, model_path) as worker:
        step_of(worker, [samples], 1)  # now the policy has left the reference
        minis, step_samples = minis_of(samples)
        assert worker._reference is not None
        worker._training.fill_old_logprobs(minis)
        worker._training.fill_ref_logprobs(minis, worker._reference)
        trained(critic_of(worker, bias=0.0), minis, step_samples, step=2)
    old, ref, returns = (by_sample(minis, name) for name in ("old_logprobs", "ref_logprobs", "returns"))
    for sample in samples:
        key = sample.prompt_id, sample.sample_index
        cost = torch.tensor(old[key]) - torch.tensor(ref[key])
        assert cost.abs().max() > 1e-3 and sample.reward is not None
        expected = sample.reward - cost.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(torch.tensor(returns[key]), expected, rtol=1e-4, atol=1e-5)


def test_a_critic_that_knows_nothing_gives_the_policy_the_gradient_of_reinforce_pp(model_path: Path) -> None:
    gradients = []
    for estimator in (Estimator.gae, Estimator.reinforce_pp):
        config = replace(ppo_config(model_path), critic=CriticConfig(), advantage=AdvantageConfig(estimator=estimator))
        samples = rewarded()
        with lone_worker(config, model_path) as worker:
            step_of(worker, [samples], 1)
            gradients.append(full_gradient(worker._policy.model))
    assert gradients[0].norm() > 1e-3
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[1].norm()


def test_gradients_do_not_depend_on_packing(model_path: Path) -> None:
    config = ppo_config(model_path, critic=CriticConfig(lr=1e-2), advantage={"gamma": 0.9, "gae_lambda": 0.7})
    found = []
    for samples, max_tokens in ((rewarded(), 1000), (rewarded()[::-1], 20)):
        with lone_worker(config, model_path) as worker:
            critic_of(worker, weight=0.01, bias=0.1)
            step_of(worker, [samples], 1, max_tokens=max_tokens)
            found.append((full_gradient(critic_of(worker).trainable.model), full_gradient(worker._policy.model)))
    for one, other in zip(*found, strict=True):
        assert one.norm() > 1e-3
        assert (one - other).norm() <= 1e-6 * one.norm()


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_number_of_ranks(model_path: Path, tmp_path: Path) -> None:
    # Twice: 16 samples, and one sample, which leaves the second rank with an empty micro-batch. Tokens that are kept
    # and weights are counted over all ranks.
    correction = MISConfig(
        low=0.9, high=1.1, rejected_denominator=RejectedDenominator.drop, self_normalize=SelfNormalize.mean_one
    )
    advantage = {"gamma": 0.9, "gae_lambda": 0.7}
    config = ppo_config(model_path, num_workers=2, advantage=advantage, correction=correction)
    batches = [rewarded(), rewarded()[4:5]]
    shared = two_ranks(config, model_path, batches)
    for samples, (critic, policy) in zip(batches, shared, strict=True):
        with lone_worker(replace(config, policy=replace(config.policy, num_workers=1)), model_path) as worker:
            critic_of(worker, weight=0.01, bias=0.1)
            step_of(worker, [samples], 1, max_tokens=1000)
            for one, other in (
                (full_gradient(critic_of(worker).trainable.model), critic),
                (full_gradient(worker._policy.model), policy),
            ):
                assert one.norm() > 1e-4
                assert (one - other).norm() <= 1e-6 * one.norm()


@pytest.mark.parametrize(
    ("name", "mini_batch_prompts", "passes"), [*((name, 2, 1) for name in MODES), ("tis", None, 1), ("tis", 2, 3)]
)
def test_every_mode_trains_both_and_pays_the_planned_forwards(
    model_path: Path, name: str, mini_batch_prompts: int | None, passes: int
) -> None:
    config = ppo_config(model_path, correction=MODES[name])
    config.batch.mini_batch_prompts, config.batch.passes = mini_batch_prompts, passes
    samples = rewarded()
    minis = [samples] if mini_batch_prompts is None else [samples[:8], samples[8:]]
    with lone_worker(config, model_path) as worker:
        tokens = count_forwards(worker)
        critic_of(worker).trainable.model.register_forward_pre_hook(lambda _, args: tokens.append(args[0].num_tokens))
        report = step_of(worker, minis, 1)
    # In every pass two backwards of weight 2 each come on top of the forwards.
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    assert sum(tokens) + 4 * passes * num_tokens == config.forwards_per_token * num_tokens
    metrics = report.metrics
    assert report.num_optimizer_steps == passes * len(minis) and metrics["critic/skipped_steps"] == 0
    assert all(value is None or math.isfinite(value) for value in metrics.values()), metrics
    norms = metrics["critic/grad_norm"], metrics["optim/grad_norm"], metrics["mismatch/k3"]
    assert all(value is not None and value > 1e-3 for value in norms)


def test_a_baseline_of_what_is_kept_forgets_rejected_responses(model_path: Path) -> None:
    # The first response is vetoed: under `kept` its reward must not matter to the others.
    correction = MISConfig(low=0.01, high=100.0, reject=RejectConfig(max_k3=2.0))
    found = {}
    for scope in BaselineScope:
        for reward in (0.0, 50.0):
            samples = rewarded()
            samples[0].reward = reward
            samples[0].rollout_logprobs = np.where(samples[0].response_mask, -40.0, 0.0)
            config = ppo_config(model_path, correction=correction, advantage={"baseline_scope": scope})
            with lone_worker(config, model_path) as worker:
                step_of(worker, [samples], 1)
                found[scope, reward] = full_gradient(worker._policy.model)
    assert torch.equal(found[BaselineScope.kept, 0.0], found[BaselineScope.kept, 50.0])
    assert not torch.equal(found[BaselineScope.all, 0.0], found[BaselineScope.all, 50.0])
    assert found[BaselineScope.kept, 0.0].norm() > 1e-4


def test_values_before_the_step_are_those_before_its_first_update_and_bound_the_later_ones(model_path: Path) -> None:
    samples = rewarded()
    clipped = {}
    for clip in (1e-3, None):
        critic = CriticConfig(value_clip=clip, lr=1e-2)
        config = ppo_config(model_path, critic=critic)
        with lone_worker(config, model_path) as worker:
            batch = pack_samples([samples[:8], samples[8:]], num_ranks=1, max_tokens=30, policy_version=0)
            metrics = trained(critic_of(worker, bias=0.5), batch.ranks[0], batch.samples)
            later = by_sample(batch.ranks[0][1:], "old_values")
        assert {value for values in later.values() for value in values} == {0.5}
        clipped[clip] = metrics["critic/clip_frac"]
    assert clipped[None] == 0
    assert clipped[1e-3] is not None and clipped[1e-3] > 0.1


def test_the_critic_learns_what_the_prompt_tells_about_the_reward(model_path: Path) -> None:
    critic = CriticConfig(value_clip=None, lr=1e-2)
    config = ppo_config(model_path, critic=critic)
    config.optim.max_grad_norm = 1.0
    samples = rewarded()
    for sample in samples:
        sample.reward = float(sample.token_ids[0]) / 10
    with lone_worker(config, model_path) as worker:
        reports = [
            trained(critic_of(worker), *minis_of(samples), step=step)["critic/explained_variance"]
            for step in range(1, 31)
        ]
    assert reports[0] == pytest.approx(0.0, abs=1e-6)
    assert reports[-1] is not None and reports[-1] > 0.9


def test_while_the_critic_learns_alone_the_policy_stays_bit_for_bit(model_path: Path) -> None:
    critic = CriticConfig(warmup_rollout_steps=1, lr=1e-2)
    config = ppo_config(model_path, critic=critic)
    config.batch.mini_batch_prompts, config.batch.passes = 2, 2
    samples = rewarded()
    with lone_worker(config, model_path) as worker:
        before, tokens = weights_of(worker), count_forwards(worker)
        first = step_of(worker, [samples[:8], samples[8:]], 1)
        # Before the policy learns, later passes have nothing to do: it is scored for pi_old, and in the first pass.
        assert sum(tokens) == 2 * sum(len(sample.token_ids) for sample in samples)
        assert all(torch.equal(a, b) for a, b in zip(before, weights_of(worker), strict=True))
        assert not worker._policy._optimizer.state
        second = step_of(worker, [samples[:8], samples[8:]], 2)
        assert not any(torch.equal(a, b) for a, b in zip(before, weights_of(worker), strict=True))
    assert (first.num_optimizer_steps, second.num_optimizer_steps) == (0, 4)
    assert first.metrics["optim/lr"] is None and first.metrics["optim/grad_norm"] is None
    assert first.metrics["optim/skipped_steps"] == 0 and second.metrics["optim/lr"] == config.optim.lr
    for key in ("mismatch/k3", "mismatch/k3_floor", "loss/policy", "critic/loss", "critic/grad_norm"):
        value = first.metrics[key]
        assert value is not None and math.isfinite(value) and value != 0, key
    # The critic has moved: what it says before the second step is not what it said before the first.
    assert first.metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert abs(second.metrics["critic/explained_variance"] or 0.0) > 1e-3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_takes_back_policy_and_critic_bit_for_bit(model_path: Path, tmp_path: Path, asynchronous: bool) -> None:
    config, samples = ppo_config(model_path), rewarded()
    (tmp_path / "saved").mkdir()
    with lone_worker(config, model_path) as worker:
        step_of(worker, [samples], 1)
        worker.save_checkpoint(tmp_path / "saved", asynchronous)
        expected = step_of(worker, [samples], 2)
        third = step_of(worker, [samples], 3)
        # Written in the background, while the weights went on, it holds them as they were.
        written = worker.saved_checkpoint(True)
        assert written is not None and written.error is None
    with lone_worker(config, model_path) as worker:
        assert worker.load_checkpoint(tmp_path / "saved", 1)
        for report, step in ((expected, 2), (third, 3)):
            again = step_of(worker, [samples], step).metrics
            same = {key for key, value in report.metrics.items() if again[key] == value}
            assert {key for key in report.metrics if not key.startswith("perf/")} <= same


REFUSED = {
    "critic.value_clip has no effect with advantage.estimator=reinforce": {"critic": CriticConfig(value_clip=None)},
    "critic.lr has no effect with advantage.estimator=reinforce": {"critic": CriticConfig(lr=1e-3)},
    "critic.warmup_rollout_steps must be < run.num_steps": {
        "critic": CriticConfig(warmup_rollout_steps=40),
        "advantage": AdvantageConfig(estimator=Estimator.gae),
    },
    "correction.reject.opsm must be null with advantage.estimator=gae": {
        "correction": MISConfig(reject=RejectConfig(opsm=0.5)),
        "advantage": AdvantageConfig(estimator=Estimator.gae),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_contradictions_are_refused(model_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        replace(make_config(model_path), **REFUSED[message])


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (CriticConfig, {"value_clip": 0.0}, "value_clip must be > 0 or null"),
        (CriticConfig, {"warmup_rollout_steps": -1}, "warmup_rollout_steps must be >= 0"),
        (CriticConfig, {"lr": 0.0}, "lr must be > 0"),
        (AdvantageConfig, {"estimator": Estimator.gae, "gamma": 1.5}, r"gamma must lie in \[0, 1\]"),
        (AdvantageConfig, {"gae_lambda": 0.9}, "gae_lambda has no effect with estimator=grpo"),
    ],
)
def test_wrong_values_are_refused(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)
