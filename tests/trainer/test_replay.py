"""Steps that are written down and scored again: equal to the run to the last bit, and under every correction."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disk import full_disk
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import grouped, pack_samples

from algorithms.config import (
    AdvantageConfig,
    BaselineScope,
    BypassConfig,
    CorrectionConfig,
    Estimator,
    MISConfig,
    RejectConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
)
from algorithms.histograms import Bins
from rollout.types import Sample
from trainer.batch.packing import micro_batch, step_samples
from trainer.batch.train_batch import RankMiniBatch, TokenScores
from trainer.cli.commands import run
from trainer.config.outputs import DumpConfig
from trainer.config.train import TrainConfig
from trainer.policy.recorder import StepRecorder
from trainer.policy.train_report import RankReport, TrainReport
from trainer.replay.modes import RUN, all_names
from trainer.replay.recorded import read_step
from trainer.replay.results import Replay, bin_rows, replay_step
from trainer.run.dumper import StepDumper
from trainer.rundir.dump import DESCRIPTION, FORMAT, DumpDescription, begin_dump, commit_dump, dumped_steps, open_dump
from trainer.rundir.sealed_directory import MANIFEST, write_manifest

STEP = 3
MASKING = MISConfig(low=0.8, high=1.25, reject=RejectConfig(), rejected_denominator=RejectedDenominator.drop)
"""Rejects tokens of the tiny policy, so that denominators count."""
NORMALISED = TISConfig(cap=1.1, self_normalize=SelfNormalize.mean_one)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def config_of(
    model_path: Path,
    *,
    correction: CorrectionConfig | None = None,
    mini_batch_prompts: int | None = None,
    passes: int = 1,
    advantage: AdvantageConfig | None = None,
    keep: int = 9,
) -> TrainConfig:
    made = make_config(
        model_path,
        num_workers=1,
        correction=correction,
        mini_batch_prompts=mini_batch_prompts,
        advantage=advantage,
    )
    return replace(made, batch=replace(made.batch, passes=passes), dump=DumpConfig(every=1, keep=keep))


def close_samples() -> list[Sample]:
    """Samples whose log-probs are near those of a policy that knows nothing: some weights above 1, some below."""
    samples = make_samples()
    for number, sample in enumerate(samples):
        sample.reward = float(5 * number % 3)
        shift = (7 * number + 3 * np.arange(len(sample.response_mask))) % 5 - 2
        sample.rollout_logprobs = np.where(sample.response_mask, -4.16 + 0.2 * shift, 0.0)
    return samples


def trained(
    config: TrainConfig,
    model_path: Path,
    run_dir: Path,
    *,
    step: int = STEP,
    say: list[str] | None = None,
    samples: list[Sample] | None = None,
) -> RankReport:
    """Train one rollout step of a rank, on `close_samples` if not given, write it down, and log it as a run does."""
    group_size = config.batch.group_size
    samples = close_samples() if samples is None else samples
    parts = config.batch.mini_batches
    size = len(samples) // parts
    assert size % group_size == 0
    batch = pack_samples(
        [samples[k * size : (k + 1) * size] for k in range(parts)], num_ranks=1, max_tokens=40, policy_version=7
    )
    assert len(batch.ranks[0][0].micro_batches) > 1, "the order of micro-batches would not matter"
    with lone_worker(config, model_path) as worker:
        dumper = StepDumper(config, run_dir, say=([] if say is None else say).append)
        path = dumper.begin(step, 7)
        report = worker.train(batch.ranks[0], batch.samples, step, dump_dir=path)
        cost = dumper.commit(TrainReport([report]))
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **report.metrics, **cost}) + "\n")
    return report


def replayed(config: TrainConfig, run_dir: Path, names: Sequence[str] = ()) -> Replay:
    return replay_step(open_dump(run_dir, STEP), config, names or all_names(), run_dir=run_dir)


@pytest.fixture(scope="module")
def one_step(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with one optimizer step per rollout, under tis."""
    run_dir = tmp_path_factory.mktemp("one_step")
    trained(config_of(model_path), model_path, run_dir)
    return run_dir


KEPT = AdvantageConfig(estimator=Estimator.dr_grpo, baseline_scope=BaselineScope.kept)
CASES: dict[str, tuple[CorrectionConfig, int | None, int, AdvantageConfig]] = {
    "two steps": (MASKING, 2, 1, AdvantageConfig()),
    "two steps, self-normalised": (NORMALISED, 2, 1, AdvantageConfig()),
    "bypass, two steps": (BypassConfig(), 2, 1, AdvantageConfig()),
    "baseline of what is kept": (MASKING, 2, 1, KEPT),
    "three passes over one mini-batch": (MASKING, None, 3, AdvantageConfig()),
    "bypass, two passes over two mini-batches": (BypassConfig(), 2, 2, AdvantageConfig()),
    "baseline of what is kept, two passes": (MASKING, 2, 2, KEPT),
}


@pytest.mark.parametrize("case", CASES)
def test_the_row_of_the_run_is_what_was_logged_to_the_last_bit(case: str, model_path: Path, tmp_path: Path) -> None:
    correction, mini_batch_prompts, passes, advantage = CASES[case]
    config = config_of(
        model_path, correction=correction, mini_batch_prompts=mini_batch_prompts, passes=passes, advantage=advantage
    )
    report = trained(config, model_path, tmp_path)
    names = [RUN, "tis", "mis", "bypass", "bypass_reinforce", "miles_default"]
    replay = replayed(config, tmp_path, names)
    assert replay.reproduction.different == {}
    assert replay.reproduction.compared >= 59
    assert replay.step.num_optimizer_steps == config.batch.optimizer_steps_per_rollout
    own = replay.scores[0].metrics
    for key in (
        "k3",
        "ess/raw_token",
        "ess/applied_token",
        "ess/raw_seq",
        "ess/applied_seq",
        "kept_frac",
        "eff_lr_neg",
    ):
        key = f"mismatch/{key}"
        assert own[key] == report.metrics[key] and own[key] is not None, key
    if correction == MASKING:
        assert 0 < (own["mismatch/kept_frac"] or 0) < 1
    refused = {mode.name: mode.refusal for mode in replay.refused}
    assert set(refused) | {score.name for score in replay.scores} == set(names)
    if case.startswith("bypass"):
        assert "pi_old of every token" in refused["tis"] and "bypass_reinforce" not in refused
    elif advantage == KEPT:
        assert "rejects nothing" in refused["tis"] and "mis" not in refused
        assert "never computes" in refused["bypass"]
    else:
        assert not refused


@pytest.mark.parametrize("name", ["mis", "bypass_reinforce", "decoupled_k3_rs_seq_tis"])
def test_another_correction_scores_what_training_with_it_measures(
    name: str, model_path: Path, one_step: Path, tmp_path: Path
) -> None:
    config = config_of(model_path)
    replay = replayed(config, one_step, [name])
    score = next(score for score in replay.scores if score.name == name)
    mode = next(mode for mode in replay.modes if mode.name == name)
    other = replace(config, correction=mode.config.correction)
    report = trained(other, model_path, tmp_path)
    logged = {key: report.metrics[key] for key in score.metrics if key in report.metrics}
    assert {key: score.metrics[key] for key in logged} == logged


def test_what_zeros_mean_is_said(model_path: Path, one_step: Path, tmp_path: Path) -> None:
    samples = close_samples()
    for sample in samples:
        sample.reward = 1.0
    config = config_of(model_path, advantage=AdvantageConfig())  # the group is the baseline
    trained(config, model_path, tmp_path, samples=samples)
    replay = replayed(config, tmp_path, ["tis"])
    assert replay.scores[0].metrics["loss/policy"] == 0
    [line] = replay.facts()[2:]
    assert line.startswith("every advantage of this step is 0, so the policy loss is 0 under every mode")
    assert len(replayed(config, one_step, ["tis"]).facts()) == 2, "nothing is 0 there"
    alike = replace(replay.scores[0], metrics=replay.scores[0].metrics | {"mismatch/k3": 0.0})
    assert replace(replay, scores=[alike]).facts()[3].startswith("K3 is 0: engine and trainer agree on every token")


def test_rows_that_speak_of_the_first_optimizer_step_are_named(
    model_path: Path, one_step: Path, tmp_path: Path
) -> None:
    config = config_of(model_path, correction=MASKING, mini_batch_prompts=2)
    trained(config, model_path, tmp_path)
    replay = replayed(config, tmp_path, ["tis", "bypass"])
    run, tis, bypass = (score.metrics["mismatch/num_tokens"] for score in replay.scores)
    assert run == tis == int(replay.step.samples.num_tokens.sum()) > bypass > 0
    [line] = replay.facts()[2:]
    assert line.startswith("bypass: the weights have no pi_old") and f"first one, {bypass:,.0f} of {run:,.0f}" in line
    assert len(replayed(config_of(model_path), one_step, ["tis", "bypass"]).facts()) == 2, "one step has all tokens"


def test_a_changed_dump_is_noticed_and_a_changed_row_is_shown(model_path: Path, one_step: Path, tmp_path: Path) -> None:
    config = config_of(model_path)
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    rows = tmp_path / "metrics.jsonl"
    row = json.loads(rows.read_text("utf-8"))
    row["mismatch/k3"] *= 1 + 1e-15
    made_up_for = {"step": STEP, "eval/accuracy": 0.5}  # an evaluation in a further row of the step
    rows.write_text(f"{json.dumps(row)}\n{json.dumps(made_up_for)}\n", encoding="utf-8")
    replay = replayed(config, tmp_path, ["tis"])
    assert list(replay.reproduction.different) == ["mismatch/k3"]
    assert "1 of" in replay.reproduction.line() and "mismatch/k3 most" in replay.reproduction.line()
    rows.unlink()
    assert "nothing to compare with" in replayed(config, tmp_path, ["tis"]).reproduction.line()
    file = tmp_path / "dumps" / "step_000003" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(["replay", str(tmp_path), f"step={STEP}"]) == 2


# ---------------------------------------------------------------- the files


def test_dumps_are_replaced_bounded_and_a_full_disk_costs_one_only(model_path: Path, tmp_path: Path) -> None:
    config, lines = config_of(model_path, keep=2), list[str]()
    batch = pack_samples([close_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, model_path) as worker:
        dumper = StepDumper(config, tmp_path, say=lines.append)

        def save(step: int) -> dict[str, float | None]:
            path = dumper.begin(step, step - 1)
            report = worker.train(batch.ranks[0], batch.samples, step, dump_dir=path)
            return dumper.commit(TrainReport([report]))

        for step in (1, 2, 3):
            metrics = save(step)
            assert set(metrics) == {"perf/dump_mib", "perf/dump_write_s"}
            assert all(value is not None and value > 0 for value in metrics.values())
        assert dumped_steps(tmp_path) == [2, 3]
        with full_disk(2**10):
            assert save(4) == {"perf/dump_failures": 1.0}
        assert dumped_steps(tmp_path) == [2, 3]
        assert "the dump of step 4 was not written: rank 0" in lines[0]
        # A run that goes on from step 1 does step 2 again: what came after belongs to the run that was.
        assert open_dump(tmp_path, 2).description.policy_version == 1
        save(2)
        assert dumped_steps(tmp_path) == [2]
        assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step_000002"]
        not_due = replace(config, dump=DumpConfig(every=5))
        dumper = StepDumper(not_due, tmp_path, say=lines.append)
        assert dumper.begin(4, 0) is None
        assert dumper.commit(TrainReport([])) == {}


# ---------------------------------------------------------------- the command


def test_the_command_writes_a_table_and_its_files_and_loads_neither_transformers_nor_ray(one_step: Path) -> None:
    words = ["replay", str(one_step), f"step={STEP}"]
    program = (
        "import sys; from trainer.cli.commands import run; "
        f"code = run({words!r}); sys.stdout.write(' '.join(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *shown, loaded = done.stdout.splitlines()
    assert "torch" in loaded.split() and not set(loaded.split()) & {"transformers", "ray", "sglang"}
    assert "16 responses in 4 groups" in shown[0] and "1 optimizer step, 1 rank" in shown[0]
    assert "to the last bit (metrics.jsonl)" in shown[1]
    rows = {line.split()[0]: line.split() for line in shown if line and line.split()[0] in all_names()}
    assert list(rows) == all_names()
    # A preset that is a mode has its numbers.
    assert rows["decoupled_token_is"][1:] == rows["tis"][1:] and rows["recompute"][1:] != rows["tis"][1:]
    result, page = (Path(line) for line in shown[-2:])
    record = json.loads(result.read_text("utf-8"))
    assert record["reproduction"]["different"] == {}
    assert [mode["name"] for mode in record["modes"]] == all_names()
    html = page.read_text("utf-8")
    assert html.startswith("<!doctype html") and "decoupled_geo_rs_seq_tis" in html and "<script" not in html


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([], ["source is missing. parity replay <run.dir> step=N [modes=NAME,...]", " or parity replay <bundle> "]),
        (["RUN"], ["step is missing. Write step=N. Steps with a dump: 3."]),
        (["RUN", "step=4"], ["has no dump of step 4. Steps with a dump: 3."]),
        (["RUN", "step=x"], ["step must be a whole number >= 1, got 'x'"]),
        (["RUN", "step=3", "modes=tiss"], ["Did you mean tis?"]),
        (["RUN", "step=3", "mode=tis"], ["mode is not a word of parity replay here", "Did you mean modes?"]),
        (["EMPTY"], ["none can be made of it now: run again with dump.every=<steps>"]),
        (["EMPTY", "step=1"], ["none can be made of it now: run again with dump.every=<steps>"]),
    ],
)
def test_what_cannot_be_replayed_is_said_at_once(
    words: list[str], messages: list[str], one_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(one_step), "EMPTY": str(tmp_path)}
    (tmp_path / "config.yaml").touch()
    assert run(["replay", *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert "nothing was started" in error
    for message in messages:
        assert message in error


def test_another_format_names_the_version_that_wrote_it(
    one_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "dumps" / "step_000003" / MANIFEST
    stored = json.loads(manifest.read_text("utf-8")) | {"format": 9}
    manifest.write_text(json.dumps(stored), encoding="utf-8")
    assert run(["replay", str(tmp_path), "step=3"]) == 2
    assert "has format 9, this version of Parity reads format 2; the version that wrote it" in capsys.readouterr().err
    manifest.write_text("{", encoding="utf-8")
    assert run(["replay", str(tmp_path), "step=3"]) == 2
    assert "manifest.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../../other.safetensors", "/other.safetensors"])
def test_a_dump_cannot_name_a_file_outside_it(
    name: str, one_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its manifest agrees with its files: whoever makes a dump makes the manifest too."""
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    dump = tmp_path / "dumps" / "step_000003"
    stored = json.loads((dump / DESCRIPTION).read_text("utf-8"))
    stored["ranks"][0]["file"] = name
    (dump / DESCRIPTION).write_text(json.dumps(stored), encoding="utf-8")
    (dump / MANIFEST).unlink()
    write_manifest(dump, layout=FORMAT)
    assert run(["replay", str(tmp_path), "step=3"]) == 2
    assert f"names the file {name!r}, which is not in it" in capsys.readouterr().err


def test_a_rank_without_samples_is_written_down_too(tmp_path: Path) -> None:
    """It trains on one token that is no sample; it must come back as such."""
    empty = micro_batch([])
    mini = RankMiniBatch(micro_batches=[empty], num_response_tokens=4, num_sequences=1)
    samples = step_samples(grouped(close_samples()[:1]), policy_version=0)
    recorder = StepRecorder(samples, rank=0)
    zero = torch.zeros(1)
    recorder.add(mini, 0, TokenScores(logprobs=zero, entropy=zero, floor_delta=None))
    path = begin_dump(tmp_path, 1)
    report = recorder.write(path)
    assert report.rank_file is not None and report.record is not None
    description = DumpDescription(step=1, policy_version=0, correction="tis", ranks=(report.rank_file,), metrics={})
    commit_dump(path, description, records={report.rank_file.file: report.record}, config_text="", keep=1)
    [[recorded]] = read_step(open_dump(tmp_path, 1)).ranks
    [micro] = recorded.mini.micro_batches
    assert micro.sample_keys == [] and micro.token_ids.tolist() == [0] and not micro.response_mask.any()
    assert recorded.mini.num_response_tokens == 4


def test_what_is_written_down_is_what_was_trained_on(model_path: Path, one_step: Path) -> None:
    replay = replayed(config_of(model_path), one_step, ["tis"])
    samples = {(sample.prompt_id, sample.sample_index): sample for sample in close_samples()}
    seen = []
    for recorded in replay.step.ranks[0]:
        for micro in recorded.mini.micro_batches:
            for place, key in enumerate(micro.sample_keys):
                tokens = slice(int(micro.cu_seqlens[place]), int(micro.cu_seqlens[place + 1]))
                sample = samples[key]
                assert micro.token_ids[tokens].tolist() == list(sample.token_ids)
                assert micro.response_mask[tokens].tolist() == list(sample.response_mask)
                assert torch.equal(micro.rollout_logprobs[tokens], torch.from_numpy(sample.rollout_logprobs).float())
                assert float(replay.step.samples.rewards[micro.sample_numbers[place]]) == sample.reward
                seen.append(key)
    assert sorted(seen) == sorted(samples)
    assert replay.dump.description.policy_version == 7


def test_bins_have_their_shares_of_k3() -> None:
    bins = Bins(
        edges=[1.0, 0.5, 0.25, 0.125], counts=[3.0, 1.0, 0.0], abs_logdiff=[0.1, 0.2, None], k3=[0.01, 0.03, None]
    )
    _title, *rows = bin_rows(bins, "probability")
    assert [(row[0], row[-1]) for row in rows] == [("0.5 to 1", "50.0%"), ("0.25 to 0.5", "50.0%")]
