"""Collection as a stream: order, early abort, slow rewards, partial rollouts, work ahead, and what a checkpoint keeps.

The answers are those of a real engine; a test decides when each comes back.
"""

import json
import random
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import pytest
from samplers import Shuffled
from test_collect import MAX_NEW_TOKENS, engine, make_prompts, parity  # noqa: F401 - engine is a fixture

from rollout.collect.collector import Collector, CollectPlan, UnfinishedGroups
from rollout.config import CollectOrder, DynamicCollectConfig, FixedCollectConfig, SamplingConfig
from rollout.data.dataset import PromptStream
from rollout.engine import ABORT_TIMEOUT_S, POLL_S
from rollout.group.actor_calls import GRACE_S
from rollout.group.engine_group import EngineGroup
from rollout.rewards import Scorer
from rollout.sglang.config import SGLangConfig
from rollout.sglang.request_stream import WATCH_INTERVAL_S
from rollout.task_config import RewardConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import FinishReason

GROUP_SIZE = 3
SCORER = Scorer(RewardConfig(num_workers=1), max_new_tokens=MAX_NEW_TOKENS, decode=parity)
"""One for all tests: it has processes."""


@pytest.fixture(scope="module", autouse=True)
def end_of_the_scorer():
    yield
    SCORER.close()


PARTIAL = FixedCollectConfig(over_sampling=1.5, partial=True)


def make(
    sampler,
    collect,
    *,
    num_prompts=6,
    max_staleness=0,
    unfinished=UnfinishedGroups.drop,
    scorer=None,
    episodes=dict,
    **sampling,
):
    prompts = PromptStream(make_prompts(), seed=0)
    if scorer is None:
        sampler.waits_for = lambda: SCORER.unfinished
    collector = Collector(
        sampler=sampler,
        prompts=prompts,
        scorer=scorer or SCORER,
        collect=collect,
        sampling=SamplingConfig(**{"max_new_tokens": MAX_NEW_TOKENS} | sampling),
        plan=CollectPlan(
            prompts_per_step=num_prompts,
            group_size=GROUP_SIZE,
            seed=0,
            stop_token_ids=(1, 7),
            min_group_size=2,
            max_staleness=max_staleness,
            unfinished=unfinished,
        ),
        take_episode_counts=episodes,
    )
    return collector, prompts


def partial(sampler, *, max_staleness=1, **options):
    return make(sampler, PARTIAL, max_staleness=max_staleness, unfinished=UnfinishedGroups.resume, **options)


ORDERS = {"as submitted": min, "backwards": max, "at random": random.Random(0).choice}
DYNAMIC = DynamicCollectConfig(over_sampling=2.0, max_rounds=20)


def test_which_groups_are_kept_does_not_depend_on_when_they_end(engine):  # noqa: F811
    collected = {}
    for name, order in ORDERS.items():
        collector, _ = make(Shuffled(engine, order), DYNAMIC)
        collected[name] = [collector.collect(step, 0) for step in (1, 2)]
    expected = collected["as submitted"]
    for steps in collected.values():
        assert [step.groups for step in steps] == [step.groups for step in expected]
        for step, other in zip(steps, expected, strict=True):
            mine, theirs = step.stats.metrics(), other.stats.metrics()
            for name in ("reward/generated_accuracy", "rollout/rounds", "rollout/groups_generated"):
                assert mine[name] == theirs[name]
            assert step.stats.groups_dropped == other.stats.groups_dropped
    # What is wasted does depend on it: backwards, everything has ended when the first group does.
    aborted = {name: steps[0].stats.samples_aborted for name, steps in collected.items()}
    assert aborted["as submitted"] > aborted["backwards"] == 0
    wasted = {name: steps[0].stats.wasted_tokens for name, steps in collected.items()}
    assert wasted["as submitted"] < wasted["backwards"]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_token_and_sample_is_accounted_for(engine, order):  # noqa: F811
    collector, _ = make(Shuffled(engine, order), DYNAMIC)
    stats = collector.collect(1, 0).stats
    assert stats.generated_tokens == sum(sum(served.lengths) for served in stats.served)
    assert stats.generated_tokens == stats.metrics()["rollout/response_tokens"] + stats.wasted_tokens
    assert stats.samples_generated + stats.samples_aborted == GROUP_SIZE * stats.groups_generated
    assert stats.groups_generated == len(stats.kept) + stats.groups_dropped.total()


def test_surplus_is_aborted_as_soon_as_the_step_has_its_groups(engine):  # noqa: F811
    sampler = Shuffled(engine, min)
    collector, _ = make(sampler, DynamicCollectConfig(over_sampling=6.0))
    stats = collector.collect(1, 0).stats
    decided = len(stats.kept) + stats.groups_dropped["zero_variance"]
    assert stats.groups_dropped["surplus"] == 36 - decided > 10
    assert stats.samples_generated == GROUP_SIZE * decided
    assert stats.samples_aborted == GROUP_SIZE * stats.groups_dropped["surplus"]
    assert sampler.unfinished == 0


def test_a_slow_reward_does_not_keep_what_has_ended_from_being_taken(engine, tmp_path):  # noqa: F811
    path, may_end = tmp_path / "slow.py", tmp_path / "may_end"
    path.write_text(
        "import os, time\n\n\n"
        "def score(response, answer):\n"
        f"    while not os.path.exists({str(may_end)!r}):\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.02)\n"
        "    return 1.0\n"
    )
    config = RewardConfig(function=f"{path}:score", num_workers=1, timeout_s=60.0)
    scored_at_end = []

    class Counting(Shuffled):
        def poll(self, timeout_s):
            found = super().poll(timeout_s)
            if self.unfinished == 0:
                responses = [response for group in collector._pending for response in group.responses]
                scored_at_end.append(sum(response.is_done for response in responses))
                may_end.touch()
            return found

    with closing(Scorer(config, max_new_tokens=MAX_NEW_TOKENS, decode=parity)) as scorer:
        collector, _ = make(Counting(engine, min), FixedCollectConfig(), scorer=scorer, num_prompts=12)
        stats = collector.collect(1, 0).stats
    assert len(stats.kept) == 12
    # All 36 responses were taken before the first reward was made.
    assert scored_at_end[0] == 0
    assert stats.reward_s > 0.3
    assert collector.take_reward_s() == stats.reward_s
    assert collector.take_reward_s() == 0.0


def test_the_order_of_completion_prefers_short_answers_and_says_so(engine):  # noqa: F811
    def by_length(sampler):
        return lambda tickets: min(tickets, key=lambda ticket: (len(sampler._ready[ticket].token_ids), ticket))

    found = {}
    configs = {
        CollectOrder.completion: FixedCollectConfig(over_sampling=4.0, order=CollectOrder.completion),
        CollectOrder.submission: FixedCollectConfig(),
    }
    for order, config in configs.items():
        sampler = Shuffled(engine, min, tokens_at_abort=MAX_NEW_TOKENS)
        sampler._order = by_length(sampler)
        found[order] = make(sampler, config)[0].collect(1, 0).stats
    everything = found[CollectOrder.completion].all_lengths
    assert len(everything) == 24 * GROUP_SIZE
    biased, fair = (found[order].metrics() for order in configs)
    assert biased["rollout/length_bias"] < 1
    assert biased["rollout/length_bias"] * sum(everything) / len(everything) == pytest.approx(
        biased["rollout/response_tokens_mean"]
    )
    assert "rollout/length_bias" not in fair


def resume_some(engine, *, steps=4, **sampling):  # noqa: F811
    """A few steps of partial rollouts; the weights are one version newer at each."""
    sampler = Shuffled(engine, min, tokens_at_abort=2)
    collector, _ = partial(sampler, **sampling)
    collected = []
    for step in range(1, steps + 1):
        sampler.version = step - 1
        collected.append(collector.collect(step, step - 1))
    return sampler, collector, collected


def test_what_a_step_leaves_unfinished_goes_on_in_the_next(engine):  # noqa: F811
    sampler, _, collected = resume_some(engine)
    # In the order of submission no prompt is passed over, and none comes twice.
    order = [group.prompt for step in collected for group in step.groups]
    assert order == PromptStream(make_prompts(), seed=0).take(24)
    assert sum(step.stats.samples_resumed for step in collected) > 5
    resumed = [request for request in sampler.asked.values() if request.resumed is not None]
    assert resumed
    samples = {(s.prompt_id, s.sample_index): s for step in collected for g in step.groups for s in g.samples}
    checked = 0
    for request in resumed:
        begun, sample = request.resumed, samples.get((request.prompt_id, request.sample_index))
        if sample is None:
            continue  # still under way
        first = len(request.prompt_token_ids)
        end = first + len(begun.token_ids)
        assert sample.token_ids[first:end].tolist() == begun.token_ids
        assert sample.rollout_logprobs[first:end].tolist() == begun.logprobs
        assert sample.token_versions[first:end].tolist() == begun.token_versions
        assert set(sample.token_versions[end:]) <= {begun.token_versions[-1] + 1}
        assert sample.num_response_tokens <= MAX_NEW_TOKENS
        is_full = sample.num_response_tokens == MAX_NEW_TOKENS
        assert (sample.finish_reason is FinishReason.length) <= is_full
        checked += 1
    assert checked > 5
    seeds = [request.sampling.seed for request in sampler.asked.values()]
    assert len(set(seeds)) == len(seeds)
    mixed = [step.stats.metrics()["rollout/mixed_version_frac"] for step in collected]
    assert mixed[0] == 0 < max(mixed)
    assert max(step.stats.metrics()["rollout/lag_max"] for step in collected) == 1


def test_what_is_resumed_keeps_the_supports_of_its_tokens(engine):  # noqa: F811
    sampler, _, collected = resume_some(engine, top_p=0.8)
    samples = {(s.prompt_id, s.sample_index): s for step in collected for g in step.groups for s in g.samples}
    checked = 0
    for request in sampler.asked.values():
        sample = samples.get((request.prompt_id, request.sample_index))
        if request.resumed is None or sample is None:
            continue
        begun = request.resumed.supports
        assert begun.sizes.tolist() == sample.supports.sizes[sample.response_mask][: len(begun)].tolist()
        assert begun.token_ids.tolist() == sample.supports.token_ids[: len(begun.token_ids)].tolist()
        checked += 1
    assert checked > 5
    for step in collected:
        sizes = [s.supports.sizes[s.response_mask].mean() for g in step.groups for s in g.samples]
        assert min(sizes) < step.stats.metrics()["rollout/support_size_mean"] < max(sizes) < 67


def test_partial_rollouts_lose_no_token(engine):  # noqa: F811
    _, collector, collected = resume_some(engine)
    stats = [step.stats for step in collected]
    assert all(each.wasted_tokens == 0 for each in stats)
    assert all(each.groups_left_over == 3 for each in stats)
    assert [each.groups_generated for each in stats] == [9, 6, 6, 6]
    kept = sum(each.metrics()["rollout/response_tokens"] for each in stats)
    left = sum(group.num_tokens for group in collector._pending)
    assert sum(each.generated_tokens for each in stats) == kept + left


def test_a_response_that_ended_early_is_not_sampled_again(engine):  # noqa: F811
    """Backwards, the surplus is complete first: the next step takes it as it is."""
    sampler = Shuffled(engine, max)
    collector, _ = partial(sampler)
    collector.collect(1, 0)
    asked = len(sampler.asked)
    sampler.version = 1
    second = collector.collect(2, 1)
    assert len(sampler.asked) == asked + 6 * GROUP_SIZE
    assert [set(s.token_versions[len(g.prompt.token_ids) :]) for g in second.groups[:3] for s in g.samples] == [{0}] * 9
    assert second.stats.samples_resumed == 0


def test_leftovers_that_are_too_old_are_dropped_and_counted(engine):  # noqa: F811
    sampler = Shuffled(engine, min)
    collector, _ = partial(sampler)
    collector.collect(1, 0)
    known = sum(group.num_tokens for group in collector._pending if group.num_tokens)
    with_tokens = sum(group.num_tokens > 0 for group in collector._pending)
    assert with_tokens > 0
    # Two optimizer steps at once are one step of the schedule: the bound counts rollout steps.
    collector._versions[2] = 2
    sampler.version = 4
    stats = collector.collect(3, 4).stats
    assert stats.groups_dropped == {"too_old": with_tokens}
    assert stats.wasted_tokens == known
    # Those that were dropped are replaced.
    assert stats.groups_generated == 6 + with_tokens


def test_an_engine_that_forgets_what_it_resumed_is_noticed(engine):  # noqa: F811
    class Forgetful(Shuffled):
        def poll(self, timeout_s):
            found = super().poll(timeout_s)
            for ticket, generation in found:
                if self.asked[ticket].resumed is not None:
                    generation.token_ids[0] += 1
            return found

    sampler = Forgetful(engine, min)
    collector, _ = partial(sampler)
    collector.collect(1, 0)
    with pytest.raises(RuntimeError, match="lost_resumed"):
        sampler.version = 1
        collector.collect(2, 1)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}], ids=["", "truncated"])
@pytest.mark.parametrize("gives_up", [False, True], ids=["between steps", "in the rollout of the next step"])
def test_a_checkpoint_keeps_what_is_left_over(engine, gives_up, sampling):  # noqa: F811
    """Stopped after step 2 and gone on with: the same steps as without, but for what was under way in an engine."""

    def run(*, interrupted):
        sampler = Shuffled(engine, min)
        collector, prompts = partial(sampler, **sampling)
        collected = []
        for step in (1, 2, 3, 4):
            sampler.version = step - 1
            collected.append(collector.collect(step, step - 1))
            if interrupted and step == 2:
                snapshot, stream = collector.snapshot(), prompts.state_dict()
                if gives_up:
                    sampler.version = 2
                    collector.collect(3, 2)
                    sampler.abort(None)
                kept = json.loads(json.dumps([snapshot(), stream]))
                collector, prompts = partial(sampler, **sampling)
                prompts.load_state_dict(kept[1])
                collector.load_state_dict(kept[0])
        return [step.groups for step in collected]

    assert run(interrupted=True) == run(interrupted=False)


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"top_p": 0.8}, {"max_staleness": 0}])
def test_leftovers_of_another_config_begin_again(engine, change):  # noqa: F811
    sampler = Shuffled(engine, min)
    collector, prompts = partial(sampler)
    collector.collect(1, 0)
    left = [group.prompt for group in collector._pending]
    state = json.loads(json.dumps(collector.state_dict()))
    again, _ = partial(sampler, **change)
    again._prompts.load_state_dict(prompts.state_dict())
    again.load_state_dict(state)
    sampler.version = 1
    collected = again.collect(2, 1)
    assert [group.prompt for group in collected.groups[:3]] == left
    assert collected.stats.samples_resumed == 0
    assert collected.stats.metrics()["rollout/lag_max"] == 0


def test_leftovers_that_a_lower_limit_does_not_allow_begin_again(engine):  # noqa: F811
    """Two tokens of every stopped response are known, and all of the ones that had ended."""
    sampler = Shuffled(engine, max)
    collector, prompts = partial(sampler)
    collector.collect(5, 0)
    known = [response.num_tokens for group in collector._pending for response in group.responses]
    assert 2 in known and max(known) > 2
    state = json.loads(json.dumps(collector.state_dict()))
    again, _ = partial(sampler, max_new_tokens=2)
    again._prompts.load_state_dict(prompts.state_dict())
    again.load_state_dict(state)
    sampler.version = 1
    collected = again.collect(2, 1)
    assert max(sample.num_response_tokens for group in collected.groups for sample in group.samples) == 2
    assert collected.stats.samples_resumed == 0


class WithTools(Shuffled):
    """Of every response the model sampled every other token only."""

    def poll(self, timeout_s):
        found = super().poll(timeout_s)
        for _, generation in found:
            generation.sampled = [place % 2 == 0 for place in range(len(generation.token_ids))]
            generation.logprobs = [
                logprob * sampled for logprob, sampled in zip(generation.logprobs, generation.sampled, strict=True)
            ]
        return found


def test_a_checkpoint_keeps_which_tokens_a_tool_wrote_and_each_step_counts_its_own_episodes(engine):  # noqa: F811
    def begin(*failed):
        left = [{"episode/failed": number} for number in failed]
        running = UnfinishedGroups.run
        sampler = WithTools(engine, min)
        return make(sampler, FixedCollectConfig(), max_staleness=1, unfinished=running, episodes=lambda: left.pop(0))

    collector, prompts = begin(1, 2)
    _, first = collector.collect(1, 0)
    collector.finish(2, 0)  # a step ahead
    state = json.loads(json.dumps([collector.state_dict(), prompts.state_dict()]))
    whole, stats = collector.collect(2, 1)
    again, stream = begin(0)
    stream.load_state_dict(state[1])
    again.load_state_dict(state[0])
    groups, resumed = again.collect(2, 1)
    assert groups == whole
    rows = [{k: v for k, v in each.metrics().items() if "episode/" in k} for each in (first, stats, resumed)]
    assert [row["episode/failed"] for row in rows] == [1, 2, 2] and rows[1] == rows[2] != rows[0]
    shown = [(~s.response_mask[len(g.prompt.token_ids) :]).sum() for g in whole for s in g.samples]
    assert rows[1]["episode/shown_tokens_mean"] == pytest.approx(sum(shown) / len(shown))
    assert not all(s.response_mask[s.num_prompt_tokens :].all() for group in whole for s in group.samples)


@dataclass
class Saved:
    """As the state of a run holds both in a checkpoint."""

    collector: object
    prompts: object


AHEAD = {
    "fixed": FixedCollectConfig(),
    "dynamic": DYNAMIC,
    "completion": replace(DYNAMIC, order=CollectOrder.completion),
}


@pytest.mark.parametrize("collect", AHEAD.values(), ids=AHEAD)
def test_a_checkpoint_keeps_the_counts_of_a_step_sampled_ahead(engine, collect):  # noqa: F811
    """Saved and gone on with after every step, while the rollout of the next one is done: schedule=one_step_off."""

    def run(*, interrupted):
        sampler = Shuffled(engine, min)
        collector, prompts = make(sampler, collect, max_staleness=1)
        for step in (1, 2, 3):
            groups, stats = collector.collect(step, step - 1)
            found = stats.counts() | stats.metrics()
            if collect.order is CollectOrder.completion:  # dropped groups too
                assert (
                    sum(stats.all_lengths)
                    == stats.generated_tokens
                    > sum(s.num_response_tokens for g in groups for s in g.samples)
                )
            yield groups, {key: found[key] for key in found if not key.endswith("_s") and "perf/" not in key}
            collector.finish(step + 1, step - 1)
            sampler.version = step
            while SCORER.unfinished:  # samples of groups that were dropped meanwhile
                SCORER.poll(1.0)
            if interrupted and step < 3:
                saved = asdict(Saved(collector.state_dict(), prompts.state_dict()))
                state = [*json.loads(json.dumps(saved)).values()]
                collector, prompts = make(sampler, collect, max_staleness=1)
                prompts.load_state_dict(state[1])
                collector.load_state_dict(state[0])

    assert list(run(interrupted=True)) == list(run(interrupted=False))


def test_a_step_sampled_ahead_has_the_weights_it_began_with(engine):  # noqa: F811
    sampler = Shuffled(engine, min)
    collector, prompts = make(sampler, DynamicCollectConfig(max_rounds=20), max_staleness=1)
    versions = [0, 1, 2, 3]
    lags = []
    for step, version in enumerate(versions, start=1):
        collected = collector.collect(step, version)
        lags.append(collected.stats.metrics()["rollout/lag_max"])
        assert collected.stats.metrics()["rollout/mixed_version_frac"] == 0
        collector.start(step + 1, version)
        assert sampler.unfinished > 0  # the engines have work while the policy is trained
        collector.finish(step + 1, version)
        assert sampler.unfinished == 0
        sampler.version = version + 1
    assert lags == [0, 1, 1, 1]
    # A checkpoint holds the step that is collected and not yet trained.
    state = json.loads(json.dumps(collector.state_dict()))
    expected = collector.collect(5, 4).groups
    again, _ = make(sampler, DynamicCollectConfig(max_rounds=20), max_staleness=1)
    again._prompts.load_state_dict(prompts.state_dict())
    again.load_state_dict(state)
    asked = len(sampler.asked)
    assert again.collect(5, 4).groups == expected
    assert len(sampler.asked) == asked


def run_ahead(engine, *, steps, max_staleness):  # noqa: F811
    sampler = Shuffled(engine, random.Random(3).choice)
    config = FixedCollectConfig()
    collector, _ = make(sampler, config, max_staleness=max_staleness, unfinished=UnfinishedGroups.run)
    collected = []
    for step in range(1, steps + 1):
        collected.append(collector.collect(step, step - 1))
        collector.start(step + 1, step - 1, num_steps=min(max_staleness, steps - step))
        sampler.version = step  # an update in flight
    return sampler, collector, collected


def test_engines_never_run_dry_and_nothing_is_older_than_allowed(engine):  # noqa: F811
    sampler, collector, collected = run_ahead(engine, steps=6, max_staleness=2)
    order = [group.prompt for step in collected for group in step.groups]
    assert order == PromptStream(make_prompts(), seed=0).take(36)
    assert [step.stats.groups_generated for step in collected] == [6, 12, 6, 6, 6, 0]
    assert max(step.stats.metrics()["rollout/lag_max"] for step in collected) <= 2
    assert max(step.stats.metrics()["rollout/lag_mean"] for step in collected) > 0
    assert not any(step.stats.groups_dropped for step in collected)
    assert sampler.unfinished == 0 and not collector._pending  # nothing is begun that no step will take


def test_the_order_of_completion_runs_into_the_bound_of_staleness(engine):  # noqa: F811
    """One response of the oldest group ends at every step; else newer groups always end before older ones."""
    first = [True]

    def order(tickets):
        return min(tickets) if first and first.pop() else max(tickets)

    sampler = Shuffled(engine, order)
    config = FixedCollectConfig(order=CollectOrder.completion)
    collector, _ = make(sampler, config, max_staleness=1, unfinished=UnfinishedGroups.run, num_prompts=2)
    dropped = 0
    for step in range(1, 7):
        stats = collector.collect(step, step - 1).stats
        dropped += stats.groups_dropped["too_old"]
        assert stats.metrics()["rollout/lag_max"] <= 1
        collector.start(step + 1, step - 1, num_steps=2)
        sampler.version = step
        first.append(True)
    assert dropped > 0


def test_what_the_engines_have_is_asked_again_after_a_restart(engine):  # noqa: F811
    sampler = Shuffled(engine, min)
    collector, prompts = make(sampler, FixedCollectConfig(), max_staleness=1, unfinished=UnfinishedGroups.run)
    collector.collect(1, 0)
    collector.start(2, 0)
    state = json.loads(json.dumps([collector.state_dict(), prompts.state_dict()]))
    fresh = Shuffled(engine, min)
    fresh.version = 1
    again, stream = make(fresh, FixedCollectConfig(), max_staleness=1, unfinished=UnfinishedGroups.run)
    stream.load_state_dict(state[1])
    again.load_state_dict(state[0])
    collected = again.collect(2, 1)
    assert [group.prompt for group in collected.groups] == PromptStream(make_prompts(), seed=0).take(12)[6:]
    lost = list(sampler.asked.values())[18:]
    assert [r.sampling.seed for r in fresh.asked.values()] == [r.sampling.seed for r in lost]


def test_aborted_responses_must_come_back(engine):  # noqa: F811
    class Deaf(Shuffled):
        def abort(self, tickets):
            pass

        def poll(self, timeout_s):
            found = super().poll(timeout_s) if self.wanted else []
            self.wanted -= len(found)
            return found

    sampler = Deaf(engine, min)
    sampler.abort_timeout_s = 0.05
    sampler.wanted = 6 * GROUP_SIZE
    collector, _ = make(sampler, PARTIAL, max_staleness=1, unfinished=UnfinishedGroups.resume)
    with pytest.raises(RuntimeError, match=r"step 1: 9 of 9 aborted responses did not come back within"):
        collector.collect(1, 0)


@pytest.mark.parametrize("config", [TorchEngineConfig(), SGLangConfig(), SGLangConfig(answer_timeout_s=600)])
def test_the_deadlines_of_an_abort_end_from_the_inside_out(config):
    """A request, then its engine, then the run: each deadline leaves the inner one time to act."""
    group = EngineGroup(pytest.fail, nodes=[], config=config)
    request = ABORT_TIMEOUT_S + WATCH_INTERVAL_S
    patience = ABORT_TIMEOUT_S + config.answer_timeout_s
    # A poll under way ends, and the next is not answered; then the engine is killed.
    replaced = patience + POLL_S + (POLL_S + config.answer_timeout_s) + GRACE_S
    assert request < patience < replaced < group.abort_timeout_s


def test_config_rules():
    with pytest.raises(ValueError, match="over_sampling must be 1: collect=fixed"):
        FixedCollectConfig(over_sampling=1.5)
    with pytest.raises(ValueError, match=r"partial has no effect with collect\.over_sampling=1"):
        FixedCollectConfig(partial=True)
    with pytest.raises(ValueError, match=r"max_partial_age must be >= collect\.over_sampling - 1 \(1\.5\)"):
        FixedCollectConfig(partial=True, over_sampling=2.5)
    assert replace(PARTIAL, over_sampling=2.5, max_partial_age=2).partial
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be > 0"):
            SamplingConfig(temperature=temperature)
