"""train(config): the whole system in one page.

    Prompt -collect-> SampleGroup (tokens, pi_rollout log-probs, rewards)      rollout/collect/collector.py
           -pack-> TrainBatch ([T] tensors, denominators fixed)                trainer/batch/packing.py
           -train-> advantages, log-probs, correction, loss, update            trainer/policy/step.py
           -sync-> every engine holds the new weights, digest by digest        trainer/cluster/weight_sync.py
           -log-> metrics.jsonl, samples.jsonl, W&B, console                   trainer/tracking/tracker.py
           -save-> weights, optimizer, place in the data, what is under way    trainer/run/saving.py
           -dump-> a step's batch, for `parity replay`                         trainer/run/dumper.py

The version of the weights is the number of completed optimizer steps. Every token carries the version of the weights
that sampled it. `schedule=` (trainer/run/rollout_schedule.py) decides which phases overlap; the phases stay the same.
Inside a block of `engines.resident()` the engines are on their GPUs, inside `policy.resident()` the policy is; if both
share GPUs, the other one is on the host meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollout.collect.collector import Collected, Collector, CollectPlan, UnfinishedGroups
from rollout.collect.dispatch import Sampler
from rollout.data.dataset import PromptStream
from rollout.episodes.sampler import episode_files, episode_outage, take_episode_counts, with_episodes
from rollout.group.engine_group import EngineGroup
from rollout.processes.stacks import STACKS_FILE
from rollout.user_code.custom_class import class_files
from rollout.user_code.custom_code import code_digest
from trainer.batch.packing import pack, split_mini_batches
from trainer.batch.planner import SequenceCost
from trainer.batch.train_batch import TrainBatch
from trainer.cluster.placement import Cluster
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.watchdog import Watchdog, longest_call_s
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.ending.termination import Termination, termination_requests
from trainer.ending.time_limit import TimeLimit, time_limit
from trainer.limits.adapter_shape import sent_adapter
from trainer.limits.estimate import largest_micro_batch
from trainer.limits.memory_plan import gpu_bytes, memory_plan
from trainer.report.page import write_report
from trainer.run.accounting import StepAccounting, look_at_hardware
from trainer.run.adapter_probe import probe_adapter
from trainer.run.dumper import StepDumper
from trainer.run.evaluation import evaluate_sets, evaluation_metrics, response_rows
from trainer.run.guard import Guard, build_guard
from trainer.run.notices import Notices
from trainer.run.probe import probe_logprobs
from trainer.run.profiling import Profiler
from trainer.run.rollout_schedule import RolloutSchedule
from trainer.run.saving import Ending, Saver
from trainer.run.step_log import StepLog
from trainer.run.task import Task, checked_task, data_notes
from trainer.rundir.checkpoint import Checkpoint, RunState
from trainer.rundir.printed import printed_log
from trainer.rundir.resume import changed_keys, checkpoint_to_resume, flat_config, takes_no_step, whole_checkpoint
from trainer.rundir.run_dir import LOGS, METRICS_FILE, StartError
from trainer.text.plain import command_line
from trainer.tracking.console import Console
from trainer.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Objects that the steps of a run work with."""

    config: TrainConfig
    task: Task
    cluster: Cluster
    policy: PolicyGroup
    engines: EngineGroup
    sampler: Sampler
    """The engines, or episodes of several turns with them."""
    prompts: PromptStream
    collector: Collector
    saver: Saver
    guard: Guard
    dumper: StepDumper
    tracker: Tracker
    termination: Termination
    ending: Ending


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Locations of the results of a finished run."""

    run_dir: Path
    report_path: Path | None
    """None if the report could not be written."""
    was_complete: bool = False
    """True if the run had taken all its steps before and saved the last step, so that nothing was started."""


def train(config: TrainConfig) -> RunResult:
    """Run `config.run.num_steps` rollout steps; returns the run directory and the path of the report."""
    run_dir = Path(config.run.dir)
    limit = time_limit(config)
    with termination_requests() as termination:
        try:
            checkpoint = checkpoint_to_resume(config, run_dir)
            was_complete = takes_no_step(config, run_dir, checkpoint)
            if not was_complete:
                run_steps(config, run_dir, checkpoint, termination, limit)
        except StartError:
            raise  # nothing was begun, and what is in the directory belongs to another run or an earlier part of it
        except BaseException:
            if not termination.at_once and run_dir.is_dir():
                _report(run_dir)
            raise
        termination.then = "the run is complete, and its report is written"
        return RunResult(run_dir=run_dir, report_path=_report(run_dir), was_complete=was_complete)


def _report(run_dir: Path) -> Path | None:
    """Write the page of a run; a failure, of a full disk for example, is a warning: it does not change how it ended.

    A run that ended before its first row has nothing to show, and no page.
    """
    if not (run_dir / METRICS_FILE).is_file():
        return None
    try:
        return write_report(run_dir)
    except Exception as error:
        logger.warning("the run has no report: %s. %s writes it", error, command_line("parity", "report", run_dir))
        return None


def run_steps(
    config: TrainConfig, run_dir: Path, checkpoint: Checkpoint | None, termination: Termination, limit: TimeLimit
) -> None:
    """The run itself, from `checkpoint` on, or from the one before if the ranks find damage.

    What it has to say goes through the tracker.
    """
    resumed = None if checkpoint is None else checkpoint.state
    console = Console(config.run.num_steps)
    with console, termination.named():  # a mistake in it leaves no run directory and no W&B run
        task, prompts = checked_task(config, resumed, progress=console.base_model_progress)
    tracking = Tracker(config, run_dir=run_dir, resumed=resumed, console=console)
    with tracking as tracker, termination.named(), printed_log(run_dir / LOGS):
        termination.last_words = tracker.record_interrupted
        place = command_line(run_dir)
        go_on = f"parity resume {place} goes on from what is saved, " if config.checkpoint.every else ""
        termination.way_on = f"; {go_on}parity report {place} draws it"
        for line in data_notes(task.dataset, run_dir):
            tracker.console.line(line)
        for note in config.notes():
            tracker.console.line(f"note: {note}")
        for line in memory_plan(config, device_bytes=gpu_bytes(), model_path=task.model_path).verdicts:
            tracker.console.line(f"memory: {line}")
        tracker.console.phase("starting Ray, the policy and the rollout engines")
        if limit.line:
            tracker.console.line(limit.line)
        with ExitStack() as within:
            run = open_run(config, task, prompts, tracker, termination, limit, run_dir=run_dir, within=within)
            if checkpoint is not None:
                tracker.console.line(f"every rank compares its share of {checkpoint.path.name} with the digests")
                checkpoint = whole_checkpoint(config, run_dir, checkpoint, compare=run.policy.compare_files)
            done, policy_version = restore(run, checkpoint)
            longest = max(len(prompt.token_ids) for prompt in task.dataset.train)
            with run.policy.resident():  # what does not fit into memory shows in the first minute
                tracker.console.line(str(run.policy.dry_run(largest_micro_batch(config, longest_prompt=longest))))
            tracker.console.line(str(sync_weights(run.policy, run.engines, policy_version=policy_version)))
            probe = probe_logprobs(config, task, run.policy, run.engines, policy_version=policy_version)
            tracker.console.line(str(probe))
            if config.sends_adapter:
                used = probe_adapter(
                    config, task, run.policy, run.engines, policy_version=policy_version, noise=probe.mean_gap
                )
                tracker.console.line(str(used))
            if checkpoint is not None:  # from here on, so that a start that dies leaves the run as it was
                tracker.take_up(checkpoint.state)
            # The evaluation before training, or one that a request gave up.
            owed = checkpoint is None or (is_evaluated(config, done) and not checkpoint.state.evaluation)
            with run.ending.last_step_saved():
                take_steps(run, done=done, policy_version=policy_version, evaluates_first=owed)


def open_run(
    config: TrainConfig,
    task: Task,
    prompts: PromptStream,
    tracker: Tracker,
    termination: Termination,
    limit: TimeLimit,
    *,
    run_dir: Path,
    within: ExitStack,
) -> Run:
    """Start Ray, the policy and the engines; leaving `within` ends them, last in, first out."""
    cluster = within.enter_context(Cluster(config, log_dir=run_dir / LOGS))
    within.enter_context(closing(task.scorer))
    policy = cluster.spawn_policy(task.model_path, task.critic_path)
    engines = cluster.spawn_engines(task.model_path, adapter=sent_adapter(config, task.model_path), routes=task.routes)
    policy.wait_ready()
    for info in engines.wait_ready():
        tracker.console.line(f"engine ready: {info.name} at {info.address} in {info.start_s:.1f} s")
    stacks = run_dir / LOGS / STACKS_FILE
    within.enter_context(
        Watchdog(policy, engines, file=stacks, longest_s=longest_call_s(config), say=tracker.console.line)
    )
    sampler = within.enter_context(with_episodes(engines, config.episode, model_path=task.model_path))
    saver, guard = Saver(config.checkpoint, run_dir=run_dir, tracker=tracker), build_guard(config)
    return Run(
        config=config,
        task=task,
        cluster=cluster,
        policy=policy,
        engines=engines,
        sampler=sampler,
        prompts=prompts,
        collector=build_collector(config, task, sampler, prompts),
        saver=saver,
        guard=guard,
        dumper=StepDumper(config, run_dir, say=tracker.console.line),
        tracker=tracker,
        termination=termination,
        ending=Ending(config=config, policy=policy, saver=saver, guard=guard, termination=termination, limit=limit),
    )


def take_steps(run: Run, *, done: int, policy_version: int, evaluates_first: bool) -> None:
    """Rollout step after rollout step, from the one after `done`; raises KeyboardInterrupt at a request in a rollout.

    If `evaluates_first`, the weights that the run begins with are evaluated, in a row of their own.
    """
    config, policy, engines, collector = run.config, run.policy, run.engines, run.collector
    log = step_log(run, is_resumed=done > 0)
    schedule = RolloutSchedule(config.schedule, collector, num_steps=config.run.num_steps)
    run.termination.step, evaluated_s = done, 0.0
    if evaluates_first:
        evaluate_before_step(run, log, done + 1)
        evaluated_s = log.begin_anew()
    else:
        run.tracker.console.training()
    profiler = Profiler(config.run, policy, engines)
    for step in profiler.recorded(range(done + 1, config.run.num_steps + 1), log):
        with run.ending.rollout(step), log.phase("rollout"), engines.resident():
            collected = collector.collect(step, policy_version)
            schedule.begin_next(step, policy_version)  # unless it is sync, the engines go on while the policy trains
        with log.phase("pack"):
            batch = build_batch(config, collected, policy_version, cost=log.sequence_cost)
        with run.ending.training(), log.phase("train"), policy.resident():
            report = policy.train(batch, step=step, dump_dir=run.dumper.begin(step, policy_version))
        sampled_by, policy_version = policy_version, policy_version + report.num_optimizer_steps
        synced, evaluation = {}, {}
        with run.ending.after_row():
            with log.phase("rollout"):
                schedule.finish_next(step, sampled_by)  # one_step_off: before the engines get new weights
            with log.phase("sync"):
                synced = sync_weights(policy, engines, policy_version=policy_version).metrics()
            if is_evaluated(config, step):
                evaluation = evaluate_policy(run, log, step)
        run.ending.trained(run_state(run, step, policy_version, evaluation))
        more = synced | evaluation | episode_outage(run.sampler) | run.task.scorer.outage_metrics()
        more |= run.cluster.metrics() | profiler.metrics()
        step_s = log.write(step, collected, batch, report, more, reward_s=collector.take_reward_s())
        with log.phase("checkpoint"):
            # The time limit must leave room for an evaluation, which no step has shown yet.
            run.ending.conclude(step, step_s=step_s + evaluated_s)
        evaluated_s = 0.0


def step_log(run: Run, *, is_resumed: bool) -> StepLog:
    """What writes the steps of the run down."""
    hardware = look_at_hardware(run.task.model_path, run.policy, run.config.policy.lora)
    return StepLog(
        StepAccounting(run.config, hardware),
        Notices(run.config, is_resumed=is_resumed),
        tracker=run.tracker,
        guard=run.guard,
        dumper=run.dumper,
        saver=run.saver,
        engines=run.engines,
        tokenizer=run.task.tokenizer,
    )


def evaluate_before_step(run: Run, log: StepLog, step: int) -> None:
    """Evaluate the weights that the run begins with, as a phase of its own: a failure is not one of the start."""
    run.tracker.console.phase(f"evaluating before step {step}")
    run.tracker.log_evaluation(step - 1, evaluate_policy(run, log, step - 1))


def restore(run: Run, checkpoint: Checkpoint | None) -> tuple[int, int]:
    """Go on from `checkpoint`: (completed steps, policy version); (0, 0) without one."""
    if checkpoint is None:
        return 0, 0
    state = checkpoint.state
    run.prompts.load_state_dict(state.stream)  # once more: the ranks may have found damage in a later checkpoint
    if state.collector is not None:
        run.collector.load_state_dict(state.collector)
    if state.guard is not None:
        for line in run.guard.load_state_dict(state.guard):
            run.tracker.console.line(line)
    with run.policy.resident():
        has_rng = run.policy.load_checkpoint(checkpoint.policy_path.resolve(), step=state.step)
    run.tracker.console.line(f"resumed after step {state.step} from {checkpoint.path}")
    for change in changed_keys(state.config, run.config).values():
        run.tracker.console.line(f"changed since then: {change}")
    for path, digest in state.user_files.items():
        if code_digest(path) not in (None, digest):  # a file that was moved has another path in the config
            run.tracker.console.line(f"changed since then: what stands in {path}")
    if not has_rng:
        logger.warning("another number of ranks wrote the checkpoint: random number generators are seeded anew")
    return state.step, state.policy_version


def run_state(run: Run, step: int, policy_version: int, evaluation: dict[str, float | None]) -> Callable[[], RunState]:
    """Fix the state that a run resumed after `step` needs besides the state that the ranks hold; the call makes it."""
    stream, collector = run.prompts.state_dict(), run.collector.snapshot()
    return lambda: RunState(
        step=step,
        policy_version=policy_version,
        stream=stream,
        collector=collector(),
        wandb_run_id=run.tracker.wandb_run_id,
        evaluation=evaluation,
        guard=run.guard.state_dict(),  # of now: it observes the step after this state is fixed
        config=flat_config(run.config),
        model_mark=run.task.model_mark,
        user_files=run.task.scorer.files | episode_files(run.sampler) | run.task.model_files | class_files(run.config),
        eval_prompts=run.task.eval_prompts,
    )


def build_collector(config: TrainConfig, task: Task, sampler: Sampler, prompts: PromptStream) -> Collector:
    """The collector that turns prompts into rewarded groups with `sampler`."""
    # Groups may still be in flight when a step has as many as it needs. They go on (run), are given up (drop), or are
    # stopped and go on in the next step (resume).
    unfinished = UnfinishedGroups.run if config.schedule.updates_in_flight else UnfinishedGroups.drop
    if config.collect.partial:
        unfinished = UnfinishedGroups.resume
    return Collector(
        sampler=sampler,
        prompts=prompts,
        scorer=task.scorer,
        collect=config.collect,
        sampling=config.sampling,
        plan=CollectPlan(
            prompts_per_step=config.batch.prompts_per_step,
            group_size=config.batch.group_size,
            seed=config.run.seed,
            stop_token_ids=task.stop_token_ids,
            routes=task.routes,
            past_end=task.past_end,
            min_group_size=config.min_group_size,
            max_staleness=config.max_staleness,
            unfinished=unfinished,
        ),
        take_episode_counts=partial(take_episode_counts, sampler),
    )


def build_batch(config: TrainConfig, collected: Collected, policy_version: int, *, cost: SequenceCost) -> TrainBatch:
    """Mini-batches and packed micro-batches for every rank."""
    return pack(
        split_mini_batches(collected.groups, config.batch.mini_batches),
        num_ranks=config.policy.num_workers,
        max_tokens=config.batch.max_tokens_per_microbatch,
        policy_version=policy_version,
        cost=cost,
    )


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """True if the policy is evaluated after `step`: every `eval.every` steps, and after the last."""
    return (config.eval.every > 0 and step % config.eval.every == 0) or step == config.run.num_steps


def evaluate_policy(run: Run, log: StepLog, step: int) -> dict[str, float | None]:
    """Accuracy on every evaluation set, greedy and sampled, as metrics; training goes on as if it had not been.

    What the engines sample for later steps goes on beside it, and is not waited for. A request to end gives the
    evaluation after `step` up (KeyboardInterrupt), and a resumed run makes up for it; that of the last step is
    finished. The responses are kept in the run directory.
    """
    then = "the evaluation is given up; what is trained is saved"
    until = nullcontext() if step == run.config.run.num_steps else run.termination.interruptible(then)
    with until, log.phase("eval"), run.engines.resident():
        results = evaluate_sets(run.config, run.task, run.sampler)
    run.tracker.log_responses(step, response_rows(run.config, run.task, results))
    return evaluation_metrics(results)
