"""Check 30: vLLM's engine without a run: a verified sync, log-probs and supports, seeds, sleep and wake.

On a CPU the release of vLLM for CPUs runs a tiny model. Of a process one engine of vLLM has the GPU, so this is one
check.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from gpu_check.full_engine import START_TIMEOUT_S, packed, random_model, requests, slept
from gpu_check.host import Host
from gpu_check.models import TINY
from gpu_check.rows import Row, judged, noted
from rollout.engine import EngineSetup, WeightSyncError
from rollout.types import GenerateRequest, Generation
from rollout.vllm.config import VLLMConfig
from rollout.vllm.engine import VLLMEngine

CHECK = "30"
GAP_BOUND = 2e-2
"""Mean absolute difference in nats, to transformers on the same tokens, that bfloat16 explains."""
LAWS = {"temperature 0.7": {"temperature": 0.7}, "top_k=20, top_p=0.9": {"top_k": 20, "top_p": 0.9},
        "min_p=0.2": {"min_p": 0.2}}  # fmt: skip


def engine(host: Host) -> Iterator[Row]:
    """All of one engine, which sleeps on a GPU."""
    # The attention of vLLM on a CPU has no heads of 16.
    path, model = random_model(host, replace(TINY, name="tiny-wide", heads=2, kv_heads=1))
    config = VLLMConfig(gpus_per_engine=host.pick(0.5, 0.0), start_timeout_s=START_TIMEOUT_S)
    setup = EngineSetup(
        config=config, index=0, seed=0, device=host.device.type, num_threads=host.threads, log_dir=host.out / "logs",
        model_path=path, sleeps=host.is_cuda,
    )  # fmt: skip
    before = host.used() if host.is_cuda else 0
    made = config.build(setup)
    assert isinstance(made, VLLMEngine)
    try:
        info = made.start(path)
        yield noted(CHECK, f"start of {info.name}", measured=f"{info.start_s:.1f} s, {info.cache_tokens} tokens")
        yield from _sync(made, model)
        for name, sampling in LAWS.items():
            yield _law(host, made, model, name, _asked(sampling))
        yield from _seeds(made)
        yield from slept(host, CHECK, made, model, kind="engine", version=2, before=before)
    finally:
        made.stop()


def _asked(sampling: dict[str, float]) -> list[GenerateRequest]:
    plain = requests(16, tokens=32)
    made = [replace(each, sampling=replace(each.sampling, **sampling)) for each in plain]  # type: ignore[arg-type]
    return [replace(each, sampling=replace(each.sampling, with_supports=each.sampling.is_truncated)) for each in made]


def _sync(engine: VLLMEngine, model: PreTrainedModel) -> Iterator[Row]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    begin = time.monotonic()
    with packed(model, version=1) as weights:
        report = engine.load_weights(weights)
        yield judged(
            CHECK,
            "weight sync, read back from vLLM's parameters",
            expected="version 1",
            measured=f"version {engine.policy_version}, {report.num_tensors} tensors, {time.monotonic() - begin:.2f} s",
            ok=engine.policy_version == 1,
        )
        changed = next(name for name in engine._places if name.endswith("k_proj.weight"))
        engine._places[changed].view(torch.int16)[0, 3] ^= 1
        found = ""
        try:
            engine._read_back(weights, engine._places, begin=time.monotonic())
        except WeightSyncError as error:
            found = str(error)
        engine.load_weights(weights)
    yield judged(
        CHECK,
        "one bit differs in a parameter of vLLM",
        expected=f"{changed} is named",
        measured="named" if changed in found else "not named",
        ok=changed in found,
        reason=found[:200] or "the read-back did not show it",
    )


def _law(host: Host, engine: VLLMEngine, model: torch.nn.Module, name: str, asked: Sequence[GenerateRequest]) -> Row:
    """The log-probs of the engine next to those of transformers, among the tokens that vLLM kept."""
    answers, gaps, kept = engine.generate(asked), [], []
    scored = model.to(host.device)
    for request, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([request.prompt_token_ids + answer.token_ids], device=host.device)
        with torch.no_grad():
            logits = scored(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        logits /= request.sampling.temperature
        if answer.supports is not None:
            sizes = answer.supports.sizes.tolist()
            outside = torch.ones_like(logits, dtype=torch.bool)
            for row, support in enumerate(torch.from_numpy(answer.supports.token_ids).long().split(sizes)):
                outside[row, support.to(host.device)] = False
            logits.masked_fill_(outside, -torch.inf)
            kept += sizes
        law = torch.log_softmax(logits, dim=-1).cpu().gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        gaps.append(law - torch.tensor(answer.logprobs))
    model.cpu()
    gap = torch.cat(gaps).abs().mean().item()
    text = f"{gap:.1e} nats" + (f", {sum(kept) / len(kept):.1f} tokens kept in the mean" if kept else "")
    what = f"log-probs and those of transformers, {name}"
    return judged(CHECK, what, expected=f"less than {GAP_BOUND} nats", measured=text, ok=gap < GAP_BOUND)


def _seeds(engine: VLLMEngine) -> Iterator[Row]:
    """The same seeds again, and responses that go on after their half."""
    asked = requests(16, tokens=32)
    first = engine.generate(asked)
    begun = [
        replace(each, resumed=Generation(
            token_ids=answer.token_ids[:16], logprobs=(answer.logprobs or [])[:16],
            token_versions=answer.token_versions[:16], finish_reason=answer.finish_reason,
        ))
        for each, answer in zip(asked, first, strict=True)
    ]  # fmt: skip
    for what, again in (("the same seeds again", asked), ("responses that go on after their half", begun)):
        pairs = zip(first, engine.generate(again), strict=True)
        same = sum(one.token_ids == other.token_ids for one, other in pairs)
        yield noted(CHECK, what, measured=f"{same} of {len(first)} responses are the same", expected="nearly all")
