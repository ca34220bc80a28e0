"""The built-in kinds of rollout engines: what `rollout=<name>` can choose. No torch, no Ray, no SGLang, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.config import EngineConfig
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from rollout.vllm.config import VLLMConfig

ENGINES: Mapping[str, type[EngineConfig]] = {kind.kind: kind for kind in (SGLangConfig, TorchEngineConfig, VLLMConfig)}
DEFAULT_ENGINE = SGLangConfig
