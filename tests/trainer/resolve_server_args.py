"""SGLang's ServerArgs, resolved for H100 GPUs on a machine without one: JSON list of arguments on stdin -> on stdout.

Run as a process of its own. SGLang's modules are imported as on a CPU, because on CUDA they load compiled kernels. Then
only the questions to the hardware get other answers, and the code that resolves and checks arguments is SGLang's own.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from rollout.sglang.cpu.torchvision import make_torchvision_importable

GIB = 2**30


def import_all(arguments: dict[str, Any]) -> None:
    """Let SGLang import what resolving needs, by resolving for a CPU."""
    from sglang.srt.server_args import ServerArgs

    ServerArgs(model_path=arguments["model_path"], device="cpu", skip_tokenizer_init=True).resolve_once()


def pretend_gpus() -> None:
    """Answer torch's questions to the driver like 8 H100 with 80 GB."""
    answers: dict[str, object] = {
        "is_available": True,
        "device_count": 8,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": SimpleNamespace(total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132),
        "mem_get_info": (79 * GIB, 80 * GIB),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer: _answer)
    torch.version.cuda = "13.0"
    from sglang.srt.utils import common

    common.is_cuda.cache_clear()
    assert common.is_cuda()


def main() -> None:
    requests: list[dict[str, Any]] = json.load(sys.stdin)
    make_torchvision_importable()
    import_all(requests[0])
    pretend_gpus()
    from sglang.srt.server_args import ServerArgs

    resolved = []
    for arguments in requests:
        server_args = ServerArgs(**arguments, host="127.0.0.1", port=20_000, api_key="a", admin_api_key="b")
        server_args.resolve_once()
        resolved.append(server_args.resolved_dict())
    json.dump(resolved, sys.stdout, default=str)


if __name__ == "__main__":
    main()
