"""Checks and settings for starting an SGLang server: the installed release, its environment, its arguments.

`rollout/sglang/engine.py` calls these functions; `rollout/sglang/server.py` starts the server.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import Quantization, Routing
from rollout.engine import EngineError, EngineNeeds
from rollout.processes.gpu_host import listed
from rollout.sglang import routed_server
from rollout.sglang.adapter_server import ACTIVE, NUM_SLOTS
from rollout.sglang.cpu.platform import ATTENTION_BACKEND, EXACT_ATTENTION_BACKEND, EXACT_VARIABLE, PLATFORM_NAME
from rollout.sglang.cuda_host import cuda_environment, engine_lacks
from rollout.sglang.loader import LOADER
from rollout.sglang.options import SGLANG_REMEDY, SLEEPING_SHARE
from rollout.sglang.quantized import quantized_server_args
from rollout.types import AdapterSpec
from rollout.weights.adapter import last_part

if TYPE_CHECKING:
    from rollout.sglang.config import SGLangConfig

MINIMUM_SGLANG = (0, 5, 23)
"""Minimum release; earlier releases execute code sent to their weight-update routes."""

SERVER_KEEP_ALIVE_S = 3600
"""Seconds after which a server closes an idle connection: clients close theirs long before, also on a slow machine."""

CPU_SERVER_ARGS: dict[str, Any] = {
    "attention_backend": ATTENTION_BACKEND,
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "lora_backend": "torch_native",
    # Without a limit SGLang takes most of the machine's memory for the cache: 65536 tokens of a 0.5B model are 0.8 GB
    # in bf16.
    "max_total_tokens": 65536,
    "max_running_requests": 512,
}
"""Default arguments on a CPU; rollout.engine_args override them."""

EXACT_SERVER_ARGS: dict[str, Any] = {
    "attention_backend": EXACT_ATTENTION_BACKEND,
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}
"""Arguments with rollout.exact=true: a graph could not read lengths on the host."""

RESTARTED_SHARE = 0.95
"""Share of a GPU for weights and cache of a server that is started anew beside a rank, its cache limited in tokens."""


DEFAULT_GRAPH_WIDTH = 256
"""Sequences of SGLang's widest decode graph on an 80 GB GPU. A wider batch is decoded kernel by kernel."""
MAX_GRAPH_WIDTH = 1024
"""The widest decode graph that Parity asks for; it takes about 1 GiB."""


def check_release(version: str) -> None:
    """Raise EngineError if this release of SGLang must not be used."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < MINIMUM_SGLANG:
        raise EngineError(
            f"SGLang {version} is too old; the floor is {'.'.join(map(str, MINIMUM_SGLANG))} "
            "(earlier releases have remote-code-execution holes)"
        )


def check_installation(*, device: str, sleeps: bool = False) -> str:
    """Version of the installed SGLang; raises EngineError if it is missing, too old, or cannot run here.

    `sleeps` is True for an engine on a GPU that frees its memory between rollouts.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(f"rollout=sglang needs SGLang: {SGLANG_REMEDY}") from error
    check_release(version)
    platforms = importlib.metadata.entry_points(group="sglang.srt.platforms")
    if device == "cpu" and PLATFORM_NAME not in platforms.names:
        raise EngineError(
            "SGLang on a CPU needs Parity's platform plug-in, which is registered when Parity is installed: "
            "pip install -e ."
        )
    if device == "cuda" and (lacks := engine_lacks(sleeps=sleeps)):
        raise EngineError(f"SGLang {version} cannot run on a GPU here: {listed(lacks)}")
    return version


def server_environment(
    config: SGLangConfig,
    *,
    device: str,
    num_threads: int | None,
    needs: EngineNeeds,
    quantization: Quantization = Quantization.none,
) -> dict[str, str]:
    """Environment variables of the server, in addition to this process's environment."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
        "TOKENIZERS_PARALLELISM": "false",
        # FastAPI prints dozens of warnings about SGLang's route names.
        "PYTHONWARNINGS": "ignore::UserWarning",
        ACTIVE: "0" if needs.adapter is None else "1",
        routed_server.ACTIVE: needs.routes.name,
    }
    if device == "cpu":
        environment |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        # Threads that spin while waiting take the cores from the trainer: on a busy machine decoding with two threads
        # was six times slower with spinning.
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        if config.tp_size > 1:
            # SGLang wants a NUMA node or a list of cores for every rank; each rank gets all cores of this process.
            cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * config.tp_size)
    if device == "cuda":
        environment |= cuda_environment(sleeps=needs.sleeps) | _gpu_variables(config, needs, quantization)
    if num_threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    return environment


def _gpu_variables(config: SGLangConfig, needs: EngineNeeds, quantization: Quantization) -> dict[str, str]:
    """SGLang's own variables of a server on a GPU. Not yet run on a GPU."""
    variables: dict[str, str] = {}
    defaults: dict[str, str] = {}
    if config.exact:
        variables[EXACT_VARIABLE] = "1"
    if config.gpu_share < 1:
        # The ranks need not hold the same on every GPU of the engine; SGLang takes what all of them have free.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    if needs.sleeps:
        variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"  # else several GiB of graphs stay on the GPU
    if needs.sleeps and config.tp_size > 1:
        # As the trainer miles has it: this all-reduce is made for memory that stays, and a check of the idle cache,
        # which would end the server, warns instead.
        names = ("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE")
        defaults |= dict.fromkeys(names, "false")
    if quantization is Quantization.fp8:
        # Kernels for every number of rows up to 16,384 take longer than rollout.start_timeout_s; few are ever used.
        defaults["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "false"
    return variables | {name: value for name, value in defaults.items() if name not in os.environ}


def shared_gpu_args(config: SGLangConfig, needs: EngineNeeds) -> dict[str, Any]:
    """ServerArgs for the memory of a server that shares its GPU with a rank, or sleeps. Not yet run on a GPU.

    SGLang's share is one of the memory that is free when it starts. A server that sleeps is alone on the GPU while it
    is awake. One in the place of a lost server finds a rank that has grown since the first start: it may take what is
    free, up to the tokens that the first could hold.
    """
    arguments: dict[str, Any] = {"mem_fraction_static": config.gpu_share}
    if needs.sleeps:
        arguments = {
            "mem_fraction_static": SLEEPING_SHARE,
            "enable_memory_saver": True,
            # SGLang's graphs of prefills cannot be freed, and refuse an allocator that frees.
            "cuda_graph_backend_prefill": "disabled",
        }
    elif needs.cache_tokens is not None:
        arguments = {"mem_fraction_static": RESTARTED_SHARE, "max_total_tokens": needs.cache_tokens}
    return arguments


def adapter_args(adapter: AdapterSpec | None) -> dict[str, Any]:
    """ServerArgs for one LoRA adapter beside the weights."""
    if adapter is None:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": sorted({last_part(name) for name in adapter.layers}),
        "max_loras_per_batch": NUM_SLOTS,
    }


def server_args(
    config: SGLangConfig,
    model_path: Path,
    *,
    device: str,
    random_seed: int,
    needs: EngineNeeds,
    quantization: Quantization = Quantization.none,
) -> dict[str, Any]:
    """SGLang's ServerArgs by name, without host, port and keys; `quantization` is the format of its weights.

    On a part of a GPU the memory is limited, also that of a server in the place of an earlier one.
    """
    shares_gpu = device == "cuda" and (config.gpu_share < 1 or needs.sleeps)
    width = min(needs.num_requests, MAX_GRAPH_WIDTH) if device == "cuda" else 0
    return {
        **(CPU_SERVER_ARGS if device == "cpu" else {}),
        **({"cuda_graph_max_bs_decode": width} if width > DEFAULT_GRAPH_WIDTH else {}),
        "log_level_http": "warning",
        "skip_server_warmup": True,
        **(shared_gpu_args(config, needs) if shares_gpu else {}),
        **config.engine_args,
        **(EXACT_SERVER_ARGS if config.exact else {}),
        **quantized_server_args(quantization),
        **adapter_args(needs.adapter),
        **({"enable_return_routed_experts": True} if needs.routes is not Routing.live else {}),
        "custom_weight_loader": [LOADER],
        "device": device,
        "disable_shared_experts_fusion": True,  # fused, they have no name of their own to be verified under
        "dtype": config.dtype.value,
        "log_level": "info",
        "model_path": str(model_path),
        "random_seed": random_seed,
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "trust_remote_code": False,
        "weight_version": "0",
    }
