"""Rules across the components of a `TrainConfig`; `trainer/config/train.py` reports all broken rules together.

Rules about schedules, episodes and combinations lie beside these configs: `schedule_problems`, `episode_problems`,
`combination_problems`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from algorithms.config import Baseline, BaselineScope, Compared, Estimator, Problem, SelfNormalize
from algorithms.config.rules import as_yaml
from rollout.config import DynamicCollectConfig, Quantization
from rollout.task_config import FileDataConfig
from trainer.config.outputs import WandbMode
from trainer.config.training import Residency

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig


def checkpoint_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between checkpoints, the time limit and evaluation."""
    every, evaluated = config.checkpoint.every, config.eval.every
    if config.run.max_hours is not None and not every:
        yield config.broken(
            "run.max_hours",
            "must be null with checkpoint.every=0: the run would leave with nothing saved",
            "Set checkpoint.every.",
        )
    if config.checkpoint.best_metric is None or every < 1 or evaluated < 0:
        return
    if evaluated == 0 or math.lcm(every, evaluated) >= config.run.num_steps:
        more_evaluations = f"Set eval.every={every}, or a divisor of it."
        fewer_steps = "Set checkpoint.every below run.num_steps, or checkpoint.best_metric=null."
        yield config.broken(
            "checkpoint.best_metric",
            f"needs checkpoints that are evaluated, and with checkpoint.every={every}, eval.every={evaluated} and "
            f"run.num_steps={config.run.num_steps} none before the last is",
            more_evaluations if every < config.run.num_steps else fewer_steps,
        )


def evaluation_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between evaluation and data."""
    if config.eval.sets and not isinstance(config.data, FileDataConfig):
        yield config.broken(
            "eval.sets",
            f"must be empty with data={config.data.kind}: their files have the columns of data=file",
            "Use data=file.",
        )
    elif isinstance(config.data, FileDataConfig):
        problems = (config.data.source_problem(f"eval.sets.{name}", path) for name, path in config.eval.sets.items())
        yield from filter(None, problems)


def sharing_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules about parts of a GPU: one rank and one engine share it, and the engine may span several."""
    policy, rollout = config.policy, config.rollout
    rank, engine, tp_size = policy.gpus_per_worker, rollout.gpus_per_engine, rollout.tp_size
    sharing = f"share with policy.gpus_per_worker=0.5 rollout.gpus_per_engine={tp_size / 2:g}"
    if 0 < rollout.gpu_share < 1 and not config.shares_gpus:
        yield config.broken(
            "rollout.gpus_per_engine",
            f"must be {tp_size}, whole GPUs, with policy.gpus_per_worker={rank:g}: two engines could get the same GPU, "
            "and each would take memory as if it were alone there",
            f"Set rollout.gpus_per_engine={tp_size}, or {sharing}.",
        )
    if 0 < rank < 1 and not config.shares_gpus:
        yield config.broken(
            "policy.gpus_per_worker",
            f"must be a whole number with rollout.gpus_per_engine={engine:g}: two ranks could get the same GPU, and "
            "NCCL connects no two ranks on one",
            f"Set policy.gpus_per_worker=1, or {sharing}.",
        )
    if config.shares_gpus and abs(rank + rollout.gpu_share - 1) > 1e-6:
        each = "" if tp_size == 1 else f" / {tp_size} GPUs"
        yield config.broken(
            "policy.gpus_per_worker",
            f"must add up to 1 with rollout.gpus_per_engine ({engine:g}{each}): a GPU has one rank and one engine",
            f"Set rollout.gpus_per_engine={tp_size * (1 - rank):g}.",
        )
    if config.shares_gpus and policy.num_workers != rollout.num_engines * tp_size:
        engines = policy.num_workers // tp_size
        fewer = f"rollout.num_engines={engines}, or " if engines * tp_size == policy.num_workers else ""
        yield config.broken(
            "policy.num_workers",
            f"must be the number of the engines' GPUs ({rollout.num_engines} x {tp_size}): a shared GPU has one rank "
            "and one engine",
            f"Set {fewer}policy.num_workers={rollout.num_engines * tp_size}.",
        )
    is_shared = config.shares_gpus or (rank == 0 and engine == 0)
    if config.cluster.residency is Residency.always and not is_shared:
        yield config.broken(
            "cluster.residency",
            "must be auto or never: no rank shares a GPU with an engine",
            f"GPUs are shared with policy.gpus_per_worker=0.5 rollout.gpus_per_engine={tp_size / 2:g}.",
        )


def advantage_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between advantages, groups and the correction."""
    estimator = config.advantage.estimator
    if config.batch.group_size < config.min_group_size:
        others = ", ".join(each.name for each in Estimator if each.baseline is not Baseline.group)
        yield config.broken(
            "batch.group_size",
            f"must be >= 2 with advantage.estimator={estimator.name}: a group of one has no baseline",
            f"Vetted: 8. These need no groups: {others}.",
        )
    if config.batch.group_size < 2 and isinstance(config.collect, DynamicCollectConfig):
        yield config.broken(
            "batch.group_size",
            "must be >= 2 with collect=dynamic, which keeps groups whose rewards differ",
            "Use collect=fixed.",
        )
    if config.has_critic and config.correction.spec().reject.opsm is not None:
        yield config.broken(
            "correction.reject.opsm",
            "must be null with advantage.estimator=gae: it reads the sign of the advantage of a response, and here "
            "every token has its own",
            "Use another criterion, for example correction.reject.veto.",
        )
    if config.advantage.baseline_scope is BaselineScope.all:
        return
    spec = config.correction.spec()
    reasons = {
        "must be all: the baseline of what is kept needs pi_old before the first update, which this correction "
        "never computes": spec.compared is Compared.current,
        "must be all: a criterion of the correction reads the advantages that would depend on it": (
            spec.reject.reads_advantages()
        ),
        "has no effect: the correction rejects nothing": not spec.rejects,
    }
    for rule, broken in reasons.items():
        if broken:
            yield config.broken(
                "advantage.baseline_scope",
                rule,
                f"Set it to all, or choose another correction than {config.correction.mode} as it is set.",
            )


def critic_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between the critic, the advantage estimator and the length of the run."""
    if not config.has_critic:
        for key in config.critic.changed():
            yield config.broken(
                f"critic.{key}",
                f"has no effect with advantage.estimator={config.advantage.estimator.name}, which has no critic",
                "Use advantage.estimator=gae, or remove it.",
            )
        return
    if config.critic.warmup_rollout_steps >= config.run.num_steps:
        yield config.broken(
            "critic.warmup_rollout_steps",
            f"must be < run.num_steps ({config.run.num_steps}), or the policy never learns",
            "Vetted: 0.",
        )


def reference_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between the KL to the reference and the correction."""
    spec = config.correction.spec()
    if config.has_kl_in_reward and spec.compared is Compared.current:
        yield config.broken(
            "reference.placement",
            "must be loss: a KL in the reward needs pi_old before the first update, which "
            f"correction={config.correction.mode} as it is set never computes",
            "Set it to loss, or choose another correction.",
        )
    if config.has_reference and not config.has_kl_in_reward and spec.self_normalize is not SelfNormalize.none:
        yield config.broken(
            "reference.coef",
            "must be 0 in the loss of self-normalised weights, whose normaliser scales the whole gradient",
            "Use reference.placement=reward, or correction.self_normalize=none.",
        )


def exact_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield what breaks the promise of `rollout.exact`: that engine and trainer compute the same bits."""
    rollout, policy = config.rollout, config.policy
    if not rollout.exact:
        return
    if (rollout.gpus_per_engine > 0) is not (policy.gpus_per_worker > 0):
        rule = "must be false with GPUs on one side only: engine and trainer must compute on the same kind of device"
        remedy = "Set policy.gpus_per_worker and rollout.gpus_per_engine both to 0, or both above 0."
        yield config.broken("rollout.exact", rule, remedy)
    if rollout.quantization is not Quantization.none:
        rule = "must be none with rollout.exact=true: the engine would hold other weights than the trainer"
        yield config.broken("rollout.quantization", rule)
    if rollout.dtype is not policy.dtype:
        rule = f"must be policy.dtype ({policy.dtype.name}) with rollout.exact=true"
        yield config.broken("rollout.dtype", rule, f"Set rollout.dtype={policy.dtype.name}.")
    reasons = {
        "policy.fp32_head": (policy.fp32_head, "the engine has its head in rollout.dtype"),
        "policy.torch_compile": (policy.torch_compile, "a compiled layer adds up in an order of its own"),
        "policy.lora.merge": (
            policy.lora.rank > 0 and policy.lora.merge,
            "the engine would add the adapter to the weights, and the trainer to the outputs",
        ),
    }
    for key, (is_set, reason) in reasons.items():
        if is_set:
            yield config.broken(key, f"must be false with rollout.exact=true: {reason}")


LEAST_LORA_RATE = 1e-5
"""Learning rate below which an adapter hardly moves: verl's guide to LoRA advises ten times that of all weights."""
_IDLE: tuple[tuple[str, tuple[str, ...], Callable[[TrainConfig], bool], str], ...] = (
    ("checkpoint", ("keep", "asynchronous"), lambda c: not c.checkpoint.every, "checkpoint.every=0 saves nothing"),
    ("dump", ("keep",), lambda c: not c.dump.every, "dump.every=0 writes no dump"),
    (
        "reward", ("overlong_penalty",), lambda c: not c.reward.overlong_buffer_tokens,
        "reward.overlong_buffer_tokens=0 turns the penalty off",
    ),
    ("collect", ("max_partial_age",), lambda c: not c.collect.partial, "collect.partial=false keeps no response"),
    ("episode", ("num_workers", "timeout_s"), lambda c: c.episode.function is None, "there is no episode.function"),
    (
        "tracking", ("project", "entity", "tags", "notes"),  # a sweep sets name and group by itself
        lambda c: c.tracking.wandb is WandbMode.disabled, "tracking.wandb=disabled turns W&B off",
    ),
    (
        "policy.lora", ("alpha", "targets", "merge"), lambda c: not c.policy.lora.rank,
        "policy.lora.rank=0 trains all weights",
    ),
    ("reference", ("estimator", "placement"), lambda c: not c.reference.coef, "reference.coef=0 turns the KL off"),
)  # fmt: skip
"""(section, keys, when they are without effect, why)."""


def idle_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence about keys that are set and have no effect beside others, and about a rate that is not met."""
    for name, keys, is_idle, why in _IDLE:
        section = attrgetter(name)(config)
        default = type(section)()
        changed = [key for key in keys if getattr(section, key) != getattr(default, key)]
        if changed and is_idle(config):
            named = " and ".join(f"{name}.{key}={as_yaml(getattr(section, key))}" for key in changed)
            yield f"without effect: {named}, because {why}"
    if isinstance(config.collect, DynamicCollectConfig) and config.collect.min_prompts is not None:
        least, prompts = config.collect.min_prompts, config.batch.prompts_per_step
        if least >= prompts:
            yield f"without effect: collect.min_prompts={least}, because a step has batch.prompts_per_step={prompts}"
    if config.policy.lora.rank and config.optim.lr < LEAST_LORA_RATE:
        yield f"optim.lr={config.optim.lr:g} is low for an adapter, which takes about ten times the rate of all weights"
    warmup, steps = config.optim.warmup_rollout_steps, config.run.num_steps
    if warmup >= steps > 1:
        yield f"optim.warmup_rollout_steps={warmup} lasts until the end, run.num_steps={steps}: optim.lr is not met"
