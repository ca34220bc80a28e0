"""`parity eval` and evaluation in training: which sets, which weights, which placement, and what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_process import HEAVY, REFUSED_S
from cli_process import parity as cli
from compose_cases import config_of
from policy_cases import save_policy

from algorithms.config import Problem
from rollout.config import DType, Quantization
from rollout.data.data_files import BadRow
from rollout.data.dataset import Dataset, StreamState
from rollout.engine import given_up
from rollout.rewards import Scorer
from rollout.task_config import RewardConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, Generation, Prompt
from trainer.cli.evaluate import render_results, run_eval
from trainer.cluster.bundles import required_bundles
from trainer.cluster.placement import engines_only
from trainer.limits.machine import CPUS_PER_WORKER
from trainer.run.evaluation import evaluate_sets, evaluation_metrics, response_rows
from trainer.run.task import Task, data_notes
from trainer.rundir.checkpoint import POLICY, CheckpointError, RunState, begin_checkpoint, commit_checkpoint
from trainer.rundir.resume import flat_config
from trainer.rundir.weights_source import SourceKind, WeightsSource, checkpoint_of, find_source


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=i, token_ids=[i % 60, 7, 3 * i % 60], text="", answer="even") for i in range(count)]


def parity(token_ids: list[int]) -> str:
    return "odd" if token_ids[0] % 2 else "even"


class OneFails:
    """An engine whose first response of each set fails."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return [given_up(requests[0]), *self._engine.generate(requests)[1:]]


def test_every_set_is_evaluated_on_its_own(tmp_path: Path) -> None:
    save_policy(tmp_path)
    engine = TorchEngine(TorchEngineConfig(dtype=DType.float32), index=0, device="cpu", num_threads=None)
    engine.start(tmp_path)
    config = config_of(
        "eval.samples=2",
        "eval.max_prompts=20",
        "sampling.max_new_tokens=5",
        "rollout=torch",
        "collect.max_invalid_fraction=0.12",
    )
    with closing(Scorer(RewardConfig(num_workers=1), max_new_tokens=5, decode=parity)) as scorer:
        task = Task(
            model_path=tmp_path,
            critic_path=tmp_path,
            tokenizer=None,  # type: ignore[arg-type]
            dataset=Dataset(
                train=[], heldout=make_prompts(30), eval_sets={"aime24": make_prompts(30), "few": make_prompts(3)}
            ),
            stop_token_ids=(1,),
            scorer=scorer,
        )
        results = evaluate_sets(config, task, engine)
        with_failures = evaluation_metrics(evaluate_sets(config, task, OneFails(engine)))
        config.collect.max_invalid_fraction, config.collect.min_failed = 0.1, 0
        with pytest.raises(RuntimeError, match="1 of 9 responses are invalid: failed 1"):
            evaluate_sets(config, task, OneFails(engine))
    engine.stop()
    kept = response_rows(config, task, results)
    assert [row["set"] for row in kept] == ["heldout"] * 20 + ["aime24"] * 20 + ["few"] * 3
    assert [kept[21]["sampled"][1][key] for key in ("response", "reward", "reward_parts")] == [
        getattr(results["aime24"].groups[1].samples[2], name) for name in ("text", "reward", "reward_parts")
    ]  # fmt: skip
    assert [with_failures[f"eval/{name}"] for name in ("failed", "aime24/failed", "few/failed")] == [1, 1, 1]
    assert {name: result.num_prompts for name, result in results.items()} == {"heldout": 20, "aime24": 20, "few": 3}
    # The same prompts: greedy responses agree, sampled ones are drawn anew.
    first, second = ([g.samples for g in results[name].groups] for name in ("heldout", "aime24"))
    assert [each[0].token_ids.tolist() for each in first] == [each[0].token_ids.tolist() for each in second]
    assert [each[1].token_ids.tolist() for each in first] != [each[1].token_ids.tolist() for each in second]
    metrics = evaluation_metrics(results)
    assert metrics["eval/accuracy"] == metrics["eval/aime24/accuracy"] == results["heldout"].accuracy
    assert metrics["eval/few/avg@2"] == results["few"].accuracy_sampled
    config.rollout.quantization = Quantization.int8
    shown = render_results(results, config.rollout).splitlines()
    assert shown[0].split() == ["set", "prompts", "type", "greedy", "avg@2", "pass@2", "maj@2", "tokens", "truncated"]
    assert [row.split()[:3] for row in shown[1:]] == [
        ["heldout", "20", "bfloat16+int8"], ["aime24", "20", "bfloat16+int8"], ["few", "3", "bfloat16+int8"]
    ]  # fmt: skip


def saved_checkpoint(run_dir: Path, **changes: object) -> Path:
    unfinished = begin_checkpoint(run_dir, 3)
    (unfinished / POLICY / "weights").write_bytes(b"0123456789")
    stream = StreamState(seed=0, epoch=0, position=0, digest="")
    state = RunState(step=3, policy_version=3, stream=stream, evaluation={}, **changes)  # type: ignore[arg-type]
    return commit_checkpoint(unfinished, state, keep=2).path


def test_what_a_source_is_shows_in_its_directory(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    kinds = {"none": "base", str(tmp_path / "run"): "run", str(path): "checkpoint", str(tmp_path / "model"): "model"}
    for given, kind in kinds.items():
        found = find_source(given, best=False)
        assert isinstance(found, WeightsSource) and found.kind is SourceKind[kind]
    refused = find_source(str(tmp_path), best=False)
    assert isinstance(refused, Problem) and "must be a run directory with checkpoints/" in str(refused)


def test_a_wrong_model_is_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    rows, data = tmp_path / "rows.jsonl", ["data.train_path=rows.jsonl", "data.eval_path=rows.jsonl"]
    rows.write_text('{"question": "1+1", "answer": "2"}\n')
    saved_checkpoint(tmp_path / "run")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text('{"model_type": "qwen2"}')
    recipe = ("eval", "gsm8k_grpo_qwen2.5_0.5b", *data, "rollout=torch", "rollout.gpus_per_engine=0", "model.path=./no")
    for given, line in (
        ("none", "  - model.path must be a directory or a repository of the hub that can be read, got './no'."),
        ("run", "  - model.path must be a directory or a repository of the hub that can be read, got './no'."),
        (
            "exported",
            "  - checkpoint must be the directory of a Hugging Face model, with *.safetensors, tokenizer.json",
        ),
    ):
        done = cli(*recipe, f"checkpoint={given}", cwd=tmp_path, watched=HEAVY)
        assert (done.code, done.loaded) == (2, ()), done.err
        assert done.err.splitlines()[0].endswith(": 1 problem, nothing was started")
        assert done.err.splitlines()[1].startswith(line), done.err
        assert done.cpu_s < REFUSED_S
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "rows.jsonl", "run"]


def test_evaluations_lie_apart_from_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places: list[Path] = []
    monkeypatch.setattr(
        "trainer.cli.evaluate._evaluate", lambda config, source, checkpoint, run_dir: places.append(run_dir) or 0
    )
    for words in ((), ("run.dir=mine",)):
        assert run_eval(["arithmetic_grpo", "checkpoint=none", "rollout=torch", *words]) == 0
    assert places[0].parent == tmp_path / "outputs" / "evals" / "arithmetic_grpo" and places[0].name.startswith("20")
    assert places[1] == tmp_path / "mine"


def test_weights_of_another_model_and_damaged_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("rollout=torch")
    path = saved_checkpoint(tmp_path / "run", config=flat_config(config_of("model.hidden_size=128", "rollout=torch")))
    for given in (tmp_path / "run", path):
        source = find_source(str(given), best=False)
        assert isinstance(source, WeightsSource)
        with pytest.raises(CheckpointError, match=r"is of another model: model\.hidden_size 128 -> 64"):
            checkpoint_of(config, source)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for given, reason in (("run", "is of another model: model.hidden_size 128 -> 64"), ("empty", "no checkpoint")):
        assert run_eval(["arithmetic_grpo", "rollout=torch", f"checkpoint={given}"]) == 2
        refused = capsys.readouterr().err
        assert f"checkpoint must hold good weights of the model of the recipe, got '{given}'" in refused
        assert reason in refused and not (tmp_path / "outputs").exists()
    (path / POLICY / "weights").write_bytes(b"0123456788")
    with pytest.raises(CheckpointError, match=r"cannot be used: .*weights has changed since it was written"):
        checkpoint_of(config, WeightsSource(kind=SourceKind.checkpoint, path=path))
    assert json.loads((path / "state.json").read_text("utf-8"))["step"] == 3


def test_the_best_checkpoint_of_a_run_that_kept_none_is_a_mistake_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started or written; the metric is that of the run, which another recipe does not name."""
    monkeypatch.chdir(tmp_path)
    words = ["arithmetic_grpo", "rollout=torch", "checkpoint=run", "--best"]
    state = RunState(step=1, policy_version=1, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    config, evaluated = flat_config(config_of("rollout=torch")), "it was evaluated"

    def refused(metric: str | None, evaluation: dict[str, float | None]) -> str:
        recorded = replace(state, config=config | {"checkpoint.best_metric": metric}, evaluation=evaluation)
        commit_checkpoint(begin_checkpoint(tmp_path / "run", 1), recorded, keep=1)
        monkeypatch.setattr("trainer.cli.evaluate._evaluate", lambda *_: evaluated)
        code = run_eval(words)
        return evaluated if code == evaluated else f"{code} {capsys.readouterr().err}"

    error = refused(None, {"eval/accuracy": 0.5})
    assert error.startswith(
        "2 parity eval arithmetic_grpo: 1 problem, nothing was started\n  - --best needs a run that"
    )
    assert "checkpoint.best_metric" in error and "got 'run'. Leave --best out for the newest checkpoint." in error
    error = refused("eval/accuracy", {})
    assert error.startswith("2 ") and "--best needs a checkpoint that was evaluated: none of the run has eval/" in error
    assert refused("eval/accuracy", {"eval/accuracy": 0.5}) == evaluated
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_cluster_for_evaluation_has_engines_only() -> None:
    words = ("policy.num_workers=2", "policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "rollout=torch")
    config = config_of(*words, "rollout.num_engines=2")
    alone = engines_only(config)
    # The other half of a GPU, which a rank has in training, is not for another engine.
    assert required_bundles(alone) == [{"CPU": CPUS_PER_WORKER, "GPU": 1.0}] * 2
    assert (config.policy.num_workers, config.policy.gpus_per_worker) == (2, 0.5)
    assert replace(alone.rollout, gpus_per_engine=0.5) == config.rollout


def test_skipped_rows_are_written_and_counted(tmp_path: Path) -> None:
    rows = [BadRow(source="a.jsonl", number=3, problem="is not JSON", values={"text": "\u00fc{"})]
    notes = data_notes(Dataset(train=[], heldout=[], notes=["a.jsonl: 1 bad rows"], skipped=rows), tmp_path)
    path = tmp_path / "bad_rows.jsonl"
    assert notes == ["data: a.jsonl: 1 bad rows", f"data: 1 bad row skipped, written to {path}"]
    written = {"source": "a.jsonl", "line": 3, "problem": "is not JSON", "values": {"text": "\u00fc{"}}
    assert json.loads(path.read_text(encoding="utf-8")) == written
    assert data_notes(Dataset(train=[], heldout=[]), tmp_path / "none") == []


@pytest.mark.parametrize("words", [(), ("resume=clean",), ("resume=auto",)])
def test_an_evaluation_does_not_write_into_the_directory_of_a_run(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert run_eval(["arithmetic_grpo", "rollout=torch", "checkpoint=none", f"run.dir={tmp_path / 'run'}", *words]) == 2
    refused = capsys.readouterr().err
    assert "run.dir must be absent or empty" in refused and "resume" not in refused


def test_a_recipe_that_cannot_be_read_is_a_problem_of_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [/train\n")
    assert run_eval([str(tmp_path / "own.yaml"), "checkpoint=none"]) == 2
    assert "is not YAML that can be read" in capsys.readouterr().err


def test_keys_of_the_training_are_told_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.cli.evaluate._evaluate", lambda *arguments: 0)
    words = ["arithmetic_grpo", "checkpoint=none", "rollout=torch", "eval.max_prompts=2"]
    assert run_eval([*words, "optim.lr=1", "correction=mis", "sampling.max_new_tokens=8"]) == 0
    said = "note: without effect in an evaluation, which trains nothing: optim.lr=1, correction=mis\n"
    assert capsys.readouterr().err == said
    assert run_eval(words) == 0 and capsys.readouterr().err == ""
