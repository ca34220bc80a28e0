"""Collection on a real engine: counts, dynamic sampling, invalid samples, seeds. Faults are put into real responses."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from samplers import Faulty, LocalSampler, Recorder
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.collect.collector import Collector, CollectPlan
from rollout.collect.filters import DropReason, is_zero_variance
from rollout.collect.requests import SeedSource, make_sample
from rollout.config import CustomFilter, DType, DynamicCollectConfig, FixedCollectConfig, SamplingConfig
from rollout.data.dataset import PromptStream
from rollout.rewards import Scorer
from rollout.rewards.custom import RESERVED_METRICS
from rollout.task_config import RewardConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import Completion, FinishReason, GenerateRequest, Generation, Prompt, SamplingParams

STOP = (EOS_TOKEN_ID, 7)
NUM_PROMPTS = 40
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    engine = TorchEngine(TorchEngineConfig(dtype=DType.float32), index=0, device="cpu", num_threads=None)
    engine.start(path)
    return engine


def make_prompts(count=NUM_PROMPTS, *, answer="even"):
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(
            prompt_id=index,
            token_ids=torch.randint(2, VOCAB_SIZE, (3 + index % 4,), generator=generator).tolist(),
            text=f"prompt {index}",
            answer=answer,
        )
        for index in range(count)
    ]


def parity(token_ids: list[int]) -> str:
    """The task of these tests: is the first token of the response even?"""
    return "odd" if token_ids[0] % 2 else "even"


SCORERS: dict[str, Scorer] = {}
"""One per config for all tests: they have processes."""


@pytest.fixture(scope="module", autouse=True)
def end_of_the_scorers():
    yield
    for scorer in SCORERS.values():
        scorer.close()


def scorer_of(reward, decode):
    key = f"{reward} {decode.__name__}"
    if key not in SCORERS:
        SCORERS[key] = Scorer(reward, max_new_tokens=MAX_NEW_TOKENS, decode=decode)
    return SCORERS[key]


def make_collector(
    sampler, collect=None, *, prompts=None, num_prompts=8, group_size=3, min_group_size=2, seed=0, **scoring
):
    return Collector(
        sampler=sampler,
        prompts=PromptStream(prompts or make_prompts(), seed=seed),
        scorer=scorer_of(scoring.get("reward", RewardConfig(num_workers=1)), scoring.get("decode", parity)),
        collect=collect or FixedCollectConfig(),
        sampling=SamplingConfig(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS),
        plan=CollectPlan(
            prompts_per_step=num_prompts,
            group_size=group_size,
            seed=seed,
            stop_token_ids=STOP,
            min_group_size=min_group_size,
        ),
    )


def verdicts(group):
    return {parity(sample.token_ids[len(group.prompt.token_ids) :].tolist()) for sample in group.samples}


def test_fixed_returns_every_group_of_the_step_as_it_was_sampled(engine):
    recorder = Recorder(engine)
    collected = make_collector(recorder).collect(1, 0)
    expected = PromptStream(make_prompts(), seed=0).take(8)
    assert [group.prompt for group in collected.groups] == expected
    (tickets,) = recorder.rounds
    requests, generations = recorder.requests, [recorder.answers[ticket] for ticket in tickets]
    samples = [sample for group in collected.groups for sample in group.samples]
    assert len(samples) == len(requests) == 24
    for sample, request, generation in zip(samples, requests, generations, strict=True):
        prompt = request.prompt_token_ids
        assert (sample.prompt_id, sample.sample_index) == (request.prompt_id, request.sample_index)
        assert sample.token_ids.tolist() == prompt + generation.token_ids
        assert sample.response_mask.tolist() == [False] * len(prompt) + [True] * len(generation.token_ids)
        assert sample.rollout_logprobs.tolist() == [0.0] * len(prompt) + generation.logprobs
        assert sample.text == parity(generation.token_ids)
        assert sample.correct is (sample.text == "even")
        assert sample.reward == float(sample.correct)
        assert sample.policy_version == 0
        assert request.sampling == SamplingParams(
            temperature=1.0, max_new_tokens=6, seed=request.sampling.seed, stop_token_ids=STOP
        )


def test_metrics_of_a_fixed_step(engine):
    recorder = Recorder(engine)
    reward = RewardConfig(correct=1.0, incorrect=-1.0)
    collected = make_collector(recorder, reward=reward).collect(1, 0)
    metrics = collected.stats.metrics()
    generations = [recorder.answers[ticket] for ticket in recorder.rounds[0]]
    lengths = [len(generation.token_ids) for generation in generations]
    correct = [parity(generation.token_ids) == "even" for generation in generations]
    accuracy = sum(correct) / 24
    assert 0 < accuracy < 1
    truncated = sum(generation.finish_reason is FinishReason.length for generation in generations)
    assert 0 < truncated < 24
    distinct = {(i // 3, tuple(generation.token_ids)) for i, generation in enumerate(generations)}
    assert metrics == {
        "rollout/policy_version": 0.0,
        "rollout/num_samples": 24.0,
        "rollout/rounds": 1.0,
        "rollout/groups_generated": 8.0,
        "rollout/groups_kept": 8.0,
        **{f"rollout/groups_dropped/{reason}": 0.0 for reason in DropReason.__members__},
        "rollout/groups_left_over": 0.0,
        "rollout/samples_generated": 24.0,
        "rollout/samples_decided": 24.0,
        "rollout/past_end_frac": None,
        "rollout/zero_variance_frac": sum(len(set(correct[i : i + 3])) == 1 for i in range(0, 24, 3)) / 8,
        **{
            f"rollout/samples_dropped/{reason}": 0.0
            for reason in (*DAMAGES, "failed", "lost_resumed", "bad_support", "bad_routes")
        },
        "rollout/samples_aborted": 0.0,
        "rollout/samples_resumed": 0.0,
        "rollout/resumed_tokens": 0.0,
        "rollout/response_tokens": float(sum(lengths)),
        "rollout/response_tokens_mean": pytest.approx(sum(lengths) / 24),
        "rollout/response_tokens_min": float(min(lengths)),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_frac": pytest.approx(truncated / 24),
        "rollout/generated_tokens": float(sum(lengths)),
        "rollout/wasted_tokens": 0.0,
        "rollout/prompt_tokens": float(sum(len(group.prompt.token_ids) * 3 for group in collected.groups)),
        # The engine reads the 24 prompts together, each of them once.
        "rollout/prompt_tokens_shared": float(sum(len(group.prompt.token_ids) * 2 for group in collected.groups)),
        "rollout/tokens_per_s": pytest.approx(sum(lengths) / collected.stats.sampling_s),
        "rollout/duplicate_frac": pytest.approx(1 - len(distinct) / 24),
        "rollout/lag_mean": 0.0,
        "rollout/lag_max": 0.0,
        "rollout/mixed_version_frac": 0.0,
        "reward/mean": pytest.approx(2 * accuracy - 1),
        "reward/std": pytest.approx(2 * (accuracy * (1 - accuracy)) ** 0.5),
        "reward/min": -1.0,
        "reward/max": 1.0,
        "reward/accuracy": pytest.approx(accuracy),
        "reward/generated_accuracy": pytest.approx(accuracy),
        "reward/timeouts": 0.0,
        "reward/crashes": 0.0,
        "reward/errors": 0.0,
        "reward/retries": 0.0,
        "reward/unscored": 0.0,
        "perf/rollout_hidden_s": 0.0,
        "perf/overlap_frac": 0.0,
    }
    own = {name.removeprefix("reward/") for name in collected.stats.metrics() if name.startswith("reward/")}
    assert own <= RESERVED_METRICS
    assert collected.stats.waited_s >= collected.stats.sampling_s > 0
    assert collected.stats.reward_s > 0


class WithTools(LocalSampler):
    """Of every response the model sampled the first token only."""

    def poll(self, timeout_s):
        found = []
        for ticket, whole in super().poll(timeout_s):
            told = len(whole.token_ids) - 1
            generation = replace(whole, logprobs=[*whole.logprobs[:1], *[0.0] * told], sampled=[True, *[False] * told])
            found.append(Completion(ticket, generation))
        return found


def test_what_a_tool_said_is_neither_sampled_nor_wasted(engine):
    metrics = make_collector(WithTools(engine)).collect(1, 0).stats.metrics()
    assert metrics["rollout/generated_tokens"] == metrics["rollout/response_tokens"] == 24.0
    assert metrics["rollout/wasted_tokens"] == 0.0


def test_clones_within_a_group_are_reported(engine):
    class Cloning(LocalSampler):
        def submit(self, requests):
            first = {request.prompt_id: request.sampling for request in reversed(requests)}
            return super().submit([replace(request, sampling=first[request.prompt_id]) for request in requests])

    stats = make_collector(Cloning(engine)).collect(1, 0).stats
    assert stats.metrics()["rollout/duplicate_frac"] == pytest.approx(2 / 3)


def test_dynamic_keeps_the_first_groups_that_disagree(engine):
    recorder = Recorder(engine)
    config = DynamicCollectConfig(over_sampling=1.5, max_rounds=20)
    collected = make_collector(recorder, config, num_prompts=9, seed=21).collect(1, 0)
    assert len(recorder.rounds) > 1, "the first round must fall short for this test to mean anything"
    expected, mixed, decided, counts = [], 0, [], []
    for tickets in recorder.rounds:
        # The size of a round follows from what was missing before it.
        assert len(tickets) == 3 * -(-3 * (9 - mixed) // 2)
        counts.append(len(tickets) // 3)
        for first in range(0, len(tickets), 3):
            group = [recorder.answers[ticket] for ticket in tickets[first : first + 3]]
            if mixed < 9:
                decided += group
            if len({parity(g.token_ids) for g in group}) == 2:
                mixed += 1
                expected.append(recorder.asked[tickets[first]].prompt_id)
    assert [group.prompt.prompt_id for group in collected.groups] == expected[:9]
    assert all(len(verdicts(group)) == 2 for group in collected.groups)
    stats = collected.stats
    assert (stats.rounds, stats.groups_generated) == (len(counts), sum(counts))
    constant = len(decided) // 3 - 9
    assert +stats.groups_dropped == +Counter(zero_variance=constant, surplus=sum(counts) - 9 - constant)
    metrics = stats.metrics()
    # Groups behind the last one that was kept are not looked at: among them, short answers come first.
    assert metrics["reward/generated_accuracy"] == pytest.approx(
        sum(parity(generation.token_ids) == "even" for generation in decided) / len(decided)
    )
    everything = sum(len(generation.token_ids) for generation in recorder.answers.values())
    assert metrics["rollout/generated_tokens"] == everything
    assert metrics["rollout/wasted_tokens"] == everything - metrics["rollout/response_tokens"] > 0


def test_surplus_groups_are_counted_not_returned(engine):
    config = DynamicCollectConfig(over_sampling=8.0)
    collected = make_collector(Recorder(engine), config, num_prompts=3).collect(1, 0)
    assert len(collected.groups) == 3
    assert collected.stats.rounds == 1
    assert collected.stats.groups_generated == 24
    assert collected.stats.groups_dropped["surplus"] > 0
    assert collected.stats.groups_dropped.total() == 21


def test_a_penalty_does_not_save_a_constant_group(engine):
    """Rewards of one length differ from those of another, yet all samples are correct."""
    reward = RewardConfig(overlong_buffer_tokens=5, overlong_penalty=1.0)
    always_right = [replace(prompt, answer="") for prompt in make_prompts()]

    def nothing(token_ids):
        return ""

    collector = make_collector(
        LocalSampler(engine),
        DynamicCollectConfig(max_rounds=2),
        prompts=always_right,
        reward=reward,
        decode=nothing,
    )
    with pytest.raises(RuntimeError, match=r"0 of 8 needed groups .* zero_variance 24"):
        collector.collect(1, 0)


@pytest.mark.scenario(24)
def test_a_starved_step_stops_with_counts_and_advice(engine):
    hopeless = make_prompts(answer="neither")
    collector = make_collector(
        LocalSampler(engine), DynamicCollectConfig(max_rounds=3, over_sampling=1.0), prompts=hopeless
    )
    with pytest.raises(RuntimeError) as caught:
        collector.collect(4, 0)
    message = str(caught.value)
    assert message.startswith(
        "step 4: 0 of 8 needed groups after 3 rounds, 24 groups and 72 samples "
        "(too_old 0, too_small 0, zero_variance 24, filtered 0, surplus 0; accuracy of all samples 0.000)."
    )
    assert all(key in message for key in ("collect.max_rounds", "collect.min_prompts", "too hard or too easy"))


@dataclass(kw_only=True)
class Even(CustomFilter):
    """Keeps the prompts with an even number, or none."""

    none: bool = False

    def __call__(self, group):
        assert all(sample.correct is not None and sample.reward is not None for sample in group.samples)
        return not self.none and group.prompt.prompt_id % 2 == 0


def test_a_filter_of_the_user_decides_which_groups_a_step_has(engine):
    found = make_collector(LocalSampler(engine), DynamicCollectConfig(max_rounds=9, filter=Even())).collect(1, 0)
    assert len(found.groups) == 8 and {group.prompt.prompt_id % 2 for group in found.groups} == {0}
    assert any(is_zero_variance(group) for group in found.groups), "correct or not does not decide"
    dropped = found.stats.metrics()
    assert dropped["rollout/groups_dropped/filtered"] > 0 == dropped["rollout/groups_dropped/zero_variance"]
    starved = make_collector(LocalSampler(engine), DynamicCollectConfig(max_rounds=2, filter=Even(none=True)))
    with pytest.raises(RuntimeError, match=r"0 of 8 needed groups .* filtered 2\d.* collect\.filter=Even\(none=true\)"):
        starved.collect(1, 0)


PARTIAL = """
def reward(response, answer):
    return {"score": 0.8 if response == answer else 0.3, "even": response == "even"}
"""


def test_partial_credit_that_is_never_correct_is_told(engine, tmp_path):
    (tmp_path / "partial.py").write_text(PARTIAL, encoding="utf-8")
    reward = RewardConfig(function=f"{tmp_path}/partial.py:reward", num_workers=1)
    fixed = make_collector(LocalSampler(engine), reward=reward).collect(1, 0).stats.metrics()
    assert (fixed["reward/min"], fixed["reward/max"], fixed["reward/accuracy"]) == (0.3, 0.8, 0.0)
    assert fixed["rollout/zero_variance_frac"] < 1, "what differs is the reward"
    assert fixed["reward/even"] == pytest.approx((fixed["reward/mean"] - 0.3) / 0.5), "over the samples of reward/mean"
    once = DynamicCollectConfig(max_rounds=1)
    with pytest.raises(RuntimeError, match=r"zero_variance [1-9]") as caught:
        make_collector(LocalSampler(engine), once, reward=reward).collect(1, 0)
    message = str(caught.value)
    assert "a number counts as correct from reward.correct=1 on" in message and "too hard or too easy" not in message
    lower = replace(reward, correct=0.5)
    assert make_collector(LocalSampler(engine), replace(once, max_rounds=20), reward=lower).collect(1, 0).groups


def test_min_prompts_lets_a_short_step_pass(engine):
    few = DynamicCollectConfig(max_rounds=1, over_sampling=1.0)
    with pytest.raises(RuntimeError, match="of 8 needed groups after 1 rounds"):
        make_collector(LocalSampler(engine), few).collect(1, 0)
    collected = make_collector(LocalSampler(engine), replace(few, min_prompts=2)).collect(1, 0)
    assert 2 <= len(collected.groups) < 8
    assert collected.stats.metrics()["rollout/groups_kept"] == len(collected.groups)
    with pytest.raises(RuntimeError, match="of 7 needed groups after 1 rounds"):
        make_collector(LocalSampler(engine), replace(few, min_prompts=7)).collect(1, 0)
    # More than a step holds means all of a step.
    with pytest.raises(RuntimeError, match="of 8 needed groups"):
        make_collector(LocalSampler(engine), replace(few, min_prompts=99)).collect(1, 0)


DAMAGES = {
    "abort": lambda g: replace(g, finish_reason=FinishReason.abort),
    "wrong_version": lambda g: replace(g, token_versions=[5] * len(g.token_ids)),
    "empty": lambda g: replace(g, token_ids=[], logprobs=[]),
    "too_long": lambda g: replace(g, token_ids=[2] * 7, logprobs=[-1.0] * 7),
    "no_logprobs": lambda g: replace(g, logprobs=None),
    "wrong_length": lambda g: replace(g, logprobs=g.logprobs[:-1]),
    "bad_logprob": lambda g: replace(g, logprobs=[float("nan"), *g.logprobs[1:]]),
}


@pytest.mark.scenario(19)
@pytest.mark.parametrize("reason", DAMAGES)
def test_invalid_samples_are_dropped_and_counted(engine, reason):
    sampler = Faulty(engine, lambda position, g: DAMAGES[reason](g) if position in (1, 9) else g)
    clean = make_collector(LocalSampler(engine)).collect(1, 0)
    collected = make_collector(sampler, FixedCollectConfig(max_invalid_fraction=0.1)).collect(1, 0)
    assert [len(group.samples) for group in collected.groups] == [2, 3, 3, 2, 3, 3, 3, 3]
    assert [sample.sample_index for sample in collected.groups[0].samples] == [0, 2]
    assert collected.groups[1:3] == clean.groups[1:3]
    metrics = collected.stats.metrics()
    assert metrics[f"rollout/samples_dropped/{reason}"] == 2.0
    assert sum(value for name, value in metrics.items() if "samples_dropped" in name) == 2.0
    assert metrics["rollout/num_samples"] == 22.0


def test_a_group_of_one_is_dropped(engine):
    sampler = Faulty(engine, lambda position, g: replace(g, logprobs=None) if position in (3, 5) else g)
    collected = make_collector(sampler, FixedCollectConfig(max_invalid_fraction=0.1)).collect(1, 0)
    assert len(collected.groups) == 7
    assert collected.stats.groups_dropped == Counter({"too_small": 1})
    assert collected.stats.samples_dropped == Counter({"no_logprobs": 2})
    assert collected.stats.metrics()["rollout/wasted_tokens"] > 0
    sampler = Faulty(engine, lambda position, g: replace(g, logprobs=None) if position in (3, 5) else g)
    lone = make_collector(sampler, FixedCollectConfig(max_invalid_fraction=0.1), min_group_size=1).collect(1, 0)
    assert sorted(len(group.samples) for group in lone.groups) == [1, *[3] * 7], "without a group baseline it is kept"
    config = DynamicCollectConfig(max_invalid_fraction=0.1, max_rounds=20)
    sampler = Faulty(engine, lambda position, g: replace(g, logprobs=None) if position in (3, 5) else g)
    replaced = make_collector(sampler, config).collect(1, 0)
    assert len(replaced.groups) == 8
    assert replaced.stats.groups_dropped["too_small"] == 1


def test_too_many_invalid_samples_stop_the_run(engine):
    def damage(position, generation):
        if position < 3:
            return replace(generation, token_versions=[5] * len(generation.token_ids))
        return replace(generation, logprobs=None) if position == 10 else generation

    with pytest.raises(RuntimeError) as caught:
        make_collector(Faulty(engine, damage), FixedCollectConfig(max_invalid_fraction=0.15)).collect(3, 0)
    assert str(caught.value).startswith(
        "step 3: 4 of 24 samples are invalid, more than collect.max_invalid_fraction=0.15: wrong_version 3 (sampled "
        "from other weights than the step expects); no_logprobs 1 (the engine returned no log-probs). "
        "Expected policy version 0, got [0, 5]."
    )
    exactly = FixedCollectConfig(max_invalid_fraction=4 / 24)
    assert len(make_collector(Faulty(engine, damage), exactly).collect(3, 0).groups) == 7


def test_an_engine_with_old_weights_stops_the_run(engine):
    with pytest.raises(RuntimeError, match=r"24 of 24 samples are invalid.*Expected policy version 1, got \[0\]"):
        make_collector(LocalSampler(engine)).collect(2, 1)
    with pytest.raises(RuntimeError, match="0 of 1 needed groups after 1 rounds"):
        make_collector(LocalSampler(engine), FixedCollectConfig(max_invalid_fraction=1.0)).collect(2, 1)


def test_lost_responses_are_noticed(engine):
    class Losing(LocalSampler):
        def poll(self, timeout_s):
            found = super().poll(timeout_s)
            return [each for each in found if each.ticket != next(iter(self.asked))]

    with pytest.raises(RuntimeError, match="step 1: 1 of the responses that were asked for never came back"):
        make_collector(Losing(engine)).collect(1, 0)


def test_steps_and_runs_draw_other_seeds_and_a_rerun_the_same(engine):
    def seeds(run_seed, steps):
        recorder = Recorder(engine)
        collector = make_collector(recorder, num_prompts=4, seed=run_seed)
        for step in steps:
            collector.collect(step, 0)
        return [(r.prompt_id, r.sample_index, r.sampling.seed) for r in recorder.requests]

    first = seeds(0, [1, 2, 3])
    assert first == seeds(0, [1, 2, 3])
    assert len({seed for *_, seed in first}) == len(first) == 36
    assert not {seed for *_, seed in first} & {seed for *_, seed in seeds(1, [1, 2, 3])}


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_anew(engine):
    """Two prompts, eight groups: the stream wraps four times within the step."""
    recorder = Recorder(engine)
    make_collector(recorder, prompts=make_prompts(2)).collect(1, 0)
    assert len({request.sampling.seed for request in recorder.requests}) == 24


def test_seeds_are_stable_unique_and_31_bits():
    drawn = [SeedSource(7, step=2).draw(11, 3) for _ in range(2)]
    assert drawn == [1944677559] * 2
    source = SeedSource(0, step=1)
    # A birthday collision of 31-bit hashes is near certain among so many draws.
    many = [source.draw(prompt, index) for prompt in range(20_000) for index in range(8)]
    assert len(set(many)) == len(many)
    assert all(0 <= seed < 2**31 for seed in many)
    without_memory = {SeedSource(0, step=1).draw(prompt, index) for prompt in range(20_000) for index in range(8)}
    assert len(without_memory) < len(many), "no collision arose: the test shows nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": None}, "no log-probs"),
        ({"logprobs": [-1.0]}, "differ in length: 4, 4, 2, 4"),
        ({"token_versions": [0]}, "sampled and token_versions differ in length"),
        ({"token_versions": []}, "sampled and token_versions differ in length"),
        ({"sampled": [True]}, "sampled and token_versions differ in length"),
        ({"sampled": [False] * 3}, "no response token"),
    ],
)
def test_make_sample_refuses_what_does_not_fit_together(change, message):
    request = GenerateRequest(
        prompt_id=1,
        sample_index=2,
        prompt_token_ids=[3],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=3, seed=0),
    )
    whole = Generation(
        token_ids=[4, 5, 6], logprobs=[-1.0] * 3, token_versions=[0] * 3, finish_reason=FinishReason.stop
    )
    assert make_sample(request, whole).token_ids.tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match=f"sample 1/2: .*{message}"):
        make_sample(request, replace(whole, **change))
