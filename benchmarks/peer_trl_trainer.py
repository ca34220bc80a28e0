"""TRL's GRPO trainer without a model: its loss, and its step after generation.

TRL has no functions for these, only methods of its trainer. They are called unbound, on an object that has what they
read and gives the log-probs of the batch in place of a model's.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from peer_batch import Batch, Outcome, outcome
from torch import Tensor
from trl import GRPOTrainer

HORIZON = 64
"""Stands for max_completion_length."""


class _Model(torch.nn.Module):
    """In training mode, and nothing else."""

    is_gradient_checkpointing = False


def _trainer(**settings: Any) -> Any:
    """What the methods read of a trainer; the values are TRL's defaults where it has them."""

    def alone(tensor: Tensor, reduction: str = "") -> Tensor:
        return tensor

    common: dict[str, Any] = {
        "model": _Model(),
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, process_index=0, gather=alone, reduce=alone
        ),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": HORIZON,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    args = {
        "delta": None,
        "use_bias_correction_kl": True,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing_kwargs": None,
        "per_device_train_batch_size": 1,
    }
    args |= {name: settings.pop(name) for name in list(settings) if name in args}
    return SimpleNamespace(**(common | settings), args=SimpleNamespace(**args))


def trl_outcome(
    batch: Batch, *, reference: Tensor | None = None, ratio: Tensor | None = None, **settings: Any
) -> Outcome:
    """TRL's loss with its gradient; `reference` [B, L] is log pi_ref, read with beta > 0, `ratio` [B, L] or [B, 1] the
    weight against the engine, read with use_vllm."""
    mask = batch.mask.long()
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old,
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": ratio,
    }

    def loss_of(theta: Tensor) -> Tensor:
        trainer = _trainer(**settings)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theta, torch.zeros_like(theta), None)
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

    return outcome(batch, loss_of)


def score(batch: Batch, rewards: Tensor, *, group: int = 8, **settings: Any) -> dict[str, Tensor]:
    """TRL's step after generation; the engine's log-probs are those of the batch."""
    responses, longest = batch.mask.shape
    ids = [[1] * longest] * responses
    generated: tuple[Any, ...] = (
        [[1]] * responses,
        ids,
        batch.mask.long().tolist(),
        ids,
        batch.rollout.tolist(),
        {},
        None,
        None,
    )
    defaults = {
        "scale_rewards": "group",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 3.0,
    }
    trainer = _trainer(
        use_vllm=True,
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=group,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        reward_funcs=[None],
        log_multimodal=False,
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        **(defaults | settings),
    )
    trainer._generate = lambda prompts: generated
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.old, None, None)
    trainer._calculate_rewards = lambda *_: rewards.unsqueeze(1)
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * responses)
