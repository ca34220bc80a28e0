"""Whole runs: prompt -> engine -> reward -> correction -> FSDP2 -> verified sync, in every mode, with both engines."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_cases import OWN
from runs import QUICK, column, compose, first_evaluation, metrics_of, replayed

from algorithms.kl import k3
from rollout.engine import EngineError
from rollout.group.actor_calls import WorkerError
from trainer.api import open_run
from trainer.cli.commands import run
from trainer.ending.time_limit import TimeLimit
from trainer.policy.step import TOKEN_SAMPLES
from trainer.run.evaluation import evaluate_model, evaluation_metrics
from trainer.run.loop import train
from trainer.rundir.weights_source import WeightsSource, checkpoint_of, find_source
from trainer.tracking.operations import load_operations

REPLAYED = (
    "k3",
    "kept_frac",
    "ess/raw_token",
    "ess/raw_seq",
    "ess/applied_token",
    "ess/applied_seq",
)
"""What `parity replay` must give back exactly; it compares everything else too."""
SMALL = ("batch.prompts_per_step=8", "batch.group_size=4")
ONE_RANK, TWO_RANKS = "policy.num_workers=1", "policy.num_workers=2"
"""Where two ranks would show nothing that others do not: starting one takes longer than such a run."""

PROMISED = (
    "step",
    "reward/mean",
    "mismatch/k3",
    "mismatch/k3_floor",
    "policy/entropy",
    "optim/grad_norm",
    "rollout/policy_version",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "perf/train_tokens_per_s",
    "perf/memory_gib/driver",
    "perf/memory_gib/policy_0",
    "perf/memory_gib/engine_0",
)
SHARES = (
    "perf/rollout_floor_frac",
    "perf/train_floor_frac",
    "perf/sync_floor_frac",
    "perf/step_floor_frac",
    "perf/mfu",
    "rollout/slots_busy_frac",
)
"""What a real run must show within (0, 1]."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_ranks"), [("mis", 2), ("ppo_is", 1)])
def test_a_mode_runs_and_measures_the_mismatch(mode: str, num_ranks: int, tmp_path: Path, local_ray: None) -> None:
    """With and without a pass for pi_old. Whole runs of the others: test_exact_run.py, test_study_run.py."""
    config = compose(
        "arithmetic_grpo",
        *QUICK,
        *SMALL,
        f"correction={mode}",
        f"policy.num_workers={num_ranks}",
        "rollout=torch",
        "run.num_steps=5",
        "dump.every=2",
        "dump.keep=1",
        f"run.dir={tmp_path / 'run'}",
    )
    result = train(config)
    rows = metrics_of(result.run_dir)
    assert column(rows, "step") == [1, 2, 3, 4, 5]
    for key in PROMISED:
        assert all(math.isfinite(value) for value in column(rows, key)), key
    assert all(value > 0 for value in column(rows, "mismatch/k3"))
    assert all(value > 0 for value in column(rows, "mismatch/k3_floor"))
    assert column(rows, "rollout/policy_version") == [0, 1, 2, 3, 4]
    assert [("eval/accuracy" in row) for row in rows] == [False, False, False, False, True]
    assert first_evaluation(result.run_dir)["eval/policy_version"] == 0
    assert sum(column(rows, "time/unattributed_s")) < 0.02 * sum(column(rows, "time/step_s"))
    for key in SHARES:
        assert all(0 < value <= 1 for value in column(rows, key)), (key, column(rows, key))
    assumptions = json.loads((result.run_dir / "accounting.json").read_text("utf-8"))["assumptions"]
    assert f"GFLOP/s float32 x {num_ranks} rank" in assumptions[0]
    responses = [json.loads(line) for line in (result.run_dir / "evaluations.jsonl").read_text("utf-8").splitlines()]
    for step, accuracy in ((0, first_evaluation(result.run_dir)["eval/accuracy"]), (5, rows[-1]["eval/accuracy"])):
        right = [row["greedy"]["correct"] for row in responses if row["step"] == step]
        assert sum(right) / len(right) == pytest.approx(accuracy)
    assert result.report_path.read_text("utf-8").lstrip().lower().startswith("<!doctype html")
    lines = (result.run_dir / "samples.jsonl").read_text("utf-8").splitlines()
    with_tokens = [row for row in map(json.loads, lines) if "tokens" in row]
    assert len(with_tokens) == 5 * TOKEN_SAMPLES
    for row in with_tokens:  # whichever rank they come from, the tokens are those that the K3 of the sample is of
        deltas = torch.tensor(row["tokens"]["deltas"])
        assert float(k3(deltas).mean()) == pytest.approx(row["k3"], rel=0.01)
        texts = [text for text in row["tokens"]["texts"] if not text.startswith("<")]  # <eos> and the like
        assert "".join(texts) == row["response"]

    assert [row["step"] for row in rows if "perf/dump_mib" in row] == [2, 4]
    assert_reproduced(result.run_dir, rows, num_ranks=num_ranks, optimizer_steps=1)


def assert_reproduced(run_dir: Path, rows: list[dict[str, Any]], *, num_ranks: int, optimizer_steps: int) -> None:
    """The last step that was dumped is what was logged of it, to the last bit: rank by rank, step by step."""
    [dump] = (run_dir / "dumps").iterdir()
    step = int(dump.name.removeprefix("step_"))
    record = replayed(run_dir, step)
    assert (record["num_ranks"], record["optimizer_steps"]) == (num_ranks, optimizer_steps)
    assert record["reproduction"]["different"] == {} and record["reproduction"]["compared"] >= 59
    [row] = [row for row in rows if row["step"] == step]
    [own] = record["modes"]
    for name in REPLAYED:
        assert own["metrics"][f"mismatch/{name}"] == row[f"mismatch/{name}"], name


@pytest.mark.slow
def test_the_evaluation_before_training_is_written_like_every_other(
    tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_s, after = [], TimeLimit.after
    monkeypatch.setattr(
        TimeLimit, "after", lambda *args, step_s: expected_s.append(step_s) or after(*args, step_s=step_s)
    )
    words = ("run.num_steps=3", "eval.every=2", "rollout=torch", ONE_RANK, f"run.dir={tmp_path / 'run'}")
    report = train(compose("arithmetic_grpo", *QUICK, *SMALL, *words)).report_path
    rows = open_run(tmp_path / "run").metrics()
    assert column(rows, "step") == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert [row["eval/policy_version"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "time/eval_s" in row] == [2, 3], "no time of step 1"
    assert expected_s[0] > rows[1]["time/step_s"], "but the time limit must leave room for the next evaluation"
    assert expected_s[1:] == column(rows[2:], "time/step_s")
    assert column(rows[1:], "reward/outage_s") == [0.0] * 3
    places = [line.partition(" | ")[0] for line in capsys.readouterr().err.splitlines()]
    told = [place for place in places if place.startswith(("held-out", "step "))]
    assert told[:2] == ["held-out before step 1", "step 1/3"]
    assert told[-1] == "held-out after step 3"
    assert report is not None and "Held-out, greedy" in report.read_text("utf-8")


ENDS_OF_THE_SPEC = (
    ("correction=miles_default", "advantage.estimator=gae", "batch.group_size=1", "critic.lr=1e-3"),
    (
        "correction=decoupled_k3_rs_seq_tis",
        "loss=gspo",
        "advantage.estimator=reinforce_pp",
        "batch.passes=2",
        TWO_RANKS,
    ),
    ("correction=bypass_ppo_clip_geo_rs",),
    ("correction=bypass_pg_token_icepop", "advantage.estimator=reinforce", "batch.group_size=1"),
)
"""Presets that, with the two runs of one seed below, use every part of the spec, surrogates and estimators;
test_corrections.py takes all of them through a rank."""


@pytest.mark.slow
@pytest.mark.parametrize("words", ENDS_OF_THE_SPEC, ids=" ".join)
def test_presets_surrogates_and_estimators_run(words: tuple[str, ...], tmp_path: Path, local_ray: None) -> None:
    quick = ("rollout=torch", "run.num_steps=2", "batch.mini_batch_prompts=4", "dump.every=2", ONE_RANK)
    config = compose("arithmetic_grpo", *QUICK, *SMALL, *quick, *words, f"run.dir={tmp_path / 'run'}")
    result = train(config)
    rows = metrics_of(result.run_dir)
    updates = config.batch.optimizer_steps_per_rollout
    assert updates == 2 * config.batch.passes
    assert_reproduced(result.run_dir, rows, num_ranks=config.policy.num_workers, optimizer_steps=updates)
    assert all(value > 0 for value in column(rows, "mismatch/k3"))
    assert all(value > 0 for value in column(rows, "mismatch/kept_frac"))
    assert column(rows, "rollout/policy_version") == [0, updates]
    # The quick base model rarely earns a reward, so an advantage, and with it the gradient, may be 0.
    assert all(math.isfinite(value) for value in column(rows, "optim/grad_norm"))


@pytest.mark.slow
@pytest.mark.scenario(37)
def test_two_runs_with_one_seed_are_bitwise_equal_with_and_without_evaluation(
    tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Entropy gives a gradient where the hurried base model earns no reward: the weights must move to be compared. The
    # model is hardly ever right: many large groups, so that some of them disagree in every step.
    words = ("rollout=torch", "run.num_steps=3", "collect.min_prompts=1", "collect.max_rounds=8", ONE_RANK)
    words += ("batch.prompts_per_step=8", "batch.group_size=8", "loss.entropy_coef=0.01")
    words += ("correction=mis", "loss=sapo", "advantage.baseline_scope=kept")
    words += ("eval.every=1", "eval.samples=3", "checkpoint.every=3", "dump.every=3")
    rows, samples, weights = [], [], []
    for name, recorded in (("with", "2,3"), ("without", "")):
        run_dir = tmp_path / name
        config = compose("arithmetic_dapo", *QUICK, *words, f"run.dir={run_dir}", f"run.profile_steps=[{recorded}]")
        train(config)
        monkeypatch.setattr("trainer.run.loop.evaluate_policy", lambda *_, **__: {})
        kept = [
            {key: value for key, value in row.items() if not key.startswith(("time/", "perf/", "sync/", "eval/"))}
            for row in metrics_of(run_dir)
        ]
        for row in kept:
            # Speed; what depends on ceilings that a busy machine measures anew for every run; and which requests of a
            # prompt an engine read together.
            for key in ("tokens_per_s", "tail_frac", "slots_busy_frac", "prompt_tokens_shared"):
                row.pop(f"rollout/{key}", None)
        rows.append(kept)
        samples.append((run_dir / "samples.jsonl").read_bytes())
        policy = run_dir / "checkpoints" / "step_000003" / "policy"
        weights.append({path.name: path.read_bytes() for path in policy.glob("*.distcp")})
    assert rows[0] == rows[1]
    assert samples[0] == samples[1] and samples[0]
    assert weights[0] == weights[1] and weights[0]
    assert all(row["optim/grad_norm"] > 0 for row in rows[0])
    for row in rows[0]:
        dropped = sum(value for key, value in row.items() if key.startswith("rollout/groups_dropped/"))
        assert row["rollout/groups_generated"] == row["rollout/groups_kept"] + dropped
        assert "rollout/groups_dropped/zero_variance" in row
    evaluated = metrics_of(tmp_path / "with")
    assert all("eval/pass@3" in row for row in evaluated)
    assert not any("eval/accuracy" in row for row in metrics_of(tmp_path / "without"))
    assert_reproduced(tmp_path / "with", evaluated, num_ranks=1, optimizer_steps=1)

    # What `parity eval` says of the last checkpoint is what the run said of those weights.
    source = find_source(str(tmp_path / "with"), best=False)
    assert isinstance(source, WeightsSource)
    config = compose("arithmetic_dapo", *QUICK, *words)
    checkpoint = checkpoint_of(config, source)
    found = evaluate_model(config, source, checkpoint=checkpoint, run_dir=tmp_path / "eval", say=lambda line: None)
    last = {key: value for key, value in evaluated[-1].items() if key.startswith("eval/")}
    assert evaluation_metrics(found.results) == last
    record = json.loads(found.result_path.read_text("utf-8"))
    assert (record["checkpoint"]["step"], record["checkpoint"]["policy_version"]) == (3, 3)
    assert record["sets"]["heldout"]["maj@3"] == last["eval/maj@3"]
    lines = [json.loads(line) for line in (tmp_path / "eval" / "eval.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 32 and all(len(line["sampled"]) == 3 for line in lines)
    assert sum(line["num_correct"] for line in lines) == pytest.approx(last["eval/accuracy_sampled"] * 96)
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["eval.json", "eval.jsonl", "logs"]


def check_goes_on_from_its_checkpoint(whole: Path, *, forked: Path) -> None:
    """A new run that begins with the fourth step of `whole` has the same fifth one, and leaves the files alone."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    source = f"run.resume_from={whole / 'checkpoints' / 'step_000004'}"
    assert run(["train", str(whole / "config.yaml"), source, f"run.dir={forked}"]) == 0
    [row], expected = metrics_of(forked), metrics_of(whole)[-1]
    for key in ("step", "reward/mean", "mismatch/k3", "optim/grad_norm", "policy/entropy", "eval/accuracy_sampled"):
        assert row[key] == expected[key], key
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


@pytest.mark.scenario(1)
@pytest.mark.scenario(2)
@pytest.mark.scenario(6)
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # Entropy gives a gradient where the hurried base model earns no reward: the weights must move to be compared.
    words = [*QUICK, "eval.max_prompts=8", "loss.entropy_coef=0.01", "run.num_steps=5"]
    script = Path(__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    options = ["--kills", "1", "--no-background", "--dir", str(tmp_path), *words]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "bitwise equal: weights, optimizer, metrics, samples, histograms" in done.stdout
    assert sum(line.startswith("| ") and line[2].isdigit() for line in done.stdout.splitlines()) == 1
    killed = tmp_path / "killed"
    check_goes_on_from_its_checkpoint(tmp_path / "waiting", forked=tmp_path / "forked")
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step_000004", "step_000005"]

    command = ["export", str(killed), str(tmp_path / "exported")]
    capsys.readouterr()
    assert run(command) == 0
    assert "after step 5" in capsys.readouterr().out
    assert run(command) == 2
    assert "must not exist" in capsys.readouterr().err
    (killed / "checkpoints" / "step_000005" / "manifest.json").unlink()
    (killed / "checkpoints" / "step_000004" / "state.json").write_bytes(b"")
    assert run(["train", "arithmetic_grpo", "rollout=torch", "resume=auto", *words, f"run.dir={killed}"]) == 2
    refused = capsys.readouterr().err
    assert "no checkpoint can be used" in refused and "state.json has 0 bytes" in refused


def flip_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.scenario(4)
@pytest.mark.slow
def test_damage_that_one_of_two_ranks_finds_costs_the_run_that_checkpoint(
    tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    words = [*QUICK, *SMALL, TWO_RANKS, "eval.max_prompts=8", "checkpoint.every=1", "checkpoint.keep=3"]
    command = ["train", "arithmetic_grpo", "rollout=torch", "resume=auto", f"run.dir={run_dir}", *words]
    assert run([*command, "run.num_steps=2"]) == 0, capsys.readouterr().err
    first = run_dir / "checkpoints" / "step_000001" / "policy" / "__0_0.distcp"
    second = run_dir / "checkpoints" / "step_000002" / "policy" / "__1_0.distcp"
    before = metrics_of(run_dir)
    flip_bit(second)
    capsys.readouterr()
    assert run([*command, "run.num_steps=3"]) == 0
    shown = capsys.readouterr().err
    assert "every rank compares its share of step_000002 with the digests" in shown
    assert "checkpoint step_000002 cannot be used and is passed over: " in shown
    assert f"{second.name} has changed since it was written" in shown
    assert "a checkpoint that cannot be used was renamed to step_000002.aside" in shown
    assert f"resumed after step 1 from {first.parents[1]}" in shown
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000001", "step_000002", "step_000003"], "the step was saved again"
    after = metrics_of(run_dir)
    assert column(after, "step") == [1, 2, 3]
    for key in ("reward/mean", "mismatch/k3", "optim/grad_norm"):
        assert column(after, key)[:2] == column(before, key), "the same step once more"


ENDLESS = ("rollout=torch", "checkpoint.every=1000", "run.num_steps=1000")


def has_taken_steps(run_dir: Path, count: int) -> bool:
    """Wait until the run has."""
    deadline = time.monotonic() + 240
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics_of(run_dir)) >= count):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def check_interrupted(run_dir: Path, *, last: int) -> None:
    """The last step was finished and saved."""
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    assert (run_dir / "report.html").exists()
    assert json.loads((run_dir / "status.json").read_text("utf-8"))["status"] == "interrupted"


def check_said(run_dir: Path, shown: str) -> None:
    """What the function printed is in its log and not among the lines `shown`; its partial credit is never correct."""
    assert "scored" not in shown and "scored" in (run_dir / "logs" / "printed.log").read_text("utf-8")
    row = metrics_of(run_dir)[0]
    before = first_evaluation(run_dir)
    assert row["reward/max"] <= 0.5 and before["eval/accuracy"] == row["reward/accuracy"] == 0
    assert before["eval/reward_mean"] is not None and 0 <= row["rollout/zero_variance_frac"] <= 1
    lines = [line for line in shown.splitlines() if line.startswith(("step ", "held-out before step 1 "))]
    assert len(lines) >= 3 and all(len(line) <= 120 for line in lines)


def suspended_in_training(parent: int) -> psutil.Process:
    """The rank of the run in process `parent`, suspended while it trains a step."""
    below = psutil.Process(parent).children(recursive=True)
    [rank] = [each for each in below if "ray::PolicyWorker" in " ".join(each.cmdline())]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if ".train" not in " ".join(rank.cmdline()):  # Ray names the process after the call that it answers
            continue
        rank.suspend()
        if ".train" in " ".join(rank.cmdline()):
            return rank
        rank.resume()
    raise AssertionError("the rank did not train within a minute")


@pytest.mark.slow
@pytest.mark.scenario(9)
@pytest.mark.scenario(34)
def test_ctrl_c_in_training_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, base_model_cache: Path
) -> None:
    """The working directory holds files with the names of packages, which break no process of the run."""
    # The README's own example is a file of the user beside the run; rollout.py and trainer.py are as natural.
    for name in ("rollout", "trainer", "algorithms"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    (tmp_path / "my_reward.py").write_text(
        "def reward(response, answer): return print('scored', response) or 0.5 * (answer in response)\n"
    )
    words = [*QUICK, *SMALL, *ENDLESS, ONE_RANK, "reward.function=my_reward.py:reward", "run.dir=run"]
    run_dir, said = tmp_path / "run", tmp_path / "stderr.txt"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "parity"), "train", "arithmetic_grpo", *words],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    assert has_taken_steps(run_dir, 2)
    rank = suspended_in_training(process.pid)
    before = metrics_of(run_dir)[-1]["step"]
    # It reaches every process of the group, Ray's too: as by Ctrl-C in a terminal, `timeout`, a job scheduler.
    os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + 30
    while "the next signal ends the run at once" not in said.read_text("utf-8") and time.monotonic() < deadline:
        time.sleep(0.05)
    rank.resume()
    assert process.wait(120) == 130
    error = said.read_text("utf-8")
    assert f"asked to end (SIGINT), after step {before + 1}; go on with parity resume {run_dir}" in error
    check_interrupted(run_dir, last=before + 1)
    check_said(run_dir, error)


@pytest.mark.sglang
def test_an_sglang_engine_and_a_rank_train_on_verified_weights(tmp_path: Path, local_ray: None) -> None:
    words = (ONE_RANK, "run.num_steps=2", f"run.dir={tmp_path / 'run'}", "run.profile_steps=[2]")
    rows = metrics_of(train(compose("arithmetic_grpo", *QUICK, *SMALL, *words)).run_dir)
    check_trained_on_verified_weights(rows)
    assert ["perf/profiled" in row for row in rows] == [False, True]
    found = {each.process: each for each in load_operations(tmp_path / "run" / "profile" / "step_000002")}
    assert sorted(found) == ["engine_0-sglang-TP-0", "rank_0"]
    assert all(each.shares["products"] > 0 for each in found.values())


@pytest.mark.slow
def test_an_engine_of_a_users_file_trains_on_verified_weights(tmp_path: Path, local_ray: None) -> None:
    toy = OWN["toy"]
    words = (ONE_RANK, f"rollout={toy}", "rollout.dtype=float32", "run.num_steps=3", f"run.dir={tmp_path / 'run'}")
    run_dir = train(compose("arithmetic_grpo", *QUICK, *SMALL, *words)).run_dir
    check_trained_on_verified_weights(metrics_of(run_dir))
    assert max(column(metrics_of(run_dir), "mismatch/k3")) < 1e-9
    assert f"override /rollout: {toy}" in (run_dir / "config.yaml").read_text("utf-8")


def check_trained_on_verified_weights(rows: list[dict[str, Any]]) -> None:
    """Every step sampled with the weights of the step before, and both sides agree on the tokens."""
    assert all(value > 0 for value in column(rows, "mismatch/k3"))
    assert all(value < 1e-2 for value in column(rows, "mismatch/k3"))
    assert column(rows, "rollout/policy_version") == list(range(len(rows)))
    assert all(value > 0 for value in column(rows, "sync/gb_per_s"))


def sglang_processes(parent: int) -> list[psutil.Process]:
    """Processes under `parent` that belong to a server."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "sglang" in words:
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.sglang
def test_two_sglang_engines_and_ranks_train_until_a_killed_server_ends_the_run_and_leaves_nothing(
    tmp_path: Path, local_ray: None
) -> None:
    run_dir = tmp_path / "run"
    words = (TWO_RANKS, "rollout.num_engines=2", "rollout.max_restarts=0", "run.num_steps=500", f"run.dir={run_dir}")
    config = compose("arithmetic_grpo", *QUICK, *SMALL, *words)
    servers: list[psutil.Process] = []

    def kill_after_two_steps() -> None:
        if has_taken_steps(run_dir, 2):
            servers.extend(sglang_processes(os.getpid()))
            for process in servers:
                process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_after_two_steps)
    killer.start()
    with pytest.raises((EngineError, WorkerError)) as caught:
        train(config)
    killer.join()
    assert servers
    message = str(caught.value)
    assert "engine 0" in message or "engine 1" in message
    assert any(phase in message for phase in ("generate", "weight sync", "load_weights")), "where the kill found it"
    assert "last log lines" in message or "log" in message
    rows = metrics_of(run_dir)
    assert len(rows) >= 2  # nothing that was measured is lost
    check_trained_on_verified_weights(rows)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(process.is_running() for process in servers):
        time.sleep(0.2)
    assert not sglang_processes(os.getpid())
