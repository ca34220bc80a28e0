"""rollout.exact=true: the log-probs of the embedded engine are those of the trainer in every bit."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import UNBIASED, write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from algorithms.config import ConfigError
from rollout.collect.requests import make_sample
from rollout.config import DType, Quantization
from rollout.exact.layers import make_exact
from rollout.sglang.config import SGLangConfig
from rollout.task_config import ArithmeticDataConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import Decoder, ExactDecoder
from rollout.types import GenerateRequest, Sample, SamplingParams
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, LoraConfig, PolicyConfig
from trainer.run.notices import Notices
from trainer.rundir.events import Severity
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.exact_attention import EXACT_ATTENTION
from trainer.scoring.forward import ScoringModel

TEMPERATURE = 0.8


def load(path: Path, dtype: torch.dtype, attention: str, *, exact: bool) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    if exact:
        make_exact(model)
    return model.eval().requires_grad_(False)


def sampled(decoder: Decoder) -> list[Sample]:
    """Responses to prompts of 1 to 69 tokens, some of them with three responses; some begin with earlier tokens."""
    draw, requests = random.Random(1), []
    for number in range(16):
        prompt = [draw.randrange(67) for _ in range(draw.randrange(1, 70))]
        for index in range(draw.choice([1, 1, 3])):
            sampling = SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=draw.randrange(1, 40), seed=draw.randrange(1000)
            )
            requests.append(
                GenerateRequest(prompt_id=number, sample_index=index, prompt_token_ids=prompt, sampling=sampling)
            )
    with torch.inference_mode():
        batch = Batch(decoder, num_slots=24, policy_version=0)
        batch.add(range(len(requests)), requests)
        found: dict[int, Sample] = {}
        turns = 0
        while batch.num_active or batch.num_waiting:
            turns += 1
            if turns == 15:  # some go on after the others have ended, in another engine's words: retracted
                for ticket, part in batch.abort([3, 5, 8]):
                    batch.add(
                        [ticket], [replace(requests[ticket], resumed=part)] if part.token_ids else [requests[ticket]]
                    )
            for ticket, generation in batch.advance():
                found[ticket] = make_sample(requests[ticket], generation)
    return [found[ticket] for ticket in sorted(found)]


def differing(model: ScoringModel, samples: Sequence[Sample], *, size: int) -> tuple[int, int]:
    """(tokens, those whose log-prob has other bits in the trainer), with `size` responses in a micro-batch."""
    tokens = different = 0
    with torch.inference_mode():
        for first in range(0, len(samples), size):
            micro = micro_batch(samples[first : first + size])
            scores = model(micro, temperature=TEMPERATURE).logprobs[micro.response_index]
            tokens += len(scores)
            different += int((scores != micro.rollout_logprobs[micro.response_index]).sum())
    return tokens, different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", *UNBIASED])
def test_trainer_and_engine_have_the_same_bits(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """Whatever is in the engine's batch and in the trainer's micro-batch, in any order, on any number of threads."""
    write_tiny_model(tmp_path, model_type=model_type, tied_experts=True)
    samples = sampled(ExactDecoder(load(tmp_path, dtype, SLOT_ATTENTION, exact=True)))
    trainer = ScoringModel(load(tmp_path, dtype, EXACT_ATTENTION, exact=True), chunk_tokens=50, exact=True)
    shuffled = random.Random(2).sample(samples, len(samples))
    before = torch.get_num_threads()
    try:
        for threads, chosen, size in ((1, samples, 1), (2, samples, 100), (3, shuffled, 7)):
            torch.set_num_threads(threads)
            tokens, different = differing(trainer, chosen, size=size)
            assert tokens == sum(sum(sample.response_mask.tolist()) for sample in samples) > 300
            assert different == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_each_half_alone_does_not_suffice(tmp_path: Path, model_type: str) -> None:
    """The test above can fail: with the usual arithmetic in one of the two most tokens differ in some bit."""
    write_tiny_model(tmp_path, model_type=model_type)
    exact = ScoringModel(load(tmp_path, torch.float32, EXACT_ATTENTION, exact=True), chunk_tokens=50, exact=True)
    usual = ScoringModel(load(tmp_path, torch.float32, PACKED_ATTENTION, exact=False), chunk_tokens=50)
    of_exact = sampled(ExactDecoder(load(tmp_path, torch.float32, SLOT_ATTENTION, exact=True)))
    of_usual = sampled(Decoder(load(tmp_path, torch.float32, SLOT_ATTENTION, exact=False)))
    for model, samples in ((usual, of_exact), (exact, of_usual), (usual, of_usual)):
        tokens, different = differing(model, samples, size=10)
        assert different > tokens / 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "mixtral"])
def test_gradients_are_those_of_the_usual_arithmetic(tmp_path: Path, model_type: str) -> None:
    write_tiny_model(tmp_path, model_type=model_type)
    samples = sampled(Decoder(load(tmp_path, torch.float32, SLOT_ATTENTION, exact=False)))[:12]
    found: list[list[Tensor]] = []
    for attention in (PACKED_ATTENTION, EXACT_ATTENTION):
        exact = attention == EXACT_ATTENTION
        model = ScoringModel(
            load(tmp_path, torch.float32, attention, exact=exact).requires_grad_(True), chunk_tokens=50, exact=exact
        )
        scores = model(micro_batch(samples), temperature=TEMPERATURE, entropy_grad=True)
        (scores.logprobs * torch.sin(torch.arange(len(scores.logprobs)))).sum().add(scores.entropy.sum()).backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    for usual, exact_one in zip(*found, strict=True):
        assert torch.allclose(usual, exact_one, rtol=1e-3, atol=1e-4 * float(usual.abs().max()))


EXACT = TrainConfig(
    model=ArithmeticModelConfig(),
    data=ArithmeticDataConfig(),
    rollout=TorchEngineConfig(exact=True),
)


def refused(**changes: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        replace(EXACT, **changes)
    return [str(problem) for problem in caught.value.problems]


def test_what_breaks_the_promise_is_refused_by_name() -> None:
    engine, policy = EXACT.rollout, EXACT.policy
    server = SGLangConfig(exact=True, engine_args={"tp_size": 2, "attention_backend": "torch_native"})
    texts = refused(rollout=server, policy=PolicyConfig(lora=LoraConfig(rank=8)))
    assert [text.split(" ")[0] for text in texts] == [
        "rollout.engine_args.tp_size", "rollout.engine_args.attention_backend", "policy.lora.rank"
    ]  # fmt: skip
    assert all("rollout.exact=true" in text and re.search(r"Remove it|Set it", text) for text in texts)
    [text] = refused(rollout=SGLangConfig(exact=True, servers=["http://127.0.0.1:30000"]))
    assert text.startswith("rollout.servers must be [] with rollout.exact=true: only a server that Parity starts")
    [text] = refused(rollout=replace(engine, quantization=Quantization.int8))
    assert text.startswith("rollout.quantization must be none with rollout.exact=true")
    [text] = refused(rollout=replace(engine, dtype=DType.float32))
    assert text.startswith("rollout.dtype must be policy.dtype (bfloat16) with rollout.exact=true")
    [text] = refused(policy=replace(policy, gpus_per_worker=1))
    assert text.startswith("rollout.exact must be false with GPUs on one side only")
    several = PolicyConfig(fp32_head=True, torch_compile=True, lora=LoraConfig(rank=8, merge=True))
    names = [text.split(" ")[0] for text in refused(policy=several)]
    assert names == ["policy.fp32_head", "policy.torch_compile", "policy.lora.merge"]
    assert replace(EXACT, policy=PolicyConfig(lora=LoraConfig(rank=8))).sends_adapter


def test_a_step_with_other_bits_is_told_once() -> None:
    row: dict[str, float | None] = {
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/generated_accuracy": 0.5,
        "rollout/zero_variance_frac": 0.25,
        "optim/grad_norm": 0.1,
        "mismatch/kept_frac": 1.0,
        "mismatch/abs_logdiff_max": 0.0,
    }
    notices = Notices(EXACT)
    assert notices.observe(1, row) == []
    [event] = notices.observe(2, row | {"mismatch/abs_logdiff_max": 3e-7})
    assert (event.kind, event.severity) == ("exact", Severity.warn)
    assert re.search(r"differ by up to 3.0e-07 nats in this step", event.text)
    assert notices.observe(3, row | {"mismatch/abs_logdiff_max": 3e-7}) == []
    assert (
        Notices(replace(EXACT, rollout=TorchEngineConfig())).observe(1, row | {"mismatch/abs_logdiff_max": 1.0}) == []
    )
