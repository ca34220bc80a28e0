"""The built-in kinds of rollout engines: what `rollout=<name>` can choose. No torch, no Ray, no SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.config import EngineConfig
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig

ENGINES: Mapping[str, type[EngineConfig]] = {"sglang": SGLangConfig, "torch": TorchEngineConfig}
DEFAULT_ENGINE = SGLangConfig
