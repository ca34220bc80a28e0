"""Evaluation on a real engine: both accuracies recomputed by hand, stable seeds, and no silent gaps."""

from dataclasses import replace

import pytest
import torch
from bucket_cases import pack_buckets
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.config import DType, RewardConfig, SamplingConfig, TorchEngineConfig
from rollout.evaluate import evaluate
from rollout.rewards import Scorer
from rollout.torch_engine import TorchEngine
from rollout.types import FinishReason, Prompt

SAMPLING = SamplingConfig(temperature=0.9, max_new_tokens=5)
STOP = (EOS_TOKEN_ID, 7)


@pytest.fixture(scope="module")
def model_and_engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = write_tiny_model(path)
    engine = TorchEngine(TorchEngineConfig(dtype=DType.float32), index=0, device="cpu", num_threads=None)
    engine.start(path)
    return model, engine


def make_prompts(count=30):
    generator = torch.Generator().manual_seed(2)
    return [
        Prompt(
            prompt_id=index,
            token_ids=torch.randint(2, VOCAB_SIZE, (4,), generator=generator).tolist(),
            text="",
            answer="even",
        )
        for index in range(count)
    ]


def parity(token_ids: list[int]) -> str:
    return "odd" if token_ids[0] % 2 else "even"


def run(sampler, prompts=None, *, seed=0):
    scorer = Scorer(RewardConfig(), max_new_tokens=5, decode=parity)
    prompts = make_prompts() if prompts is None else prompts
    return evaluate(sampler, prompts, scorer, sampling=SAMPLING, seed=seed, stop_token_ids=STOP)


class Recorder:
    def __init__(self, engine, damage=None):
        self.engine, self.damage, self.calls = engine, damage, []

    def generate(self, requests):
        generations = self.engine.generate(requests)
        if self.damage is not None:
            generations[3] = self.damage(generations[3])
        self.calls.append((list(requests), generations))
        return generations


def test_accuracies_lengths_and_version(model_and_engine):
    model, engine = model_and_engine
    recorder = Recorder(engine)
    result = run(recorder)
    ((requests, generations),) = recorder.calls
    assert len(requests) == 60
    greedy_requests, greedy, sampled = requests[::2], generations[::2], generations[1::2]
    assert {request.sampling.temperature for request in greedy_requests} == {0.0}
    assert {request.sampling.temperature for request in requests[1::2]} == {0.9}
    # The greedy answers, from a forward of the model itself.
    ids = torch.tensor([prompt.token_ids for prompt in make_prompts()])
    with torch.no_grad():
        best = model(input_ids=ids).logits[:, -1].argmax(dim=-1)
    assert result.accuracy == (best % 2 == 0).double().mean().item()
    assert [generation.token_ids[0] for generation in greedy] == best.tolist()
    assert result.accuracy_sampled == sum(g.token_ids[0] % 2 == 0 for g in sampled) / 30
    assert result.accuracy != result.accuracy_sampled
    assert result.num_prompts == 30
    assert result.response_tokens_mean == pytest.approx(sum(len(g.token_ids) for g in generations) / 60)
    truncated = sum(g.finish_reason is FinishReason.length for g in generations)
    assert 0 < truncated < 60
    assert result.truncated_frac == pytest.approx(truncated / 60)
    assert result.policy_version == 0
    assert result.metrics() == {
        "eval/accuracy": result.accuracy,
        "eval/accuracy_sampled": result.accuracy_sampled,
        "eval/num_prompts": 30.0,
        "eval/response_tokens_mean": result.response_tokens_mean,
        "eval/truncated_frac": result.truncated_frac,
        "eval/policy_version": 0.0,
    }


def test_two_evaluations_of_the_same_weights_agree_whatever_the_version(model_and_engine):
    model, engine = model_and_engine
    first = run(engine)
    engine.load_weights(
        pack_buckets(model.named_parameters(), policy_version=8, bucket_bytes=1 << 20, dtype=torch.float32)
    )
    assert run(engine) == replace(first, policy_version=8)
    other = run(Recorder(engine), seed=1)
    assert other.accuracy == first.accuracy
    # Half of the prompts answer the same as all of them did: seeds belong to the prompt, not to its place.
    recorders = Recorder(engine), Recorder(engine)
    run(recorders[0])
    run(recorders[1], make_prompts()[15:])
    assert [g.token_ids for g in recorders[1].calls[0][1]] == [g.token_ids for g in recorders[0].calls[0][1][30:]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda g: replace(g, finish_reason=FinishReason.abort), "abort 1"),
        (lambda g: replace(g, token_versions=[version + 1 for version in g.token_versions]), "wrong_version 1"),
        (lambda g: replace(g, logprobs=None), "no_logprobs 1"),
    ],
)
def test_an_invalid_response_stops_the_evaluation(model_and_engine, damage, reason):
    with pytest.raises(RuntimeError, match=rf"1 of 60 responses are invalid: {reason}"):
        run(Recorder(model_and_engine[1], damage))


def test_no_prompts_and_lost_responses(model_and_engine):
    engine = model_and_engine[1]
    with pytest.raises(ValueError, match="no held-out prompts"):
        run(engine, [])

    class Losing:
        def generate(self, requests):
            return engine.generate(requests)[1:]

    with pytest.raises(RuntimeError, match="60 responses were asked for, 59 came back"):
        run(Losing())
