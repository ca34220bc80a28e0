"""The accounting of a step: fractions worked by hand, what is unknown, and what cannot be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from policy_cases import make_config
from test_floors import TINY
from test_packing import make_sample

from algorithms.histograms import HistogramArrays
from rollout.collect.collect_stats import CollectStats, Served
from rollout.collect.collector import Collected
from rollout.config import DType
from rollout.sglang.config import SGLangConfig
from rollout.types import GenerateRequest, Prompt, SampleGroup, SamplingParams
from trainer.batch.packing import pack
from trainer.batch.planner import DEFAULT_COST
from trainer.config.train import TrainConfig
from trainer.limits.ceilings import Ceilings
from trainer.limits.floors import GroupLengths, Lengths, Rates, prefill_floor, replay_decode, training_flops
from trainer.policy.train_report import RankReport, TrainReport
from trainer.run.accounting import Hardware, StepAccounting

RANK = Ceilings(device="a rank", copy_bytes_per_s=1e6, float32_flops=1e6, bfloat16_flops=4e6, float16_flops=1e3)
ENGINE = replace(RANK, device="an engine", copy_bytes_per_s=2e6, float32_flops=3e6)
KNOWN = Hardware(shape=TINY, policy=RANK, engine=ENGINE)
TIMES: dict[str, float | None] = {
    "time/rollout_s": 4.0,
    "time/train_s": 8.0,
    "time/sync_s": 1.0,
    "time/eval_s": 5.0,
    "time/step_s": 20.0,
}


def request(prompt_id: int, index: int, prompt: Sequence[int]) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=16, seed=0)
    return GenerateRequest(prompt_id=prompt_id, sample_index=index, prompt_token_ids=list(prompt), sampling=sampling)


def step(
    config: TrainConfig, hardware: Hardware, times: dict[str, float | None], *, optimizer_steps: int = 1
) -> dict[str, float | None]:
    """Metrics of a step: two prompts of 3 tokens, two responses of 4 tokens each, one more response dropped."""
    groups = [
        SampleGroup(
            prompt=Prompt(prompt_id=p, token_ids=[1, 2, p], text="", answer=""),
            samples=[make_sample(prompt_id=p, index=i) for i in range(2)],
        )
        for p in range(2)
    ]
    stats = CollectStats(policy_version=0, kept=groups)
    requests = [request(p, i, [1, 2, p]) for p in range(2) for i in range(2)]
    stats.served = [Served(requests=requests, lengths=[4, 4, 4, 9])]
    batch = pack([groups], num_ranks=2, max_tokens=100, policy_version=0)
    histograms = HistogramArrays.__new__(HistogramArrays)
    report = TrainReport(
        [RankReport(metrics={}, num_optimizer_steps=optimizer_steps, sample_k3={}, histograms=histograms)]
    )
    accounting = StepAccounting(config, hardware)
    return accounting.metrics(times, collected=Collected(groups, stats), batch=batch, report=report)


def test_every_share_by_hand() -> None:
    config = make_config(Path("nowhere"), num_workers=2)
    found = step(config, KNOWN, TIMES)
    trained = [GroupLengths(3, (4, 4), 8)] * 2
    # float32, two ranks; the optimizer moves 28 bytes per parameter over both.
    train_s = training_flops(TINY, trained) / 2e6
    update_s = 1000 * 28 / 2e6
    engine = Rates(flops=3e6, bytes_per_s=2e6)
    decode = replay_decode(TINY, [Lengths(3, n) for n in (4, 4, 4, 9)], engine, number_bytes=4, slots=256)
    rollout_s = prefill_floor(TINY, [3, 3], engine) + decode.seconds
    sync_s = 2 * 1000 * 4 / 2e6
    assert found["perf/mfu"] == pytest.approx(train_s / 8.0)
    assert found["perf/train_floor_frac"] == pytest.approx((train_s + update_s) / 8.0)
    assert found["perf/rollout_floor_frac"] == pytest.approx(rollout_s / 4.0)
    assert found["perf/sync_floor_frac"] == pytest.approx(sync_s / 1.0)
    # Evaluation has no floor and is left out of the step.
    assert found["perf/step_floor_frac"] == pytest.approx((train_s + update_s + rollout_s + sync_s) / 15.0)
    assert found["perf/train_tokens_per_s"] == 4 * 7 / 8.0
    assert found["perf/exposed_sync_frac"] == 1 / 20
    assert found["rollout/slots_busy_frac"] == pytest.approx((3 * 3 + 8) / (4 * 8))


def test_every_pass_counts_and_what_is_scored_once_counts_once() -> None:
    config = make_config(Path("nowhere"), num_workers=2, mini_batch_prompts=2)
    config = replace(config, batch=replace(config.batch, passes=3))
    trained, times = [GroupLengths(3, (4, 4), 8)] * 2, {**TIMES, "time/train_s": 80.0}
    one_s = training_flops(TINY, trained) / 2e6
    for taken, passes in ((6, 3.0), (4, 2.0), (1, 1.0)):  # mini-batches without a usable gradient were left out
        found = step(config, KNOWN, times, optimizer_steps=taken)
        assert found["perf/mfu"] == pytest.approx(passes * one_s / 80)
        assert found["perf/train_tokens_per_s"] == pytest.approx(passes * 4 * 7 / 80)
        old_s, update_s = one_s / 3, taken * 1000 * 28 / 2e6
        assert found["perf/train_floor_frac"] == pytest.approx((passes * one_s + old_s + update_s) / 80)
    assert StepAccounting(config, KNOWN).assumptions()[0].startswith("MFU: 18 x (600 body parameters")


def test_two_engines_work_side_by_side_on_their_own_part() -> None:
    config = make_config(Path("nowhere"), num_workers=2, num_engines=2)
    found = step(config, KNOWN, TIMES)
    engine = Rates(flops=3e6, bytes_per_s=2e6)
    slower = replay_decode(TINY, [Lengths(3, 4), Lengths(3, 9)], engine, number_bytes=4, slots=256)
    assert found["perf/rollout_floor_frac"] == pytest.approx((prefill_floor(TINY, [3], engine) + slower.seconds) / 4.0)


def test_more_than_possible_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    accounting = StepAccounting(make_config(Path("nowhere")), KNOWN)
    with caplog.at_level(logging.WARNING):
        assert accounting.fraction("train", 2.0, 1.0) is None
        assert accounting.fraction("train", 3.0, 1.0) is None
        assert accounting.fraction("train", 1.0, 1.0) == 1.0
        assert accounting.fraction("sync", 1.0, 0.0) is None
    assert [
        record.getMessage().startswith("train took 1 s, less than its floor of 2 s") for record in caplog.records
    ] == [True]


@pytest.mark.parametrize(
    "hardware", [Hardware(shape=None, policy=RANK, engine=ENGINE), Hardware(shape=TINY, policy=None, engine=None)]
)
def test_what_is_unknown_costs_only_its_shares(hardware: Hardware) -> None:
    config = make_config(Path("nowhere"))
    found = step(config, hardware, TIMES)
    assert not any("floor" in key or key == "perf/mfu" for key in found)
    assert found["perf/train_tokens_per_s"] == 4 * 7 / 8.0
    assert StepAccounting(config, hardware).assumptions() == ["limits: unknown, so no fractions of them"]


def test_the_assumption_names_formula_and_ceiling() -> None:
    lines = StepAccounting(make_config(Path("nowhere"), num_workers=2), KNOWN).assumptions()
    assert lines[0].startswith("MFU: 6 x (600 body parameters x tokens + 200 head parameters x response tokens)")
    assert len(lines) == 3 and "a rank" in lines[1] and "an engine" in lines[2]


def test_a_type_that_is_emulated_is_told_with_its_key() -> None:
    config = make_config(Path("nowhere"))
    emulated = replace(ENGINE, bfloat16_flops=1e6)
    config = replace(config, rollout=replace(config.rollout, dtype=DType.bfloat16))

    def notes(policy: Ceilings, engine: Ceilings) -> list[str]:
        hardware = Hardware(shape=TINY, policy=policy, engine=engine)
        return StepAccounting(config, hardware).slow_types()

    [note] = notes(RANK, emulated)
    assert note.startswith("note: rollout.dtype=bfloat16 is multiplied") and "rollout.dtype=float32 is likely" in note
    assert notes(RANK, ENGINE) == []
    config = replace(config, rollout=replace(config.rollout, dtype=DType.float32))
    assert notes(RANK, emulated) == []
    config = replace(config, policy=replace(config.policy, dtype=DType.float16))
    [note] = notes(RANK, emulated)
    assert note.startswith("note: policy.dtype=float16 is multiplied")


def test_the_planner_gets_the_cost_of_this_model() -> None:
    config = make_config(Path("nowhere"))
    cost = StepAccounting(config, KNOWN).sequence_cost
    assert (cost.per_token, cost.per_cell) == (2 * 800, 2 * 2 * 8)
    assert StepAccounting(config, replace(KNOWN, shape=None)).sequence_cost == DEFAULT_COST


def test_sequences_that_an_engine_runs_together() -> None:
    assert make_config(Path("nowhere")).rollout.max_running == 256
    assert SGLangConfig().max_running is None
    assert SGLangConfig(engine_args={"max_running_requests": 32}).max_running == 32
