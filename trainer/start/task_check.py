"""Problems of model, data, reward and machine that would end a run, found before torch or transformers is imported.

`trainer/start/checks.py` asks for them, for `--dry-run` and for the run alike. What only a tokenizer shows is found by
`load_task` (trainer/run/task.py), before anything is started or written.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from algorithms.config import ConfigError, Problem
from rollout.collect.requests import sampling_params
from rollout.config import Routing
from rollout.data.data_files import DataError, on_hub
from rollout.data.dataset import first_row, load_dataset
from rollout.data.file_prompts import Judgement
from rollout.episodes.trial import load_problem, try_episode
from rollout.model.text_part import rope_length, text_part
from rollout.rewards import judgement, try_reward
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from rollout.types import Prompt
from rollout.user_code.custom_code import is_custom
from rollout.weights.experts import BIASED
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, HFModelConfig, ModelConfig
from trainer.limits.adapter_shape import chosen_layers, linear_shapes
from trainer.limits.machine import CPUS_PER_WORKER, Machine, this_machine
from trainer.limits.memory_plan import gpu_bytes, memory_plan
from trainer.limits.model_shape import UnknownShapeError
from trainer.models.directory import described, find_model, has_experts, local_model
from trainer.rundir.cache import default_cache_dir
from trainer.rundir.run_dir import unusable_problem
from trainer.text.plain import size

logger = logging.getLogger(__name__)

HOPELESS = 2.0
"""Plan of the ranks over the memory of the machine from which on a run is refused: the plan is at the cap of prompts
and responses, which a run may never reach."""
OTHER_GPUS = ("/dev/dxg", "/dev/kfd")
"""Devices of GPUs that `Machine.gpus` does not count: of Windows below Linux, and of AMD."""


def task_problems(configs: Sequence[TrainConfig], *, trains: bool = True) -> list[Problem]:
    """Problems of all runs, each once; a model, a file or a function that several runs share is looked at once.

    Runs that do not train have no ranks, and their model is not looked at: it is not always that of the config.
    """
    machine = this_machine()
    found: list[Problem] = []
    for config in {task_key(config): config for config in configs}.values():
        found += [*(_model_problems(config) if trains else ()), *_data_problems(config), *_episode_problems(config)]
    # After the models: the sizes of one of the hub are known once its config.json is fetched.
    small = [problem for config in configs for problem in _machine_problems(config, machine, trains=trains)]
    return list({str(problem): problem for problem in [*small, *found]}.values())


def task_key(config: TrainConfig) -> str:
    """The same text for runs that work on the same task."""
    sections = ("model", "critic", "advantage", "data", "eval", "reward", "sampling", "rollout", "episode")
    return repr([getattr(config, name) for name in sections])


EXACT_ACTIVATION = "silu"
"""Activation of an MLP that rollout/exact computes."""


def on_disk(config: TrainConfig) -> TrainConfig | None:
    """The config with models of the hub as their directories in its cache; None if something has to be fetched or made:
    a model, or the rows."""
    if isinstance(config.data, FileDataConfig) and on_hub(config.data, config.sources):
        return None
    if config.has_critic and config.critic.path:
        critic = local_model(config.critic.path, None)
        if critic is None:
            return None
        config = replace(config, critic=replace(config.critic, path=str(critic)))
    if isinstance(config.model, HFModelConfig):
        model = local_model(config.model.path, config.model.revision)
        return None if model is None else replace(config, model=replace(config.model, path=str(model)))
    if not any(default_cache_dir().glob(f"{config.model.kind}-*")):
        return None
    # Imported here because this line imports torch and transformers.
    from trainer.models.resolve import made_model

    return None if made_model(config.model) is None else config


def _machine_problems(config: TrainConfig, machine: Machine, *, trains: bool) -> Iterator[Problem]:
    """Yield the problems of workers that do not fit on this machine; a cluster at an address is not asked."""
    if config.cluster.address is not None:
        return
    policy, rollout = config.policy, config.rollout
    ranks = policy.num_workers if trains else 0
    of_engine = rollout.gpus_per_engine
    if of_engine and not trains:
        of_engine = rollout.tp_size  # alone on its GPUs
    gpus = ranks * policy.gpus_per_worker + rollout.num_engines * of_engine
    cpus = CPUS_PER_WORKER * (ranks + rollout.num_engines * rollout.tp_size)
    elsewhere = "or name a Ray cluster with cluster.address."
    if gpus > machine.gpus and not any(Path(device).exists() for device in OTHER_GPUS):
        key = "rollout.gpus_per_engine" if rollout.gpus_per_engine else "policy.gpus_per_worker"
        rule = f"must fit on this machine: the run needs {gpus:g} GPU, and it has {machine.gpus}"
        remedy = f"Set policy.gpus_per_worker=0 and rollout.gpus_per_engine=0 for a run on the CPU, {elsewhere}"
        yield config.broken(key, rule, remedy)
    if cpus > max(machine.cpus, os.cpu_count() or 1):  # Ray counts the cores of the machine
        rule = f"must fit on this machine: the workers need {cpus:g} CPU, and it has {machine.cpus}"
        keys = ["policy.num_workers", "rollout.num_engines"]
        if rollout.num_engines * rollout.tp_size > ranks:
            keys.reverse()
        yield config.broken(keys[0], rule, f"Lower it, or {keys[1]}, {elsewhere}")
    if not trains:
        return
    yield from _memory_problems(config, machine, uses_gpus=gpus > 0)


def _memory_problems(config: TrainConfig, machine: Machine, *, uses_gpus: bool) -> Iterator[Problem]:
    """Yield the problems of models, and of micro-batches, that this machine cannot hold."""
    elsewhere = "or name a Ray cluster with cluster.address."
    plan = memory_plan(config, device_bytes=gpu_bytes() if uses_gpus else None)
    for needed, bytes_there in ((plan.least_host_bytes, machine.memory), (plan.least_device_bytes, plan.device_bytes)):
        if needed is not None and bytes_there is not None and needed > bytes_there:
            yield Problem(
                key="model",
                rule=f"must fit into {size(bytes_there)} of memory: weights, gradients and AdamW need {size(needed)}",
                value=config.model.description + " and its critic" * config.has_critic,
                remedy=f"Use a smaller model or more GPUs, {elsewhere}",
            )
            return
    needed = plan.ranks_host_bytes
    # A rank on a GPU holds its micro-batches there.
    if not config.policy.gpus_per_worker and needed is not None and needed > HOPELESS * machine.memory:
        rule = (
            f"must be lower: at the cap the largest micro-batch makes ranks take {size(needed)}, and this machine has "
        )
        remedy = f"Or lower sampling.max_new_tokens, or set policy.activation_checkpoint_every=1, {elsewhere}"
        yield config.broken("batch.max_tokens_per_microbatch", rule + size(machine.memory), remedy)


def policy_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the directory, or name on the hub, of the policy, or of the cache that it is made in."""
    if isinstance(config.model, HFModelConfig):
        found = find_model("model.path", config.model.path, config.model.revision)
        if isinstance(found, Problem):
            yield found
        elif found is not None:
            yield from _context_problems(config, found)
            yield from engine_problems(config, found)
        return
    is_mixture = isinstance(config.model, ArithmeticModelConfig) and config.model.num_experts > 0
    yield from _routing_problems(config, is_mixture=is_mixture)
    try:
        cache = default_cache_dir()
    except ConfigError as error:
        yield from error.problems
        return
    # A cache that cannot be written to may hold the model already.
    if not any(cache.glob(f"{config.model.kind}-*")) and (unusable := unusable_problem("$PARITY_CACHE", cache)):
        yield unusable


def engine_problems(config: TrainConfig, directory: Path) -> Iterator[Problem]:
    """Yield the problems of the model in `directory` with the engines of the run; its config.json is enough."""
    yield from _exact_problems(config, directory)
    if rule := config.rollout.model_rule(text_part(described(directory))):
        remedy = "Use another model, or rollout=torch."
        yield Problem(key="model.path", rule=f"must {rule}", value=config.model.description, remedy=remedy)
    yield from _routing_problems(config, is_mixture=has_experts(directory))


def _routing_problems(config: TrainConfig, *, is_mixture: bool) -> Iterator[Problem]:
    """Yield what a mixture of experts cannot be trained with, and what a dense model has no use for."""
    if not is_mixture:
        if config.policy.routing is Routing.weights:
            rule = f"has no effect: {config.model.description} is a dense model, which chooses no experts"
            yield config.broken("policy.routing", rule, "Leave it out.")
        return
    if config.policy.routing is not Routing.live and not config.rollout.returns_routes:
        rule = f"must be live: engines of rollout={config.rollout.kind} as they are set here return no routes"
        yield config.broken("policy.routing", rule, "The trainer then chooses the experts itself.")
    if config.policy.routing is not Routing.live and config.policy.torch_compile:
        rule = f"must be false for a mixture of experts with policy.routing={config.policy.routing.name}"
        yield config.broken("policy.torch_compile", rule, "Or set policy.routing=live.")
    if config.rollout.exact and config.policy.gpus_per_worker:
        rule = "must be false for a mixture of experts on GPUs: exact arithmetic has it on a CPU only"
        yield config.broken("rollout.exact", rule, "Use a dense model, or no GPU.")
    if config.rollout.exact and config.policy.routing is Routing.weights:
        rule = "must be replay or live with rollout.exact=true: the engine's factors come rounded to 16 bits"
        yield config.broken("policy.routing", rule, "The trainer computes the same factors, in every bit.")


def _exact_problems(config: TrainConfig, directory: Path) -> Iterator[Problem]:
    """Yield the problem of a model that `rollout.exact` has no arithmetic for, as far as its config.json tells.

    What else a model has is found when the ranks and the engines load it.
    """
    model = text_part(described(directory))
    activation = model.get("hidden_act", EXACT_ACTIVATION)
    if config.rollout.exact and activation != EXACT_ACTIVATION:
        rule = f"must be false for a model with hidden_act={activation}: exact arithmetic has {EXACT_ACTIVATION}"
        yield config.broken("rollout.exact", rule, f"model.path={directory}. Use another model.")
    if config.rollout.exact and (family := model.get("model_type")) in BIASED:
        rule = f"must be false for a {family}: exact arithmetic has no router with a bias"
        yield config.broken("rollout.exact", rule, f"model.path={directory}. Use another model.")


def missing_model_problems(models: Iterable[ModelConfig]) -> list[Problem]:
    """Problems of the places of models alone, for runs whose other sections have problems."""
    found = [find_model("model.path", each.path, each.revision) for each in models if isinstance(each, HFModelConfig)]
    return [problem for problem in found if isinstance(problem, Problem)]


def _adapter_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of an adapter that does not fit the layers of the model, where these are known."""
    lora = config.policy.lora
    if not lora.rank:
        return
    try:
        shapes = linear_shapes(config)
    except UnknownShapeError:
        return
    chosen = chosen_layers(shapes, lora.targets)
    if not chosen:
        ends = sorted({name.rpartition(".")[2] for name in shapes})
        rule = "must be the name of a linear layer of the model's blocks"
        first = next(iter(shapes), "")
        remedy = f"all, attention, or a regular expression for whole names such as {first}; ends: {', '.join(ends)}."
        yield config.broken("policy.lora.targets", rule, remedy)
    dense = [name for name in chosen if re.search(r"\.mlp\.(gate|up|down)_proj$", name)]
    if dense and any(".shared_experts." in name for name in shapes):
        rule = f"must leave out the MLP of layers without experts, such as {dense[0]}: peft takes it for experts"
        yield config.broken("policy.lora.targets", rule, "Choose attention.")
    too_small = [name for name in chosen if min(shapes[name]) < lora.rank]
    if too_small:
        rows, columns = shapes[too_small[0]]
        rule = f"must be at most {min(rows, columns)} for {too_small[0]} [{rows}, {columns}]"
        more = f" {len(too_small) - 1} more layers are as small." if len(too_small) > 1 else ""
        yield config.broken(
            "policy.lora.rank", rule, f"Lower it, or choose larger layers with policy.lora.targets.{more}"
        )
    if config.sends_adapter and chosen and (rule := config.rollout.adapter_rule(chosen, among=shapes)):
        yield config.broken("policy.lora.targets", rule, "Choose them, or set policy.lora.merge=true.")


def _model_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the directories, or names on the hub, of policy and critic, and of the adapter."""
    yield from policy_problems(config)
    yield from _adapter_problems(config)
    if config.has_critic and config.critic.path is not None:
        found = find_model("critic.path", config.critic.path, None)
        if isinstance(found, Problem):
            yield found


def _context_problems(config: TrainConfig, directory: Path) -> Iterator[Problem]:
    """Yield the problem of responses that fit with no prompt; the prompts are read only then, for the right number."""
    if any(context_problems(config, directory, longest_prompt=None)):
        yield from context_problems(config, directory, longest_prompt=_longest_prompt(config, directory))


def _longest_prompt(config: TrainConfig, directory: Path) -> int | None:
    """Tokens of the longest prompt; None if it is not on this disk, or cannot be read, which others report."""
    if on_disk(config) is None:
        return None
    # Imported here because the import takes seconds, and only this refusal needs it.
    from rollout.data.tokenizer import load_tokenizer

    try:
        return load_dataset(config.data, load_tokenizer(directory), eval_sets=config.eval.sets).longest_prompt
    except Exception as error:  # transformers raises whatever its readers of files raise
        logger.debug("the prompts cannot be read: %s", error)
        return None


def context_problems(
    config: TrainConfig, directory: Path, *, longest_prompt: int | None, window: int | None = None
) -> Iterator[Problem]:
    """Yield the problem of responses for which a prompt of `longest_prompt` tokens leaves no room in the context, in
    the sliding `window` of the model's attention, or in the range where no other sequence changes its positions.

    None is a length that is not known, of at least a token. Nothing is yielded where the engine decides: with servers
    that run already, and with scaled positions.
    """
    model = text_part(described(directory))
    fixed, kind = rope_length(model)
    lengths = {
        "context": config.rollout.context_length(model),
        "sliding window": window,
        f"range of short texts (rope_type={kind}: beyond it all positions of a batch change)": fixed,
    }
    known = [(length, what) for what, length in lengths.items() if isinstance(length, int)]
    context, what = min(known, default=(None, ""), key=lambda pair: pair[0])
    tokens = {"sampling.max_new_tokens": config.sampling.max_new_tokens}
    tokens |= {"eval.max_new_tokens": config.eval.max_new_tokens} if config.eval.max_new_tokens is not None else {}
    for key, most in tokens.items():
        if context is None or (longest_prompt or 1) + most <= context:
            continue
        rule = f"must leave room for a prompt in the model's {what} of {context} tokens"
        remedy = f"Take {context} less the tokens of the longest prompt, which is not read yet."
        if longest_prompt is not None:
            rule = f"must be <= {context - longest_prompt}: the model's {what} has {context} tokens, and prompts have "
            rule += f"up to {longest_prompt} of them"
            remedy = "Or leave long prompts out (data.max_prompt_tokens, data.on_bad_row=skip)."
            if longest_prompt >= context:  # no response is short enough
                rule = f"must leave room for the prompts, which have up to {longest_prompt} tokens: the model's {what} "
                rule += f"has {context}"
                remedy = f"Leave long prompts out with data.max_prompt_tokens={max(1, context - most)} "
                remedy += "data.on_bad_row=skip, or take another model."
        yield Problem(key=key, rule=rule, value=most, remedy=remedy)


def vocabulary_size(directory: Path) -> int | None:
    """Number of tokens that the model in `directory` can read and write; None if its config.json does not say it."""
    size = text_part(described(directory)).get("vocab_size")
    return size if isinstance(size, int) else None


def vocabulary_problems(directory: Path, *, largest_token: int, stop_ids: Sequence[int]) -> Iterator[Problem]:
    """Yield the problem of prompts, or of ends of responses, with tokens that the model does not have.

    The tokenizer is then of another model. One of the `stop_ids` is enough to end responses.
    """
    size = vocabulary_size(directory)
    for what, token in (("prompts have", largest_token), ("every response would end with", min(stop_ids))):
        if size is not None and token >= size:
            rule = f"must hold the tokenizer of its model: {what} the token id {token}, and vocab_size is {size}"
            remedy = "Save the tokenizer that belongs to the model into the directory."
            yield Problem(key="model.path", rule=rule, value=str(directory), remedy=remedy)


def _episode_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problem of a rollout function of the user's own that cannot be loaded."""
    name = config.episode.function
    if name is not None and is_custom(name) and (reason := load_problem(config.episode)):
        yield config.broken("episode.function", "must be a rollout function that can be loaded", f"It failed: {reason}")


def trial_problems(
    config: TrainConfig, prompt: Prompt, model_path: Path, stop_token_ids: tuple[int, ...], notes: list[str]
) -> Iterator[Problem]:
    """Yield the problems of functions of the user's own that are called with what a run gives them.

    `prompt` is the first of training, with its text and its tokens. What may be the fault of a text becomes a note.
    """
    if is_custom(config.reward.function) and (reason := try_reward(config.reward, prompt)):
        rule = "must score the first prompt, in the form in which the engine reads it"
        yield config.broken("reward.function", rule, f"It failed: {reason}")
    name, tokenizer_file = config.episode.function, model_path / "tokenizer.json"
    if name is not None and not tokenizer_file.is_file():
        remedy = f"AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it; DIR is {model_path}."
        yield config.broken("episode.function", f"must be null for a model without {tokenizer_file.name}", remedy)
        return
    if name is None or not is_custom(name):
        return
    sampling = sampling_params(config.sampling, seed=0, stop_token_ids=stop_token_ids)
    trial = try_episode(config.episode, prompt, sampling, tokenizer_file)
    if trial.reason and not trial.num_turns:
        rule = "must bring an episode to an end"
        yield config.broken("episode.function", rule, f"For the first prompt it failed: {trial.reason}")
    elif trial.reason:
        notes.append(
            f"episode.function failed in a trial in which every turn was the answer of the first row: {trial.reason}"
        )


def data_judgement(config: TrainConfig) -> Judgement:
    """What the reward, and code of the user, need of the rows of a run."""
    return judgement(config.reward, own_rollout=config.episode.function is not None)


def _data_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the rows, and of the reward function with the first of them."""
    try:
        first = first_row(config.data, config.eval.sets, data_judgement(config))
    except DataError as error:
        yield from error.problems
        return
    own_rule = isinstance(config.data, ArithmeticDataConfig) and ":" not in config.reward.function
    if first is None or own_rule:
        return
    # In the form of the template `load_task` has the prompt.
    if reason := try_reward(config.reward, first[0], only_loads=first[1]):
        rule = "must score the first row of the data, with its own answer and with a wrong one as the response"
        yield config.broken("reward.function", rule, f"It failed: {reason}")
