"""Paths that begin with ~, from everywhere where a config or a command can get them."""

from __future__ import annotations

import pwd
from dataclasses import fields
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import yaml
from cli_process import parity
from compose_cases import config_of, own_recipe, resolved
from omegaconf import OmegaConf

from algorithms.config import Checked, ConfigError
from algorithms.config.home import from_home, path_fields
from trainer import api
from trainer.cli.arguments import given_words
from trainer.cli.diagnose import run_diagnose
from trainer.cli.doctor import _cache
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.hydra_session import hydra_session
from trainer.compose.overrides import parse, quoted_home
from trainer.compose.read import read_own_keys
from trainer.config.train import GROUPS, TrainConfig
from trainer.rundir.cache import default_cache_dir
from trainer.rundir.provenance import config_document
from trainer.rundir.weights_source import find_source
from trainer.start.checks import variable_problems
from trainer.study.config import StudyConfig

RECIPE = """
defaults: [/train, override /model: hf, override /data: file, override /rollout: sglang, override /collect: fixed,
           override /correction: tis, override /loss: ppo_clip, _self_]
run: {{dir: '{home}/runs/x', resume_from: '{home}/runs/y/checkpoints/step_000002'}}
model: {{path: '{home}/model'}}
critic: {{path: '{home}/critic'}}
data: {{train_path: '{home}/train.jsonl', eval_path: '{home}/sets:main@test'}}
eval: {{sets: {{more: '{home}/train.jsonl', hub: some/where@~test}}}}
reward: {{function: '{home}/mine.py:score', arguments: {{rubric: '{home}/rubric.txt'}}}}
episode: {{function: '{home}/mine.py:turns'}}
cluster: {{env: {{HF_HOME: '{home}/hf', OTHER: a~b}}}}
rollout: {{engine_args: {{chat_template: '{home}/t.jinja', more: ['{home}/a', {{b: '{home}/c'}}], tp_size: 1}}}}
sampling: {{max_new_tokens: 64}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, with an apostrophe in its name, that has what the recipe names."""
    directory = tmp_path / "it's me"
    (directory / "model").mkdir(parents=True)
    (directory / "sets").mkdir()
    (directory / "train.jsonl").write_text('{"prompt": "2+3", "answer": "5"}\n')
    (directory / "mine.py").write_text(
        "def score(response, answer, rubric): return 1.0\n\n\nasync def turns(episode): ...\n"
    )
    monkeypatch.setenv("HOME", str(directory))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return directory


def values_of(config: TrainConfig) -> dict[str, Any]:
    """Key -> value of every key that names a path."""
    found = {}
    for section in fields(config):
        part = getattr(config, section.name)
        found.update({f"{section.name}.{name}": getattr(part, name) for name in path_fields(type(part))})
    return found


def texts(value: object) -> list[str]:
    if isinstance(value, dict | list):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in texts(inner)]
    return [value] if isinstance(value, str) else []


def config_in(recipe: Path, *words: str) -> TrainConfig:
    """The config of a recipe file, with the estimator that needs a critic."""
    resolution = resolve(recipe, ["advantage.estimator=gae", *words], own_dir=None, multirun=False)
    assert not resolution.problems, list(map(str, resolution.problems))
    config = resolution.runs[0].config
    assert config is not None
    return config


@pytest.mark.parametrize("tilde", ["~", "${oc.env:TILDE}", "~${oc.env:NOBODY}"])
def test_every_key_of_a_recipe_that_names_a_path_knows_the_home_directory(
    home: Path, tilde: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILDE", "~")
    monkeypatch.setenv("NOBODY", "")
    config = config_in(own_recipe(home, RECIPE.format(home=tilde)))
    assert values_of(config) == {
        "run.dir": f"{home}/runs/x",
        "run.resume_from": f"{home}/runs/y/checkpoints/step_000002",
        "model.path": f"{home}/model",
        "critic.path": f"{home}/critic",
        "data.train_path": f"{home}/train.jsonl",
        "data.eval_path": f"{home}/sets:main@test",
        "eval.sets": {"more": f"{home}/train.jsonl", "hub": "some/where@~test"},
        "reward.function": f"{home}/mine.py:score",
        "reward.arguments": {"rubric": f"{home}/rubric.txt"},
        "episode.function": f"{home}/mine.py:turns",
        "episode.arguments": {},
        "cluster.env": {"HF_HOME": f"{home}/hf", "OTHER": "a~b"},
        "rollout.engine_args": {
            "chat_template": f"{home}/t.jinja", "more": [f"{home}/a", {"b": f"{home}/c"}], "tp_size": 1,
        },
    }  # fmt: skip
    assert yaml.safe_load(config_document(config))["model"]["path"] == f"{home}/model"
    assert [path.name for path in Path.cwd().iterdir()] == [], "nothing was made, and no directory named ~"


WORDS = {
    "run.dir=~/r": ("run.dir", "/r"),
    "run.dir=~": ("run.dir", ""),
    "run.dir=~/a, b": ("run.dir", "/a, b"),
    "run.dir=~/lr=3 (1)/it's": ("run.dir", "/lr=3 (1)/it's"),
    "+cluster.env.X=~/x": ("cluster.env", {"X": "/x"}),
    "cluster.env={X: ~/x y,Y: '~/z',Z: \"~/q\"}": ("cluster.env", {"X": "/x y", "Y": "/z", "Z": "/q"}),
    "++critic.path='~/c'": ("critic.path", "/c"),
    "critic.path=${oc.env:UNSET_HERE,'~/c'}": ("critic.path", "/c"),
    "critic.path=${run.dir}/c": ("critic.path", "/a run/c"),
}


class Texts(StrEnum):
    none = "a group"


class Numbers(IntEnum):
    one = 1


@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_command_line_and_values_of_python_know_the_home_directory(home: Path, word: str) -> None:
    key, expected = WORDS[word]
    config = config_of("advantage.estimator=gae", "run.dir=~/a run", word)
    below = {n: f"{home}{v}" for n, v in expected.items()} if isinstance(expected, dict) else f"{home}{expected}"
    assert values_of(config)[key] == below
    python = {"advantage.estimator": "gae", "run.dir": "~/p", "cluster.env": {"A": Path("~/x")}, "critic.path": "./~/c"}
    python |= {"optim.lr": np.float64(1e-3), "run.num_steps": np.int64(3)}
    python |= {"tracking.group": Texts.none, "run.seed": Numbers.one}
    config = api.load_config("arithmetic_grpo", python)
    assert (config.tracking.group, config.run.seed) == ("a group", 1), "not their names"
    assert (config.run.dir, config.cluster.env) == (f"{home}/p", {"A": f"{home}/x"})
    assert config.critic.path == "./~/c", "a directory of that name can still be meant"


def test_other_texts_keep_their_tilde(home: Path) -> None:
    config = config_of("tracking.notes=~/x", "tracking.tags=[~a,b~,'~']", "cluster.env={A: x/~/y}", "run.dir=a/~/b~")
    assert config.run.dir == "a/~/b~"
    assert (config.tracking.notes, config.tracking.tags) == ("~/x", ["~a", "b~", "~"])
    assert config.cluster.env == {"A": "x/~/y"}


def test_a_key_that_refers_to_a_path_agrees_with_it(home: Path) -> None:
    config = config_of("run.dir=~/r", "tracking.notes=${run.dir}/here", "tracking.project=${tracking.notes}")
    assert config.tracking.notes == config.tracking.project == f"{home}/r/here"


def test_a_sweep_has_a_home_directory_in_each_value_and_in_its_own_directory(home: Path) -> None:
    words = ("advantage.estimator=gae", "critic.path=~/a,~/b c,/d,'~/e,f'", "hydra.sweep.dir=~/sweep")
    resolution = resolved(*words, multirun=True)
    assert not resolution.problems, list(map(str, resolution.problems))
    paths = [run.config.critic.path for run in resolution.runs if run.config is not None]
    assert paths == [f"{home}/a", f"{home}/b c", "/d", f"{home}/e,f"]
    assert resolution.run_dir(1) == home / "sweep" / "1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("~/a/${run.recipe},~/b", ["/a/arithmetic_grpo", "/b"]),
        ("~/${oc.env:UNSET_HERE,q},~/${oc.env:UNSET_HERE,'q r'}.d", ["/q", "/q r.d"]),
        ("~/${oc.env:UNSET_HERE,${run.recipe}}/x,~/b", ["/arithmetic_grpo/x", "/b"]),
        ("choice(~/a,'~/b,c')", ["/a", "/b,c"]),
        ("sort(~/b=2,~/a:1 x)", ["/a:1 x", "/b=2"]),
        ("~/a #1,~/b#2,~/c\\,d,~/it's", ["/a #1", "/b#2", "/c,d", "/it's"]),
    ],
)
def test_a_sweep_takes_from_home_what_it_takes_elsewhere(home: Path, value: str, expected: list[str]) -> None:
    words = ("advantage.estimator=gae", f"critic.path={value}", "hydra.sweep.dir=~/sw/${run.recipe}")
    resolution = resolved(*words, multirun=True)
    assert not resolution.problems, list(map(str, resolution.problems))
    paths = [run.config.critic.path for run in resolution.runs if run.config is not None]
    assert paths == [f"{home}{path}" for path in expected]
    assert resolution.run_dir(1) == home / "sw" / "arithmetic_grpo" / "1"


@pytest.mark.parametrize("value", ["glob(~/data/*)", "~/a [1],~/b", "[~/a,(~/b]", "tag(~/a)"])
def test_a_path_of_a_sweep_that_is_refused_is_quoted_as_it_was_typed(home: Path, value: str) -> None:
    [problem] = resolved("run.seed=0,1", f"critic.path={value}", multirun=True).problems
    assert problem.key == "critic.path" and problem.value in (value, f"critic.path={value}")
    assert "'~" not in f"{problem.rule}{problem.remedy}"


def test_a_deletion_is_no_path() -> None:
    assert quoted_home("~optim.lr") == "~optim.lr" and quoted_home("~model=~/x") == "~model='~/x'"
    for word in ("a=[x,'~/y',${b:~/z}]", 'a="it\'s ~/x"', "a=1e-5", "a={b:c}", "a='b,~c'", "a=", "a=x'~'"):
        assert quoted_home(word) == quoted_home(word, sweeps=True) == word
    with hydra_session(find_recipe("arithmetic_grpo", own_dir=None), None) as loader:  # type: ignore[arg-type]
        [override], problems = parse(["~tracking.tags"], loader=loader, multirun=False)
    assert override.is_delete() and not problems


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("run.dir=~nobody_here/x", "run.dir"),
        ("+eval.sets.more=~nobody_here/a@train", "eval.sets.more"),
        ("reward.function=~nobody_here/a.py:f", "reward.function"),
        ("hydra.sweep.dir=~nobody_here", "hydra.sweep.dir"),
    ],
)
def test_a_user_that_nobody_knows_is_a_problem_and_no_directory(home: Path, word: str, key: str) -> None:
    found = [each for each in resolved(word, "optim.lr=-1").problems if each.key != "eval.sets"]
    assert [problem.key for problem in found] == [key, "optim.lr"], "one problem, reported with the others"
    rule = f"{key} must not begin with ~nobody_here: this machine has no user of that name, got '~nobody_here"
    assert str(found[0]).startswith(rule) and "Write ./~nobody_here" in str(found[0])
    file = own_recipe(home, "defaults: [/arithmetic_grpo, _self_]\nrun: {dir: ~nobody_here/x}\n")
    [problem] = resolve(file, (), own_dir=None, multirun=False).problems
    assert problem.key == f"{file}: run.dir"


def test_a_mapping_of_any_values_keeps_a_tilde_of_no_user(home: Path) -> None:
    file = own_recipe(home, RECIPE.format(home="~"))
    for value in ("~5", "~nobody_here/x", "~/x", "~root/x"):
        words = (f"+rollout.engine_args.a={value}", f"+rollout.engine_args.b=[{value},1]")
        config = config_in(file, f"+cluster.env.A={value}", *words)
        expected = {"~/x": f"{home}/x", "~root/x": f"{pwd.getpwnam('root').pw_dir}/x"}.get(value, value)
        arguments = values_of(config)["rollout.engine_args"]
        assert (config.cluster.env["A"], arguments["a"], arguments["b"]) == (expected, expected, [expected, 1])


def test_a_variable_that_names_a_directory_knows_the_home_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("tracking.wandb=disabled")
    monkeypatch.setenv("RAY_TMPDIR", "~/new/ray")
    assert [*variable_problems([config])] == [] and not (home / "new").exists()
    (home / "file").touch()
    for value, rule in {"~nobody_here/r": "must not begin with ~nobody_here", "~/file": "must be a directory"}.items():
        monkeypatch.setenv("RAY_TMPDIR", value)
        [problem] = variable_problems([config])
        assert problem.key == "$RAY_TMPDIR" and problem.rule.startswith(rule)
        assert [*variable_problems([config_of("tracking.wandb=disabled", "cluster.address=auto")])] == []
    monkeypatch.delenv("RAY_TMPDIR")
    for name in ("WANDB_DIR", "NETRC"):
        monkeypatch.setenv(name, "~nobody_here/x")
        [problem] = variable_problems([config_of("tracking.wandb=offline")])
        assert problem.key == f"${name}" and [*variable_problems([config])] == []
        monkeypatch.setenv(name, "~/x")
        assert [*variable_problems([config_of("tracking.wandb=offline")])] == []


def test_the_study_has_its_directory_from_home(home: Path) -> None:
    for word, expected in {"study.dir=~/s": f"{home}/s", "study.dir=~": str(home), "study.dir=./~": "./~"}.items():
        config, problems = read_own_keys(StudyConfig, [word], section="study")
        assert (config.dir, problems) == (expected, [])
    [problem] = read_own_keys(StudyConfig, ["study.dir=~nobody_here"], section="study")[1]
    assert problem.key == "study.dir"


def test_every_text_of_a_field_that_a_path_may_be_in_is_marked() -> None:
    """A field of which the docstring names a file or a directory as its value."""
    marked = {f"{kind.__name__}.{name}" for kind in kinds() for name in path_fields(kind)}
    assert marked == {
        "RunConfig.dir", "RunConfig.resume_from", "HFModelConfig.path", "CriticConfig.path",
        "FileDataConfig.train_path", "FileDataConfig.eval_path", "EvalConfig.sets", "RewardConfig.function",
        "EpisodeConfig.function", "ClusterConfig.env", "SGLangConfig.engine_args", "StudyConfig.dir",
        "RewardConfig.arguments", "EpisodeConfig.arguments",
    }  # fmt: skip
    unmarked = [
        f"{kind.__name__}.{name}"
        for kind in kinds()
        for name, hint in get_type_hints(kind).items()
        if (hint is str or str in get_args(hint)) and name not in path_fields(kind)
        if any(word in name for word in ("path", "dir", "file", "function"))
    ]
    assert unmarked == []


def kinds() -> list[type[Checked]]:
    sections = [kind for name, kind in get_type_hints(TrainConfig).items() if name not in GROUPS]
    return [*sections, *(kind for options in GROUPS.values() for kind in options.values()), StudyConfig]


@pytest.mark.parametrize("flags", [("--cfg", "job"), ("--cfg", "job", "--resolve"), ("--cfg", "job", "-p", "run")])
def test_the_config_that_is_shown_is_the_one_of_the_run(home: Path, flags: tuple[str, ...]) -> None:
    cwd = home.parent / "work"
    file = own_recipe(home, RECIPE.format(home="~"))
    words = ("train", str(file), "advantage.estimator=gae", "critic.path=~/other", "+eval.sets.w=~/train.jsonl@x")
    outcome = parity(*words, *flags, cwd=cwd)
    assert (outcome.code, outcome.err) == (0, "")
    shown = OmegaConf.to_container(OmegaConf.create(outcome.out))
    assert isinstance(shown, dict)
    run = shown.get("run", shown)
    assert (run["dir"], run["resume_from"]) == (f"{home}/runs/x", f"{home}/runs/y/checkpoints/step_000002")
    if "model" in shown:
        config = config_in(file, "critic.path=~/other", "+eval.sets.w=~/train.jsonl@x")
        for key, value in values_of(config).items():
            section, name = key.split(".")
            assert shown[section][name] == value


def test_a_config_that_is_refused_is_shown_with_its_home_directories(home: Path) -> None:
    words = ("train", "arithmetic_grpo", "model=hf", "model.path=~/model", "optim.lr=-1")
    outcome = parity(*words, "--cfg", "job", cwd=home)
    assert outcome.code == 0 and yaml.safe_load(outcome.out)["model"]["path"] == f"{home}/model"
    assert "a run with this configuration is refused" in outcome.err


def test_words_that_compose_no_config_know_the_home_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_words(["out=~/o", "modes=a,b"]) == {"out": f"{home}/o", "modes": "a,b"}
    (home / "run" / "checkpoints").mkdir(parents=True)
    source = find_source("~/run", best=False)
    assert getattr(source, "path", None) == home / "run"
    file = own_recipe(home, "defaults: [/arithmetic_grpo, _self_]\n")
    assert find_recipe("~/mine.yaml", own_dir=None) == file.resolve()
    assert api.load_config("~/mine.yaml").run.recipe == "mine"
    assert api.load_config("mine", ["--config-dir=~"]).run.recipe == "mine"
    with pytest.raises(FileNotFoundError, match="run_dir must be the directory of a run"):
        api.open_run("~/run")
    with pytest.raises(ConfigError) as refused:
        api.resume("~/run")
    assert refused.value.problems[0].value == str(home / "run")
    monkeypatch.setenv("PARITY_CACHE", "~/cache")
    assert default_cache_dir() == home / "cache"
    monkeypatch.setenv("PARITY_CACHE", "~nobody_here")
    assert "$PARITY_CACHE must not begin with ~nobody_here" in str(_cache())
    with pytest.raises(ConfigError, match="source must not begin with ~nobody_here"):
        run_diagnose(["~nobody_here/run"])


@pytest.mark.parametrize(
    "words",
    [
        ("export", "~/run", "~nobody_here/out"),
        ("report", "~/run", "-o", "~nobody_here/out.html"),
        ("replay", "~/run", "step=1", "out=~nobody_here/out"),
        ("diagnose", "~/run", "out=~nobody_here/out"),
        ("resume", "~nobody_here/run"),
        ("train", "~nobody_here/mine.yaml"),
        ("train", "arithmetic_grpo", "--config-dir=~nobody_here", "--dry-run"),
        ("eval", "arithmetic_grpo", "checkpoint=~nobody_here/run"),
        ("study", "arithmetic_grpo", "study.dir=~nobody_here/s", "--dry-run"),
    ],
    ids=lambda words: words[0],
)
def test_no_command_makes_a_directory_named_after_an_unknown_user(home: Path, words: tuple[str, ...]) -> None:
    (home / "run").mkdir()
    cwd = home.parent / "work"
    outcome = parity(*words, cwd=cwd)
    assert outcome.code == 2 and "must not begin with ~nobody_here: this machine has no user" in outcome.err
    assert list(cwd.iterdir()) == []


def test_a_path_may_hold_what_looks_like_an_interpolation(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{home}/${{x}}")
    config = config_of("advantage.estimator=gae", "run.dir=~/r", "critic.path=${run.dir}/c")
    assert (config.run.dir, config.critic.path) == (f"{home}/${{x}}/r", f"{home}/${{x}}/r/c")


def test_only_the_beginning_of_a_text_is_a_home_directory() -> None:
    for text in ("", "a", "a/~", "./~", "./~root", "org/model", "C:~"):
        assert from_home(text, key="k") == text
    assert from_home("~root/x", key="k") == f"{pwd.getpwnam('root').pw_dir}/x"
    for text in ("~no_one/x", "~a\0b", "~no:main@train"):
        with pytest.raises(ConfigError, match="k must not begin with ~"):
            from_home(text, key="k")


PATHS = (
    "2026_11_28",
    "1e5",
    "0.10",
    "true",
    "nan",
    "données/ä b (1).jsonl",
    "a=b",
    "a;b#c",
    "a[1]",
    "it's",
    "~root/a(1)",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_what_is_written(home: Path, path: str) -> None:
    words = [f"run.dir={path}", "advantage.estimator=gae", f"critic.path={path}", f"+eval.sets.x={path}"]
    expected = from_home(path, key="k")
    for multirun in (False, True):  # a study composes all its runs so
        name = "hydra.sweep.dir" if multirun else "run.dir"
        found = resolved(f"{name}={path}", *words[1:], multirun=multirun)
        unread = [each for each in found.problems if "cannot be read" in each.rule or "one value" in each.rule]
        assert not unread and found.runs[0].output_dir == Path(expected).absolute()
    config = config_of(*words[:3])
    assert (config.run.dir, config.critic.path) == (expected, expected)
    study, problems = read_own_keys(StudyConfig, [f"study.dir={path}"], section="study")
    assert (study.dir, problems) == (expected, [])
    for quoted in (f'study.dir="{path}"', "study.dir=null"):
        assert read_own_keys(StudyConfig, [quoted], section="study")[0].dir in (expected, None)
    assert config_of("advantage.estimator=gae", "critic.path=null").critic.path is None


@pytest.mark.parametrize("written", ["2026_11_28", "0.10", "on", "12:30:45"])
def test_a_number_in_a_file_is_no_path(home: Path, written: str) -> None:
    """YAML has made something else of it than was written."""
    file = own_recipe(home, f"defaults: [/arithmetic_grpo, _self_]\nrun: {{dir: {written}}}\n")
    [problem] = resolve(file, (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{file}: run.dir must be text, got") and "write it in quotes" in str(problem)
    file = own_recipe(home, f"defaults: [/arithmetic_grpo, _self_]\nrun: {{dir: '{written}'}}\n")
    assert config_in(file).run.dir == written


@pytest.mark.parametrize("value", ["$HOME/runs", "$DATA"])
def test_a_variable_of_a_shell_is_no_directory(home: Path, value: str) -> None:
    file = own_recipe(home, f"defaults: [/arithmetic_grpo, _self_]\nrun: {{dir: {value}}}\n")
    [problem] = resolve(file, (), own_dir=None, multirun=False).problems
    name = value[1:].partition("/")[0]
    assert str(problem).startswith(f"{file}: run.dir must not begin with ${name}: no shell reads it here")
    assert f"Write ${{oc.env:{name}}}" in str(problem)
    config = config_of(f"+cluster.env.A={value}", f"run.dir=./{value}")
    assert (config.cluster.env["A"], config.run.dir) == (value, f"./{value}"), "a process may read the variable itself"


def test_the_way_to_a_variable_of_the_environment_is_named(home: Path) -> None:
    file = own_recipe(home, 'defaults: [/arithmetic_grpo, _self_]\nrun: {dir: "${HOME}/runs"}\n')
    [problem] = resolve(file, (), own_dir=None, multirun=False).problems
    assert "Interpolation key 'HOME' not found" in problem.rule and "${oc.env:HOME} reads" in problem.remedy
