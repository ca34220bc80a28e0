"""vLLM's own release for GPUs, on a machine without one: its code resolves Parity's arguments, draws, and reports.

`make test-gpu-packages ENGINE=vllm` runs this with the packages of requirements/vllm-gpu.txt. Only the questions to the
hardware get made-up answers.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from described_models import write_config
from sglang_cases import make_requests

from rollout.embedded.batch import Response
from rollout.engine import EngineSetup
from rollout.types import GenerateRequest
from rollout.vllm.config import VLLMConfig
from rollout.vllm.gpu import CACHE, WEIGHTS, GPUEngine
from rollout.vllm.releases import ON_GPU

pytestmark = pytest.mark.skipif(not ON_GPU.is_installed, reason=f"{ON_GPU} is not installed: {ON_GPU.remedy}")

DRIVER_CALLS = (
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuDriverGetVersion",
    "cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate",
    "cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap",
    "cuPointerGetAttribute", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""What vLLM's libraries link of the driver's library."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
KV_BYTES = 2 * 2 * 64 * 2 * 24
"""Bytes of the keys and values of a token of it in bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def h100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's own platform for NVIDIA GPUs, which asks the driver nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**GPUEngine.environment, "CUDA_VISIBLE_DEVICES": ""}.items():
            patch.setenv(name, value)
        driver = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
        program = "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER_CALLS)
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-Wl,-soname,libcuda.so.1", "-o", str(driver), "-"]
        subprocess.run(command, input=program.encode(), check=True)
        ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
        from vllm import platforms
        from vllm.platforms.cuda import NonNvmlCudaPlatform
        from vllm.platforms.interface import DeviceCapability

        class H100(NonNvmlCudaPlatform):
            get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(9, 0))
            get_device_name = classmethod(lambda _, device_id=0: "NVIDIA H100 80GB HBM3")
            get_device_total_memory = classmethod(lambda _, device_id=0: 80 * 2**30)

        patch.setattr(platforms, "_current_platform", H100())
        yield
    for child in psutil.Process().children():  # a package that vLLM imports compiles in the background
        child.kill()
        child.wait()


def resolved(directory: Path, *, sleeps: bool = False, lost_tokens: int | None = None, **options: Any) -> Any:
    """The VllmConfig that vLLM makes of an engine's arguments."""
    from vllm.engine.arg_utils import EngineArgs

    path = write_config(MODEL, directory)
    config = VLLMConfig(gpus_per_engine=0.5, **options)
    setup = EngineSetup(
        config=config, index=1, seed=3, device="cuda", num_threads=1, log_dir=directory, model_path=path,
        sleeps=sleeps, cache_tokens=lost_tokens,
    )  # fmt: skip
    engine = config.build(setup)
    assert isinstance(engine, GPUEngine)
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return EngineArgs(**engine.engine_args(path, described)).create_engine_config()


def test_vllm_resolves_the_arguments_to_what_is_meant(tmp_path: Path) -> None:
    found = resolved(tmp_path, max_batch_size=512)
    model, cache, scheduler = found.model_config, found.cache_config, found.scheduler_config
    assert found.use_v2_model_runner and found.parallel_config.distributed_executor_backend == "uni"
    assert model.logprobs_mode == "processed_logprobs" and model.return_sampling_mask
    assert found.max_concurrent_batches == 1, "a step would end before its tokens are there"
    assert scheduler.max_num_seqs == 512 and cache.enable_prefix_caching
    assert (cache.gpu_memory_utilization, cache.kv_cache_memory_bytes) == (0.5, None)
    assert not model.enable_sleep_mode and not found.use_cumem_cudagraph_pool
    sleeping = resolved(tmp_path, sleeps=True)
    assert sleeping.model_config.enable_cumem_allocator and sleeping.use_cumem_cudagraph_pool
    assert sleeping.cache_config.gpu_memory_utilization == 0.85


@pytest.mark.parametrize(("options", "lost"), [({"cache_tokens": 640}, None), ({}, 640), ({"cache_tokens": 640}, 9)])
def test_a_cache_has_the_size_that_is_asked_for_or_that_the_lost_engine_had(
    tmp_path: Path, options: dict[str, Any], lost: int | None
) -> None:
    cache = resolved(tmp_path, lost_tokens=lost, **options).cache_config
    assert cache.kv_cache_memory_bytes == (640 + 32) * KV_BYTES


def test_the_calls_of_the_engine_are_there() -> None:
    from vllm.device_allocator import DEFERRABLE_TAGS
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    assert (WEIGHTS, CACHE) == DEFERRABLE_TAGS
    calls: list[tuple[Any, dict[str, Any]]] = [
        (LLMEngine.sleep, {"level": 2}), (LLMEngine.wake_up, {"tags": [WEIGHTS]}),
        (LLMEngine.reset_prefix_cache, {"reset_running_requests": True}), (LLMEngine.step, {}),
        (LLMEngine.add_request, {"request_id": "1", "prompt": {}, "params": None}),
        (LLMEngine.abort_request, {"request_ids": [], "internal": True}), (GPUModelRunner.get_model, {}),
    ]  # fmt: skip
    for call, arguments in calls:
        inspect.signature(call).bind(None, **arguments)
    assert "self.sleeping_tags" in inspect.getsource(UniProcExecutor.__mro__[1].__init__)
    assert "if self.return_sampling_mask:" in inspect.getsource(Sampler.__call__), "it is asked in every step"


def request(**sampling: Any) -> GenerateRequest:
    [made] = make_requests([[3, 4, 5]], max_new_tokens=4)
    return replace(made, sampling=replace(made.sampling, **sampling))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1, "temperature": 0.7}]
)
def test_vllm_accepts_the_law_of_every_request_and_keeps_it(tmp_path: Path, sampling: dict[str, Any]) -> None:
    from vllm import SamplingParams

    from rollout.vllm.reported import ReportedBatch

    asked = request(**sampling).sampling
    law = SamplingParams(**ReportedBatch._law(None, request(**sampling)))  # type: ignore[arg-type]
    law.verify(resolved(tmp_path).model_config, None, None, None)
    assert (law.temperature, law.min_p, law.seed) == (asked.temperature, asked.min_p, asked.seed)
    assert (law.top_k, law.top_p) == (max(asked.top_k, 0), asked.top_p) and law.logprobs == 0


def test_a_token_depends_on_its_seed_and_place_and_its_log_prob_is_that_of_what_is_kept() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "vllm_kernels.py")]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]


def test_what_vllm_reports_of_a_step_comes_into_the_response(tmp_path: Path) -> None:
    """vLLM's own way from the arrays of a step to the output of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

    from rollout.vllm.reported import ReportedBatch

    asked = request(top_k=3, with_supports=True)
    params = SamplingParams(
        **ReportedBatch._law(None, asked),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,  # type: ignore[arg-type]
    )
    fields = dict.fromkeys(inspect.signature(EngineCoreRequest).parameters)
    given = {"request_id": "7-a", "external_req_id": "7", "prompt_token_ids": [3, 4, 5], "sampling_params": params}
    processor = OutputProcessor(None, log_stats=False)
    processor.add_request(EngineCoreRequest(**fields | given | {"arrival_time": 0.0}), None)
    response = Response(ticket=7, request=asked, taken_up=0.0, tokens=[])
    batch = object.__new__(ReportedBatch)
    for version, (token, logprob) in enumerate([(5, -0.5), (1, -1.5)]):
        batch._version = version
        lists = LogprobsLists(np.array([[token]]), np.array([[logprob]]), np.array([1]), None)
        kept = SamplingMaskLists(np.array([1, 3, 5], np.int32))
        output = EngineCoreOutput("7-a", [token], new_logprobs=lists, new_sampling_mask=kept)
        [reported] = processor.process_outputs([output]).request_outputs
        assert reported.request_id == "7"
        batch._take(response, reported.outputs[0])
    assert (response.tokens, response.logprobs, response.versions) == ([5, 1], [-0.5, -1.5], [0, 1])
    assert [support.tolist() for support in response.supports] == [[1, 3, 5]] * 2
