"""Other trainers' names of options. `keys.py` reads the tables if a key does not exist."""

from __future__ import annotations

from typing import Final

from algorithms.config.advantage import Estimator

_NAMES: Final[dict[str, str]] = {
    "advantage.estimator": "verl adv_estimator; slime advantage_estimator",
    "advantage.estimator=grpo (true) or dr_grpo (false)": "verl norm_adv_by_std_in_grpo; TRL scale_rewards",
    "advantage.gae_lambda": "verl lam; others lambd",
    "batch.group_size": "verl n; slime n_samples_per_prompt; TRL num_generations",
    "batch.max_tokens_per_microbatch": (
        "verl ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu"
    ),
    "batch.mini_batch_prompts": "verl ppo_mini_batch_size",
    "batch.mini_batch_prompts: mini-batches per rollout = prompts_per_step / it": "TRL steps_per_generation",
    "batch.passes": "verl ppo_epochs; TRL num_iterations num_ppo_epochs; others update_epochs_per_batch",
    "batch.prompts_per_step": "verl train_batch_size; slime rollout_batch_size",
    "batch.prompts_per_step times batch.group_size": "TRL generation_batch_size",
    "batch.prompts_per_step, over all ranks": "TRL per_device_train_batch_size",
    "checkpoint.asynchronous": "verl async_save",
    "checkpoint.every": "verl save_freq; slime save_interval; TRL save_steps save_strategy",
    "checkpoint.keep": "verl max_ckpt_to_keep max_actor_ckpt_to_keep; TRL save_total_limit",
    "cluster.address: workers go where the Ray cluster has room": "verl nnodes",
    "cluster.residency": "verl free_cache_engine; TRL vllm_enable_sleep_mode",
    "collect=dynamic": "verl filter_groups.enable",
    "collect.max_rounds of collect=dynamic": "verl max_num_gen_batches",
    "collect.over_sampling": "slime over_sampling_batch_size",
    "collect.partial=true": "slime partial_rollout",
    "correction=bypass": "verl bypass_mode",
    "correction=ppo_is, or correction=bypass without the extra forward": "slime use_rollout_logprobs",
    "correction=tis": "slime use_tis; others enable_vllm_is_correction",
    "correction=tis (true) or correction=recompute (false)": "TRL vllm_importance_sampling_correction",
    "correction=tis (truncate) or correction=mis (mask), with correction.level": "TRL vllm_importance_sampling_mode",
    "correction=tis (truncate), correction=mis (mask) or correction.bound of correction=custom": "slime tis_mode",
    "correction=tis correction.cap": "verl tis_imp_ratio_cap",
    "correction=tis correction.level=token|sequence, or a preset such as correction=decoupled_token_is": (
        "verl rollout_is"
    ),
    "correction.cap": (
        "verl rollout_is_threshold; slime tis_clip; TRL vllm_importance_sampling_cap; others "
        "token_tis_ratio_clip_high truncated_importance_sampling_ratio behav_imp_weight_cap"
    ),
    "correction.cap with correction.level=sequence": "others sequence_tis_ratio_clip_high",
    "correction.cap, or correction.high": "slime tis_upper_bound; TRL vllm_importance_sampling_clip_max",
    "correction.level": "slime tis_level",
    "correction.level of correction=tis": "others tis_ratio_type",
    "correction.low": "slime tis_lower_bound; TRL vllm_importance_sampling_clip_min",
    "correction.reject.<criterion>": "verl rollout_rs_threshold; slime use_rs",
    "correction.reject.<criterion> of correction=mis, bypass or custom": "verl rollout_rs",
    "correction.reject.opsm": "TRL off_policy_mask_threshold",
    "correction.reject.opsm, which measures mu against pi_train instead of drift since pi_old: try 0.5": (
        "slime use_opsm opsm_delta"
    ),
    "correction.reject.token_ratio, sequence_ratio or geometric_ratio": "slime rs_level",
    "correction.reject.veto": "slime rs_veto_threshold veto",
    "correction.self_normalize=mean_one": "verl rollout_is_batch_normalize; slime tis_batch_normalize",
    "critic.lr": "others critic_learning_rate",
    "critic.value_clip": "verl cliprange_value; others value_clip",
    "critic.warmup_rollout_steps": "verl critic_warmup; others freezing_actor_steps",
    "data.answer_key": "slime label_key",
    "data.chat_template": "slime apply_chat_template",
    "data.eval_path": "verl val_files",
    "data.max_prompt_tokens": "verl max_prompt_length prompt_length",
    "data.prompt_key": "slime input_key",
    "data.train_path": "verl train_files",
    "episode.function": "verl multi_turn.enable",
    "eval.every": "verl test_freq; slime eval_interval; TRL eval_steps eval_strategy",
    "eval.samples": "verl val_kwargs.n; TRL num_generations_eval",
    "loss=gspo for the level sequence": "TRL importance_sampling_level",
    "loss=ppo_clip|gspo|cispo|reinforce|dppo_tv|dppo_kl|sapo": "verl loss_type loss_mode",
    "loss.aggregation": "verl loss_agg_mode",
    "loss.clip_high": "verl clip_ratio_high; slime eps_clip_high; TRL epsilon_high",
    "loss.clip_low": "verl clip_ratio_low; others eps_clip_low",
    "loss.clip_low and loss.clip_high": "verl clip_ratio cliprange; slime eps_clip; TRL epsilon; others clip_range",
    "loss.dual_clip": "verl clip_ratio_c; slime eps_clip_c; TRL delta",
    "loss.entropy_coef": "verl entropy_coeff",
    "model.path": "TRL model_name_or_path",
    "optim.beta2": "TRL adam_beta2",
    "optim.lr": "TRL learning_rate",
    "optim.max_grad_norm": "verl grad_clip",
    "optim.schedule": "verl warmup_style lr_scheduler_type",
    "optim.schedule=cosine or linear, which end at 0": "verl min_lr_ratio",
    "optim.warmup_rollout_steps": "verl lr_warmup_steps; TRL warmup_steps",
    "policy.activation_checkpoint_every": "slime recompute_granularity",
    "policy.activation_checkpoint_every=1": "verl enable_gradient_checkpointing; TRL gradient_checkpointing",
    "policy.dtype=bfloat16": "TRL bf16",
    "policy.dtype=float16": "TRL fp16",
    "policy.fp32_head": "TRL cast_lm_head_to_fp32",
    "policy.gpus_per_worker=0.5 rollout.gpus_per_engine=0.5": "slime colocate",
    "policy.num_workers, the ranks, and policy.gpus_per_worker": "verl n_gpus_per_node",
    "policy.offload=optimizer": "verl optimizer_offload",
    "policy.offload=parameters": "verl param_offload",
    "policy.lora.alpha": "verl lora_alpha",
    "policy.lora.rank": "verl lora_rank; TRL lora_r",
    "policy.lora.targets": "verl target_modules; TRL lora_target_modules",
    "policy.torch_compile": "verl use_torch_compile; TRL torch_compile",
    "reference.coef": "verl kl_loss_coef kl_ctrl kl_coef; TRL beta",
    "reference.estimator": "verl kl_loss_type kl_penalty",
    "reference.placement=reward": "verl use_kl_in_reward",
    "resume=auto: the newest run of the recipe, or the one in run.dir=...": "verl resume_mode resume",
    "reward.function": "verl reward_manager",
    "reward.function, which returns one score and may add named parts": "TRL multi_objective_aggregation",
    "reward.function=path.py:name": (
        "verl custom_reward_function.path custom_reward_function.name; slime custom_rm_path; TRL reward_funcs; "
        "others reward.path reward.file reward.name"
    ),
    "reward.overlong_buffer_tokens": "verl overlong_buffer.len",
    "reward.overlong_penalty": "verl overlong_buffer.penalty_factor",
    "rollout=sglang or rollout=torch": "verl rollout.name; TRL use_vllm",
    "+rollout.engine_args.chunked_prefill_size": "verl max_num_batched_tokens",
    "+rollout.engine_args.context_length": "verl max_model_len; TRL vllm_max_model_length",
    "+rollout.engine_args.disable_cuda_graph": "verl enforce_eager",
    "+rollout.engine_args.max_running_requests": "verl max_num_seqs",
    "+rollout.engine_args.mem_fraction_static": "verl gpu_memory_utilization; TRL vllm_gpu_memory_utilization",
    "+rollout.engine_args.tp_size": "verl tensor_model_parallel_size; TRL vllm_tensor_parallel_size",
    "rollout.servers": "TRL vllm_server_base_url",
    "run.dir": "verl default_local_dir; TRL output_dir",
    "run.num_steps": "verl total_training_steps; slime num_rollout; TRL max_steps",
    "run.num_steps: rollout steps, of which an epoch has prompts / batch.prompts_per_step": (
        "verl total_epochs; TRL num_train_epochs"
    ),
    "run.resume_from": "verl resume_from_path; TRL resume_from_checkpoint",
    "sampling.max_new_tokens": (
        "verl max_response_length response_length; slime rollout_max_response_len; TRL max_completion_length"
    ),
    "schedule=bounded schedule.max_staleness": "verl staleness_threshold; slime max_weight_staleness",
    "tracking.entity": "slime wandb_team; others wandb_org",
    "tracking.group": "slime wandb_group",
    "tracking.name, in W&B; run.dir names the directory": "verl experiment_name; TRL run_name; others wandb_run_name",
    "tracking.project": "verl project_name; slime wandb_project",
    "tracking.samples_per_step": "verl log_val_generations; TRL log_completions num_completions_to_print",
    "tracking.tags": "others wandb_tags",
    "tracking.wandb": "slime wandb_mode use_wandb",
    "tracking.wandb and tracking.tensorboard": "TRL report_to",
}
"""Key of Parity, or a sentence with it -> its names in other trainers: "trainer name name; trainer name".

slime stands for miles too, others for OpenRLHF, SkyRL, NeMo-RL and AReaL. A name is the last part of a key, or the last
two parts."""

_ABSENT: Final[dict[str, str]] = {
    "micro-batches are packed by tokens: batch.max_tokens_per_microbatch bounds them": (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "gradient_accumulation_steps"
    ),
    "it is always on": "use_dynamic_bsz use_remove_padding balance_batch calculate_log_probs",
    "the untouched policy is always evaluated first": "val_before_train",
    "one reward.function returns the score, and may return its parts by name": "reward_weights reward_fn_key",
    "every rollout step is logged": "logging_steps logging_strategy",
    "tracking.wandb and tracking.tensorboard choose the trackers; files are always written": "logger",
    "the policy is always sharded with FSDP2": "strategy",
    "engines and ranks always share weights; cluster.residency lets them share GPUs": "hybrid_engine",
    "training always samples; the evaluation is greedy and sampled": "do_sample",
    "reference.coef above 0 turns the KL on": "use_kl_loss",
    "optim.warmup_rollout_steps counts rollout steps": "lr_warmup_steps_ratio warmup_ratio",
    "reward.overlong_buffer_tokens penalises long responses instead": "mask_truncated_completions",
    "engines are always processes of the run, or servers that run already (rollout.servers)": "vllm_mode",
    "policy.lora.rank above 0 trains an adapter": "use_peft peft_config",
    "run.num_steps counts rollout steps, each of batch.prompts_per_step x batch.group_size samples": "total_episodes",
    "policy and critic have losses and optimizers of their own: critic.lr": "vf_coef",
    "the reference is the policy at the start of the run": "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
    "ranks are data-parallel (FSDP2) only": "ulysses_sequence_parallel_size",
    "data.on_bad_row=skip drops prompts above data.max_prompt_tokens, fail reports them": "filter_overlong_prompts",
    "data.on_bad_row=skip drops prompts above data.max_prompt_tokens; none is cut": "truncation",
    "off: it changes the sampling distribution, but not the log-prob that the engine reports": "repetition_penalty",
    "code of a model is never run": "trust_remote_code",
}
"""Sentence that says why there is no such key -> last parts of the keys in other trainers."""

BY_TRAINER: Final[dict[str, dict[str, str]]] = {
    trainer: {
        name: here
        for here, names in _NAMES.items()
        for part in names.split("; ")
        if part.startswith(f"{trainer} ")
        for name in part.split()[1:]
    }
    for trainer in ("verl", "slime", "TRL", "others")
}
"""Trainer -> its name of a key -> the key of Parity."""
RENAMED: Final = {name: here for names in BY_TRAINER.values() for name, here in names.items()}
"""Another trainer's name of a key -> the key of Parity."""
ABSENT: Final = {name: reason for reason, names in _ABSENT.items() for name in names.split()}
"""Another trainer's name of a key that has no key here -> a sentence that says why."""

SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("fp32", "fp64", "float64", "double"), ("float32",)),
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    **dict.fromkeys(("none", "null", "off", "false", "no"), ("none", "disabled", "never", "recompute")),
    **dict.fromkeys(("on", "true", "yes"), ("mismatch", "always", "online")),
    "async": ("one_step_off",),
    "low_var_kl": ("k3",),
    "mse": ("k2",),
    "kl": ("k1",),
    "seq_mean_token_sum_norm": ("fixed_length",),
    "ppo": ("ppo_clip", "gae"),
    "hf": ("torch",),
}
"""Word of other trainers for a value -> values of Parity; the first one that a key or a group accepts is meant."""


CHOICES: Final[dict[str, str]] = {
    "rollout=vllm": "There is no such engine here; rollout=sglang is the server.",
    **{
        f"loss={estimator.name}": f"It is an estimator of advantages: advantage.estimator={estimator.name}."
        for estimator in Estimator
    },
}
"""Choice of an option that other trainers have in this group -> a sentence about what there is instead."""


def renamed_hint(path: list[str]) -> str:
    """A sentence about another trainer's key, with Parity's key if there is one; empty for other keys."""
    parts = [part.replace("-", "_") for part in path]
    here = RENAMED.get(".".join(parts[-2:])) or RENAMED.get(parts[-1])
    if here is not None:
        return f"Here it is {here}."
    return f"There is none here: {ABSENT[parts[-1]]}." if parts[-1] in ABSENT else ""
