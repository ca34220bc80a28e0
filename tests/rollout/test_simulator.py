"""The simulator: cases worked by hand, nothing decoded twice or lost, no slot used twice, and what must be monotone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.group.balance import split_by_load
from rollout.simulate.simulated_schedules import Plant, Schedule, TrainCost, prompts_needed, simulate
from rollout.simulate.simulator import EngineCost, Fleet, Work
from rollout.types import GenerateRequest, SamplingParams

UNIT = EngineCost(step_s=1.0)
"""Every decode step takes a second, a prefill none."""


def plant(**changes) -> Plant:
    base = Plant(cost=UNIT, train=TrainCost(), sync_s=0.0, other_s=0.0, num_engines=2, slots=2, prompts_per_step=2)
    return replace(base, **changes)


def work(responses, *, prompts=None, cap=None) -> Work:
    return Work(
        prompts=prompts or [3] * len(responses), responses=responses, cap=cap or max(max(group) for group in responses)
    )


# ----------------------------------------------------------------------------------------------- worked by hand


def test_a_synchronous_step_by_hand() -> None:
    # Two engines with two slots; a response of n tokens takes n - 1 steps, for the prefill gives the first token.
    # Engine 0: [5, 3, 2] -> 4 and 2 steps; the third takes the second's slot at 2 and ends at 3. Engine 1: [9, 1, 1]:
    # 8 steps and at once nothing, twice. The round ends at 8; then training 10, sync 2, other 1.
    made = simulate(
        Schedule.synchronous,
        work([[5, 3, 2], [9, 1, 1]] * 2),
        plant(train=TrainCost(step_s=10.0), sync_s=2.0, other_s=1.0),
        num_steps=2,
    )
    assert (made.rollout_s, made.wait_s, made.train_s, made.step_s) == (8, 8, 10, 21)
    # Busy slot-seconds: 4 + 2 + 1 and 8, of 4 slots for 8 seconds; one of four slots or fewer... is busy from 4 on.
    assert made.slots_busy_frac == 15 / 32
    assert made.tail_frac == 0
    assert made.tokens_per_s == 21 / 21
    assert (made.wasted_frac, made.lags, made.length_bias) == (0, {0: 1.0}, 1.0)


def test_the_tail_by_hand() -> None:
    # Eight slots, all busy for one second; then one of them for nine: less than a quarter.
    made = simulate(Schedule.synchronous, work([[2] * 4, [2, 2, 2, 11]]), plant(slots=4), num_steps=1)
    assert made.rollout_s == 10
    assert made.tail_frac == 0.9
    assert made.slots_busy_frac == (8 + 9) / 80


def test_over_sampling_by_hand() -> None:
    # Three prompts start, two are needed: they end at 2 and 4. The third has then 1 + 4 of its 30 tokens, and 1 + 1.
    lengths = [[3, 3], [5, 2], [30, 2]]
    made = simulate(Schedule.over_sampled, work(lengths), plant(slots=None), num_steps=1)
    assert made.rollout_s == 4
    assert made.wasted_frac == (5 + 2) / (5 + 2 + 13)
    assert made.length_bias == (13 / 4) / (45 / 6)


def test_partial_rollouts_by_hand() -> None:
    # As above; what is left has 25 tokens to come. In the next round its prefill gives one of them and 24 steps the
    # others, while [4, 4] ends at 3 and [6, 6] at 5: the round ends at 5.
    lengths = [[3, 3], [5, 2], [30, 2], [4, 4], [6, 6], [28, 40], [50, 50], [60, 60], [70, 70]]
    made = simulate(Schedule.partial, work(lengths), plant(slots=None), num_steps=3)
    assert made.wasted_frac == 0
    # The third round: 30 - (5 + 1 + 5) = 19 tokens left, of which the prefill gives one: 18 seconds; [28, 40] takes 39,
    # [50, 50] 49. Two groups are complete after 39.
    assert made.rollout_s == pytest.approx((4 + 5 + 39) / 3)
    # Trained in step 3: the long group, with 5 + 2 tokens of lag 2, 6 of lag 1 and 19 of lag 0, and [28, 40].
    # Step 1 trained [3, 3] and [5, 2], step 2 [4, 4] and [6, 6].
    total = 13 + 20 + 32 + 68
    assert made.lags == {0: pytest.approx((13 + 20 + 19 + 68) / total), 1: 6 / total, 2: 7 / total}


def test_one_step_off_by_hand() -> None:
    # Every round takes 4 seconds, training 6: from the second step on a step takes 6 + 1, and nobody waits.
    made = simulate(
        Schedule.one_step_off, work([[5], [5]] * 9), plant(train=TrainCost(step_s=6.0), sync_s=1.0), num_steps=8
    )
    assert (made.step_s, made.wait_s, made.rollout_s, made.lags) == (7, 0, 4, {1: 1.0})
    # Two of four slots have a request, one per engine; they are busy for 4 of 7 seconds.
    assert (made.slots_busy_frac, made.running_mean, made.tail_frac) == (1, 4 / 7, 0)
    # With training of 1 second the step is the rollout.
    short = simulate(
        Schedule.one_step_off, work([[5], [5]] * 9), plant(train=TrainCost(step_s=1.0), sync_s=1.0), num_steps=8
    )
    assert (short.step_s, short.wait_s) == (5, 3)


def test_asynchronous_collection_by_hand() -> None:
    # One engine, all at once, one prompt per step; staleness 1. Prompts 0 and 1 start at 0. 0 has 5 tokens: complete
    # at 4; trained from 4 to 6 (2 s), sync until 7. Prompt 1 (9 tokens) has 1 + 6 then; its prefill at 7 gives the 8th,
    # the 9th comes at 8. So step 2 begins at 8, with 7 tokens of lag 1 and 2 of lag 0, trains until 10, sync until 11.
    lengths = [[5], [9], [2], [2]]
    one = plant(num_engines=1, prompts_per_step=1, slots=None, max_staleness=1, train=TrainCost(step_s=2.0), sync_s=1.0)
    made = simulate(Schedule.asynchronous, work(lengths), one, num_steps=2)
    assert (made.step_s, made.wait_s) == ((7 + 4) / 2, (4 + 1) / 2)
    # Two steps: none is left out as the first quarter. Step 1: 5 tokens of lag 0.
    assert made.lags == {0: 7 / 14, 1: 7 / 14}


def test_decode_steps_cost_what_the_formula_says() -> None:
    cost = EngineCost(step_s=0.5, read_s=40.0, kv_s=1.0, token_s=3.0, context_s=2.0)
    swapped = EngineCost(step_s=0.5, read_s=4.0, kv_s=2.0, token_s=30.0, context_s=1.0)
    for each in (cost, swapped, replace(cost, read_s=0.0), replace(cost, context_s=1.0)):
        for running, contexts, steps in ((1, 5, 60), (3, 2, 40), (7, 100, 1), (2, 31, 9)):
            by_hand = sum(
                each.step_s
                + max(
                    each.read_s + each.kv_s * (contexts + i * running),
                    each.token_s * running + each.context_s * (contexts + i * running),
                )
                for i in range(steps)
            )
            assert each.decode(steps, running, contexts) == pytest.approx(by_hand)
            within = each.steps_within(by_hand * 0.6, steps, running, contexts)
            assert each.decode(within, running, contexts) <= by_hand * 0.6 < each.decode(within + 1, running, contexts)


def test_a_prompt_is_read_once_per_engine_and_sync() -> None:
    cost = EngineCost(prefill_s=1.0, prefill_token_s=10.0, prefill_square_s=100.0)
    fleet = Fleet(work([[4, 4, 4]], prompts=[2]), cost, num_engines=1, slots=None)
    fleet.submit([0])
    fleet.start(0.0)
    while fleet.advance():
        pass
    assert fleet.groups[0].end_s == 1 + 20 + 400
    # What is behind others attends to them too: 3 tokens behind 2.
    assert cost.prefill(3, behind=2) == 1 + 30 + 100 * (25 - 4)


def test_a_pause_drops_what_was_read() -> None:
    # The prompt is read until 20, a step makes the second token at 21. After the pause prompt and both tokens are read
    # again, 40 seconds, which gives the third; the fourth takes a step.
    fleet = Fleet(work([[4]], prompts=[2]), EngineCost(step_s=1.0, prefill_token_s=10.0), num_engines=1, slots=None)
    fleet.submit([0])
    fleet.start(0.0)
    assert not fleet.advance(until=21.5)
    fleet.stop(21.5, keep=True)
    fleet.version = 1
    fleet.start(30.0)
    assert fleet.advance()
    assert fleet.groups[0].end_s == 30 + 40 + 1
    assert fleet.groups[0].tokens_by_version == {0: 2, 1: 2}


# ------------------------------------------------------------------------------------------ what must always hold


def test_groups_go_where_the_engine_group_would_send_them() -> None:
    rng = random.Random(0)
    for num_engines in (1, 3, 8):
        prompts = [rng.randint(1, 40) for _ in range(20)]
        requests = [
            GenerateRequest(
                prompt_id=group,
                sample_index=index,
                prompt_token_ids=[1] * prompts[group],
                sampling=SamplingParams(temperature=1.0, max_new_tokens=64, seed=0),
            )
            for group in range(20)
            for index in range(3)
        ]
        fleet = Fleet(work([[2, 3, 4]] * 20, prompts=prompts, cap=64), UNIT, num_engines=num_engines, slots=None)
        fleet.submit(range(20))
        placed = [[3 * group + index for group, index in engine.waiting] for engine in fleet._engines]
        assert placed == split_by_load(requests, num_engines)


def drawn(num_groups: int, size: int, *, seed: int = 0, cap: int = 400) -> Work:
    rng = random.Random(seed)
    lengths = [[min(cap, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(size)] for _ in range(num_groups)]
    return Work(prompts=[rng.randint(1, 50) for _ in range(num_groups)], responses=lengths, cap=cap)


COST = EngineCost(
    step_s=1e-3, read_s=5e-3, kv_s=1e-6, token_s=1e-4, context_s=1e-7, prefill_token_s=1e-4, prefill_square_s=1e-8
)


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(list(Schedule)),
    num_engines=st.integers(1, 5),
    slots=st.one_of(st.none(), st.integers(1, 6)),
    staleness=st.integers(1, 3),
    over_sampling=st.floats(1.0, 3.0),
    train_s=st.floats(0.0, 3.0),
    seed=st.integers(0, 5),
)
def test_every_token_is_decoded_once_and_no_slot_is_used_twice(
    schedule: Schedule,
    num_engines: int,
    slots: int | None,
    staleness: int,
    over_sampling: float,
    train_s: float,
    seed: int,
) -> None:
    made_of = plant(
        cost=COST,
        num_engines=num_engines,
        slots=slots,
        prompts_per_step=4,
        max_staleness=staleness,
        over_sampling=over_sampling,
        train=TrainCost(step_s=train_s),
        sync_s=0.05,
    )
    steps = 5
    all_work = drawn(prompts_needed(schedule, made_of, num_steps=steps), 3, seed=seed)
    seen: list[Fleet] = []
    original = Fleet.__init__

    def remember(self: Fleet, *words: object, **named: object) -> None:
        original(self, *words, **named)  # type: ignore[arg-type]
        seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "__init__", remember)
        made = simulate(schedule, all_work, made_of, num_steps=steps)
    [fleet] = seen
    assert made.tokens_decoded == made.tokens_taken + made.tokens_in_flight
    assert fleet.trace.most <= (num_engines * slots if slots is not None else fleet.most_outstanding)
    assert 0 < made.slots_busy_frac <= 1 + 1e-9
    assert 0 <= made.tail_frac <= 1 + 1e-9
    assert sum(made.lags.values()) == pytest.approx(1)
    assert made.step_s >= made.train_s + made.wait_s
    bounds = {Schedule.synchronous: 0, Schedule.over_sampled: 0, Schedule.one_step_off: 1}
    assert max(made.lags) <= bounds.get(schedule, staleness if schedule is Schedule.asynchronous else steps)
    if schedule is not Schedule.over_sampled:
        assert made.wasted_frac == 0
    if schedule is Schedule.synchronous:
        assert made.tokens_in_flight == 0
    if schedule in (Schedule.synchronous, Schedule.one_step_off):
        assert made.tokens_decoded == sum(sum(group) for group in all_work.responses)


def test_more_engines_and_more_slots_are_not_slower_and_overlap_helps() -> None:
    base = plant(cost=COST, num_engines=1, slots=8, prompts_per_step=16, train=TrainCost(step_s=2.0), sync_s=0.1)
    all_work = drawn(16 * 14, 4)

    def step_s(schedule: Schedule, **changes: object) -> float:
        return simulate(schedule, all_work, replace(base, **changes), num_steps=8).step_s  # type: ignore[arg-type]

    by_engines = [step_s(Schedule.synchronous, num_engines=count) for count in (1, 2, 4, 16)]
    assert by_engines == sorted(by_engines, reverse=True)
    by_slots = [step_s(Schedule.synchronous, slots=count) for count in (1, 4, 64)]
    assert by_slots == sorted(by_slots, reverse=True)
    assert step_s(Schedule.one_step_off) < step_s(Schedule.synchronous)
    assert step_s(Schedule.over_sampled, slots=None) < step_s(Schedule.synchronous, slots=None)
    by_staleness = [step_s(Schedule.asynchronous, max_staleness=count) for count in (1, 2, 4)]
    assert by_staleness == sorted(by_staleness, reverse=True)
    assert step_s(Schedule.synchronous, cost=replace(COST, step_s=2e-3)) > by_engines[0]


def test_a_thousand_engines_take_seconds() -> None:
    made_of = plant(
        cost=COST, num_engines=1024, slots=64, prompts_per_step=1024, train=TrainCost(step_s=2.0), max_staleness=2
    )
    all_work = drawn(1024 * 6, 8)
    before = time.process_time()
    made = simulate(Schedule.asynchronous, all_work, made_of, num_steps=4)
    assert made.tokens_decoded > 1_000_000
    assert time.process_time() - before < 10


def test_wrong_work_is_refused() -> None:
    for wrong in ({"prompts": [1]}, {"responses": [[1, 2], [1]]}, {"responses": [[0], [1]]}, {"responses": [[9], [1]]}):
        with pytest.raises(ValueError, match=r"the work needs|must have 1 to 5"):
            Work(**{"prompts": [1, 1], "responses": [[1], [2]], "cap": 5, **wrong})
    with pytest.raises(ValueError, match="partial needs 9 prompts for 3 steps, the work has 2"):
        simulate(Schedule.partial, work([[1], [2]]), plant(), num_steps=3)
