"""TrainConfig -> what a run works on: a local model directory, its tokenizer, the prompts and the scorer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from algorithms.config import Problem
from rollout.config import Routing
from rollout.data.data_files import DataError
from rollout.data.dataset import Dataset, PromptStream, bad_rows_text, load_dataset, prompts_digest
from rollout.data.special_tokens import response_decoder
from rollout.data.tokenizer import load_tokenizer
from rollout.data.turn_ends import EOS_FILES, control_ends, past_end_note, stop_token_ids, text_end_note
from rollout.model.limits import attention_window
from rollout.rewards import Scorer
from rollout.rewards.references import form_notes
from rollout.task_config import CustomData, FileDataConfig
from rollout.user_code.custom_code import code_digest
from trainer.config.outputs import HELDOUT
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.models.directory import has_experts
from trainer.models.resolve import compare_files, resolve_critic, resolve_model
from trainer.rundir.cache import Progress
from trainer.rundir.checkpoint import RunState
from trainer.rundir.model_mark import model_mark
from trainer.rundir.resume import changed_keys, flat_config, other_model
from trainer.rundir.run_dir import StartError, write_whole
from trainer.start.task_check import (
    context_problems,
    data_judgement,
    trial_problems,
    vocabulary_problems,
    vocabulary_size,
)
from trainer.text.plain import counted

BAD_ROWS_FILE = "bad_rows.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Model, data and scorer that a run works on."""

    model_path: Path
    """Local Hugging Face directory; trainer and engines load the same files."""
    critic_path: Path
    """Local directory of the model that a critic starts from."""
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    stop_token_ids: tuple[int, ...]
    scorer: Scorer
    routes: Routing = Routing.live
    """What the engines return of the routes of a mixture's tokens, for the trainer to replay."""
    past_end: int | None = None
    """Token with which the chat template ends an answer, if no response ends there."""
    model_mark: str | None = None
    """Tells the weights of the model apart from others; None of a model that Parity makes and trains as a whole."""
    model_files: dict[str, str] = field(default_factory=dict)
    """Path of each file that says how the model computes and where it stops -> its `code_digest`."""
    eval_prompts: Mapping[str, str] = field(default_factory=dict)
    """Name of each evaluation set -> `prompts_digest` of it."""


def load_task(config: TrainConfig, *, progress: Progress, model_path: Path | None = None) -> Task:
    """Resolve the model, tokenize the prompts and build the scorer.

    A `model_path` takes the place of the config's model, to be evaluated: no critic is looked for then.

    Raises StartError for a model or data that cannot be used, before anything is started or written.
    """
    trains = model_path is None
    key = "model.path" if trains else "checkpoint"
    model_path = resolve_model(config, progress=progress) if model_path is None else model_path
    try:
        tokenizer = load_tokenizer(model_path)
        stop_ids = stop_token_ids(tokenizer, model_path, stop=config.sampling.stop)
        judgement = data_judgement(config)
        dataset = load_dataset(config.data, tokenizer, eval_sets=config.eval.sets, judgement=judgement)
    except DataError as error:
        raise StartError(*error.problems) from error
    except Exception as error:  # transformers raises whatever its readers of files raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rule = "must hold a tokenizer that can be read"
        raise StartError(Problem(key=key, rule=rule, value=str(model_path), remedy=reason)) from error
    if not trains or isinstance(config.model, HFModelConfig):
        compare_files(key, model_path)
    past_end = dataset.turn_end if dataset.turn_end not in stop_ids else None
    if past_end is not None:
        dataset.notes.append(past_end_note(past_end, tokenizer))
    if note := text_end_note(stop_ids, tokenizer, config.sampling.stop):
        dataset.notes.append(note)
    if (size := vocabulary_size(model_path)) and (beyond := [str(each) for each in stop_ids if each >= size]):
        dataset.notes.append(f"no response ends with the token id {', '.join(beyond)}: vocab_size is {size}")
    if trains and config.batch.prompts_per_step > len(dataset.train):
        step, there = config.batch.prompts_per_step, len(dataset.train)
        dataset.notes.append(f"batch.prompts_per_step={step} takes prompts again in a step: there are {there}")
    window = attention_window(AutoConfig.from_pretrained(model_path, trust_remote_code=False)) if trains else None
    problems = [
        *context_problems(config, model_path, longest_prompt=dataset.longest_prompt, window=window),
        *vocabulary_problems(model_path, largest_token=dataset.largest_token, stop_ids=stop_ids),
    ]
    if isinstance(config.data, FileDataConfig):
        dataset.notes.extend(form_notes(config.reward, [prompt.text for prompt in dataset.train]))
    if not problems:
        problems += trial_problems(config, dataset.train[0], model_path, stop_ids, dataset.notes)
    if problems:
        raise StartError(*problems)

    ends, without_special = control_ends(tokenizer, stop_ids), response_decoder(tokenizer)

    def decode(token_ids: list[int]) -> str:
        ended = bool(token_ids) and token_ids[-1] in ends
        return without_special(token_ids[:-1] if ended else token_ids)

    described = [str(model_path / name) for name in EOS_FILES]
    sets = {HELDOUT: dataset.heldout, **dataset.eval_sets}
    # A model that Parity makes differs in its last bits from machine to machine. Only an adapter needs the very same.
    has_mark = isinstance(config.model, HFModelConfig) or config.policy.lora.rank > 0
    return Task(
        model_path=model_path,
        critic_path=resolve_critic(config, model_path, tokenizer) if trains else model_path,
        tokenizer=tokenizer,
        dataset=dataset,
        stop_token_ids=stop_ids,
        routes=config.policy.routing if trains and has_experts(model_path) else Routing.live,
        past_end=past_end,
        scorer=Scorer(
            config.reward,
            max_new_tokens=config.sampling.max_new_tokens,
            decode=decode,
            decode_raw=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=False)),
        ),
        model_mark=model_mark(model_path) if has_mark else None,
        model_files={path: digest for path in described if (digest := code_digest(path)) is not None},
        eval_prompts={name: prompts_digest(prompts) for name, prompts in sets.items()},
    )


def checked_task(config: TrainConfig, resumed: RunState | None, *, progress: Progress) -> tuple[Task, PromptStream]:
    """What a run works on, and its prompts from where the run `resumed` had come to; the same for `--dry-run`.

    Raises StartError for all that can be refused before anything is started or written.
    """
    task = load_task(config, progress=progress)
    return task, prompt_stream(config, task, resumed)


def data_notes(dataset: Dataset, run_dir: Path) -> list[str]:
    """Return the notes about the data, a line each; write skipped rows to bad_rows.jsonl in `run_dir`."""
    notes = [f"data: {note}" for note in dataset.notes]
    if dataset.skipped:
        path = run_dir / BAD_ROWS_FILE
        write_whole(path, bad_rows_text(dataset.skipped))
        notes.append(f"data: {counted(len(dataset.skipped), 'bad row')} skipped, written to {path}")
    return notes


def prompt_stream(config: TrainConfig, task: Task, resumed: RunState | None) -> PromptStream:
    """The training prompts, from where the run `resumed` had come to.

    Raises StartError for other data, or another model, than it had.
    """
    if resumed is not None and (problems := list(other_model(resumed, config, task.model_path))):
        raise StartError(*problems)
    prompts = PromptStream(task.dataset.train, seed=config.run.seed)
    try:
        if resumed is not None:
            prompts.load_state_dict(resumed.stream)
    except ValueError as error:
        key = "data.train_path" if isinstance(config.data, FileDataConfig) else "data"
        rule = f"must give the prompts that the run had ({error})"
        remedy = "Or begin a new run in another run.dir."
        if isinstance(config.data, CustomData):
            remedy = f"rows() of {config.data.source} must give the same rows at every call. {remedy}"
        raise StartError(config.broken(key, rule, remedy)) from error
    if resumed is not None and (problems := list(_other_sets(resumed, config, task))):
        raise StartError(*problems)
    return prompts


def _other_sets(resumed: RunState, config: TrainConfig, task: Task) -> Iterator[Problem]:
    """Yield the problem of each evaluation set with other prompts than before: its accuracies would be of two sets.

    A set of eval.sets that the config now takes from another place is a changed key, which is told.
    """
    of_file, now = isinstance(config.data, FileDataConfig), flat_config(config)
    changed = changed_keys(resumed.config, config)
    for name, digest in task.eval_prompts.items():
        key = f"eval.sets.{name}" if name != HELDOUT else "data.eval_path" if of_file else "data"
        is_told = name != HELDOUT and key in changed
        if not is_told and resumed.eval_prompts.get(name, digest) != digest:
            rule = "must give the prompts that the run had: it would go on with accuracies of other ones"
            remedy = "Name the new ones as a further set, eval.sets.<name>, or begin a new run in another run.dir."
            yield Problem(key=key, rule=rule, value=now[key], remedy=remedy)
