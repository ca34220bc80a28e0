"""The routes that engines return are the experts that sampled: of prompts, resumed responses, changing weights."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from engine_cases import HEAD_DIMS
from packing_cases import pack
from sglang_cases import LONG, PROMPTS, Served, make_requests, poll_all, start_served, without_end
from tiny_model import EXPERTS_PER_TOKEN, NUM_EXPERTS, experts_chosen, write_tiny_model
from torch import Tensor

from rollout.config import DType, Routing
from rollout.engine import Engine, EngineNeeds, EngineSetup
from rollout.group.engines import ENGINES
from rollout.model.router_tap import routers
from rollout.sglang.replies import ReplyError, routes_of
from rollout.types import FinishReason, GenerateRequest, Generation
from rollout.weights.experts import Mixture
from rollout.weights.packed_weights import stored_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONG_PROMPT = list(range(3, 40))
"""Long enough for SGLang's engine to read it once for several requests."""
NUM_LAYERS = 2


class Case:
    """A running engine of a mixture, and the model whose weights it holds."""

    def __init__(self, kind: str, family: str, directory: Path) -> None:
        self.family = family
        self._served: Served | None = None
        if kind == "sglang":
            needs = EngineNeeds(routes=Routing.weights)
            self._served = start_served(directory, model_type=family, tied=False, dtype=DType.float32, needs=needs)
            self.engine: Engine = self._served.engine
            self.model = self._served.model
            return
        self.model = write_tiny_model(
            directory / "model", model_type=family, max_positions=LONG + 20, head_dim=HEAD_DIMS.get(kind, 16)
        )
        config = ENGINES[kind](dtype=DType.float32)
        setup = EngineSetup(
            config=config,
            index=0,
            seed=0,
            device="cpu",
            num_threads=1,
            log_dir=directory,
            model_path=directory / "model",
            routes=Routing.weights,
        )
        self.engine = config.build(setup)
        self.engine.start(directory / "model")

    def load(self, model: PreTrainedModel) -> None:
        version = self.engine.policy_version + 1
        self.engine.load_weights(pack(stored_state(model), policy_version=version, dtype=torch.float32))
        self.model = model


@pytest.fixture(
    scope="module",
    params=[
        "torch-qwen3_moe",
        "torch-deepseek_v3",
        pytest.param("vllm-qwen3_moe", marks=pytest.mark.vllm),
        *(
            pytest.param(f"vllm-{family}", marks=[pytest.mark.vllm, pytest.mark.slow])
            for family in ("mixtral", "olmoe", "qwen2_moe")
        ),
        *(
            pytest.param(f"sglang-{family}", marks=[pytest.mark.sglang, pytest.mark.slow])
            for family in ("qwen3_moe", "glm4_moe")
        ),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(*request.param.split("-"), tmp_path_factory.mktemp(request.param))
    yield made
    made.engine.stop()


def with_routes(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(each, sampling=replace(each.sampling, routes=Routing.weights)) for each in requests]


def routes_under(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[T, L, K] sorted experts of every token in a forward of transformers."""
    return experts_chosen(model, token_ids).sort(-1).values


def factors_under(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[T, L, K] factors of the experts of every token, in the order of the experts' numbers."""
    found: list[Tensor] = []

    def record(_gate: object, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(output[1].gather(-1, output[2].argsort(-1)))

    hooks = [gate.register_forward_hook(record) for gate in routers(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def returned(request: GenerateRequest, generation: Generation) -> Tensor:
    """[N, L, K] sorted experts of every token before the last sampled one."""
    assert generation.routes is not None
    whole = generation.routes.whole()
    assert whole.dtype == np.uint8
    count = len(request.prompt_token_ids) + len(generation.token_ids) - 1 - request.first_route
    assert whole.shape == (count, NUM_LAYERS, EXPERTS_PER_TOKEN)
    return torch.from_numpy(whole.astype(np.int64)).sort(-1).values


def share_equal(found: list[Tensor], expected: list[Tensor]) -> float:
    return (torch.cat(found) == torch.cat(expected)).all(-1).float().mean().item()


def share_as_under(model: PreTrainedModel, requests: list[GenerateRequest], generations: list[Generation]) -> float:
    """The share of (token, layer) pairs whose returned experts are those of a forward of transformers."""
    found = [returned(*each) for each in zip(requests, generations, strict=True)]
    expected = [
        routes_under(model, request.prompt_token_ids + generation.token_ids)[request.first_route : -1]
        for request, generation in zip(requests, generations, strict=True)
    ]
    return share_equal(found, expected)


def test_routes_are_those_of_the_weights(case: Case) -> None:
    requests = with_routes(make_requests([*PROMPTS, LONG_PROMPT], num_samples=4, max_new_tokens=20))
    generations = case.engine.generate(requests)
    assert share_as_under(case.model, requests, generations) > 0.995
    for request, generation in zip(requests, generations, strict=True):
        assert generation.routes is not None
        factors = torch.from_numpy(np.concatenate(generation.routes.weights)).float()
        order = torch.from_numpy(generation.routes.whole().astype(np.int64)).argsort(-1)
        own = factors_under(case.model, request.prompt_token_ids + generation.token_ids)[:-1]
        gaps = (factors.gather(-1, order) - own).abs()
        assert gaps.quantile(0.99) < 1e-3 and own.std() > 0.05
    shared = [generation.routes.parts[0] for generation in generations[-4:] if generation.routes]
    assert all(part is shared[0] for part in shared), "the routes of a prompt are one array for all its responses"
    plain = case.engine.generate(make_requests(PROMPTS))
    assert all(generation.routes is None for generation in plain)


def test_a_response_that_goes_on_keeps_its_routes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    without_end(monkeypatch)
    requests = with_routes(make_requests(PROMPTS, num_samples=2, max_new_tokens=LONG, stop=()))
    [short] = make_requests(PROMPTS[:1], max_new_tokens=6, stop=())
    case.engine.submit(range(len(requests) + 1), [*requests, short])
    poll_all(case.engine, 1)
    case.engine.abort(None)
    got = poll_all(case.engine, len(requests))
    begun = [got[ticket] for ticket in range(len(requests))]
    assert all(each.finish_reason is FinishReason.abort and each.token_ids for each in begun)
    resumed = [
        replace(request, resumed=part, sampling=replace(request.sampling, max_new_tokens=len(part.token_ids) + 5))
        for request, part in zip(requests, begun, strict=True)
    ]
    whole = case.engine.generate(resumed)
    assert share_as_under(case.model, resumed, whole) > 0.995


def test_a_later_turn_returns_the_routes_that_are_not_known(case: Case) -> None:
    request = replace(with_routes(make_requests([LONG_PROMPT], max_new_tokens=4))[0], first_route=30)
    assert share_as_under(case.model, [request], case.engine.generate([request])) > 0.995


def test_routes_stay_those_of_the_weights_that_sampled(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_end(monkeypatch)
    old = case.model
    new = write_tiny_model(
        tmp_path, seed=5, model_type=case.family, max_positions=LONG + 20, head_dim=case.model.config.head_dim
    )
    old_version = case.engine.policy_version
    requests = with_routes(
        make_requests([*PROMPTS, LONG_PROMPT], num_samples=4, max_new_tokens=LONG - 40, seed=11, stop=())
    )
    [short] = make_requests(PROMPTS[:1], max_new_tokens=8, stop=())
    case.engine.submit(range(len(requests) + 1), [*requests, short])
    got = poll_all(case.engine, 1)
    case.load(new)
    case.engine.submit([900], make_requests(PROMPTS[:1], max_new_tokens=30, stop=()))
    poll_all(case.engine, 2, into=got)
    case.engine.abort(None)
    poll_all(case.engine, len(requests) + 2, into=got)
    found, expected, others, mixed = [], [], [], 0
    for ticket, request in enumerate(requests):
        generation, prompt = got[ticket], len(request.prompt_token_ids)
        mixed += len(set(generation.token_versions)) == 2
        before, after = (routes_under(model, request.prompt_token_ids + generation.token_ids) for model in (old, new))
        # A route belongs to the weights that sampled the next token; those of the prompt to the first token.
        versions = torch.tensor([generation.token_versions[0]] * (prompt - 1) + generation.token_versions)
        is_old = (versions == old_version)[:, None, None]
        found.append(returned(request, generation))
        expected.append(torch.where(is_old, before[:-1], after[:-1]))
        others.append(torch.where(is_old, after[:-1], before[:-1]))
    assert mixed >= 2, "no response was under way during the sync"
    assert share_equal(found, expected) > 0.99
    assert share_equal(found, others) < 0.5


@pytest.mark.parametrize(("experts", "reason"), [([0, 0], "twice"), ([1, NUM_EXPERTS], f"of {NUM_EXPERTS}")])
def test_what_are_no_routes_is_refused(experts: list[int], reason: str) -> None:
    text, mixture = base64.b64encode(np.array([experts] * 6, np.int32).tobytes()).decode(), Mixture(NUM_EXPERTS, 2)
    with pytest.raises(ReplyError, match=reason):
        routes_of(text, (3, 2), mixture)
    with pytest.raises(ReplyError, match="48 bytes are no routes"):
        routes_of(text, (4, 2), mixture)
