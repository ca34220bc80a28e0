"""Evaluation on a real engine: both accuracies recomputed by hand, stable seeds, and no silent gaps."""

import itertools
import math
import statistics
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from packing_cases import pack
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.collect.evaluate import (
    EvalPlan,
    evaluate,
    evaluation_requests,
    majority_vote,
    pass_at_k,
    standard_error,
    summarize,
)
from rollout.config import DType, SamplingConfig
from rollout.rewards import RewardError, Scorer
from rollout.rewards.custom import RESERVED_METRICS
from rollout.task_config import RewardConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
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


def run(sampler, prompts=None, *, seed=0, num_samples=1, name="", max_failed_fraction=0.0, min_failed=0):
    scorer = Scorer(RewardConfig(), max_new_tokens=5, decode=parity)
    prompts = make_prompts() if prompts is None else prompts
    plan = make_plan(seed=seed, num_samples=num_samples, name=name, max_failed_fraction=max_failed_fraction)
    return evaluate(sampler, prompts, scorer, replace(plan, min_failed=min_failed))


def make_plan(*, seed=0, num_samples=1, name="", max_failed_fraction=0.0):
    return EvalPlan(
        sampling=SAMPLING, num_samples=num_samples, seed=seed, stop_token_ids=STOP, name=name,
        max_failed_fraction=max_failed_fraction,
    )  # fmt: skip


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
    result = run(recorder, seed=2)
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
    assert result.policy_version == engine.policy_version
    assert result.metrics() == {
        "eval/accuracy": result.accuracy,
        "eval/accuracy_sampled": result.accuracy_sampled,
        "eval/reward_mean": result.accuracy_sampled,
        "eval/num_prompts": 30.0,
        "eval/response_tokens_mean": result.response_tokens_mean,
        "eval/truncated_frac": result.truncated_frac,
        "eval/policy_version": float(engine.policy_version),
    }


def test_two_evaluations_of_the_same_weights_agree_whatever_the_version(model_and_engine):
    model, engine = model_and_engine
    first = run(engine)
    engine.load_weights(pack(model.named_parameters(), policy_version=8, dtype=torch.float32))
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


def failing(positions):
    """A sampler whose responses at these positions failed, with what they had by then."""

    class Failing(Recorder):
        def generate(self, requests):
            generations = super().generate(requests)
            for position in positions:
                generations[position] = replace(generations[position], finish_reason=FinishReason.failed)
            return generations

    return Failing


def test_responses_that_fail_are_incorrect_up_to_the_bound(model_and_engine, caplog):
    engine = model_and_engine[1]
    whole = run(engine)
    right = [i for i, group in enumerate(whole.groups) if all(sample.correct for sample in group.samples)]
    greedy, sampled = 2 * right[0], 2 * right[1] + 1
    result = run(failing([greedy, sampled])(engine), max_failed_fraction=2 / 60)
    assert "2 of 60 responses failed" in caplog.text
    assert result.accuracy == pytest.approx(whole.accuracy - 1 / 30)
    assert result.accuracy_sampled == pytest.approx(whole.accuracy_sampled - 1 / 30)
    assert result.metrics()["eval/failed"] == 2 and "eval/failed" not in whole.metrics()
    failed = result.groups[right[0]].samples[0]
    assert (failed.finish_reason, failed.correct, failed.reward) == (FinishReason.failed, False, None)
    came = [
        s.num_response_tokens for g in result.groups for s in g.samples if s.finish_reason is not FinishReason.failed
    ]
    assert len(came) == 58 and result.response_tokens_mean == pytest.approx(sum(came) / 58)
    # All others are scored as without the failures, and the seeds do not move.
    assert result.groups[right[2]] == whole.groups[right[2]]


def test_too_many_failures_and_one_of_another_kind_end_an_evaluation(model_and_engine):
    engine = model_and_engine[1]
    with pytest.raises(RuntimeError, match=r"3 of 60 .*failed 3 .*collect.max_invalid_fraction=0.03"):
        run(failing([0, 1, 2])(engine), max_failed_fraction=0.03)
    with pytest.raises(RuntimeError, match=r"2 of 60 .*(failed 1|abort 1)"):
        run(failing([0])(engine, lambda g: replace(g, finish_reason=FinishReason.abort)), max_failed_fraction=0.5)
    assert run(failing(range(60))(engine), max_failed_fraction=1.0).accuracy == 0
    assert run(failing(range(59))(engine), min_failed=100).num_failed == 59
    with pytest.raises(RuntimeError, match="60 of 60 responses are invalid"):
        run(failing(range(60))(engine), min_failed=100)


def test_responses_that_the_judge_could_not_score_are_told(model_and_engine, tmp_path, caplog):
    path = tmp_path / "judge.py"
    path.write_text("def reward(response):\n    if response == 'odd':\n        raise OSError\n    return 1.0\n")
    config = RewardConfig(function=f"{path}:reward", max_tries=1, outage_wait_s=0.0, min_failed=60, num_workers=1)
    scorer = Scorer(config, max_new_tokens=5, decode=parity)
    with closing(scorer):
        result = evaluate(model_and_engine[1], make_prompts(), scorer, make_plan())
    assert result.metrics()["eval/unscored"] == result.num_unscored
    odd = 60 - round(30 * (result.accuracy + result.accuracy_sampled))
    assert 0 < odd < 60 and result.num_unscored == odd and result.reward_mean == 1.0
    assert f"{odd} of 60 responses have no reward and count as incorrect" in caplog.text


def test_the_responses_are_kept_if_the_judge_fails(model_and_engine, tmp_path):
    path = tmp_path / "judge.py"
    path.write_text("def reward(response):\n    if response == 'odd':\n        raise OSError\n    return 1.0\n")
    config = RewardConfig(function=f"{path}:reward", max_tries=1, outage_wait_s=0.0, min_failed=0, num_workers=1)
    kept = []
    with closing(Scorer(config, max_new_tokens=5, decode=parity)) as scorer, pytest.raises(RewardError):
        evaluate(
            model_and_engine[1], make_prompts(), scorer, make_plan(), keep=lambda plan, groups: kept.extend(groups)
        )
    samples = [sample for group in kept for sample in group.samples]
    assert [len(group.samples) for group in kept] == [2] * 30
    assert {(sample.text, sample.reward) for sample in samples} >= {("odd", None), ("even", 1.0)}


def test_no_prompts_and_lost_responses(model_and_engine):
    engine = model_and_engine[1]
    with pytest.raises(ValueError, match="no held-out prompts"):
        run(engine, [])

    class Losing:
        def generate(self, requests):
            return engine.generate(requests)[1:]

    with pytest.raises(RuntimeError, match="60 responses were asked for, 59 came back"):
        run(Losing())


def test_several_samples_on_a_real_engine(model_and_engine):
    engine = model_and_engine[1]
    one, recorder = run(engine), Recorder(engine)
    result = run(recorder, num_samples=5)
    ((requests, generations),) = recorder.calls
    assert len(requests) == 30 * 6
    assert len({(request.prompt_id, request.sampling.seed) for request in requests}) == len(requests)
    right = [[g.token_ids[0] % 2 == 0 for g in generations[6 * i + 1 : 6 * i + 6]] for i in range(30)]
    assert result.accuracy == one.accuracy
    assert [group.samples[1].token_ids.tolist() for group in result.groups] == [
        group.samples[1].token_ids.tolist() for group in one.groups
    ]
    assert result.accuracy_sampled == pytest.approx(sum(map(sum, right)) / 150)
    assert result.sampled_error == pytest.approx(statistics.stdev([sum(each) / 5 for each in right]) / math.sqrt(30))
    assert result.pass_at.keys() == {1, 2, 4, 5}
    assert result.pass_at[1] == pytest.approx(result.accuracy_sampled)
    assert result.pass_at[5] == pytest.approx(sum(any(each) for each in right) / 30)
    assert result.majority == pytest.approx(sum(sum(each) >= 3 for each in right) / 30)
    found = result.metrics("eval/aime")
    assert found["eval/aime/avg@5"] == found["eval/aime/accuracy_sampled"] == result.accuracy_sampled
    assert {key.rpartition("/")[2] for key in found} >= {"pass@2", "pass@4", "pass@5", "maj@5"}
    assert "eval/aime/pass@1" not in found


def test_a_named_set_draws_for_itself():
    seeds = [
        [request.sampling.seed for request in evaluation_requests(make_prompts(), make_plan(name=name))]
        for name in ("", "aime24", "amc23", "aime24")
    ]
    assert seeds[1] == seeds[3]
    assert not set(seeds[0]) & set(seeds[1]) and not set(seeds[1]) & set(seeds[2])


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
    for n in range(1, 7):
        for c in range(n + 1):
            outcomes = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                chosen = list(itertools.combinations(outcomes, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_at_k(1000, 3, 100) == pytest.approx(1 - (900 * 899 * 898) / (1000 * 999 * 998))
    for wrong in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="1 <= k <= n and 0 <= c <= n"):
            pass_at_k(*wrong)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", True), ("7", True), ("8", False)], 1.0),
        ([("7", True), ("8", False), ("8", False)], 0.0),
        ([("7", True), ("8", False)], 0.5),  # a tie is decided at random
        ([("7", True), ("8", False), ("9", False)], 1 / 3),
        ([("7", True), (None, False), (None, False)], 1.0),  # no answer, no vote
        ([(None, False)], 0.0),
        ([("7", True), ("7", False)], 0.5),  # a reward that judges more than the answer
    ],
)
def test_majority_vote(votes, expected):
    assert majority_vote(votes) == pytest.approx(expected)


def test_a_reward_that_tells_no_answer_has_no_majority(model_and_engine, tmp_path):
    result = run(model_and_engine[1], num_samples=2)
    assert result.majority is not None
    (tmp_path / "own.py").write_text("def reward(response): return True", encoding="utf-8")
    scorer = Scorer(RewardConfig(function=f"{tmp_path}/own.py:reward"), max_new_tokens=5, decode=parity)
    again = summarize(result.groups, scorer, num_samples=2, policy_version=0)
    assert again.majority is None and again.metrics()["eval/maj@2"] is None
    assert again.accuracy_sampled == result.accuracy_sampled


def test_rewards_and_the_keys_of_a_dict_are_those_of_the_sampled_responses(model_and_engine, tmp_path):
    source = (
        "def reward(response, answer): return {'score': 0.8 if response == answer else 0.3, 'even': response == answer}"
    )
    (tmp_path / "partial.py").write_text(source, encoding="utf-8")
    config = RewardConfig(function=f"{tmp_path}/partial.py:reward", num_workers=1)
    with closing(Scorer(config, max_new_tokens=5, decode=parity)) as scorer:
        result = evaluate(model_and_engine[1], make_prompts(), scorer, make_plan(num_samples=2))
    found = result.metrics()
    even = sum(sample.text == "even" for group in result.groups for sample in group.samples[1:]) / 60
    assert found["eval/accuracy"] == found["eval/accuracy_sampled"] == 0, "no reward reaches reward.correct"
    assert found["eval/even"] == pytest.approx(even) and found["eval/reward_mean"] == pytest.approx(0.3 + 0.5 * even)
    own = {key.removeprefix("eval/") for key in found if "@" not in key}
    assert own - {"even"} <= RESERVED_METRICS


def test_standard_error_by_hand():
    assert standard_error([1.0]) is None
    # Mean 1/2, squared deviations 4 * 1/4, over 3, over 4.
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx((1 / 3 / 4) ** 0.5)
