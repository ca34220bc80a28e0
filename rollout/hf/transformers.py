"""The names of Hugging Face transformers that Parity uses; import them from here.

transformers imports torchvision with any model class. Where torchvision is a CUDA build and torch is not (SGLang on a
CPU needs torchvision's wheel, which exists only in that form), this import fails unless a few operators are declared
first; importing through this file declares the operators.
"""

from rollout.hf.torchvision_operators import declare_torchvision_operators

declare_torchvision_operators()

from transformers import (  # noqa: E402  (the operators must be declared before)
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PretrainedConfig",
    "Qwen2Config",
    "Qwen2ForCausalLM",
]
