"""TrainConfig: composes the component configs and checks the rules across components.

Imports no torch, no Ray and no SGLang, so that the command line builds and checks a config in well under a second.
`trainer/compose/hydra_session.py` registers the Hydra groups from the tables `GROUPS` and `PRESETS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from algorithms.config import (
    NOT_SET,
    AdvantageConfig,
    Aggregation,
    Baseline,
    BaselineScope,
    Checked,
    CorrectionConfig,
    Custom,
    CustomCorrection,
    CustomLoss,
    KLPlacement,
    LossConfig,
    PPOClipConfig,
    Problem,
    ReferenceKLConfig,
    TISConfig,
)
from algorithms.config import PRESETS as CORRECTION_PRESETS
from algorithms.config.combine import combination_notes, combination_problems, resolved_loss
from algorithms.config.correction import CORRECTIONS
from algorithms.config.loss import LOSSES
from rollout.config import (
    CollectConfig,
    CustomEngine,
    DynamicCollectConfig,
    EngineConfig,
    EngineUse,
    FixedCollectConfig,
    SamplingConfig,
)
from rollout.episodes.config import EpisodeConfig, episode_problems
from rollout.group.engines import DEFAULT_ENGINE, ENGINES
from rollout.task_config import ArithmeticDataConfig, CustomData, DataConfig, FileDataConfig, RewardConfig
from trainer.config.conflicts import (
    advantage_problems,
    checkpoint_problems,
    critic_problems,
    evaluation_problems,
    exact_problems,
    idle_notes,
    reference_problems,
    sharing_problems,
)
from trainer.config.guard import CustomGuard, GuardConfig, MismatchGuardConfig, NoGuardConfig, guard_problems
from trainer.config.outputs import CheckpointConfig, DumpConfig, EvalConfig, TrackingConfig
from trainer.config.schedule import (
    BoundedScheduleConfig,
    OneStepOffScheduleConfig,
    ScheduleConfig,
    SyncScheduleConfig,
    schedule_problems,
)
from trainer.config.training import (
    ArithmeticModelConfig,
    BatchConfig,
    ClusterConfig,
    CriticConfig,
    HFModelConfig,
    LRSchedule,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RunConfig,
    SmolLM2ModelConfig,
)


@dataclass(kw_only=True, slots=True)
class TrainConfig(Checked):
    """The whole configuration of a run. Components check their own rules; this class checks rules across components."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: EngineConfig = field(default_factory=DEFAULT_ENGINE)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    collect: CollectConfig = field(default_factory=FixedCollectConfig)
    schedule: ScheduleConfig = field(default_factory=SyncScheduleConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: CorrectionConfig = field(default_factory=TISConfig)
    loss: LossConfig = field(default_factory=PPOClipConfig)
    reference: ReferenceKLConfig = field(default_factory=ReferenceKLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=NoGuardConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def min_group_size(self) -> int:
        """Smallest number of samples of a trainable group."""
        return 2 if self.advantage.estimator.baseline is Baseline.group else 1

    @property
    def sources(self) -> list[str]:
        """Every source of rows that the config names."""
        named = [self.data.train_path, self.data.eval_path] if isinstance(self.data, FileDataConfig) else []
        return [*named, *self.eval.sets.values()]

    @property
    def max_staleness(self) -> int:
        """Largest lag, in rollout steps, of the weights that sampled a token behind the trained weights."""
        return self.collect.max_partial_age if self.collect.partial else self.schedule.steps_ahead

    @property
    def policy_loss(self) -> LossConfig:
        """The loss after resolution with the correction, which may replace `loss` by REINFORCE."""
        return resolved_loss(self.correction, self.loss)

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling parameters of an evaluation."""
        given = {spec.name: getattr(self.eval, spec.name, None) for spec in fields(self.sampling)}
        return replace(self.sampling, **{name: value for name, value in given.items() if value is not None})

    def notes(self) -> Iterator[str]:
        """Yield a sentence for every setting that is allowed and probably not intended."""
        yield from combination_notes(self.correction, self.loss)
        yield from idle_notes(self)

    @property
    def needs_prepass(self) -> bool:
        """True if pi_old must be known before the first update even with one optimizer step per rollout."""
        return self.advantage.baseline_scope is BaselineScope.kept or self.has_kl_in_reward

    @property
    def has_critic(self) -> bool:
        """True if a critic learns values and every token has its own advantage."""
        return self.advantage.estimator.baseline is Baseline.critic

    @property
    def critic_optim(self) -> OptimConfig:
        """AdamW of the critic: the settings of the policy with the critic's constant learning rate."""
        return replace(self.optim, lr=self.critic.lr, warmup_rollout_steps=0, schedule=LRSchedule.constant)

    def policy_learns(self, step: int) -> bool:
        """True if the policy is updated in rollout step `step` (1-based); False while only the critic learns."""
        return step > self.critic.warmup_rollout_steps

    @property
    def has_reference(self) -> bool:
        """True if the run also computes log-probs of the frozen initial policy."""
        return self.reference.coef > 0

    @property
    def sends_adapter(self) -> bool:
        """True if the engines hold the frozen weights and get an adapter; otherwise they get all weights."""
        return self.policy.lora.rank > 0 and not self.policy.lora.merge

    def engine_use(self, *, trains: bool = True) -> EngineUse:
        """What the run asks of its engines, or an evaluation, which does not train."""
        return EngineUse(
            sampling=self.sampling,
            lora_rank=self.policy.lora.rank,
            sends_adapter=self.sends_adapter,
            schedule=self.schedule.kind,
            updates_in_flight=self.schedule.updates_in_flight,
            eval_temperature=self.eval.temperature,
            trains=trains,
        )

    @property
    def has_kl_in_reward(self) -> bool:
        """True if the KL to the reference is subtracted from the reward."""
        return self.has_reference and self.reference.placement is KLPlacement.reward

    @property
    def needs_old_logprobs(self) -> bool:
        """True if pi_old is kept beside a token: it is needed before the first update, or after it."""
        steps = self.batch.optimizer_steps_per_rollout
        return self.needs_prepass or (self.correction.needs_old_logprobs and steps > 1)

    @property
    def needs_old_logprobs_pass(self) -> bool:
        """True if pi_old needs a separate forward; otherwise the detached training forward of the first pass is it."""
        return self.needs_prepass or (self.correction.needs_old_logprobs and self.batch.mini_batches > 1)

    @property
    def shares_gpus(self) -> bool:
        """True if every GPU has one rank and a part of one engine, because each reserves a fraction of it."""
        return 0 < self.policy.gpus_per_worker < 1 and 0 < self.rollout.gpu_share < 1

    @property
    def samples_per_round(self) -> int:
        """Responses of the first round of a step."""
        return math.ceil(self.collect.over_sampling * self.batch.prompts_per_step) * self.batch.group_size

    @property
    def requests_per_engine(self) -> int:
        """Most responses that an engine has at a time: a round of each step that it may sample at once."""
        return math.ceil(max(1, self.schedule.steps_ahead) * self.samples_per_round / self.rollout.num_engines)

    @property
    def num_gpus(self) -> float:
        """GPUs of ranks and engines together."""
        policy, rollout = self.policy, self.rollout
        return policy.num_workers * policy.gpus_per_worker + rollout.num_engines * rollout.gpus_per_engine

    @property
    def forwards_per_token(self) -> int:
        """Cost of training in forward equivalents: a pass 3 (forward 1, backward 2), separate pi_old 1, reference 1.

        The cost of the critic is 1 for the values before the first update, and 3 for each pass.
        """
        trained = 3 * self.batch.passes
        return trained + self.needs_old_logprobs_pass + self.has_reference + (1 + trained) * self.has_critic

    def conflicts(self) -> Iterator[Problem]:
        # The default of a group is its base class, which is no option.
        unchosen = [key for key in GROUPS if not option_name(key, type(getattr(self, key)))]
        for key in unchosen:
            yield Problem(
                key=key,
                rule="is not chosen",
                value=NOT_SET,
                remedy=f"Use one of {', '.join(f'{key}={name}' for name in GROUPS[key])}; in the defaults of a recipe "
                f"- override /{key}: {next(iter(GROUPS[key]))}.",
            )
        if isinstance(self.model, ArithmeticModelConfig) and not isinstance(
            self.data, ArithmeticDataConfig | CustomData
        ):
            yield Problem(
                key="model",
                rule="arithmetic knows only the vocabulary of data=arithmetic",
                value=self.data.kind,
                remedy="Use model=hf with data=file.",
            )
        if self.reward.overlong_buffer_tokens >= self.sampling.max_new_tokens:
            yield self.broken(
                "reward.overlong_buffer_tokens", f"must be < sampling.max_new_tokens ({self.sampling.max_new_tokens})"
            )
        prompt_tokens = self.data.max_prompt_tokens if isinstance(self.data, FileDataConfig) else 1
        if prompt_tokens + self.sampling.max_new_tokens > self.batch.max_tokens_per_microbatch:
            yield self.broken(
                "batch.max_tokens_per_microbatch",
                f"must hold a prompt ({prompt_tokens} tokens) and sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}) response tokens",
            )
        if self.batch.samples_per_step < self.policy.num_workers:
            samples = f"batch.prompts_per_step x batch.group_size = {self.batch.samples_per_step} samples per step"
            yield self.broken("policy.num_workers", f"must be <= {samples}")
        yield from self.rollout.use_problems(self.engine_use())
        yield from exact_problems(self)
        yield from sharing_problems(self)
        yield from schedule_problems(self)
        if (self.loss.aggregation is Aggregation.fixed_length) and (self.loss.fixed_length_tokens or 0) < (
            self.sampling.max_new_tokens
        ):
            yield self.broken(
                "loss.fixed_length_tokens", f"must be >= sampling.max_new_tokens ({self.sampling.max_new_tokens})"
            )
        yield from episode_problems(self.episode, self.collect)
        yield from checkpoint_problems(self)
        yield from evaluation_problems(self)
        if "correction" not in unchosen and "loss" not in unchosen:
            yield from combination_problems(self.correction, self.loss)
            yield from advantage_problems(self)
            yield from reference_problems(self)
            yield from guard_problems(self)
        yield from critic_problems(self)


GROUPS: Mapping[str, Mapping[str, type[Checked]]] = {
    "model": {"hf": HFModelConfig, "smollm2": SmolLM2ModelConfig, "arithmetic": ArithmeticModelConfig},
    "data": {"file": FileDataConfig, "arithmetic": ArithmeticDataConfig},
    "rollout": ENGINES,
    "collect": {"fixed": FixedCollectConfig, "dynamic": DynamicCollectConfig},
    "schedule": {
        "sync": SyncScheduleConfig,
        "one_step_off": OneStepOffScheduleConfig,
        "bounded": BoundedScheduleConfig,
    },
    "correction": CORRECTIONS,
    "loss": LOSSES,
    "guard": {"none": NoGuardConfig, "mismatch": MismatchGuardConfig},
}
"""Hydra group -> option -> config class: `correction=tis` chooses the class, `correction.cap=3` sets a field."""

CUSTOM: Mapping[str, type[Custom]] = {
    "data": CustomData,
    "rollout": CustomEngine,
    "correction": CustomCorrection,
    "loss": CustomLoss,
    "guard": CustomGuard,
}
"""Group -> base of the classes that `group=path/to/file.py:Name` may choose."""


def option_name(group: str, kind: type) -> str:
    """The option of `group` that chooses the class `kind`; empty if none does."""
    names = [name for name, option in GROUPS[group].items() if option is kind]
    return names[0] if names else kind.source if issubclass(kind, Custom) else ""


PRESETS: Mapping[str, Mapping[str, Checked]] = {"correction": CORRECTION_PRESETS}
"""Group -> name -> config, further options of a group: for example `correction=decoupled_token_is`."""
