"""The real command line: help, exit codes, messages, sweeps, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import HEAVY, REFUSED_S, parity

from algorithms.config import PRESETS
from algorithms.config.correction import CORRECTIONS
from rollout.rewards.scorer import RewardError
from trainer.cli.commands import run
from trainer.cli.job import ERROR_LOG, failed
from trainer.cli.parsers import PARSERS

pytestmark = pytest.mark.usefixtures("no_cached_model")


@pytest.mark.parametrize("words", [["--help"], ["recipes", "--help"], ["replay", "--help"], ["train", "--help"]])
def test_help_appears_at_once(words: list[str], tmp_path: Path) -> None:
    outcome = parity(*words, cwd=tmp_path, watched=(*HEAVY, "hydra", "omegaconf", "rich"))
    assert outcome.code == 0
    assert outcome.loaded == ()
    assert outcome.cpu_s < 1  # 0.2 on an idle core; more beside other programs
    assert "parity" in outcome.out
    assert outcome.err == ""


def test_recipes_lists_what_each_is_for(tmp_path: Path) -> None:
    outcome = parity("recipes", cwd=tmp_path, watched=(*HEAVY, "hydra"))
    assert outcome.code == 0
    assert outcome.loaded == ()
    header, *rows = outcome.out.splitlines()
    assert header.split() == ["recipe", "question", "hardware", "verified"]
    row = next(row for row in rows if row.startswith("gsm8k_grpo_qwen2.5_0.5b "))
    assert "How far does GRPO" in row
    assert "2 GPUs" in row
    assert "not yet run on a GPU" in row


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "parity recipes"),
        (["trian"], "command is not known, got 'trian'. Did you mean parity train?"),
        (["recipes", "x"], "parity recipes takes no arguments, got 'x'."),
        (
            ["train"],
            "recipe is missing. parity train <recipe>; recipes: arithmetic_async, arithmetic_dapo",
        ),
        (["train", "--dry-run"], "recipe is missing."),
        (["study"], "recipe is missing. parity study <recipe>; see parity study --help."),
        (["eval", "checkpoint=none"], "recipe is missing. parity eval <recipe>; see parity eval --help."),
        (["eval", "arithmetic_grpo"], "checkpoint is missing. checkpoint=... is one of: a run directory, a checkpoint"),
        (["resume"], "run.dir is missing. parity resume <run.dir> [key=value ...]."),
        (["report"], "run is missing. A run directory is what parity train printed"),
        (["replay"], "source is missing. parity replay <run.dir> step=N [modes=NAME,...]"),
        (
            ["train", "arithmetic_grp"],
            "recipe is not known, got 'arithmetic_grp'. Did you mean arithmetic_grpo? Recipe",
        ),
        (["train", "./nosuch.yaml"], "recipe must be an existing file, got './nosuch.yaml'."),
        (["train", "a/b"], "recipe must be the name of a recipe or end in .yaml, got 'a/b'."),
    ],
)
def test_a_command_that_cannot_be_understood(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.scenario(31)
@pytest.mark.sglang
def test_mistakes_are_reported_together_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    outcome = parity(
        "train",
        "arithmetic_grpo",
        "loss.clip_hihg=0.3",
        "--dryrun",
        "correction=mis",
        "correction.cap=3",
        "batch.group_size=1",
        "reward.overlong_buffer_tokens=999",
        "optim.lr=abc",
        "colect=dynamic",
        cwd=tmp_path,
        watched=HEAVY,
    )
    assert outcome.code == 2
    assert outcome.loaded == ()
    assert outcome.cpu_s < REFUSED_S
    title, *lines = outcome.err.splitlines()
    assert title == "parity train arithmetic_grpo: 7 problems, nothing was started"
    assert [line.split()[1] for line in lines] == [
        "flag",
        "loss.clip_hihg",
        "correction.cap",
        "optim.lr",
        "colect",
        "reward.overlong_buffer_tokens",
        "batch.group_size",
    ]
    assert lines[0] == "  - flag is not known, got '--dryrun'. Did you mean --dry-run? See parity train --help."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [".", "own"])
def test_a_mistyped_file_of_a_recipe_is_found_beside_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(place).mkdir(exist_ok=True)
    for name in ("letters.yaml", "numbers.yaml"):
        (Path(place) / name).touch()
    for given, meant in (("leters.yaml", "letters.yaml"), ("Letters.yaml", "letters.yaml"), ("words.yaml", None)):
        assert run(["train", str(Path(place) / given)]) == 2
        hint = f"Did you mean {Path(place) / meant}? Recipes: " if meant else "Recipes: "
        assert f"must be an existing file, got '{Path(place) / given}'. {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (["--num-steps=4"], "got '--num-steps=4'. Keys have no dashes: run.num_steps=4. See parity eval --help."),
        (["--dryrun"], "got '--dryrun'. Keys have no dashes: dryrun=<value>. See parity eval --help."),
        (["--bset"], "got '--bset'. Did you mean --best? See parity eval --help."),
        (["--clip-grad", "8"], "got '--clip-grad=8'. Here it is optim.max_grad_norm=8. See parity eval --help."),
        (["--cfg", "job"], "got '--cfg'. It is a flag of parity train, parity resume. See parity eval --help."),
    ],
)
def test_eval_names_its_own_flags_and_help(flag: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "arithmetic_grpo", *flag, "checkpoint=none", "rollout=torch"]) == 2
    _, *problems = capsys.readouterr().err.splitlines()
    assert problems == [f"  - flag is not known, {said}"]


def test_no_plan_is_made_of_words_that_were_not_understood(tmp_path: Path) -> None:
    outcome = parity("train", "arithmetic_grpo", "rollout=torch", "--dry-run", "--use-tis", cwd=tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[1:] == [
        "  - flag is not known, got '--use-tis'. Here it is correction=tis correction.cap=... See parity train --help."
    ]


def test_an_unknown_recipe_and_flag_are_reported_together(tmp_path: Path) -> None:
    outcome = parity("train", "arith", "--config-dir", "nosuch", "--multi-run", cwd=tmp_path)
    assert outcome.code == 2
    assert [line.split()[1] for line in outcome.err.splitlines()[1:]] == ["recipe", "flag", "--config-dir"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cfg", "job", "--dry-run"], "flags cannot be combined, got '--cfg --dry-run'."),
        (["--cfg", "jobb"], "invalid choice: 'jobb'"),
        (["--resolve"], "--resolve has no effect without --cfg"),
        (["--use-tis"], "flag is not known, got '--use-tis'. Here it is correction=tis correction.cap="),
        (["--config-name", "x"], "flag is not known, got '--config-name=x'."),
        (["--advantage-estimator", "grpo"], "Here it is advantage.estimator=grpo."),
        (["--kl-loss-type", "low_var_kl", "--colocate", "run.seed=3"], "Here it is reference.estimator=k3."),
        (["--experimental-rerun", "x.pickle"], "flag is not known, got '--experimental-rerun'."),
    ],
)
def test_flags_that_cannot_be_used(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "arithmetic_grpo", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    words = ("train", "--dry-run", "arithmetic_grpo", "rollout=torch")
    outcome = parity(*words, cwd=tmp_path, watched=HEAVY)
    assert (outcome.code, outcome.err, outcome.loaded) == (0, "", ())
    labels = [line.split()[0] for line in outcome.out.splitlines() if not line.startswith(" ")]
    assert labels == [
        "recipe",
        "model",
        "batch",
        "reward",
        "objective",
        "forwards",
        "memory",
        "schedule",
        "engines",
        "placement",
        "evaluation",
        "checkpoints",
        "disk",
        "files",
        "tracking",
    ]
    assert "L = -sum m * sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.2) * A" in outcome.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sglang
def test_a_dry_run_of_a_sweep_prints_every_plan(tmp_path: Path) -> None:
    outcome = parity("train", "arithmetic_grpo", "-m", "correction=tis,bypass", "--dry-run", cwd=tmp_path)
    assert outcome.code == 0
    assert "run 1 of 2: correction=tis\n" in outcome.out
    assert "run 2 of 2: correction=bypass\n" in outcome.out
    assert outcome.out.count("objective") == 2
    assert "PPOclip(pi_theta/mu, 0.2, 0.2)" in outcome.out


def test_a_sweep_with_one_bad_combination_starts_nothing(tmp_path: Path) -> None:
    outcome = parity("train", "arithmetic_grpo", "-m", "correction=tis,mis", "correction.cap=3", cwd=tmp_path)
    assert outcome.code == 2
    assert "[correction=mis] correction.cap is not a key of correction=mis, got 3." in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_the_composed_config(tmp_path: Path) -> None:
    outcome = parity("train", "arithmetic_grpo", "loss.clip_high=0.28", "--cfg", "job", "-p", "loss", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "clip_high: 0.28\n" in outcome.out
    assert "aggregation: seq_mean_token_mean\n" in outcome.out


def test_cfg_answers_what_cannot_be_composed_as_a_run_does(tmp_path: Path) -> None:
    for word, expected in (
        ("optim.lrr=3", "optim.lrr is not a key of optim, got 3. Did you mean optim.lr?"),
        ("learning_rate=1e-5", "learning_rate is not a key, got 1e-05. Here it is optim.lr=1e-05."),
    ):
        outcome = parity("train", "arithmetic_grpo", word, "--cfg", "job", "-p", "optim", cwd=tmp_path)
        assert outcome.code == 2 and expected in outcome.err, outcome.err
        assert "HYDRA" not in outcome.err and "append" not in outcome.err
    outcome = parity("train", "arithmetic_grpo", "optim.lr=-3", "--cfg", "job", "-p", "optim", cwd=tmp_path)
    assert outcome.code == 0 and "lr: -3\n" in outcome.out
    assert "note: a run with this configuration is refused, the first reason is: optim.lr must be > 0" in outcome.err


def test_cfg_shows_a_config_that_is_not_complete_yet(tmp_path: Path) -> None:
    outcome = parity("train", "gsm8k_grpo_qwen2.5_0.5b", "--cfg", "job", "--resolve", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "train_path: ''\n" in outcome.out
    assert "recipe: gsm8k_grpo_qwen2.5_0.5b\n" in outcome.out
    refused = parity("train", "gsm8k_grpo_qwen2.5_0.5b", "--dry-run", cwd=tmp_path)
    assert refused.code == 2
    assert "data.train_path must be set" in refused.err
    assert "data.eval_path must be set" in refused.err


@pytest.mark.sglang
def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "correction").mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [arithmetic_grpo, override /correction: wide, _self_]\n")
    (own / "correction/wide.yaml").write_text("defaults: [tis, _self_]\ncap: 9\n")
    by_dir = parity("train", "mine", "--config-dir", "own", "--dry-run", cwd=tmp_path)
    assert by_dir.code == 0, by_dir.err
    assert "min(pi_old/mu, 9)" in by_dir.out
    by_path = parity("train", "own/mine.yaml", "--cfg", "job", "-p", "correction", cwd=tmp_path)
    assert by_path.code == 0, by_path.err
    assert "cap: 9\n" in by_path.out
    group_only = parity("train", "arithmetic_grpo", "correction=wide", "-cd", "own", "--dry-run", cwd=tmp_path)
    assert group_only.code == 0, group_only.err
    assert "min(pi_old/mu, 9)" in group_only.out
    typo = parity("train", "mime", "--config-dir", "own", cwd=tmp_path)
    assert "Did you mean mine?" in typo.err


def test_a_recipe_called_like_the_start_of_all_recipes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("defaults: [/train]\n")
    outcome = parity("train", "./train.yaml", "--dry-run", cwd=tmp_path)
    assert outcome.code == 2
    assert "must not be called train.yaml" in outcome.err


@pytest.mark.sglang
def test_the_directory_of_a_sweep_can_be_named(tmp_path: Path) -> None:
    words = ("-m", "run.seed=0,1", "hydra.sweep.dir=there", "--dry-run")
    outcome = parity("train", "arithmetic_grpo", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert f"{tmp_path}/there/1:" in outcome.out


def completions(line: str, cwd: Path, *asked: str) -> list[str]:
    outcome = parity("-sc", *asked, cwd=cwd, watched=(*HEAVY, "hydra", "numpy"), env={"COMP_LINE": line})
    assert (outcome.code, outcome.loaded, outcome.err) == (0, (), "")
    return outcome.out.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("parity ", sorted(PARSERS)),
        ("parity train arithmetic_d", ["arithmetic_dapo"]),
        (
            "parity train arithmetic_grpo corr",
            ["correction.", *(f"correction={name}" for name in sorted([*CORRECTIONS, *PRESETS]))],
        ),
        ("parity train arithmetic_grpo -m correction=t", ["correction=tis"]),
        ("parity resume somewhere collect.or", ["collect.order="]),
        ("parity train arithmetic_grpo --dry", ["--dry-run"]),
        ("parity eval arithmetic_grpo checkp", ["checkpoint.", "checkpoint="]),
        ("parity study arithmetic_grpo study.s", ["study.seeds=", "study.stop_timeout_s="]),
    ],
)
def test_completion_of_every_position(line: str, words: list[str], tmp_path: Path) -> None:
    assert completions(line, tmp_path) == words


def test_completion_of_the_part_of_a_word_that_the_shell_asks_for(tmp_path: Path) -> None:
    line = "parity train arithmetic_grpo correction=t"
    assert completions(line, tmp_path, "parity", "t", "=") == ["tis"]


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
def test_completion_is_installed_by_the_line_that_is_told(tmp_path: Path) -> None:
    outcome = parity("-sc", "install=bash", cwd=tmp_path)
    assert outcome.code == 2
    line = outcome.err.partition("Install it: ")[2]
    done = subprocess.run(["/bin/bash", "-c", f"{line}\ncomplete -p parity"], capture_output=True, text=True)
    assert done.stdout.endswith(" -C 'parity -sc' parity\n") and not done.stderr


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train", "arithmetic_grpo", "x=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "x is not a key, got 1." in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    script = f"{Path(sys.executable).parent}/parity recipes | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_config_that_is_shown_calls_nothing_that_the_recipe_names(tmp_path: Path) -> None:
    """Hydra's own command sets up log handlers, of any class, before it shows a config."""
    owned, recipe = tmp_path / "owned", tmp_path / "mine.yaml"
    handler = f"{{class: logging.FileHandler, filename: {owned}}}"
    logs = f"{{version: 1, handlers: {{x: {handler}}}, root: {{handlers: [x]}}}}"
    recipe.write_text(f"defaults: [arithmetic_grpo, _self_]\nhydra: {{hydra_logging: {logs}}}\n")
    outcome = parity("train", str(recipe), "--cfg", "job", cwd=tmp_path)
    assert outcome.code == 2 and f"{recipe}: hydra has no effect" in outcome.err
    assert not owned.exists()


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"


def test_what_a_stranger_wrote_does_not_move_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message of a reward that failed on a response, a file name, a value of the command line: one way out."""
    failed(RewardError(f"no answer in {ESCAPES}\ud83d"), tmp_path / "run", command="parity train")
    run(["report", str(tmp_path / f"no{ESCAPES}run")])
    run(["train", "arithmetic_grpo", f"optim.lr={ESCAPES}"])
    captured = capsys.readouterr()
    assert "no answer in ]0;owned[2J31m" in captured.err and "optim.lr" in captured.err
    shown = captured.out + captured.err + (tmp_path / "run" / ERROR_LOG).read_text()
    assert not set(ESCAPES + "\ud83d") & set(shown) - set("]0;owned[2J31m")


def test_a_warning_without_a_console_does_not_move_the_terminal(tmp_path: Path) -> None:
    """`parity export` of a stranger's run warns about a file whose name is an escape sequence."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(
        '{"format": 2, "files": {"\\u001b]0;owned": {"bytes": 1, "xxh3_128": ""}}}'
    )
    code = (
        "from pathlib import Path; from trainer.cli import commands; from trainer.rundir import checkpoint\n"
        "commands.run(['--version'])\n"
        f"checkpoint.newest_checkpoint(Path({str(tmp_path / 'run')!r}))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first = outcome.stderr.splitlines()[0]
    assert "step_000001 cannot be used" in first and "]0;owned" in first and "\x1b" not in first


def test_a_file_of_another_user_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def denied(words: list[str]) -> int:
        raise PermissionError(13, "Permission denied", "/theirs/metrics.jsonl")

    monkeypatch.setattr("trainer.cli.report.run_report", denied)
    assert run(["report", "/theirs"]) == 2
    assert "must be open to this user, got '/theirs/metrics.jsonl'" in capsys.readouterr().err


@pytest.mark.parametrize("command", PARSERS)
def test_each_command_tells_its_flags_and_what_it_does_not_know(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"parity {command}" in shown and all(f"{flag} " in shown for flag in PARSERS[command].flags)
    assert run([command, str(tmp_path / "nosuch"), "--no-such-flag", "--verison"]) == 2
    said = capsys.readouterr().err
    if command not in ("recipes", "doctor"):
        assert said.count("flag is not known") == 2 and f"See parity {command} --help." in said
    assert completions(f"parity {command} {tmp_path} --h", tmp_path) == ["--help"]


@pytest.mark.parametrize("words", [("report",), ("resume",), ("export", "new"), ("replay", "step=1")])
def test_the_directory_above_runs_is_answered_with_the_runs_in_it(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(7):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "config.yaml").touch()
        os.utime(tmp_path / f"run{number}" / "config.yaml", (number, number))
    command, *rest = words
    assert run([command, str(tmp_path), *rest]) == 2
    assert "Runs in it, the newest first: run6, run5, run4, run3, run2, and 2 more." in capsys.readouterr().err
    (step := tmp_path / "run6" / "dumps" / "step_000001").mkdir(parents=True)
    assert run([command, str(step), *rest]) == 2
    assert f"Its run is {tmp_path / 'run6'}." in capsys.readouterr().err
