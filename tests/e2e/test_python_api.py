"""The Python API, its guide (docs/python.md) and the notebook (docs/first_run.ipynb), whose code is run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer
from algorithms.config import ConfigError, MISConfig, TISConfig
from rollout.data.arithmetic import TOKENS, save_tokenizer
from trainer.rundir.run_dir import RunStatus, lock_holder

DOCS = Path(__file__).parents[2] / "docs"
QUICK = {
    "rollout": "torch",
    "model.num_steps": 120,
    "policy.num_workers": 1,
    "batch.prompts_per_step": 4,
    "batch.group_size": 4,
    "eval.max_prompts": 4,
    "tracking.wandb": "disabled",
}


def blocks(heading: str) -> list[str]:
    """The Python blocks of the guide below a heading."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", (DOCS / "python.md").read_text("utf-8"), re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


def cells() -> list[dict[str, Any]]:
    """The cells of the notebook."""
    found: list[dict[str, Any]] = json.loads((DOCS / "first_run.ipynb").read_text("utf-8"))["cells"]
    return found


def execute(sources: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    for number, source in enumerate(sources, start=1):
        exec(compile(source, f"<block {number}>", "exec"), namespace)
    return namespace


def end_runs(found: object) -> None:
    """End the runs whose handles are in a namespace."""
    if isinstance(found, trainer.RunHandle):
        while found.is_running:
            found.stop()
            time.sleep(1.0)
    elif isinstance(found, dict | list):
        for inner in list(found.values()) if isinstance(found, dict) else found:
            end_runs(inner)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory, base_model_cache: Path) -> Iterator[dict[str, Any]]:
    """What the guide's blocks about runs leave behind."""
    namespace: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guide"))
        try:
            yield execute([*blocks("A run"), *blocks("The handle")], namespace)
        finally:
            end_runs(namespace)


@pytest.mark.slow
def test_rows_come_while_the_run_goes_on_and_a_stopped_run_saves(guide: dict[str, Any]) -> None:
    run = guide["run"]
    assert run.status is RunStatus.interrupted and run.wait() is RunStatus.interrupted
    assert "SIGTERM" in run.output and "go on with parity resume" in run.output
    steps = guide["steps"]
    assert 10 <= steps < 100 and next(iter(run.checkpoints)) == steps
    assert guide["row"]["step"] == 10, "the loop was left while the run went on"
    rows = [row for row in run.metrics() if row["step"]]
    assert all(row["reward/mean"] > 0.1 and row["optim/grad_norm"] > 0 for row in rows), "every step teaches something"
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[7:10]) > sum(rewards[:3]), "what is learnt shows in the guide's own run"


@pytest.mark.slow
def test_a_run_is_opened_exported_and_resumed(guide: dict[str, Any]) -> None:
    steps, longer, again = guide["steps"], guide["longer"], guide["again"]
    assert longer.wait() is RunStatus.completed and again.status is RunStatus.completed
    assert [row["step"] for row in again] == list(range(steps + 2)), "an ended run is iterated too"
    assert again.metrics() == longer.metrics() and again.samples()[-1]["step"] == steps + 1
    assert again.report() == again.dir / "report.html"
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in guide["model"].iterdir()}
    with pytest.raises(trainer.RunError, match="directory must not exist"):
        again.export(guide["model"])


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, base_model_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a hurried base model, and a few small steps; three of its runs go side by side."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"hurried": QUICK}
    _, first, *others = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    sources = ["MODEL_STEPS, RUN_STEPS = 120, 2", f"{first}\nsmall |= hurried", *others]
    try:
        execute(sources, namespace)
        runs = namespace["runs"]
        assert {mode: len(run.metrics()) for mode, run in runs.items()} == {"recompute": 3, "tis": 3, "mis": 3}
        assert len({run.dir for run in runs.values()}) == 3
        assert trainer.load_config(runs["mis"].dir).correction == MISConfig()
        assert namespace["own"].status is RunStatus.interrupted and namespace["own"].checkpoints
        assert all("reward/has_mark" in row for row in namespace["own"].metrics() if row["step"])
    finally:
        end_runs(namespace)
    printed = capsys.readouterr().out
    assert "step  2" in printed and "completed" in printed and "|Delta|" in printed


def test_the_notebook_holds_no_outputs_and_no_magic() -> None:
    """It is committed as it was written: the tests show that it runs."""
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
    assert [cell["id"] for cell in cells() if "parameters" in cell["metadata"].get("tags", [])] == ["cell-01"]


def test_a_refused_run_raises_every_problem_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in blocks("The handle") if "ConfigError" in block]
    execute([block], {"train": trainer.train})
    with pytest.raises(ConfigError) as refused:
        trainer.train("arithmetic_grpo", "rollout=torch optim.lr=-1 nosuch=3 run.dir=here")
    assert {problem.key for problem in refused.value.problems} == {"optim.lr", "nosuch"}
    assert str(refused.value).splitlines() == [str(problem) for problem in refused.value.problems]
    with pytest.raises(ConfigError, match=r"optim\.lr must be > 0"):
        trainer.load_config("arithmetic_grpo", {"optim.lr": 0})
    with pytest.raises(ConfigError, match="recipe is not known, got 'arithmetic'"):
        trainer.train("arithmetic")
    for words in (["-m", "run.seed=0,1"], ["--dry-run"], ["--cfg", "job"], ["--nosuch"]):
        with pytest.raises(ConfigError, match="flag"):
            trainer.train("arithmetic_grpo", ["rollout=torch", *words])
    with pytest.raises(ConfigError, match=r"(?s)flags must be those of one run.*optim\.lr must be > 0"):
        trainer.load_config("arithmetic_grpo", "optim.lr=-1 --dry-run")
    with pytest.raises(ConfigError, match="must be the directory of a run of Parity"):
        trainer.resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="run_dir must be the directory of a run of Parity"):
        trainer.open_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_raises_what_the_command_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = {"cluster.address": "127.0.0.1:1"}
    run = trainer.train("arithmetic_grpo", {**QUICK, **nowhere, "run.dir": str(tmp_path / "run")})
    with pytest.raises(trainer.RunError) as failed:
        list(run)
    assert str(failed.value).startswith("parity train failed: ") and "cluster.address" in str(failed.value)
    assert f"The full traceback is in {run.dir}/error.log." in str(failed.value)
    assert run.status is RunStatus.failed and run.metrics() == [] and run.checkpoints == {}
    assert "failed" in repr(run)


HOLDER = """
import pathlib, signal, sys
from trainer.rundir.run_dir import lock_directory
lock = lock_directory(pathlib.Path(sys.argv[1]), key="run.dir")
signal.pause()
"""


def test_a_run_that_was_started_elsewhere_is_seen_and_asked_to_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)])
    try:
        while lock_holder(run_dir) is None:
            assert holder.poll() is None
            time.sleep(0.02)
        run = trainer.open_run(run_dir)
        assert run.is_running and run.status is None and "goes on" in repr(run)
        with pytest.raises(TimeoutError, match=r"goes on after 0.1 s"):
            run.wait(0.1)
        run.stop()
        assert holder.wait(30) == -15
    finally:
        holder.kill()
        holder.wait()
    assert not run.is_running
    with pytest.raises(trainer.RunError, match="failed or was killed"):
        run.wait()


def test_importing_the_package_costs_next_to_nothing() -> None:
    program = """
import sys, trainer
before = {name.partition(".")[0] for name in sys.modules}
trainer.train
after = {name.partition(".")[0] for name in sys.modules}
assert "hydra" in after - before and not after & {"torch", "ray", "transformers"}, (before, after)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = trainer.nosuch


def test_the_loop_of_the_guide_learns_under_both_corrections(capsys: pytest.CaptureFixture[str]) -> None:
    execute(blocks("The corrections in a loop of your own"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "TISConfig reward 0.96, kept 1.000"
    assert re.fullmatch(r"MISConfig reward 0\.9\d, kept 0\.99\d", second)


def test_the_trainer_of_trl_takes_the_corrections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed; it is no dependency of Parity")
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(TOKENS), eos_token_id=1, pad_token_id=0, num_key_value_heads=2,
                                         initializer_range=0.5, **shape))  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    batches: list[dict[str, Any]] = []

    def spy(original: Any) -> Any:
        def call(self: Any, inputs: Any) -> Any:
            batches.append(original(self, inputs))
            return batches[-1]

        return call

    first, second = blocks("In TRL's GRPOTrainer")
    namespace = execute([first], {"model_dir": str(tmp_path / "model")})
    kind = namespace["CorrectedGRPOTrainer"]
    kind._generate_and_score_completions = spy(kind._generate_and_score_completions)
    kind.correction = TISConfig(cap=1.01)
    execute([second], namespace)
    assert len(batches) == 2
    for batch in batches:
        mask = batch["completion_mask"].bool()
        ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
        weight = torch.where(mask, ratio.clamp(max=1.01), 0.0)
        per_response = batch["advantages"].sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        torch.testing.assert_close(batch["advantages"], per_response * weight)
        assert (ratio[mask] > 1.01).any() and ratio[mask].log().abs().mean() < 0.15, "bfloat16 against float32"


@pytest.mark.parametrize("overrides", [5, [("optim.lr", 1)], {"optim.lr"}])
def test_overrides_of_another_type_are_a_problem_of_the_config(overrides: Any) -> None:
    for call in (trainer.load_config, trainer.train):
        with pytest.raises(ConfigError, match="overrides must be words, or a mapping of keys to values"):
            call("arithmetic_grpo", overrides)


def test_a_recipe_of_another_type_and_keys_of_hydra_are_problems_of_the_config() -> None:
    with pytest.raises(ConfigError, match="recipe must be the name of a recipe, the path of one, or the directory of"):
        trainer.train(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir has no effect: Parity starts the runs itself"):
        trainer.load_config("arithmetic_grpo", {"hydra.run.dir": "x"})
