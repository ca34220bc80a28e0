"""Every message about what a recipe or an override must not say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from compose_cases import messages, own_recipe, recipe, resolved
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.compose.choices import plain_values
from trainer.compose.compose import resolve
from trainer.compose.hydra_session import sections
from trainer.compose.read import build_config, read_own_keys
from trainer.config.train import GROUPS, TrainConfig
from trainer.start.checks import start_problems
from trainer.study.config import StudyConfig

REFUSALS = {
    "keys that do not exist": [
        (
            "loss.clip_hihg=0.3",
            "loss.clip_hihg is not a key of loss=ppo_clip, got 0.3. Did you mean loss.clip_high? Keys of ppo_clip: a",
        ),
        ("lr=1e-5", "lr is not a key, got 1e-05. Here it is optim.lr=1e-05."),
        ("batch.lr=1e-5", "batch.lr is not a key of batch, got 1e-05. Here it is optim.lr=1e-05."),
        ("num_step=3", "num_step is not a key, got 3. Did you mean run.num_steps?"),
        ("bactch.group_sise=4", "bactch.group_sise is not a key, got 4. Did you mean batch.group_size?"),
        ("corection=mis", "corection is not a key, got 'mis'. Did you mean correction?"),
        ("sampling.temperature.x=3", "sampling.temperature.x is not a key: sampling.temperature is a single value"),
        ("zzz=3", "zzz is not a key, got 3. Sections: run, model, data, rollout, sampling"),
        (
            "reward={correct:2,incorect:1}",
            "reward.incorect is not a key of reward, got 1. Did you mean reward.incorrec",
        ),
        (
            "hydra.job.chdir=true",
            "hydra.job.chdir has no effect: Parity starts the runs itself, got 'true'. Use run.dir",
        ),
        ("hydra/launcher=joblib", "hydra/launcher has no effect: Parity starts the runs itself, got 'joblib'."),
    ],
    "a plus sign smuggles nothing in": [
        ("+loss.clip_hihg=0.3", "loss.clip_hihg is not a key of loss=ppo_clip, got 0.3. Did you mean loss.clip_high?"),
        ("++seed=3", "seed is not a key, got 3. Here it is run.seed=3."),
    ],
    "additions and removals": [
        ("~loss.clip_low", "~loss.clip_low cannot be removed, got 0.2."),
        ("+correction=mis", "+correction is not how a group is chosen, got 'mis'. Write correction=mis."),
        ("~model", "model=arithmetic; in the defaults of a recipe - override /model: hf."),
    ],
    "options that do not exist": [
        (
            "correction=tiss",
            "ppo_is, recompute, tis, vanilla_is, got 'tiss'. Did you mean correction=tis?",
        ),
        ("correction=tiss", "Did you mean correction=tis?"),
        ("rollout=sglan", "rollout must be one of sglang, torch, vllm, got 'sglan'. Did you mean rollout=sglang?"),
        ("collect=null", "collect must be one of dynamic, fixed, got null."),
    ],
    "keys of another option": [
        (
            "correction.high=3",
            "correction.high is not a key of correction=tis, got 3. It belongs to correction=mis, correction=custom; k",
        ),
        ("rollout.max_batch_size=3", "max_batch_size is not a key of rollout=sglang, got 3. It belongs to rollout=tor"),
        ("model.path=x", "model.path is not a key of model=arithmetic, got 'x'. It belongs to model=hf; keys of arith"),
        ("correction.hihg=3", "Did you mean correction.high of correction=mis?"),
        (
            "correction.mode=mis",
            "correction.mode is not a key of correction=tis, got 'mis'. Write correction=mis; in a r",
        ),
        (
            "loss.surrogate=gspo",
            "loss.surrogate is not a key of loss=ppo_clip, got 'gspo'. Write loss=gspo; in a recipe",
        ),
        ("schedule.updates_in_flight=true", "schedule.updates_in_flight is not a key of schedule=sync, got true."),
        (
            "+rollout.kind=torch",
            "rollout.kind is not a key of rollout=sglang, got 'torch'. Write rollout=torch; in a r",
        ),
        (
            "+reward.path=a.py",
            "reward.path is not a key of reward, got 'a.py'. Here it is reward.function=path.py:name.",
        ),
    ],
    "wrong types": [
        ("batch.group_size=4.5", "batch.group_size must be an integer, got 4.5. The default is 8."),
        ("loss.clip_low=abc", "loss.clip_low must be a number, got 'abc'."),
        ("loss.dual_clip=abc", "loss.dual_clip must be a number or null, got 'abc'. The default is null."),
        ("run.seed=null", "run.seed must be an integer, got null."),
        ("reward.function=[1,2]", "reward.function must be text, got [1, 2]."),
        ("loss.aggregation=token_maen", "must be one of token_mean, seq_mean_token_mean, seq_mean_token_sum, fixed_le"),
        ("loss.aggregation=token_maen", "got 'token_maen'. Did you mean loss.aggregation=token_mean?"),
        (
            "policy=3",
            "policy must be a mapping of its keys to values, got 3. Its keys: policy.num_workers, policy.dtype",
        ),
        ("advantage=rloo", "got 'rloo'. Did you mean advantage.estimator=rloo? Its keys: "),
        ("episode=calculator", "got 'calculator'. Did you mean episode.function=calculator? Its keys: "),
        ("optim.lr=nan", "optim.lr must be a finite number, got nan. The default is 1e-06."),
        ("optim.weight_decay=???", "optim.weight_decay is not set. The default is 0.01."),
        ("optim.beta2=${no.key}", "optim.beta2 cannot be resolved (Interpolation key 'no.key' not found), got '${no.k"),
    ],
    "rules": [
        (
            "correction.cap=-1",
            "correction.cap must be >= 1, or on-policy tokens are cut, got -1.0. Use correction=vanilla_is",
        ),
        ("batch.mini_batch_prompts=5", "batch.mini_batch_prompts must divide batch.prompts_per_step (16), got 5."),
        ("run.num_steps=0", "run.num_steps must be >= 1, got 0. The default is 40."),
        ("loss.clip_low=1.5", "loss.clip_low must lie in (0, 1), got 1.5. Vetted: 0.2."),
        ("+rollout.engine_args.port=3", "rollout.engine_args.port is set by Parity, got 3. Remove it."),
        ("reward.overlong_buffer_tokens=999", "reward.overlong_buffer_tokens must be < sampling.max_new_tokens ("),
        ("episode.function=calculators", "must be one of calculator, or path.py:function, got 'calculators'"),
        ("reward.function=gsm8", "or path.py:function, got 'gsm8'. Did you mean reward.function=gsm8k?"),
        ("data=file", "model arithmetic knows only the vocabulary of data=arithmetic, got 'file'."),
        ("data=file", "data.train_path must be set, got ''."),
    ],
    "what must be given": [("model=hf", "model.path must be set, got ''. A local directory or a hub name.")],
    "words": [
        ("eval.every = 3", "eval.every must have no spaces around =, got 'eval.every = 3'. Write eval.every=3."),
        (
            "data.instruction=it's",
            """data.instruction cannot be read (data.instruction=it's), got "data.instruction=it's". A text with an """
            'apostrophe stands in double quotes: "data.instruction=\\"it\'s\\"".',
        ),
        ("loss.clip_low", "loss.clip_low is not an override, got 'loss.clip_low'. Write key=value, in quotes where "),
        ("a=b=c", "a cannot be read (mismatched input '=' expecting <EOF>), got 'a=b=c'. Quote a value that holds"),
        ("optim.lr=1e-3,1e-4", "optim.lr must be one value, got '1e-3,1e-4'. parity train -m runs each value"),
        ("run.recipe=x", "run.recipe is set by the command line, got 'x'. Remove it."),
    ],
}


@pytest.mark.parametrize("rows", REFUSALS.values(), ids=[name.replace(" ", "-") for name in REFUSALS])
def test_refusals_name_key_rule_value_and_way_out(rows: list[tuple[str, str]]) -> None:
    found = messages(*dict(rows))
    for word, expected in rows:
        assert any(expected in message for message in found), f"{word}: {expected!r} not in {found}"
    assert len(found) == len({message.split()[0] for message in found}), f"a key is reported twice: {found}"
    assert len(found) <= len(rows) + 1, f"something else is reported: {found}"


def test_a_text_with_both_kinds_of_quotes_is_shown_as_a_shell_takes_it() -> None:
    text = 'it\'s "so"'
    [message] = messages(f"run.name={text}")
    [typed] = shlex.split(message.rpartition(": ")[2].removesuffix("."))
    assert OverridesParser.create().parse_override(typed).value() == text


@pytest.mark.scenario(31)
def test_all_problems_come_together_and_once() -> None:
    found = messages(
        "loss.clip_hihg=0.3",
        "correction=mis",
        "correction.cap=3",
        "batch.group_size=1",
        "reward.overlong_buffer_tokens=999",
        "sampling.top_p=1.5",
        "optim.lr=abc",
        "colect=dynamic",
        "a=b=c",
    )
    keys = [message.split()[0] for message in found]
    assert sorted(keys) == [
        "a",
        "batch.group_size",
        "colect",
        "correction.cap",
        "loss.clip_hihg",
        "optim.lr",
        "reward.overlong_buffer_tokens",
        "sampling.top_p",
    ]


def test_a_misspelt_option_does_not_hide_or_invent_problems_below_it() -> None:
    # The key belongs to the option that was meant, and its value breaks that option's rule.
    found = messages("correction=mi", "correction.high=-2", "collect=dinamic", "collect.over_sampling=2")
    assert [message.split()[0] for message in found] == ["correction", "collect", "correction.low"]


def test_build_config_does_not_raise_and_collects_every_component() -> None:
    root = OmegaConf.create(sections())
    chosen = {"model": "hf", "data": "file", "rollout": "torch", "collect": "fixed", "schedule": "sync"}
    chosen["guard"] = "none"
    kinds = {group: GROUPS[group][option] for group, option in chosen.items()}
    for group, kind in kinds.items():
        root[group] = plain_values(kind)
    root.optim.lr = -1.0
    root.tracking.samples_per_step = -1
    config, unreadable, broken = build_config(root, kinds)
    assert config.optim.lr == -1.0  # a value that breaks a rule stays
    assert {problem.key for problem in [*unreadable, *broken]} == {
        "correction",
        "loss",
        "model.path",
        "data.train_path",
        "data.eval_path",
        "optim.lr",
        "tracking.samples_per_step",
    }


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("correction.rollout_is_threshold=3", "Here it is correction.cap=3."),
        ("algorithm.rollout_correction.bypass_mode=true", "Here it is correction=bypass."),
        ("+algorithm.rollout_correction.rollout_is_threshold='0.5_5'", "correction.bound=mask correction.low=0.5"),
        ("vllm_importance_sampling_cap=3", "Here it is correction.high=3."),
        ("loss.clip_ratio_c=3", "Here it is loss.dual_clip=3."),
        ("correction.veto=1e-4", "Here it is correction.reject.veto=0.0001."),
        ("batch.num_generations=3", "Here it is batch.group_size=3."),
        ("learning_rate=1e-6", "Here it is optim.lr=1e-06."),
        ("data.train_files=train.parquet", "Here it is data.train_path=train.parquet."),
        ("actor_rollout_ref.rollout.n=8", "Here it is batch.group_size=8."),
        ("rollout.n=8", "Here it is batch.group_size=8."),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "Here it is eval.samples=4."),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "Here it is eval.top_p=0.7."),
        ("trainer.total_epochs=15", "set run.num_steps, of which an epoch has prompts / batch.prompts_per_step."),
    ],
)
def test_a_key_of_another_trainer_is_translated(word: str, expected: str) -> None:
    [found] = messages(word)
    assert expected in found


def test_the_sections_are_listed_where_no_key_is_similar() -> None:
    sections = f"Sections: {', '.join(TrainConfig.__dataclass_fields__)}."
    words = ("actor_rollout_ref.rollout.n=8", "zzz=3", "optim.lr=-1", "trainer.total_training_steps=15")
    assert messages(*words) == [
        "actor_rollout_ref.rollout.n is not a key, got 8. Here it is batch.group_size=8.",
        f"zzz is not a key, got 3. {sections}",
        "trainer.total_training_steps is not a key, got 15. Here it is run.num_steps=15.",
        "optim.lr must be > 0, got -1.0. The default is 1e-06.",
    ]
    one_of_two = messages("lose.x=1,2", "zzz=3", multirun=True)
    assert [sections in message for message in one_of_two] == [False, True, False]


def test_many_wrong_keys_of_a_section_list_its_keys_once() -> None:
    found = messages("data=file", "data.zzz=1", "data.yyy=2", "data.train_files=a", "xxx=1", "www=2")
    assert sum("eys of file: train_path" in message for message in found) == 1
    assert sum("Sections: " in message for message in found) == 1
    [translated] = [message for message in found if message.startswith("data.train_files ")]
    assert translated.endswith("Here it is data.train_path=a.")


def test_nested_keys_are_checked_like_any_other() -> None:
    assert not messages("correction=mis", "correction.reject.max_k3=0.5", "correction.reject.token_ratio=[0.5,3]")
    found = messages("correction=mis", "correction.reject.max_k4=0.5", "correction.reject.veto=2", "optim.lr=-1")
    assert len(found) == 3, found
    assert any("correction.reject.max_k4 is not a key of correction.reject" in message for message in found)
    assert any(message.startswith("correction.reject.veto must lie in (0, 1) or be null") for message in found)
    [found_type] = messages("correction=mis", "correction.reject.token_ratio=abc")
    assert "correction.reject.token_ratio must be a list, each entry a number or null, got 'abc'" in found_type


def test_one_value_for_a_list_is_answered_with_the_list() -> None:
    assert messages("tracking.tags=night") == [
        "tracking.tags must be a list, each entry text, got 'night'. Write tracking.tags=[night]."
    ]
    [one_number] = read_own_keys(StudyConfig, ["study.seeds=0"], section="study")[1]
    assert str(one_number) == "study.seeds must be a list, each entry an integer, got 0. Write study.seeds=[0]."
    [too_long] = messages(f"tracking.tags=[night,{'x' * 65}]")
    assert too_long.startswith("tracking.tags must be texts of 1 to 64 characters, which W&B takes, got 'xxx")


def test_a_sweep_without_a_value_is_refused() -> None:
    [found] = messages("correction=glob(zzz*)", multirun=True)
    assert found.startswith("correction must have a value, got 'glob(zzz*)'. Options: recompute, ppo_is")


def test_what_hydra_would_do_in_a_recipe_is_refused(tmp_path: Path) -> None:
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo, _self_]\nhydra: {mode: MULTIRUN}\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem) == (
        f"{path}: hydra has no effect: Parity starts the runs itself, got {{'mode': 'MULTIRUN'}}. Remove it."
    )


CODE = "{_target_: os.system, command: 'touch owned'}"
CHOSEN = "[/train, {}, override /model: arithmetic, override /data: arithmetic, _self_]"


@pytest.mark.parametrize(
    ("file", "content", "choice"),
    [
        ("hydra/callbacks/own.yaml", f"x: {CODE}", "/hydra/callbacks: own"),
        ("hydra/launcher/own.yaml", CODE, "/hydra/launcher: own"),
        ("hydra/config.yaml", f"launcher: {CODE}", "override /guard: none"),
        ("guard/own.yaml", f"# @package _global_\nhydra: {{callbacks: {{x: {CODE}}}}}", "override /guard: own"),
        ("guard/train.yaml", f"# @package _global_\nhydra: {{callbacks: {{x: {CODE}}}}}", "override /guard: train"),
        ("guard/own.yaml", f"# @package hydra.callbacks.x\n{CODE}", "override /guard: own"),
    ],
)
def test_nothing_that_hydra_would_call_gets_in_through_files_of_the_user(
    tmp_path: Path, file: str, content: str, choice: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(content + "\n")
    path = own_recipe(tmp_path, f"defaults: {CHOSEN.format(choice)}\n")
    problems = [str(problem) for problem in resolve(path, (), own_dir=tmp_path, multirun=False).problems]
    expected = f"{tmp_path / file}: hydra has no effect: Parity starts the runs itself"
    assert [text for text in problems if text.startswith(expected)], problems


def test_what_a_recipe_chooses_for_hydra_is_refused(tmp_path: Path) -> None:
    for choice in ("override /hydra/launcher: basic", "/hydra/launcher: basic"):
        path = own_recipe(tmp_path, f"defaults: {CHOSEN.format(choice)}\n")
        [problem] = resolve(path, (), own_dir=None, multirun=False).problems
        assert "hydra/launcher" in str(problem)


def test_a_file_in_the_place_of_an_option_is_refused(tmp_path: Path) -> None:
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "mismatch.yaml").write_text("defaults: [none]\n")
    path = own_recipe(tmp_path, f"defaults: {CHOSEN.format('override /guard: mismatch')}\n")
    [problem] = resolve(path, (), own_dir=tmp_path, multirun=False).problems
    assert str(problem).startswith(f"{tmp_path}/guard/mismatch.yaml must not have the name of an option of guard")


def test_files_of_one_directory_are_no_options_of_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "careful.yaml").write_text("defaults: [mismatch]\n")
    assert not resolve(recipe("arithmetic_grpo"), ["guard=careful"], own_dir=tmp_path, multirun=False).problems
    assert messages("guard=careful")[0].startswith("guard must be one of mismatch, none, got 'careful'")


def test_a_recipe_cannot_put_a_secret_of_the_environment_into_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("OWNER", "ada")
    text = (
        "defaults: [arithmetic_grpo, _self_]\ntracking: {project: '${oc.env:WANDB_API_KEY}', entity: '${oc.env:OWNER}'}"
    )
    path = own_recipe(tmp_path, text)
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{path}: tracking.project cannot be resolved")
    assert "oc.env must not read WANDB_API_KEY, whose name is that of a secret" in str(problem)
    assert "0123456789" not in str(problem)
    [run] = resolve(path, ("tracking.project=p",), own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.tracking.entity == "ada"


def test_the_directory_of_one_run_cannot_be_given_to_a_sweep() -> None:
    assert messages("run.dir=x", "run.seed=0,1", multirun=True) == [
        "run.dir has no effect in a sweep: every run has its own directory, got 'x'. Remove it; hydra.sweep.dir=... "
        "names the directory that holds them all."
    ]


@pytest.mark.sglang
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/metrics.jsonl").touch()
    (tmp_path / "empty").mkdir()
    used = start_problems(resolved(f"run.dir={tmp_path}/used"))
    assert [problem.key for problem in used] == ["run.dir"]
    assert "must be absent or empty" in str(used[0])
    assert start_problems(resolved(f"run.dir={tmp_path}/empty")) == []
    assert start_problems(resolved(f"run.dir={tmp_path}/absent")) == []
    swept = start_problems(resolved(f"hydra.sweep.dir={tmp_path}/used", "run.seed=0,1", multirun=True))
    assert [problem.key for problem in swept] == ["hydra.sweep.dir"]


@pytest.mark.parametrize("words", [("optim.lr", "=", "1e-3"), ("optim.lr=", "1e-3"), ("optim.lr", "=1e-3")])
def test_a_key_apart_from_its_value_is_one_problem(words: tuple[str, ...]) -> None:
    expected = "optim.lr must have no spaces around =, got 'optim.lr = 1e-3'. Write optim.lr=1e-3."
    assert messages("run.seed=1", *words, "run.num_steps=3") == [expected]
    assert messages(*words) == [expected]


@pytest.mark.parametrize("word", ["batch.group_size=-8", "batch.prompts_per_step=0", "sampling.max_new_tokens=-1"])
def test_one_mistake_is_one_problem(word: str) -> None:
    [found] = messages(word)
    assert found.startswith(word.partition("=")[0])
