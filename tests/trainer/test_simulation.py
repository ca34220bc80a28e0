"""What a simulation stands on: floors as the accounting has them, fits that find what they were made of, lengths."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest
from test_compose import config_of
from test_floors import QWEN_7B, TINY

from rollout.simulate.simulated_schedules import Schedule, simulate
from rollout.simulate.simulator import Work
from trainer.cli.commands import run
from trainer.limits.floors import Lengths, Rates, optimizer_floor, prefill_floor, replay_decode, training_flops
from trainer.simulate.simulation import (
    DEVICES,
    Efficiencies,
    LengthLaw,
    RecordingError,
    Scaling,
    SimulateConfig,
    build_plant,
    draw_work,
    fit_step_cost,
    measure_efficiencies,
    read_recording,
)

RATES = Rates(flops=1e12, bytes_per_s=1e11)
WORDS = ("rollout=torch", "batch.prompts_per_step=4", "batch.group_size=3", "sampling.max_new_tokens=300")
MICRO = "batch.max_tokens_per_microbatch=8192"


def plant_of(config, *, efficiencies=None, shape=TINY, num_engines=1, rates=RATES, **assumed):
    made = efficiencies or Efficiencies()
    return build_plant(
        config,
        SimulateConfig(**assumed),
        shape,
        engine=rates,
        rank=rates,
        efficiencies=made,
        num_engines=num_engines,
    )


def lengths(count, *, seed=0, most=300):
    rng = random.Random(seed)
    return [[min(most, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(3)] for _ in range(count)]


@pytest.mark.parametrize("slots", [1, 3, 100])
@pytest.mark.parametrize("shape", [TINY, QWEN_7B], ids=["by compute", "by memory"])
def test_an_ideal_engine_takes_the_floor(slots: int, shape) -> None:
    config = config_of(*WORDS, MICRO, "rollout.dtype=bfloat16")
    plant = plant_of(config, shape=shape, slots=slots, rates=RATES if shape is TINY else DEVICES["h200"])
    responses = lengths(4)
    made = simulate(Schedule.synchronous, Work(prompts=[7] * 4, responses=responses, cap=300), plant, num_steps=1)
    rates = RATES if shape is TINY else DEVICES["h200"]
    flat = [Lengths(7, tokens) for group in responses for tokens in group]
    floor = replay_decode(shape, flat, rates, number_bytes=2, slots=slots)
    assert made.rollout_s == pytest.approx(floor.seconds + prefill_floor(shape, [7] * 4, rates))
    flops = training_flops(shape, flat)
    update = optimizer_floor(shape.num_parameters, Rates(flops=1.0, bytes_per_s=rates.bytes_per_s * 2))
    assert made.train_s == pytest.approx(flops / (2 * rates.flops) + update)  # two ranks


def test_weak_scaling_keeps_the_seconds_of_a_step() -> None:
    config = config_of(*WORDS, MICRO)
    one = plant_of(config, scaling=Scaling.weak)
    many = plant_of(config, scaling=Scaling.weak, num_engines=64)
    assert (many.prompts_per_step, one.prompts_per_step) == (256, 4)
    work = Work(prompts=[7] * 256, responses=[[50, 60, 70]] * 256, cap=300)
    by_one = simulate(Schedule.synchronous, work, one, num_steps=1)
    by_many = simulate(Schedule.synchronous, work, many, num_steps=1)
    assert by_many.rollout_s == pytest.approx(by_one.rollout_s)
    # Of training all but the update, which more ranks share.
    assert by_many.train_s - many.train.step_s == pytest.approx(by_one.train_s - one.train.step_s)
    assert many.train.step_s == pytest.approx(one.train.step_s / 64)


def test_a_fit_finds_what_it_was_made_of_and_stays_possible() -> None:
    counts, floors = [10.0, 20.0, 17.0], [1.0, 5.0, 3.0]
    assert fit_step_cost(counts, floors, [0.1 * n + 4 * f for n, f in zip(counts, floors, strict=True)]) == (
        pytest.approx(0.1),
        pytest.approx(4),
    )
    # Nothing is faster than its floor, and a step takes no negative time.
    overhead, slowness = fit_step_cost(counts, floors, [0.3 * n + 0.5 * f for n, f in zip(counts, floors, strict=True)])
    assert slowness == 1 and 0 < overhead < 0.3
    assert fit_step_cost(counts, floors, [7 * f - 0.01 * n for n, f in zip(counts, floors, strict=True)])[0] == 0


def test_noisy_steps_of_like_lengths_are_put_down_to_the_overhead() -> None:
    # 19 or 20 decode steps of 15 ms each, whose floor is 0.1 ms: what noise there is must not make the floor 150 times
    # slower, or a step with few sequences would be as quick as its floor.
    rng = random.Random(1)
    counts = [float(rng.randint(19, 20)) for _ in range(8)]
    floors = [1e-4 * rng.uniform(0.9, 1.1) * count for count in counts]
    seconds = [0.015 * count * rng.uniform(0.7, 1.3) for count in counts]
    overhead, slowness = fit_step_cost(counts, floors, seconds)
    assert overhead == pytest.approx(0.015, rel=0.25)
    assert slowness < 40


def write_run(directory: Path, steps: list[list[list[int]]], seconds: list[dict[str, float]]) -> Path:
    samples = [
        {"step": number, "prompt_id": prompt, "sample_index": index, "num_response_tokens": tokens}
        for number, groups in enumerate(steps, start=1)
        for prompt, group in enumerate(groups)
        for index, tokens in enumerate(group)
    ]
    rows = [
        {
            "step": number,
            "rollout/num_samples": float(sum(map(len, groups))),
            "rollout/wasted_tokens": 0.0,
            "rollout/response_tokens": float(sum(map(sum, groups))),
            "perf/train_tokens": float(sum(map(sum, groups)) + 5 * sum(map(len, groups))),
            **times,
        }
        for number, (groups, times) in enumerate(zip(steps, seconds, strict=True), start=1)
    ]
    directory.mkdir()
    for name, lines in {"samples.jsonl": samples, "metrics.jsonl": rows}.items():
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_efficiencies_are_found_in_a_recorded_run(tmp_path: Path) -> None:
    config = config_of(*WORDS, MICRO, "rollout.num_engines=2", "rollout.max_batch_size=4")
    true = Efficiencies(decode=0.25, step_overhead_s=2e-7, train=0.5, sync_s=0.125, other_s=0.03)
    plant = plant_of(config, efficiencies=true, num_engines=2)
    steps = [lengths(4, seed=seed) for seed in range(6)]
    seconds = []
    for groups in steps:
        made = simulate(Schedule.synchronous, Work(prompts=[5] * 4, responses=groups, cap=300), plant, num_steps=1)
        times = {
            "rollout": made.rollout_s,
            "train": made.train_s,
            "sync": 0.125,
            "step": made.step_s + 0.5,
            "eval": 0.5,
        }
        seconds.append({f"time/{name}_s": value for name, value in times.items()})
    recording = read_recording(write_run(tmp_path / "run", steps, seconds))
    assert recording.steps == steps and recording.prompt_tokens == 5
    found = measure_efficiencies(config, recording, TINY, engine=RATES, rank=RATES, steps=slice(1, None))
    for name in ("decode", "step_overhead_s", "train", "sync_s", "other_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    work = draw_work(config, SimulateConfig(), recording, num_prompts=50)
    assert all(sorted(group) in [sorted(each) for step in steps for each in step] for group in work.responses)


def test_a_run_that_recorded_only_some_samples_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [lengths(4)] * 3, [{}] * 3)
    samples = (path / "samples.jsonl").read_text().splitlines()
    (path / "samples.jsonl").write_text("\n".join(samples[:-1]) + "\n")
    with pytest.raises(
        RecordingError, match=r"step 3: 11 samples in samples\.jsonl, 12 trained on.*samples_per_step=12"
    ):
        read_recording(path)


def test_made_lengths_follow_their_law() -> None:
    config = config_of(*WORDS, MICRO)

    def drawn(**assumed) -> list[list[int]]:
        return draw_work(config, SimulateConfig(**assumed), None, num_prompts=2000).responses

    flat = [tokens for group in drawn(median_tokens=60, sigma=0.5) for tokens in group]
    assert statistics.median(flat) == pytest.approx(60, rel=0.03)
    assert statistics.quantiles(flat, n=100)[83] == pytest.approx(60 * 2.718**0.5, rel=0.06)
    assert max(tokens for group in drawn(sigma=2.0) for tokens in group) == 300
    two = [tokens for group in drawn(lengths=LengthLaw.bimodal, median_tokens=10, long_frac=0.3) for tokens in group]
    assert sum(tokens > 30 for tokens in two) / len(two) == pytest.approx(0.3, abs=0.02)
    assert drawn() == drawn() != drawn(seed=1)

    def spread(correlation: float) -> float:
        groups = drawn(median_tokens=60, sigma=0.5, group_correlation=correlation)
        return statistics.mean(statistics.pstdev(group) for group in groups)

    assert spread(1.0) == 0 < spread(0.5) < spread(0.0)
    assert all(tokens == 10 for group in drawn(median_tokens=10, sigma=0.0) for tokens in group)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["simulate", "arithmetic_grpo", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_assumptions_and_a_row_per_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate.device=h100", "simulate.engines=[1,1024]", "simulate.steps=4", "simulate.max_staleness=3")
    code, out, err = simulated(capsys, *words)
    assert (code, err) == (0, "")
    head, _, table = out.partition("engines  schedule")
    assert "log-normal, median 6, sigma 0.8" in head and "h100, data sheet" in head
    assert "no step can be faster on this device" in head and "staleness at most 3" in head
    rows = [line.split()[:2] for line in table.splitlines()[1:]]
    assert rows == [[count, each.name] for count in ("1", "1024") for each in Schedule]
    shared = ("policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "rollout.num_engines=2")
    code, out, _ = simulated(capsys, "simulate.device=h100", "simulate.decode_efficiency=0.5", *shared)
    assert code == 0
    assert "one_step_off and asynchronous are left out" in out and "decode 0.5 of the floor" in out
    assert [line.split()[1] for line in out.splitlines()[-3:]] == ["synchronous", "over_sampled", "partial"]


def test_wrong_assumptions_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate.devise=h200", "simulate.engines=[0]", "simulate.steps=abc", "simulate.lengths=recorded")
    code, out, err = simulated(capsys, *words, "eval.samples=0", "--dry-run")
    assert (code, out) == (2, "")
    title, *lines = err.splitlines()
    assert title == "parity simulate arithmetic_grpo: 6 problems, nothing was started"
    assert [line.split()[1] for line in lines] == [
        "flags",
        "simulate.devise",
        "simulate.steps",
        "simulate.engines",
        "simulate.lengths",
        "eval.samples",
    ]
    assert "Did you mean simulate.device?" in err and "must be an integer, got 'abc'" in err
    code, _, err = simulated(capsys, "simulate.run=/nosuch", "rollout.gpus_per_engine=1", "policy.gpus_per_worker=1")
    assert code == 2 and "simulate.run must be the directory of a run" in err


def test_evaluation_without_a_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, expected in (
        (
            [],
            "checkpoint must be given once, got None. A run directory, a checkpoint in it, an exported model, or none",
        ),
        (["checkpoint=none", "checkpoint=none"], "checkpoint must be given once, got 'none none'"),
        ([f"checkpoint={tmp_path}"], "checkpoint must be a run directory with checkpoints/"),
        (["checkpoint=none", "--best"], "--best needs a run directory, got 'none'"),
        (
            ["checkpoint=none", "rollout=sglang", "rollout.servers=[http://localhost:30000]"],
            "rollout.servers must be empty in an evaluation",
        ),
        (["checkpoint=none", "-m", "eval.samples=0", "optim.lrr=1"], "3 problems, nothing was started"),
    ):
        assert run(["eval", "arithmetic_grpo", "rollout=torch", *words]) == 2
        assert expected in capsys.readouterr().err
    assert run(["eval", "--help"]) == 0
    assert "eval.json" in capsys.readouterr().out
