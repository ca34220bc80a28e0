"""Check 9: the embedded engine: verified weights, log-probs next to the trainer's, seeds, quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from algorithms.kl import k3
from gpu_check.host import Host
from gpu_check.models import QWEN_05B, TINY
from gpu_check.ranks import Setting, lone_rank, run_config
from gpu_check.rows import Row, judged, noted
from rollout.config import Quantization
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import FinishReason, GenerateRequest, Generation, Sample, SamplingParams
from rollout.weights.shared_weights import WeightReader
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicyWorker

GAP_BOUND = 1e-2
"""Mean absolute difference of log-probs in nats that bfloat16 explains."""
PROMPT_TOKENS = 16
VERSION = 3


def engine(host: Host) -> Iterator[Row]:
    """Generate with the weights of a rank, plain and quantised."""
    size = host.pick(QWEN_05B, TINY)
    setting = Setting(size=size, prompt_tokens=PROMPT_TOKENS, response_tokens=host.pick(256, 24), cap=2048)
    base = run_config(setting, host)
    for quantization in (Quantization.none, Quantization.int8, Quantization.fp8):
        if quantization is Quantization.fp8 and not host.is_cuda:
            continue  # blocks of 128 x 128 do not fit into the tiny model
        config = replace(
            base, rollout=TorchEngineConfig(gpus_per_engine=host.pick(1.0, 0.0), quantization=quantization)
        )
        with lone_rank(config, host) as worker:
            yield from _compare(host, config, worker, setting)


def _compare(host: Host, config: TrainConfig, worker: PolicyWorker, setting: Setting) -> Iterator[Row]:
    """Rows of one engine that holds the weights of `worker`."""
    assert isinstance(config.rollout, TorchEngineConfig)
    kind = config.rollout.quantization
    check = f"9 {setting.size.name}" + ("" if kind is Quantization.none else f", {kind.value}")
    engine = TorchEngine(config.rollout, index=0, device=host.device.type, num_threads=host.threads)
    reader = WeightReader()
    try:
        engine.start(host.scratch / f"qwen2-{setting.size.name}")
        shared = worker.publish_weights(VERSION)
        assert shared is not None  # the only rank publishes
        with reader.opened(shared) as weights:
            report = engine.load_weights(weights)
        yield judged(
            check,
            "weights loaded and read back, version",
            expected=f"version {VERSION}",
            measured=f"version {engine.policy_version}, loaded {report.load_s:.2f} s, verified {report.verify_s:.2f} s",
            ok=engine.policy_version == VERSION,
        )
        requests = _requests(setting, number=host.pick(64, 8))
        answers, seconds = host.once(lambda: engine.generate(requests))
        tokens = sum(len(answer.token_ids) for answer in answers)
        yield noted(check, "generate", measured=f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s")
        versions = {version for answer in answers for version in answer.token_versions}
        yield judged(
            check,
            "version of every token",
            expected=f"{{{VERSION}}}",
            measured=str(versions),
            ok=versions == {VERSION},
            reason="labels are wrong",
        )
        yield _gap(check, worker, requests, answers, kind)
        again = engine.generate(requests)
        same = sum(one.token_ids == other.token_ids for one, other in zip(answers, again, strict=True))
        text = f"{same} of {len(again)} responses are the same"
        yield noted(check, "the same seeds again", measured=text, expected="all, on a CPU")
    finally:
        engine.stop()
        reader.close()


def _requests(setting: Setting, *, number: int) -> list[GenerateRequest]:
    generator = np.random.default_rng(0)
    prompts = generator.integers(2, setting.size.vocab, (number, PROMPT_TOKENS)).tolist()
    return [
        GenerateRequest(
            prompt_id=index,
            sample_index=0,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=setting.response_tokens, seed=index),
        )
        for index, prompt in enumerate(prompts)
    ]


def _gap(
    check: str, worker: PolicyWorker, requests: list[GenerateRequest], answers: list[Generation], kind: Quantization
) -> Row:
    """Difference of the log-probs that engine and trainer give the same tokens."""
    samples = [_sample(request, answer) for request, answer in zip(requests, answers, strict=True)]
    micros = [micro_batch([sample]) for sample in samples]
    scores = worker.logprobs(micros, temperature=1.0)
    delta = torch.cat(
        [(score - micro.rollout_logprobs)[micro.response_mask] for score, micro in zip(scores, micros, strict=True)]
    ).double()
    mean, largest = float(delta.abs().mean()), float(delta.abs().max())
    text = f"mean {mean:.2g}, largest {largest:.2g}, K3 {float(k3(delta).mean()):.2g}"
    what = "log-probs of engine and trainer, nats apart"
    if kind is not Quantization.none:
        return noted(check, what, measured=text, expected="the error of the quantisation")
    return judged(
        check,
        what,
        expected=f"mean below {GAP_BOUND:g}",
        measured=text,
        ok=mean < GAP_BOUND,
        reason="more than bfloat16 explains",
    )


def _sample(request: GenerateRequest, answer: Generation) -> Sample:
    assert answer.logprobs is not None
    prompt, response = len(request.prompt_token_ids), len(answer.token_ids)
    return Sample(
        prompt_id=request.prompt_id,
        sample_index=0,
        token_ids=np.array([*request.prompt_token_ids, *answer.token_ids], dtype=np.int64),
        response_mask=np.arange(prompt + response) >= prompt,
        rollout_logprobs=np.array([0.0] * prompt + answer.logprobs),
        token_versions=np.array([0] * prompt + answer.token_versions, dtype=np.int64),
        finish_reason=FinishReason.length,
    )
