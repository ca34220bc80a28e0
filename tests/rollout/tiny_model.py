"""A tiny random model in a Hugging Face directory (config.json + safetensors): seed -> directory. For engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 67
"""Not a multiple of 64: engines that pad the vocabulary must still report the right log-probs and digests."""
EOS_TOKEN_ID = 1
BIASED = ("deepseek_v3", "glm4_moe")
"""Mixtures whose router has a bias that is no parameter; their first layer has no experts."""
UNBIASED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
MIXTURES = (*BIASED, *UNBIASED)
SERVED = tuple(family for family in MIXTURES if family != "deepseek_v3")
"""Those that SGLang serves."""
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def write_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    model_type: str = "qwen2",
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 512,
    head_dim: int = 16,
    tied_experts: bool = False,
    sparse_step: int = 1,
) -> PreTrainedModel:
    """Write a seeded random model (2 layers, 4 heads, 2 KV heads) and return it.

    Args:
        directory: created if missing; receives config.json, generation_config.json and model.safetensors.
        seed: decides every weight.
        model_type: "qwen2", "qwen3" or "llama", or one of MIXTURES (8 experts, 2 for a token).
        tied: whether lm_head shares the embedding; a mixture has a head of its own.
        dtype: type in which the weights are stored.
        vocab_size: rows of the embedding.
        max_positions: longest sum of prompt and response.
        head_dim: numbers of each of the 4 heads; vLLM serves no smaller ones than 32.
        sparse_step: of a Qwen mixture every so-manieth layer has experts, the others have none.
        tied_experts: whether half of the experts of a mixture have the same score, for every token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {
        "num_local_experts": NUM_EXPERTS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "norm_topk_prob": model_type != "olmoe",  # as SGLang has it
        "moe_intermediate_size": 64,
        # Only where the family has one: vLLM makes one in every Qwen mixture whose config names a size.
        **({"shared_expert_intermediate_size": 64} if model_type == "qwen2_moe" else {}),
        "decoder_sparse_step": sparse_step,
    }
    if model_type in BIASED:
        experts |= {
            "n_routed_experts": NUM_EXPERTS,
            "n_group": 2 if model_type == "deepseek_v3" else 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        }
    if model_type == "deepseek_v3":
        sizes = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
        experts |= {"q_lora_rank": 32, "kv_lora_rank": 16, **sizes}
    config = AutoConfig.for_model(
        model_type,
        **(experts if model_type in MIXTURES else {}),
        vocab_size=vocab_size,
        hidden_size=4 * head_dim,
        intermediate_size=128,
        num_hidden_layers=3 if model_type in BIASED else 2,
        num_attention_heads=4,
        num_key_value_heads=4 if model_type in ("olmoe", "deepseek_v3") else 2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=None,
        tie_word_embeddings=tied and model_type not in MIXTURES,
        # Wide weights: a peaked next-token law, so that a wrong weight or temperature changes log-probs visibly.
        initializer_range=0.12,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            # Biases start at 0 and norms at 1: make them tell a lost tensor from a loaded one.
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
        if tied_experts and name.endswith("mlp.gate.weight"):
            parameter.data[: NUM_EXPERTS // 2] = parameter.data[0]
    model = model.to(dtype).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # float32 in every model
            module.e_score_correction_bias = torch.nn.Buffer(torch.randn(NUM_EXPERTS) * 0.3)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    return model


def experts_chosen(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[T, L, K] the experts of every token in every layer of a mixture, in one forward of transformers."""
    from rollout.model.router_tap import RouterTap
    from rollout.weights.experts import mixture_of

    chosen: list[torch.Tensor] = []

    def record(experts: torch.Tensor) -> torch.Tensor:
        chosen.append(experts)
        return experts

    mixture = mixture_of(model.config.to_dict())
    assert mixture is not None
    with torch.no_grad(), RouterTap(mixture, record):
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return torch.stack(chosen, dim=1)
