"""What of vLLM's engine the contract does not ask: pause modes, shared prompts, the draw, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import start_engine
from packing_cases import pack
from sglang_cases import LONG, PROMPTS, largest_gap, make_requests, poll_all, reference_logprobs, tokens
from tiny_model import write_tiny_model

from algorithms.config import ConfigError
from rollout.config import DType, EngineUse, PauseMode, Quantization, SamplingConfig
from rollout.engine import EngineError, EngineSetup, LayoutError
from rollout.types import FinishReason, GenerateRequest
from rollout.vllm.config import VLLMConfig
from rollout.vllm.weights import places_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.vllm.engine import VLLMEngine

PROMPT = [3 + number % 50 for number in range(75)]
"""Two whole blocks of vLLM's cache, and a part."""


def tiny(directory: Path, *, seed: int = 0) -> PreTrainedModel:
    return write_tiny_model(directory, seed=seed, head_dim=32, max_positions=LONG + 20)


def started(directory: Path, *, logs: str = "", **options: object) -> VLLMEngine:
    config, model = VLLMConfig(dtype=DType.float32, **options), directory / "model"  # type: ignore[arg-type]
    setup = EngineSetup(
        config=config, index=0, seed=0, device="cpu", num_threads=1, log_dir=directory / logs, model_path=model
    )
    engine: VLLMEngine = config.build(setup)  # type: ignore[assignment]
    engine.start(model)
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    tiny(made / "model")
    return made


@pytest.mark.vllm
def test_a_cache_smaller_than_the_context_holds_a_response_of_its_size(directory: Path) -> None:
    """Before the engine that the other tests share: a process holds one at a time."""
    small = started(directory, logs="small", cache_tokens=64, max_batch_size=4096)
    try:
        [request] = make_requests([PROMPT[:40]], max_new_tokens=24, stop=())
        [generation] = small.generate([request])
        assert len(generation.token_ids) == 24
    finally:
        small.stop()


@pytest.mark.vllm
def test_responses_that_a_full_cache_takes_back_go_on_as_they_were(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks hold two responses until each needs its second one: vLLM takes one back, and reads it again later."""
    model, requests = tiny(directory / "model"), make_requests([PROMPT[:20], PROMPT[1:21]], max_new_tokens=24, stop=())
    small = started(directory, logs="small", cache_tokens=64)
    assert small._model is not None
    scheduler, taken_back = small._model.engine_core.engine_core.scheduler, []
    take_back = scheduler._preempt_request

    def noted(request: object, *arguments: object, **options: object) -> None:
        taken_back.append(request)
        take_back(request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", noted)
    try:
        generations = small.generate(requests)
    finally:
        small.stop()
    assert taken_back and largest_gap(requests, generations, model, temperature=1.0) < 1e-4


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VLLMEngine]:
    made = started(directory, max_batch_size=16)
    yield made
    made.stop()


@pytest.fixture
def first(engine: VLLMEngine, directory: Path) -> PreTrainedModel:
    """The model that the engine starts a test with."""
    engine.abort(None)
    engine.poll(0.2)
    model = tiny(directory / "model")
    load(engine, model)
    return model


def load(engine: VLLMEngine, model: PreTrainedModel) -> None:
    engine.load_weights(pack(model.named_parameters(), policy_version=engine.policy_version + 1, dtype=torch.float32))


def under_way(engine: VLLMEngine) -> list[GenerateRequest]:
    requests = make_requests(PROMPTS, num_samples=2, max_new_tokens=LONG, seed=11, stop=())
    [short] = make_requests(PROMPTS[:1], max_new_tokens=8, stop=())
    engine.submit(range(len(requests) + 1), [*requests, short])
    assert poll_all(engine, 1).keys() == {len(requests)}
    return requests


@pytest.mark.vllm
def test_an_engine_writes_what_vllm_says_into_its_own_log(engine: VLLMEngine, directory: Path) -> None:
    """Also after another one in the same process."""
    assert all((directory / place / "engine-0.log").stat().st_size for place in ("small", ""))


@pytest.mark.vllm
def test_a_group_reads_its_prompt_once_and_each_version_reads_it_anew(
    engine: VLLMEngine, first: PreTrainedModel, tmp_path: Path
) -> None:
    requests = make_requests([PROMPT], num_samples=6)
    generations = engine.generate(requests)
    assert [each.shared_prompt_tokens for each in generations] == [0] + [64] * 5
    assert largest_gap(requests, generations, first, temperature=1.0) < 1e-4
    new = tiny(tmp_path, seed=5)
    load(engine, new)
    generations = engine.generate(requests)
    assert [each.shared_prompt_tokens for each in generations] == [0] + [64] * 5
    assert largest_gap(requests, generations, new, temperature=1.0) < 1e-4


@pytest.mark.vllm
def test_more_tokens_than_a_step_reads_come_in_parts(engine: VLLMEngine, first: PreTrainedModel) -> None:
    """Rows of prompts that are read in part are drawn in vain; each request waits for one of 16 places."""
    prompts = [[3 + (number * 7 + length) % 60 for number in range(900 + length)] for length in range(5)]
    requests = make_requests(prompts, num_samples=4, max_new_tokens=5, stop=())
    generations = engine.generate(requests)
    assert largest_gap(requests, generations, first, temperature=1.0) < 1e-4
    assert tokens(generations)[::7] == tokens(engine.generate(requests[::7])), "a draw depends on the others"


@pytest.mark.vllm
def test_in_place_keeps_what_was_computed_but_no_later_request_sees_it(
    engine: VLLMEngine, first: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._config, "pause_mode", PauseMode.in_place)
    fresh = make_requests([PROMPT], num_samples=2, seed=77)
    engine.generate(fresh)
    requests, old = under_way(engine), engine.policy_version
    new = tiny(tmp_path, seed=9)
    load(engine, new)
    engine.submit([500, 501], fresh)
    got = poll_all(engine, 2)
    engine.abort(None)
    poll_all(engine, len(requests) + 2, into=got)
    stale = 0.0
    for ticket, request in enumerate(requests):
        versions = torch.tensor(got[ticket].token_versions)
        assert set(versions.tolist()) == {old, old + 1}
        logprobs = torch.tensor(got[ticket].logprobs)
        before, after = (
            reference_logprobs(model, request.prompt_token_ids, got[ticket].token_ids, temperature=1.0)
            for model in (first, new)
        )
        assert (logprobs - before)[versions == old].abs().max() < 1e-4
        stale = max(stale, (logprobs - after)[versions > old].abs().max().item())
    assert stale > 1e-3, "what the old weights computed was not used"
    assert largest_gap(fresh, [got[500], got[501]], new, temperature=1.0) < 1e-4


@pytest.mark.vllm
def test_abort_ends_what_is_under_way_with_the_old_weights(
    engine: VLLMEngine, first: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._config, "pause_mode", PauseMode.abort)
    requests, old = under_way(engine), engine.policy_version
    load(engine, first)
    got = poll_all(engine, len(requests))
    assert {each.finish_reason for each in got.values()} == {FinishReason.abort}
    assert {version for each in got.values() for version in each.token_versions} == {old}


@pytest.mark.vllm
def test_every_parameter_is_one_that_the_engine_computes_with(engine: VLLMEngine, first: PreTrainedModel) -> None:
    """vLLM packs weights by default, and shows parameters that nothing reads."""
    requests = make_requests(PROMPTS[:2], max_new_tokens=4, temperature=0.0)
    before = [each.logprobs for each in engine.generate(requests)]
    names = [name for name, _ in first.named_parameters()]
    assert engine._places.keys() == set(names)
    for name in names:
        place = engine._places[name]
        kept = place.clone()
        place.mul_(1.5)
        engine._model.reset_prefix_cache()
        assert [each.logprobs for each in engine.generate(requests)] != before, name
        place.copy_(kept)
    engine._model.reset_prefix_cache()
    assert [each.logprobs for each in engine.generate(requests)] == before


@pytest.mark.vllm
def test_what_the_copy_does_not_reach_is_named(
    engine: VLLMEngine, first: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "gate")]
    monkeypatch.setitem(engine._places, names[0], engine._places[names[1]])
    with pytest.raises(EngineError, match=r"tensor model\.layers\.1\.mlp\.(up|gate)_proj\.weight was sent with digest"):
        load(engine, first)
    with pytest.raises(EngineError, match="load weights again"):
        engine.submit([0], make_requests(PROMPTS[:1]))
    monkeypatch.undo()
    load(engine, first)
    assert len(engine.generate(make_requests(PROMPTS[:1]))) == 1


@pytest.mark.vllm
def test_a_stopped_engine_starts_again_and_rounds_inputs_where_weights_are_rounded(
    directory: Path, engine: VLLMEngine, first: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(PROMPTS, max_new_tokens=4)
    for quantization, low, high in ((Quantization.int8, 1e-4, 0.5), (Quantization.none, 0.0, 1e-4)):
        monkeypatch.setattr(engine._config, "quantization", quantization)
        engine.stop()
        engine.start(directory / "model")
        assert low <= largest_gap(requests, engine.generate(requests), first, temperature=1.0) < high


@pytest.mark.vllm
def test_a_model_that_vllm_cannot_serve_is_refused_at_the_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", head_dim=16)
    with pytest.raises(EngineError, match=r"the model must have heads of 32, .* not of 16"):
        started(tmp_path)


def test_the_rules_of_a_model_hold_under_the_other_names_of_config_json(tmp_path: Path) -> None:
    """Those of GPT-2's family, or in the config of the language model alone."""
    for described in ({"n_embd": 96, "n_head": 2}, {"text_config": {"hidden_size": 96, "num_attention_heads": 2}}):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(described), encoding="utf-8")
        with pytest.raises(EngineError, match=r"the model must have heads of 32, .* not of 48"):
            started(tmp_path)


@pytest.mark.vllm
def test_a_seed_draws_what_it_draws_in_the_torch_engine(
    directory: Path, engine: VLLMEngine, first: PreTrainedModel
) -> None:
    other = start_engine("torch", directory / "model", log_dir=directory)
    requests = make_requests(PROMPTS, num_samples=4, max_new_tokens=40)
    assert tokens(engine.generate(requests)) == tokens(other.generate(requests))
    other.stop()


def test_tensors_that_do_not_fill_a_parameter_are_named() -> None:
    model = torch.nn.Module()
    model.qkv_proj = torch.nn.Linear(4, 8, bias=False)
    shapes = {f"{part}_proj.weight": (2, 4) for part in "qkv"}
    with pytest.raises(LayoutError, match=r"qkv_proj\.weight of vLLM has 8 rows, and q_proj\.weight, .* have 6"):
        places_of(model, shapes)
    with pytest.raises(LayoutError, match=r"q_proj\.weight has shape \(4, 3\), and .* \(8, 4\)"):
        places_of(model, shapes | {"q_proj.weight": (4, 3)})
    places = places_of(model, shapes | {"q_proj.weight": (4, 4)})
    places["v_proj.weight"].fill_(7)
    assert (model.qkv_proj.weight[6:] == 7).all() and (model.qkv_proj.weight[:6] != 7).all()


USE = EngineUse(sampling=SamplingConfig(), lora_rank=0, sends_adapter=False, schedule="bounded", updates_in_flight=True)


def test_what_vllm_does_not_do_is_refused_by_key() -> None:
    with pytest.raises(ConfigError) as caught:
        VLLMConfig(gpus_per_engine=2, exact=True, quantization=Quantization.int8)
    for rule in ("gpus_per_engine must be at most 1", "exact must be false", "quantization must be none"):
        assert rule in str(caught.value)
    on_gpu = VLLMConfig(gpus_per_engine=0.5)
    hot = replace(USE, sampling=SamplingConfig(temperature=3.0), eval_temperature=0.001)
    assert [each.key for each in on_gpu.use_problems(hot)] == ["sampling.temperature", "eval.temperature"]
    assert not list(VLLMConfig().use_problems(hot)) and not list(on_gpu.use_problems(USE))
    assert "be dense" in on_gpu.model_rule({"model_type": "qwen3_moe"})
    assert not on_gpu.model_rule({"model_type": "llama", "head_dim": 48})
    assert on_gpu.context_length({"max_position_embeddings": 99}) == 99
    assert VLLMConfig().context_length({"max_position_embeddings": 99999}) == 65536
    aborting = VLLMConfig(pause_mode=PauseMode.abort)
    [problem] = aborting.use_problems(USE)
    assert problem.key == "rollout.pause_mode"
    [problem] = VLLMConfig().use_problems(replace(USE, lora_rank=8, sends_adapter=True))
    assert problem.key == "policy.lora.merge" and "rollout=vllm" in problem.rule
    assert VLLMConfig(cache_tokens=128).context_length({"max_position_embeddings": 4096}) == 128
    sizes = {"hidden_size": 896, "num_attention_heads": 14}
    for text, rule in (
        ({"model_type": "qwen2"}, ""),
        ({"model_type": "glm4_moe"}, "another family"),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "norm_topk_prob=false"),
        ({"model_type": "llama", "head_dim": 48}, "not of 48"),
    ):
        found = VLLMConfig().model_rule(sizes | text)
        assert rule in found and bool(rule) is bool(found)


@pytest.mark.vllm
def test_a_second_engine_in_a_process_is_refused(engine: VLLMEngine, directory: Path) -> None:
    with pytest.raises(EngineError, match="a process holds one engine of vLLM"):
        started(directory)
    assert len(engine.generate(make_requests(PROMPTS[:1], max_new_tokens=2, stop=()))) == 1


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "no clip_qkv"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, ""),
    ],
)
def test_what_vllm_computes_otherwise_is_refused(model: dict[str, object], rule: str) -> None:
    found = VLLMConfig().model_rule(model)
    assert rule in found and bool(found) == bool(rule)
