"""Classes of a user in place of built-in choices: every example of docs/extend.md, and what is refused."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from compose_cases import config_of, messages, own_recipe
from extend_page import MOST_LINES, commands, files, write_files

from algorithms.config import CorrectionSpec
from algorithms.objective import objective
from rollout.config import DynamicCollectConfig
from rollout.data.data_files import rows_of
from rollout.data.dataset import PromptStream
from rollout.types import Prompt
from rollout.user_code.custom_class import class_files, own_choices
from rollout.user_code.custom_code import code_digest, own_line
from trainer.cli.evaluate import UNREAD
from trainer.cli.export import NOT_EXPORTED
from trainer.compose.compose import resolve
from trainer.config.outputs import CustomSink
from trainer.config.paths import recipe_dir
from trainer.replay.modes import chosen_modes, name_problems
from trainer.run.guard import build_guard
from trainer.run.task import Task, prompt_stream
from trainer.rundir.checkpoint import RunState
from trainer.rundir.provenance import config_document
from trainer.rundir.resume import changed_keys, flat_config
from trainer.rundir.run_dir import StartError
from trainer.study.config import StudyConfig
from trainer.study.grid import compose_study
from trainer.tracking import sink_thread
from trainer.tracking.sink_thread import SinkThread
from trainer.tracking.tracker import Tracker

ALL = (
    *("correction=custom", "correction.level=ctpo.py:HalfPrefix", "correction.bound={use: ctpo.py:GrowingCap, scale: 2}"),  # noqa: E501
    *("correction.reject.custom=[{use: sigma.py:TokenSigma, bound: 3}]", "loss=anchored.py:Anchored", "loss.beta=0.5"),
    *("loss.aggregation=root_length.py:RootLength", "advantage.estimator=maxrl.py:MaxRL"),
    *("reference.coef=0.01", "reference.estimator=huber.py:Huber", "tracking.metrics=[hellinger.py:Hellinger]"),
    *("tracking.sinks=[to_sqlite.py:Sqlite]", "guard=entropy.py:Entropy", "guard.steps=2"),
)  # fmt: skip
"""Choices of all kinds that go together, but data and filter."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user, with the files of the page."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", files())
def test_a_file_of_the_page_is_short(name: str) -> None:
    assert len(files()[name].splitlines()) <= MOST_LINES


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[-1])
def test_a_command_of_the_page_makes_the_choice_that_it_names(words: list[str], here: Path) -> None:
    config = config_of(*words[1:], name=words[0])
    assert list(own_choices(config))
    assert all(choice.source in " ".join(words) for choice in own_choices(config))


def test_the_test_of_the_page_passes(here: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_sigma.py"], capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_keys_have_the_values_of_the_words_and_defaults_of_the_class(here: Path) -> None:
    config = config_of(*ALL)
    by_name = {choice.name: choice for choice in own_choices(config)}
    shown = {
        name: {
            key: getattr(choice, key) for key in ("bound", "scale", "beta", "width", "least") if hasattr(choice, key)
        }
        for name, choice in by_name.items()
    }
    assert shown["TokenSigma"] == {"bound": 3.0} and shown["GrowingCap"] == {"scale": 2.0}
    assert (
        shown["Anchored"] == {"beta": 0.5} and shown["Huber"] == {"width": 0.5} and shown["Entropy"] == {"least": 0.01}
    )
    line = objective(config.correction, config.loss)
    assert "1[|log(pi_old/mu)| <= 3 std_y(log(pi_old/mu))]" in line
    assert "sg(min(pi_old/mu sqrt(prod_<t(pi_old/mu)), exp(2 sqrt(t)))) * (pi_theta/pi_old - 0.5 log" in line
    assert line.endswith("* A / (N_sequences * sqrt(|y|))")


def test_config_yaml_and_a_recipe_give_the_same_config(here: Path) -> None:
    config = config_of(*ALL)
    again = here / "config.yaml"
    again.write_text(config_document(config), "utf-8")
    found = resolve(again, ["run.dir=x"], own_dir=None, multirun=False)
    assert not found.problems and found.runs[0].config is not None
    assert not changed_keys(flat_config(config), found.runs[0].config)
    assert list(own_choices(found.runs[0].config)) == list(own_choices(config))
    named = own_recipe(
        here, "defaults: [/arithmetic_grpo, override /loss: anchored.py:Anchored, _self_]\nloss: {beta: 0.25}\n"
    )
    [run] = resolve(named, [], own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.loss.beta == 0.25, run.problems  # type: ignore[attr-defined]
    assert not resolve(named, ["loss=cispo"], own_dir=None, multirun=False).problems, "beta went with its loss"


def test_a_choice_in_another_directory_is_found_by_its_path(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("further")
    write_files(elsewhere)
    for path in (f"{elsewhere}/anchored.py", f"../{elsewhere.name}/anchored.py"):
        assert config_of(f"loss={path}:Anchored", "loss.beta=0.3").loss.beta == 0.3  # type: ignore[attr-defined]


def test_other_processes_run_the_file_for_themselves_and_refuse_a_changed_one(here: Path) -> None:
    config = config_of(*ALL)
    saved = pickle.dumps(config)
    (here / "config.pickle").write_bytes(saved)
    code = (
        "import pickle; loss = pickle.load(open('config.pickle', 'rb')).loss; "
        "print(loss.beta, loss.source, loss.text(ratio='r'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0.5 anchored.py:Anchored (r - 0.5 log(pi_theta/mu)^2 / (2 A))\n", done.stderr
    assert class_files(config)[str(here / "sigma.py")] == code_digest("sigma.py")
    (here / "beside_it.py").write_text("POWER = 2\n")
    (here / "with_help.py").write_text("from beside_it import POWER\n" + (here / "anchored.py").read_text())
    helped = class_files(config_of("loss=with_help.py:Anchored"))
    assert helped[str(here / "beside_it.py")] == code_digest("beside_it.py") and not class_files(config_of())
    (here / "sigma.py").write_text((here / "sigma.py").read_text() + "# edited\n")
    with pytest.raises(ValueError, match=r"sigma\.py is not as it was when the config was read"):
        pickle.loads(saved)


def test_a_file_that_was_edited_is_run_again(here: Path) -> None:
    assert config_of("loss=anchored.py:Anchored").loss.beta == 0.1  # type: ignore[attr-defined]
    (here / "anchored.py").write_text((here / "anchored.py").read_text().replace("ruled(0.1,", "ruled(0.75,"))
    assert config_of("loss=anchored.py:Anchored").loss.beta == 0.75  # type: ignore[attr-defined]


def test_modules_of_one_name_beside_two_files_are_told_apart(here: Path) -> None:
    for directory, power in (("a", 0.25), ("b", 0.5)):
        (here / directory).mkdir()
        (here / directory / "helpers.py").write_text(f"POWER = {power}\n")
        text = (here / "anchored.py").read_text().replace("ruled(0.1, at_least(0))", "POWER")
        (here / directory / "loss.py").write_text("from helpers import POWER\n" + text)
    for _ in range(2):
        for directory, power in (("a", 0.25), ("b", 0.5)):
            assert config_of(f"loss={directory}/loss.py:Anchored").loss.beta == power  # type: ignore[attr-defined]


POST = """
from dataclasses import dataclass
from algorithms.config import CustomEstimator
@dataclass(kw_only=True)
class Between(CustomEstimator):
    low: float = 0.1
    high: float = 0.9
    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low is above high")
        self.middle = (self.low + self.high) / 2
    def __call__(self, step):
        return step.rewards - self.middle
"""


def test_post_init_runs_where_a_config_is_read_and_in_other_processes(here: Path) -> None:
    (here / "post.py").write_text(POST)
    config = config_of("advantage.estimator={use: post.py:Between, low: 0.5}")
    assert config.advantage.estimator.middle == 0.7  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(config)).advantage.estimator.middle == 0.7
    [line] = messages("advantage.estimator={use: post.py:Between, low: 2}")
    assert line.startswith("advantage.estimator ") and "low is above high" in line


BAD = """
from dataclasses import dataclass
from typing import ClassVar, Literal
from algorithms.config import CustomLoss
class Bare(CustomLoss):
    beta: float = 1.0
@dataclass(kw_only=True)
class Mute(CustomLoss):
    beta: float = 1.0
@dataclass(kw_only=True)
class Asks(CustomLoss):
    beta: float
    def __call__(self, tokens): ...
@dataclass(kw_only=True)
class Odd(CustomLoss):
    kind: Literal["a", "b"] = "a"
    def __call__(self, tokens): ...
@dataclass(kw_only=True)
class Says(CustomLoss):
    formula: ClassVar[str] = "{nosuch}"
    def __call__(self, tokens): ...
"""
REFUSED = {  # R: correction.reject.custom
    "R=[{use: sigma.py:TokenSigma, bond: 3}]": ("R[0].bond", "is not a key"),
    "R=[{use: sigma.py:TokenSigma, bound: 0}]": ("R[0].bound", "must be > 0"),
    "R=[{use: sigma.py:TokenSigma, bound: much}]": ("R[0].bound", "must be a number"),
    "R=[sigma.py:TokenSigma, sigma.py:TokenSigma]": ("R", "mismatch/rs/TokenSigma_frac of TokenSigma is there twice"),
    "R=sigma.py:TokenSigma": ("R", "must be a list"),
    "R=[sigma.py]": ("R[0]", "Did you mean sigma.py:TokenSigma?"),
    "R=[veto]": ("R[0]", "CustomCriterion of yours"),
    "R=[huber.py:Huber]": ("R[0]", "must name a subclass of CustomCriterion"),
    "R=[sigma.py:Sigma]": ("R[0]", "which has TokenSigma"),
    "advantage.estimator=nosuch.py:MaxRL": ("advantage.estimator", "must name an existing file"),
    "advantage.estimator=maxrl.py:MaxRL batch.group_size=1": ("batch.group_size", "must be >= 2"),
    "advantage.estimator=maxrl": ("advantage.estimator", "or a CustomEstimator of yours"),
    "loss=bad.py:Bare": ("loss", "must name a dataclass"),
    "loss=bad.py:Mute": ("loss", "must name a class with a method __call__ (class Mute of"),
    "loss=bad.py:Asks": ("loss", "beta has none (class Asks of"),
    "loss=bad.py:Odd": ("loss", "must name a class whose fields have types of a config"),
    "loss=bad.py:Says": ("loss", "it holds nosuch"),
    "loss=leaves.py:Loss": ("loss", "SystemExit: 3"),
    "loss=broken.py:Loss": ("loss", "ZeroDivisionError: division by zero ("),
    "loss=sigma.py:TokenSigma": ("loss", "must name a subclass of CustomLoss"),
    "loss=anchored.py:Anchored loss.clip_low=0.1": ("loss.clip_low", "is not a key of loss=anchored.py:Anchored"),
    "loss=anchored.py:Anchored loss.beta=-1": ("loss.beta", "must be >= 0"),
    "tracking.metrics=[hellinger.py:Hellinger,hellinger.py:Hellinger]": ("tracking.metrics", "of different names"),
    "model=sigma.py:TokenSigma": ("model", "must be one of"),
}  # fmt: skip


FAILING = """
import sys
from dataclasses import dataclass, field
from algorithms.config import Anchor, Bound, Compared, CorrectionSpec, Level, RejectConfig, WeightSpec
from algorithms.config import CustomCorrection, CustomCriterion
from algorithms.config.rules import above, ruled
@dataclass(kw_only=True)
class Base(CustomCriterion):
    least: float = 1.0
    def __call__(self, tokens): ...
@dataclass(kw_only=True)
class Correction(CustomCorrection):
    def spec(self):
        weight = WeightSpec(level=Level.token, bound=Bound.truncate, high=2.0)
        return CorrectionSpec(anchor=Anchor.old, compared=Compared.old, weight=weight)
@dataclass(kw_only=True)
class Mine(BASE):
BODY"""
SPEC = "def spec(self): return CorrectionSpec(anchor=Anchor.old, compared=Compared.old, "
FAILURES = {
    "def conflicts(self): yield 'words'": ("Base", "succeeds: TypeError: it must give Problem, and gave str"),
    "def conflicts(self): return None": ("Base", "conflicts() succeeds: TypeError"),
    "def conflicts(self): yield 1 / 0": ("Base", "conflicts() succeeds: ZeroDivisionError: division by zero"),
    "def conflicts(self): yield self.broken('nokey', 'must be good')": ("Base", "no attribute 'nokey'"),
    "text: str = ruled('x', above(0))": ("Base", "keys have names of their own: text"),
    "name: str = 'x'": ("Base", "keys have names of their own: name"),
    "use: float = 1.0": ("Base", "keys have names of their own: use"),
    "conflicts: bool = False": ("Base", "keys have names of their own: conflicts"),
    "word: str = ruled('x', above(0))": ("Base", "problems() succeeds: TypeError"),
    "def __post_init__(self): sys.exit(0)": ("Base", "__post_init__ succeeds: SystemExit: 0"),
    "def __call__(self, tokens, more): ...": ("Base", "must name a class with a method __call__(self, tokens"),
    "def spec(self): sys.exit(0)": ("Correction", "spec() succeeds: SystemExit: 0"),
    "def spec(self): return None": ("Correction", "spec() succeeds: TypeError: it must give CorrectionSpec"),
    "def spec(self): return CorrectionSpec()": ("Correction", "spec() succeeds: TypeError"),
    f"{SPEC}reject=RejectConfig(custom=['sigma.py:TokenSigma']))": ("Correction", "spec() succeeds: AttributeError"),
    f"{SPEC}reject=RejectConfig(veto=5))": ("Correction", "spec() succeeds: ConfigError: veto must lie in"),
    f"{SPEC}weight=WeightSpec(level=Level.token, bound=Bound.truncate, high=-1))": (
        "Correction", "keeps the rules of correction=custom: high must be >= 1"
    ),
    f"{SPEC}weight=WeightSpec(level='token', bound=Bound.none))": ("Correction", "level must be one of Level.token"),
}  # fmt: skip


@pytest.mark.parametrize("body", FAILURES)
def test_a_class_that_fails_while_the_config_is_read_is_named_with_file_and_line(body: str, here: Path) -> None:
    base, said = FAILURES[body]
    (here / "failing.py").write_text(FAILING.replace("BASE", base).replace("BODY", f"    {body}\n"))
    words = ["correction=custom", "correction.reject.custom=[failing.py:Mine]"]
    [line] = messages(*(words if base == "Base" else ["correction=failing.py:Mine"]))
    assert line.startswith(("correction", "failing.py:Mine must")) and said in line, line
    assert re.search(r"failing\.py:\d+\)|class Mine of .*failing\.py|correction=custom.*failing\.py", line), line


LEAVES = """
import sys
from dataclasses import dataclass
from rollout.task_config import CustomData
from trainer.config.outputs import CustomSink
print("said by a file")
@dataclass(kw_only=True)
class Data(CustomData):
    def rows(self, source):
        yield {"prompt": "1+1=", "answer": "2"}
        sys.exit(0)
@dataclass(kw_only=True)
class Sink(CustomSink):
    def start(self, run_dir, config, *, last_step): ...
    def log(self, step, numbers): sys.exit(0)
    def close(self, status): ...
"""


def test_a_class_that_ends_its_process_fails_like_any_other(
    here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (here / "leaves.py").write_text(LEAVES)
    data = config_of("data=leaves.py:Data").data
    with pytest.raises(ValueError, match=r"SystemExit: 0 .*leaves\.py:11"):
        list(rows_of(data, "train"))  # type: ignore[arg-type]
    [sink] = config_of("tracking.sinks=[leaves.py:Sink]").tracking.sinks
    thread = SinkThread(sink, here, {}, last_step=None)
    thread.put("log", 1, {})
    assert thread.close("completed") == 1 and "SystemExit" in caplog.text
    out, err = capsys.readouterr()
    assert "said by a file" in err and not out, "stdout is that of the command"


def test_a_guard_cannot_write_into_the_row_and_rows_must_stay_the_same(here: Path) -> None:
    text = (here / "entropy.py").read_text()
    row = {"policy/entropy": 1.0}
    for body, said in (
        ("row['policy/entropy'] = 7.0", "does not support item assignment"),
        ("return None", "NoneType"),
    ):
        changed = text.replace("        return [Read", f"        {body}\n        return [Read")
        (here / "entropy.py").write_text(changed)
        guard = build_guard(config_of("guard=entropy.py:Entropy"))
        with pytest.raises(ValueError, match=rf"entropy\.py:Entropy must be .*readings\(\).*{said}.*entropy\.py"):
            guard.observe(1, row)
        assert row == {"policy/entropy": 1.0}
    config = config_of("data=sums.py:Sums", "data.chat_template=false")
    before = [Prompt(prompt_id=n, token_ids=[n], text=str(n), answer=str(n)) for n in range(3)]
    state = RunState(step=1, policy_version=1, stream=PromptStream(before, seed=0).state_dict())
    task = SimpleNamespace(dataset=SimpleNamespace(train=before[1:]), model_path=here, eval_prompts={})
    with pytest.raises(StartError, match=r"rows\(\) of sums\.py:Sums must give the same rows at every call"):
        prompt_stream(config, cast(Task, task), state)


KINDS = """
from dataclasses import dataclass, field
from enum import Enum
from algorithms.config import CustomCriterion
from beside_it import Colour
class Outer:
    class Side(Enum):
        left = "l"
        right = "r"
@dataclass(kw_only=True)
class Mine(CustomCriterion):
    side: Outer.Side = Outer.Side.left
    sides: list[Outer.Side] = field(default_factory=list)
    colour: Colour = Colour.red
    def __call__(self, tokens): return self.side is Outer.Side.right and self.colour is Colour.blue
"""


def test_enumerations_of_a_file_and_of_modules_beside_it_go_to_other_processes(here: Path) -> None:
    for directory in ("a", "b"):  # two modules of one name
        (here / directory).mkdir()
        (here / directory / "kinds.py").write_text(KINDS)
        (here / directory / "beside_it.py").write_text("from enum import Enum\nColour = Enum('Colour', 'red blue')\n")
    own = "correction.reject.custom=[{use: a/kinds.py:Mine, side: right, sides: [left, right], colour: blue}]"
    config = config_of("correction=custom", own)
    (here / "config.pickle").write_bytes(pickle.dumps(config))
    config_of("correction=custom", own.replace("a/", "b/"))
    (here / "again.pickle").write_bytes(pickle.dumps(config.correction.reject.custom[0].side))  # type: ignore[attr-defined]
    code = (
        "import pickle; load = lambda name: pickle.load(open(name, 'rb')); mine = load('config.pickle')"
        ".correction.reject.custom[0]; print(mine(None), [side.name for side in mine.sides], load('again.pickle'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here)
    assert done.stdout == "True ['left', 'right'] Side.right\n", done.stderr


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_said_before_anything_starts(words: str, here: Path) -> None:
    (here / "bad.py").write_text(BAD)
    (here / "broken.py").write_text("import math\n1 / 0\n")
    (here / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    key, rule = REFUSED[words]
    words, key = (re.sub(r"^R\b", "correction.reject.custom", text) for text in (words, key))
    list_of_words = words.replace(", ", ",").split(" ") if "[" not in words else [words]
    base = ["correction=custom"] if words.startswith("correction") else []
    found = messages(*base, *list_of_words)
    assert any(line.startswith(f"{key} ") and rule in line for line in found), found


def test_a_user_correction_of_a_study_lies_in_any_directory(here: Path) -> None:
    (place := here / "données (1), b").mkdir()
    (place / "gentle.py").write_bytes((here / "gentle.py").read_bytes())
    axes = StudyConfig(modes=["tis", f"{place}/gentle.py:GentleTIS"], precisions=["int8"], seeds=[0])
    study, problems = compose_study(recipe_dir() / "arithmetic_grpo.yaml", ["rollout=torch"], axes, own_dir=None)
    assert not problems and [cell.mode for cell in study.cells] == axes.modes
    assert [type(cell.config.correction).__name__ for cell in study.cells] == ["TISConfig", "GentleTIS"]


def test_a_user_correction_stands_in_a_study_and_in_a_replay(here: Path) -> None:
    assert StudyConfig(modes=["tis", "gentle.py:GentleTIS"]).modes
    assert not name_problems(["gentle.py:GentleTIS"])
    assert "subclass of CustomCorrection" in str(name_problems(["sigma.py:TokenSigma"])[0])
    modes, refused = chosen_modes(config_of(), ["gentle.py:GentleTIS"], optimizer_steps=1, has_old_logprobs=True)
    assert [mode.name for mode in modes] == ["run", "gentle.py:GentleTIS"] and not refused
    spec = modes[1].config.correction.spec()
    assert isinstance(spec, CorrectionSpec) and spec.weight is not None and spec.weight.high == 1.2
    broken = (here / "gentle.py").read_text().replace("high=self.cap", "high=1 / 0")
    (here / "gentle.py").write_text(f"{broken}\n    def __post_init__(self) -> None: ...\n")
    _, [refused] = chosen_modes(config_of(), ["gentle.py:GentleTIS"], optimizer_steps=1, has_old_logprobs=True)
    assert "spec() succeeds: ZeroDivisionError" in refused.refusal and "gentle.py:" in refused.refusal


def test_a_filter_decides_instead_of_correct_or_not(here: Path) -> None:
    config = config_of("collect.filter={use: middling.py:Middling, low: 0.3}", name="arithmetic_dapo")
    assert isinstance(config.collect, DynamicCollectConfig) and config.collect.filter is not None
    assert config.collect.filter.low == 0.3  # type: ignore[attr-defined]
    assert config_of("collect.filter=null", name="arithmetic_dapo").collect.filter is None  # type: ignore[attr-defined]


def test_a_run_whose_files_are_gone_is_exported_and_evaluated_without_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(*ALL, "run.dir=run", "rollout=torch")
    with Tracker(config, run_dir=here / "run") as tracker:
        tracker.log(1, {})
    recorded = here / "run" / "config.yaml"
    assert not resolve(recorded, [], own_dir=None, multirun=False).problems
    (here / "maxrl.py").write_text((here / "maxrl.py").read_text().replace("floor", "least"))
    for name in ("anchored", "sigma", "entropy", "huber"):
        (here / f"{name}.py").rename(here / f"{name}s.py")
    lines = [str(problem) for problem in resolve(recorded, [], own_dir=None, multirun=False).problems]
    assert any(line.startswith(f"{here / 'maxrl.py'} has changed since") for line in lines), lines
    assert any(line.startswith(f"{here / 'sigma.py'} is gone") for line in lines) and "Did you mean" not in str(lines)
    for unneeded in (NOT_EXPORTED, UNREAD):
        found = resolve(recorded, [], own_dir=None, multirun=False, unneeded=unneeded)
        [again] = [run.config for run in found.runs]
        assert not found.problems and again is not None and again.model == config.model
        assert not list(own_choices(again)), "no file of the user's own is run"
    named = resolve(recorded, ["loss=gone.py:Loss"], own_dir=None, multirun=False, unneeded=UNREAD)
    assert not named.problems
    refused = resolve(recorded, ["data=gone.py:Data"], own_dir=None, multirun=False, unneeded=UNREAD).problems
    assert "must name an existing file" in " ".join(map(str, refused)), "an evaluation needs its data"


@dataclass(kw_only=True)
class Noted(CustomSink):
    """Keeps what it gets; `step` 2 fails, `hangs` waits for ever."""

    hangs: bool = False

    def __post_init__(self) -> None:
        self.seen: list[object] = []
        self.free = threading.Event()

    def start(self, run_dir: Path, config: Mapping[str, object], *, last_step: int | None) -> None:
        self.seen.append((run_dir.name, last_step))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.hangs:
            self.free.wait()
        if step == 2:
            raise OSError("the server is away")
        self.seen.append(dict(numbers))

    def close(self, status: str) -> None:
        self.seen.append(status)


def test_a_sink_gets_every_row_and_its_failures_are_counted(tmp_path: Path) -> None:
    sink = Noted()
    thread = SinkThread(sink, tmp_path, {}, last_step=4)
    for step in (1, 2, 3):
        thread.put("log", step, {"k3": float(step)})
    assert thread.close("completed") == 1
    assert sink.seen == [(tmp_path.name, 4), {"k3": 1.0}, {"k3": 3.0}, "completed"]


def test_a_sink_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "CLOSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sink_thread, "MOST_WAITING", 4)
    sink = Noted(hangs=True)
    thread = SinkThread(sink, tmp_path, {}, last_step=None)
    begun = time.monotonic()
    for step in range(9):
        thread.put("log", step, {})
    assert thread.close("failed") >= 4
    assert time.monotonic() - begun < 5.0
    sink.free.set()


def test_a_failure_of_a_worker_names_the_line_of_the_user() -> None:
    package = f'File "{subprocess.__file__}", line 9, in run\n'
    assert own_line(f'{package}File "/srv/mine.py", line 3, in f\nFile "/srv/mine.py", line 5\n{package}') == (
        " (/srv/mine.py:5)"
    )
    assert own_line(package) == ""
