"""Mistakes in model, data, reward and machine: found before torch is imported, by the dry run and the run alike."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest
import task_cases
from cli_process import HEAVY, REFUSED_S, parity
from huggingface_hub import constants
from resume_cases import save, state_of
from safetensors.torch import load_file, save_file
from task_cases import config_of, edit_config

from rollout.data.tokenizer import load_tokenizer
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.cli.commands import run
from trainer.cli.job import load_tasks
from trainer.compose.catalog import recipe_files
from trainer.compose.compose import resolve
from trainer.config.paths import recipe_dir
from trainer.config.training import ArithmeticModelConfig, Offload
from trainer.limits.machine import Machine
from trainer.limits.memory_plan import memory_plan
from trainer.models.base_model import build_base_model
from trainer.run import loop
from trainer.run.task import load_task, prompt_stream
from trainer.rundir.run_dir import StartError
from trainer.start import task_check
from trainer.start.task_check import task_problems

made, own = task_cases.made, task_cases.own


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_mistakes_cost_no_import_of_torch_and_leave_nothing(own: Path, more: tuple[str, ...]) -> None:
    before = sorted(own.rglob("*"))
    wrong = ("data.prompt_key=question", "model.path=nosuch/a/b", "rollout.gpus_per_engine=1")
    outcome = parity("train", "mine.yaml", *wrong, *more, cwd=own, watched=HEAVY, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (outcome.code, outcome.loaded) == (2, ()), outcome.err
    assert outcome.cpu_s < REFUSED_S
    title, *problems = outcome.err.splitlines()
    assert title == "parity train mine.yaml: 3 problems, nothing was started"
    keys = ["rollout.gpus_per_engine", "model.path", "data.train_path"]
    assert [line.split()[1] for line in problems] == keys
    assert "data.prompt_key=question is not a column; columns are q, a." in problems[-1]
    assert sorted(own.rglob("*")) == before


TINY = ("arithmetic_grpo", "rollout=torch", "model.num_steps=1", "model.num_layers=1", "model.hidden_size=64")
"""Recipe of a model that Parity makes, here in a second."""
BAD_INPUTS: list[tuple[tuple[str, ...], str]] = [
    (("model.path=.",), "model.path must be the directory of a Hugging Face model, with config.json, *.safetensors"),
    (("model.path=tiny/config.json",), "It is a file: model.path=tiny is its directory."),
    (("sampling.max_new_tokens=200",), "sampling.max_new_tokens must be <= 108: the model's context has 128"),
    (("eval.max_new_tokens=200",), "eval.max_new_tokens must be <= 108: the model's context has 128"),
    (("sampling.max_new_tokens=127", "eval.max_new_tokens=126"), "eval.max_new_tokens must be <= 108: the model"),
    (("sampling.stop=[nosuch]",), "sampling.stop"),
    (("reward.function=own.py:raises",), "got 'own.py:raises'. It failed: KeyError: '0' (own.py, line 3)"),
    (("reward.function=own.py:of_verl",), "ground_truth is answer."),
    (("reward.function=own.py:rewrd",), "own.py has no function 'rewrd'; it has of_verl, on_plain, raises, reward"),
    (("reward.function=own.py:on_plain",), "ValueError: it is templated"),
    (("episode.function=turns.py:fails",), "episode.function must bring an episode to an end"),
    (("episode.function=turns.py:nowhere",), "nowhere"),
    (("data.train_path=word_problems:hard@train",), "is unknown: use word_problems:LEVEL@SPLIT"),
    (("data.answer_key=b",), "data.answer_key=b is not a column; columns are q, a."),
    (("data.train_path=openai/gsm8k",), "On the hub it is openai/gsm8k@train."),
    (("data.train_path=empty.jsonl",), "empty.jsonl has no rows"),
    (("data.train_path=broken.jsonl",), "broken.jsonl, line 2: "),
    (("data.train_path=chat.jsonl", "data.eval_path=chat.jsonl", "data.instruction=Hm"), "data.instruction must be ''"),
    (("data.max_prompt_tokens=1",), "more than data.max_prompt_tokens=1"),
    (("+data.chat_template_kwargs.nosuch=1",), "data.chat_template_kwargs.nosuch has no effect"),
    (("run.resume_from=nosuch",), "run.resume_from must be the directory of a checkpoint"),
    ((*TINY, "sampling.max_new_tokens=300"), "sampling.max_new_tokens must be <= 250: the model's context has 256"),
    ((*TINY, "sampling.stop=[nosuch]"), "sampling.stop"),
    ((*TINY, "episode.function=turns.py:fails"), "episode.function must bring an episode to an end"),
    (
        (*TINY[:2], "model=hf", "model.path=tiny", "sampling.max_new_tokens=127"),
        "sampling.max_new_tokens must be <= 122: the model's context has 128",
    ),
]  # fmt: skip
"""Words of bad inputs on this disk, after a recipe if there is one -> what is said of them."""


@pytest.mark.parametrize(("words", "expected"), BAD_INPUTS)
def test_a_dry_run_refuses_what_the_run_refuses(
    own: Path,
    words: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("the run was not refused")

    monkeypatch.setattr(loop, "Tracker", begun)
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    recipe = [] if words[0] in recipe_files(recipe_dir()) else ["mine.yaml"]
    if not recipe:
        build_base_model(ArithmeticModelConfig(num_steps=1, num_layers=1, hidden_size=64))
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in str(path))
    told = []
    for more in (["--dry-run"], []):
        assert run(["train", *recipe, *words, *more]) == 2, more
        told.append(capsys.readouterr().err.partition("parity train ")[2].splitlines())
    assert told[0] == told[1]
    title, *problems = told[0]
    assert title.endswith(" nothing was started") and expected in " ".join(problems)
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in str(path)) == before


def test_a_reward_is_tried_with_the_prompt_that_the_run_has(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the template it has the roles; without it the text is that of the row with the instruction."""
    for words, function in (
        ([], "templated"),
        (["data.chat_template=false", "data.instruction=Count"], "instructed"),
    ):
        assert run(["train", "mine.yaml", *words, f"reward.function=forms.py:{function}", "--dry-run"]) == 0
        assert not capsys.readouterr().err
        assert run(["train", "mine.yaml", f"reward.function=forms.py:never{function}", "--dry-run", *words]) == 2
        assert "AssertionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        ("math", "Put it in \\boxed{}."),
        ("math_dapo", "End with answer: $Answer"),
        ("gsm8k", "After ####."),
        ("exact_match", ""),
    ],
)
def test_prompts_that_do_not_ask_for_the_form_of_the_reward_are_named(
    own: Path,
    function: str,
    asks: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    for recipe in ("mine.yaml", "away.yaml"):  # the model of which is not here
        for instruction, is_said in (("", bool(asks)), (asks, False)):
            words = [recipe, f"reward.function={function}", f"data.instruction={json.dumps(instruction)}"]
            assert run(["train", *words, "--dry-run"]) == 0
            shown = capsys.readouterr().out
            assert (f"WARNING: reward.function={function} reads answers with" in shown) == is_said, words


def test_the_longest_response_that_is_named_is_accepted(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first refusal names the number that holds for the prompts, not only for some prompt."""
    assert run(["train", "mine.yaml", "sampling.max_new_tokens=200", "--dry-run"]) == 2
    [number] = re.findall(r"sampling.max_new_tokens must be <= (\d+):", capsys.readouterr().err)
    for most, code in ((int(number), 0), (int(number) + 1, 2)):
        assert run(["train", "mine.yaml", f"sampling.max_new_tokens={most}", "--dry-run"]) == code


def test_prompts_longer_than_the_context_give_no_impossible_number(own: Path) -> None:
    config = config_of(own, "sampling.max_new_tokens=20")
    [problem] = task_check.context_problems(config, own / "tiny", longest_prompt=985)
    assert "must leave room for the prompts, which have up to 985 tokens: the model's context has 128" in str(problem)
    assert "data.max_prompt_tokens=108 data.on_bad_row=skip" in str(problem)


def test_sequences_beyond_a_sliding_window_are_refused_before_a_start(own: Path, tmp_path: Path) -> None:
    """A window that no layer uses counts for nothing."""
    path = shutil.copytree(own / "tiny", tmp_path / "windowed") / "config.json"
    plain = json.loads(path.read_text()) | {"sliding_window": 64, "max_window_layers": 0, "layer_types": None}
    words = ["train", "mine.yaml", f"model.path={path.parent}", "sampling.max_new_tokens=60", "--dry-run"]
    for is_used, code in ((False, 0), (True, 2)):
        path.write_text(json.dumps(plain | {"use_sliding_window": is_used}))
        assert run(words) == code


@pytest.mark.parametrize(
    ("field", "rope", "length"),
    [
        ("rope_scaling", {"type": "longrope"}, 64),
        ("rope_scaling", {"type": "su", "original_max_position_embeddings": 32}, 32),
        ("rope_parameters", {"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}, 128),
        ("rope_parameters", {"rope_type": "yarn", "original_max_position_embeddings": 32}, 256),
    ],
)
def test_sequences_that_would_change_the_positions_of_others_are_refused(
    own: Path, tmp_path: Path, field: str, rope: dict[str, object], length: int
) -> None:
    model = {"max_position_embeddings": 128, "original_max_position_embeddings": 64, field: rope}
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ["rollout=sglang", "+rollout.engine_args.context_length=256", f"sampling.max_new_tokens={length - 10}"]
    config = config_of(own, *words)
    for longest, count in ((10, 0), (11, 1)):
        assert len([*task_check.context_problems(config, tmp_path, longest_prompt=longest)]) == count


def test_the_context_is_known_by_the_name_of_gpt2(own: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_positions": 128}')
    config = config_of(own, "sampling.max_new_tokens=109")
    for longest, count in ((19, 0), (20, 1)):
        assert len([*task_check.context_problems(config, tmp_path, longest_prompt=longest)]) == count


def test_prompts_that_cannot_be_read_yet_give_no_number(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.train_path=some/set@train", "sampling.max_new_tokens=200"]
    assert run(["train", "mine.yaml", *words, "--dry-run"]) == 2
    expected = "must leave room for a prompt in the model's context of 128 tokens, got 200. Take 128 less the tokens of"
    assert f"sampling.max_new_tokens {expected} the longest prompt" in capsys.readouterr().err


def test_the_plan_names_schedule_quantisation_and_trackers(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for words in ([], ["schedule=bounded", "rollout.quantization=int4", "tracking.tensorboard=true"]):
        assert run(["train", "arithmetic_grpo", "rollout=torch", "run.dir=out", "--dry-run", *words]) == 0
        plans.append(capsys.readouterr().out.splitlines())
    differs = [line.split()[0] for line in plans[1] if line not in plans[0]]
    assert differs == ["schedule", "engines", "tracking"]


def test_a_step_of_more_prompts_than_there_are_is_remarked_on(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, is_said in ((30, False), (31, True)):
        assert run(["train", "mine.yaml", f"batch.prompts_per_step={number}", "--dry-run"]) == 0
        said = f"batch.prompts_per_step={number} takes prompts again in a step: there are 30"
        assert (said in capsys.readouterr().out) == is_said


def test_a_dry_run_names_the_data_of_the_hub_that_it_does_not_read(own: Path) -> None:
    words = ("data.train_path=openai/gsm8k@train",)
    problems, notes = load_tasks(resolve(own / "mine.yaml", words, own_dir=None, multirun=False))
    assert (problems, notes) == ([], ["openai/gsm8k@train is on the hub: not read now"])


def test_a_dry_run_reads_the_prompts_for_a_model_in_the_cache_of_the_hub_once_it_is_whole(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, commit = tmp_path / "hub" / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(config_of(own).model.path, cached / "snapshots" / commit)  # type: ignore[attr-defined]
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    words = ("model.path=some/model", "batch.prompts_per_step=31")
    resolution = resolve(own / "mine.yaml", words, own_dir=None, multirun=False)
    assert any("there are 30" in note for note in load_tasks(resolution)[1])
    (cached / "snapshots" / commit / "model.safetensors").unlink()
    problems, [note, *_] = load_tasks(resolution)
    assert problems == [] and "the model is not on this disk" in note


def test_a_dry_run_refuses_other_prompts_than_the_run_had(own: Path, tmp_path: Path) -> None:
    words = (f"run.dir={tmp_path / 'run'}", "run.resume=auto")
    resolution = resolve(own / "mine.yaml", words, own_dir=None, multirun=False)
    assert load_tasks(resolution)[0] == []
    save(config_of(own, *words), 2)  # of a stream over other prompts
    [problem] = load_tasks(resolution)[0]
    assert problem.startswith("data.train_path must give the prompts that the run had")


def test_other_prompts_of_an_evaluation_are_refused_and_another_place_of_them_is_not(own: Path, tmp_path: Path) -> None:
    first, second = (
        "".join(json.dumps({"q": f"{n}?", "a": "1"}) + "\n" for n in range(start, 40)) for start in (30, 31)
    )
    (held := tmp_path / "held.jsonl").write_text(first)
    (hard := tmp_path / "hard.jsonl").write_text(first)
    words = (f"run.dir={tmp_path / 'run'}", f"data.eval_path={held}", f"+eval.sets.hard={hard}")
    config = config_of(own, *words)
    task = load_task(config, progress=lambda *_: None)
    prompts = prompt_stream(config, task, None)
    state = replace(state_of(config, 2), stream=prompts.state_dict(), eval_prompts=task.eval_prompts)

    def problems(*more: str) -> list[str]:
        now = config_of(own, *words[:1], *(more or words[1:]))
        try:
            prompt_stream(now, load_task(now, progress=lambda *_: None), state)
        except StartError as error:
            return [str(problem) for problem in error.problems]
        return []

    shutil.copy(held, moved := tmp_path / "moved.jsonl")
    assert not problems() and not problems(f"data.eval_path={moved}", f"+eval.sets.hard={hard}")
    held.write_text(second)
    hard.write_text(second)
    found = problems()
    assert [each.partition(" ")[0] for each in found] == ["data.eval_path", "eval.sets.hard"], found
    assert not problems(f"data.eval_path={moved}", f"+eval.sets.hard={held}"), "another path in eval.sets is told"


def test_prompts_with_tokens_that_the_model_has_not_are_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TemporaryDirectory(dir=own) as directory:
        shutil.copytree(own / "tiny", directory, dirs_exist_ok=True)
        edit_config(Path(directory), vocab_size=50)
        weights = load_file(Path(directory) / "model.safetensors")
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:50].clone()
        save_file(weights, Path(directory) / "model.safetensors")
        assert run(["train", "mine.yaml", f"model.path={directory}"]) == 2
    assert re.search(r"prompts have the token id \d+, and vocab_size is 50", capsys.readouterr().err)


def test_ends_of_responses_that_the_model_has_not_are_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TemporaryDirectory(dir=own) as directory:
        shutil.copytree(own / "tiny", directory, dirs_exist_ok=True)
        (Path(directory) / "generation_config.json").write_text('{"eos_token_id": [300, 70]}')
        edit_config(Path(directory), text_config=None)
        words = ["train", "mine.yaml", f"model.path={directory}", "reward.function=exact_match", "--dry-run"]
        assert run(words) == 0
        told = capsys.readouterr().out
        assert "no response ends with the token id 300: vocab_size is 300" in told
        assert re.search(r"responses end at .* \(id 70\) too, which is ordinary text", told)
        assert run([*words, "sampling.stop=[70]"]) == 0
        assert "ordinary text" not in capsys.readouterr().out
        for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
            path = Path(directory) / name
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 301, "eos_token": None}))
        assert run(words) == 2
        assert re.search(
            r"every response would end with the token id 30\d, and vocab_size is 300", capsys.readouterr().err
        )


def test_a_rollout_function_without_its_tokenizer_is_refused_before_a_start(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers reads such a tokenizer; the processes of rollout functions read tokenizer.json alone."""
    shutil.copytree(own / "tiny", path := tmp_path / "model")
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (path / "merges.txt").write_text("")
    words = ["train", "mine.yaml", f"model.path={path}", "reward.function=exact_match", "episode.function=calculator"]
    assert run([*words, "--dry-run"]) == 2
    assert "episode.function must be null for a model without tokenizer.json" in capsys.readouterr().err


def test_the_end_of_a_turn_is_no_text_though_the_tokenizer_does_not_mark_it(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own / "tiny", path := tmp_path / "model")
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens(["<|im_end|>", "</answer>"])
    tokenizer.save_pretrained(path)
    stops = "sampling.stop=['<|im_end|>','</answer>']"
    config = config_of(own, f"model.path={path}", stops, "reward.function=exact_match")
    scorer = load_task(config, progress=lambda done, total, detail: None).scorer
    samples = []
    for index, text in enumerate(("5<|im_end|>", "5</answer>", "<|im_end|>5")):
        ids = [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        samples.append(
            Sample(
                prompt_id=0, sample_index=index, token_ids=ids, response_mask=[False] + [True] * (len(ids) - 1),
                rollout_logprobs=[0.0] * len(ids), token_versions=[0] * len(ids), finish_reason=FinishReason.stop,
            )
        )  # fmt: skip
    try:
        scorer.score([SampleGroup(prompt=Prompt(prompt_id=0, token_ids=[1], text="", answer="5"), samples=samples)])
    finally:
        scorer.close()
    assert [(each.text, each.correct) for each in samples] == [
        ("5", True), ("5</answer>", False), ("<|im_end|>5", False),
    ]  # fmt: skip


def test_a_rollout_function_that_cannot_be_loaded_is_refused(own: Path) -> None:
    def problems(function: str) -> list[str]:
        config = config_of(own, f"episode.function={function}")
        return [str(problem) for problem in task_problems([config]) if problem.key == "episode.function"]

    [told] = problems("own.py:reward")
    assert "must be `async def` with one parameter, the episode" in told
    [told] = problems("own.py:nowhere")
    assert "nowhere" in told
    assert problems("turns.py:turns") == []


def test_a_micro_batch_that_is_far_too_large_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(own)
    needed = memory_plan(config, device_bytes=None).ranks_host_bytes
    assert needed is not None
    for memory, refused in ((needed // 2 - 2**20, True), (needed // 2 + 2**20, False)):
        monkeypatch.setattr(task_check, "this_machine", lambda memory=memory: Machine(cpus=2, gpus=0, memory=memory))
        keys = [problem.key for problem in task_problems([config])]
        assert keys == ["batch.max_tokens_per_microbatch"] * refused


def test_weights_that_never_fit_are_refused_and_activations_that_may_not_are_not(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(own)
    for memory, refused in ((2**17, True), (2**30, False)):
        monkeypatch.setattr(task_check, "this_machine", lambda memory=memory: Machine(cpus=2, gpus=0, memory=memory))
        problems = [str(problem) for problem in task_problems([config])]
        assert [line.startswith("model must fit into 128 KiB of memory: weights") for line in problems] == [
            True
        ] * refused
    offloaded = replace(config, policy=replace(config.policy, gpus_per_worker=1.0, offload=Offload.parameters))
    monkeypatch.setattr(task_check, "this_machine", lambda: Machine(cpus=2, gpus=9, memory=2**30))
    for on_gpu, fits in ((config.policy, False), (offloaded.policy, True)):
        monkeypatch.setattr(task_check, "gpu_bytes", lambda: 2**16)
        policy = replace(on_gpu, gpus_per_worker=1.0)
        assert bool(task_problems([replace(config, policy=policy)])) is not fits


def test_more_workers_than_the_machine_has_room_for_are_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_check, "this_machine", lambda: Machine(cpus=2, gpus=0, memory=2**40))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for num_workers, refused in ((7, False), (8, True)):  # and an engine, a quarter of a CPU each
        config = config_of(own, f"policy.num_workers={num_workers}")
        found = [str(problem) for problem in task_problems([config])]
        assert ["the workers need 2.25 CPU, and it has 2, got 8." in line for line in found] == [True] * refused
        assert not task_problems([config], trains=False), "an evaluation has no ranks"


def test_an_evaluation_needs_a_whole_gpu_per_engine(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "rollout.num_engines=2"]
    config = config_of(own, *words, "policy.num_workers=2")
    for gpus, refused in ((1, True), (2, False)):
        monkeypatch.setattr(task_check, "this_machine", lambda gpus=gpus: Machine(cpus=2, gpus=gpus, memory=2**40))
        found = [str(problem) for problem in task_problems([config], trains=False)]
        assert ["the run needs 2 GPU, and it has 1" in line for line in found] == [True] * refused


def test_a_function_that_several_runs_share_is_called_once(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(task_check, "try_reward", lambda config, prompt, **_: called.append(prompt.answer) or "no")
    config = config_of(own)
    runs = [replace(config, run=replace(config.run, seed=seed)) for seed in range(3)]
    [problem] = task_problems(runs)
    assert problem.key == "reward.function" and called == ["0"]


def test_a_missing_model_is_told_beside_problems_of_other_sections(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.train_path=no.jsonl", "reward.function=no.py:score", "optim.lr=-1", "model.path=no/such/model"]
    assert run(["train", "mine.yaml", *words, "--dry-run"]) == 2
    _, *problems = capsys.readouterr().err.splitlines()
    keys = {line.split()[1].removesuffix(":score") for line in problems}
    assert keys == {"data.train_path", "reward.function", "optim.lr", "model.path"}
    assert run(["train", "mine.yaml", *words[:3], "model.path=", "--dry-run"]) == 2
    assert sum("model.path" in line for line in capsys.readouterr().err.splitlines()) == 1


def test_a_model_on_the_hub_is_asked_for_once_and_briefly(own: Path) -> None:
    """Nobody listens at the address of the hub."""
    words = ["train", "mine.yaml", "model.path=some/model"]
    outcome = parity(*words, cwd=own, env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(own / "hf")})
    assert outcome.code == 2 and outcome.cpu_s < REFUSED_S
    [_, problem] = outcome.err.splitlines()
    assert "model.path must be a directory or a repository of the hub that can be read, got 'some/model'." in problem
