"""Other trainers' names of options, and former names of Parity. `keys.py` reads the table if a key does not exist."""

from __future__ import annotations

from typing import Final

_UNTRUNCATED = "off: truncated sampling makes the engine's log-prob wrong by the log of the kept mass"

EVERYWHERE: Final[dict[str, str]] = {
    "top_p": _UNTRUNCATED,
    "top_k": _UNTRUNCATED,
    "min_p": _UNTRUNCATED,
}

VERL: Final[dict[str, str]] = {
    "rollout_is": "correction=tis correction.level=token|sequence, or a preset such as correction=decoupled_token_is",
    "rollout_is_threshold": "correction.cap",
    "rollout_is_batch_normalize": "correction.self_normalize=mean_one",
    "rollout_rs": "correction.reject.<criterion> of correction=mis, bypass or custom",
    "rollout_rs_threshold": "correction.reject.<criterion>",
    "bypass_mode": "correction=bypass",
    "tis_imp_ratio_cap": "correction=tis correction.cap",
    "loss_type": "loss=ppo_clip|gspo|cispo|reinforce|dppo_tv|dppo_kl|sapo",
    "loss_mode": "loss=ppo_clip|gspo|cispo|reinforce|dppo_tv|dppo_kl|sapo",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregation",
    "adv_estimator": "advantage.estimator",
    "entropy_coeff": "loss.entropy_coef",
    "kl_loss_coef": "reference.coef",
    "lam": "advantage.gae_lambda",
    "cliprange_value": "critic.value_clip",
    "critic_warmup": "critic.warmup_rollout_steps",
    "kl_loss_type": "reference.estimator",
    "use_kl_in_reward": "reference.placement=reward",
    "kl_ctrl": "reference.coef",
    "enable_gradient_checkpointing": "policy.activation_checkpoint_every=1",
    "param_offload": "policy.offload=parameters",
    "optimizer_offload": "policy.offload=optimizer",
    "free_cache_engine": "cluster.residency",
    "save_freq": "checkpoint.every",
    "max_ckpt_to_keep": "checkpoint.keep",
    "resume_mode": "resume=auto: the newest run of the recipe, or the one in run.dir=...",
    "resume": "resume=auto: the newest run of the recipe, or the one in run.dir=...",
    "staleness_threshold": "schedule=bounded schedule.max_staleness",
    "train_files": "data.train_path",
    "val_files": "data.eval_path",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "train_batch_size": "batch.prompts_per_step",
    "ppo_mini_batch_size": "batch.mini_batch_prompts",
    "total_training_steps": "run.num_steps",
    "total_epochs": "run.num_steps: rollout steps, of which an epoch has prompts / batch.prompts_per_step",
    "n": "batch.group_size",
    "val_kwargs.n": "eval.samples",
    "test_freq": "eval.every",
}
"""Key of verl -> key of Parity: algorithm.rollout_correction.*, actor.* and others."""

SLIME: Final[dict[str, str]] = {
    "partial_rollout": "collect.partial=true",
    "over_sampling_batch_size": "collect.over_sampling",
    "max_weight_staleness": "schedule=bounded schedule.max_staleness",
    "recompute_granularity": "policy.activation_checkpoint_every",
    "colocate": "policy.gpus_per_worker=0.5 rollout.gpus_per_engine=0.5",
    "save_interval": "checkpoint.every",
    "use_tis": "correction=tis",
    "tis_clip": "correction.cap",
    "tis_mode": "correction=tis (truncate), correction=mis (mask) or correction.bound of correction=custom",
    "tis_level": "correction.level",
    "tis_lower_bound": "correction.low",
    "tis_upper_bound": "correction.cap, or correction.high",
    "tis_batch_normalize": "correction.self_normalize=mean_one",
    "use_rs": "correction.reject.<criterion>",
    "rs_level": "correction.reject.token_ratio, sequence_ratio or geometric_ratio",
    "rs_veto_threshold": "correction.reject.veto",
    "veto": "correction.reject.veto",
    "use_rollout_logprobs": "correction=ppo_is, or correction=bypass without the extra forward",
    "use_opsm": "correction.reject.opsm, which measures mu against pi_train instead of drift since pi_old: try 0.5",
    "opsm_delta": "correction.reject.opsm, which measures mu against pi_train instead of drift since pi_old: try 0.5",
    "eps_clip": "loss.clip_low and loss.clip_high",
    "eps_clip_high": "loss.clip_high",
    "eps_clip_c": "loss.dual_clip",
    "advantage_estimator": "advantage.estimator",
    "n_samples_per_prompt": "batch.group_size",
    "rollout_batch_size": "batch.prompts_per_step",
    "rollout_max_response_len": "sampling.max_new_tokens",
    "num_rollout": "run.num_steps",
    "eval_interval": "eval.every",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "apply_chat_template": "data.chat_template",
    "custom_rm_path": "reward.function=path.py:name",
}
"""Key of miles and slime -> key of Parity."""

TRL: Final[dict[str, str]] = {
    "vllm_importance_sampling_correction": "correction=tis (true) or correction=recompute (false)",
    "vllm_importance_sampling_mode": "correction=tis (truncate) or correction=mis (mask), with correction.level",
    "vllm_importance_sampling_cap": "correction.cap",
    "vllm_importance_sampling_clip_max": "correction.cap, or correction.high",
    "vllm_importance_sampling_clip_min": "correction.low",
    "importance_sampling_level": "loss=gspo for the level sequence",
    "epsilon": "loss.clip_low and loss.clip_high",
    "off_policy_mask_threshold": "correction.reject.opsm",
    "epsilon_high": "loss.clip_high",
    "num_generations": "batch.group_size",
    "learning_rate": "optim.lr",
    "max_completion_length": "sampling.max_new_tokens",
    "max_steps": "run.num_steps",
    "eval_steps": "eval.every",
    "reward_funcs": "reward.function=path.py:name",
    "gradient_checkpointing": "policy.activation_checkpoint_every=1",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "resume=auto: the newest run of the recipe, or the one in run.dir=...",
    "beta": "reference.coef",
    "scale_rewards": "advantage.estimator=grpo (true) or dr_grpo (false)",
}

OTHERS: Final[dict[str, str]] = {
    "enable_vllm_is_correction": "correction=tis",
    "tis_ratio_type": "correction.level of correction=tis",
    "token_tis_ratio_clip_high": "correction.cap",
    "sequence_tis_ratio_clip_high": "correction.cap with correction.level=sequence",
    "truncated_importance_sampling_ratio": "correction.cap",
    "behav_imp_weight_cap": "correction.cap",
    "eps_clip_low": "loss.clip_low",
    "lambd": "advantage.gae_lambda",
    "value_clip": "critic.value_clip",
    "critic_learning_rate": "critic.lr",
    "freezing_actor_steps": "critic.warmup_rollout_steps",
}
"""Key of OpenRLHF, SkyRL, NeMo-RL and AReaL -> key of Parity."""

_CONSTANT = "a constant now: leave the key out"
_NO_CRITERION = "no criterion any more: docs/from_other_trainers.md says what to use"

FORMER: Final[dict[str, str]] = {
    "advantage.epsilon": _CONSTANT,
    "cluster.placement_timeout_s": _CONSTANT,
    "critic.aggregation": _CONSTANT,
    "data.keep_eval_duplicates": _CONSTANT,
    "data.max_operand": _CONSTANT,
    "data.num_heldout": _CONSTANT,
    "data.seed": _CONSTANT,
    "ess.trip": "guard.min_ess",
    "ess.steps": "guard.steps",
    "k3.trip": "guard.max_k3",
    "k3.steps": "guard.steps",
    "khat.trip": "guard.max_khat",
    "khat.steps": "guard.steps",
    "loss.ratio_cap": _CONSTANT,
    "loss.temperature_negative": _CONSTANT,
    "loss.temperature_positive": _CONSTANT,
    "model.seed": _CONSTANT,
    "model.wrong_fraction": _CONSTANT,
    "policy.cpus_per_worker": _CONSTANT,
    "policy.logprob_chunk_tokens": _CONSTANT,
    "policy.sync_bucket_mib": _CONSTANT,
    "policy.threads_per_worker": _CONSTANT,
    "reject.max_k2": _NO_CRITERION,
    "reject.mean_k2": _NO_CRITERION,
    "reject.sum_k2": _NO_CRITERION,
    "reject.sum_k3": _NO_CRITERION,
    "reject.token_k2": _NO_CRITERION,
    "reward.format_score": _CONSTANT,
    "reward.max_error_fraction": _CONSTANT,
    "reward.memory_gib": _CONSTANT,
    "rollout.cpus_per_engine": _CONSTANT,
    "tracking.token_samples_per_step": _CONSTANT,
    "tracking.wandb_timeout_s": _CONSTANT,
}
"""Last two parts of a key that Parity had until 2026-11-23 -> what took its place. A config.yaml may hold it."""

RENAMED: Final[dict[str, str]] = EVERYWHERE | VERL | SLIME | TRL | OTHERS | FORMER
"""Last part, or last two parts, of another trainer's or a former key -> the key of Parity."""


def renamed_hint(path: list[str]) -> str:
    """A sentence with Parity's name of another trainer's or a former key; empty for all other keys."""
    parts = [part.replace("-", "_") for part in path]
    here = RENAMED.get(".".join(parts[-2:])) or RENAMED.get(parts[-1])
    return "" if here is None else f"Here it is {here}."
