"""Faults of rewards: real processes that hide, fork, die, flood and eat memory, and what becomes of the responses."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rollout.processes.child_process import ENVIRONMENT_NAMES, child_environment, with_remedy
from rollout.rewards import RewardError, Scorer
from rollout.rewards.answer_rules import RULES
from rollout.rewards.custom import RESERVED_METRICS, Calling, CustomReward
from rollout.task_config import RewardConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from rollout.user_code.pool import Failure, UserCodeError
from tests.rollout.reward_calls import children, ended, outcomes, pool_of_function, scores

REPOSITORY = Path(__file__).parents[2]
GIB = 1 << 30
HIDE = """
    import os, subprocess, sys, time

    def hide(seconds="SECONDS"):
        '''Leave a process behind that has a session of its own and no parent.'''
        program = f"import subprocess; subprocess.Popen(['sleep', {seconds!r}], start_new_session=True)"
        subprocess.run([sys.executable, "-c", program], start_new_session=True, check=True)
""".replace("SECONDS", f"700.{os.getpid()}")


@pytest.fixture
def write(tmp_path):
    """write(source) -> reward.function of a file with it."""

    def build(source):
        path = tmp_path / "own_reward.py"
        path.write_text(textwrap.dedent(HIDE) + textwrap.dedent(source), encoding="utf-8")
        return f"{path}:reward"

    return build


@pytest.fixture
def pool_of(write):
    """pool_of(source, ...) -> a pool with one worker, closed after the test."""
    pools = []

    def build(source, **config):
        pools.append(pool_of_function(write(source) if "\n" in source else source, **config))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def hidden():
    return [
        each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", f"700.{os.getpid()}"]
    ]


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---------------------------------------------------------------- what a function leaves behind


@pytest.mark.scenario(22)
@pytest.mark.parametrize("end", ["close", "exit", "killed", "hang"])
def test_a_process_in_a_session_of_its_own_ends_with_its_worker(pool_of, end):
    pool = pool_of(
        """
        def reward(response):
            hide()
            match response:
                case "exit": os._exit(3)
                case "killed": os.kill(os.getpid(), 9)
                case "hang": time.sleep(600)
            return 1.0
        """,
        timeout_s=1.5,
    )
    [outcome] = outcomes(pool, [end])
    if end == "close":
        assert outcome.value.score == 1.0 and len(hidden()) == 1
        pool.close()
    assert not hidden()


@pytest.mark.scenario(22)
def test_a_process_in_a_session_of_its_own_ends_with_a_trainer_that_is_killed(write):
    function = write("def reward(response):\n    hide()\n    time.sleep(600)\n")
    script = f"""
import time
from tests.rollout.reward_calls import pool_of_function
pool = pool_of_function({function!r}, timeout_s=600.0)
pool.submit(0, {{"response": "", "answer": "", "prompt": ""}})
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as trainer:
        until(hidden)
        trainer.kill()
    until(lambda: not hidden())


def test_a_fork_that_keeps_the_pipe_does_not_hide_the_end_of_its_worker(pool_of):
    pool = pool_of(
        """
        def reward(response):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            os._exit(3)
    """,
        timeout_s=300.0,
    )
    begin = time.monotonic()
    [outcome] = outcomes(pool, ["a"])
    assert outcome.failure is Failure.crash and "exit status 3" in outcome.message
    assert time.monotonic() - begin < 120  # not the deadline


@pytest.mark.scenario(22)
def test_a_fork_bomb_is_found_and_ended(pool_of):
    before = psutil.Process().children(recursive=True)  # such as the resource tracker that another test has started
    pool = pool_of("""
        def reward(response):
            if response == "bomb":
                for _ in range(9):  # 2^9 processes, each in a session of its own
                    if os.fork() == 0:
                        os.setsid()
                time.sleep(600)
            return 1.0
    """)
    bomb, good = outcomes(pool, ["bomb", "good"])
    assert bomb.failure is Failure.crash and "more than 256 processes" in bomb.message
    assert good.value.score == 1.0
    assert len(set(psutil.Process().children(recursive=True)) - set(before)) == 2


@pytest.mark.scenario(22)
def test_memory_is_bounded_over_all_processes_of_a_worker(pool_of, monkeypatch):
    monkeypatch.setattr("rollout.user_code.worker.MEMORY_BYTES", 500 << 20)
    pool = pool_of(
        """
        def reward(response):
            shared = b"x" * (100 << 20)
            for _ in range(6):
                if os.fork() == 0:
                    held = b"x" * (200 << 20) if response == "much" else shared
                    time.sleep(600)
            time.sleep(600 if response == "much" else 1.0)
            for pid in open("/proc/thread-self/children").read().split():
                os.kill(int(pid), 9)
                os.wait()
            return 1.0
        """
    )
    shared, much = outcomes(pool, ["shared", "much"])
    assert shared.value.score == 1.0  # 7 times the same 100 MiB are 100 MiB
    assert much.failure is Failure.crash and "more memory than allowed" in much.message


def test_a_worker_in_the_middle_of_a_call_does_not_delay_the_end(pool_of):
    pool = pool_of("def reward(response):\n    time.sleep(600)\n", timeout_s=600.0)
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    until(children)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 60 and not children()


# ---------------------------------------------------------------- what a function sees and may do


def test_secrets_are_not_in_the_environment_of_a_worker(pool_of, monkeypatch):
    planted = ("WANDB_API_KEY", "HF_TOKEN", "PARITY_SGLANG_ADMIN_API_KEY", "AWS_SECRET_ACCESS_KEY", "JUDGE_API_KEY")
    for name in planted:
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("PARITY_TEST_PLAIN", "planted")
    source = """
        def reward(response):
            seen = open("/proc/self/environ").read() + str(os.environ) + open(f"/proc/{os.getppid()}/environ").read()
            return float(response in seen)
    """
    names = [*planted, "PARITY_TEST_PLAIN", "PATH", "HOME"]
    assert dict(zip(names, scores(pool_of(source), names), strict=True)) == {
        **dict.fromkeys(planted, 0.0), "PARITY_TEST_PLAIN": 1.0, "PATH": 1.0, "HOME": 1.0,
    }  # fmt: skip
    monkeypatch.setenv(ENVIRONMENT_NAMES, "OTHER, JUDGE_API_KEY")
    assert scores(pool_of(source), ["JUDGE_API_KEY", "HF_TOKEN"]) == [1.0, 0.0]


@pytest.mark.parametrize("where", ["key = os.environ['JUDGE_API_KEY']", ""])
def test_a_secret_that_a_function_misses_is_told_with_the_way_to_give_it(pool_of, monkeypatch, where):
    monkeypatch.setenv("JUDGE_API_KEY", "planted")
    source = f"{where}\ndef reward(response):\n    return float(os.environ['JUDGE_API_KEY'] == response)\n"
    try:
        [outcome] = outcomes(pool_of(source), ["planted"])
        told = outcome.message
    except UserCodeError as error:
        told = str(error)
    assert "KeyError: 'JUDGE_API_KEY' (own_" in told and f"{ENVIRONMENT_NAMES}=JUDGE_API_KEY" in told
    monkeypatch.setenv(ENVIRONMENT_NAMES, "JUDGE_API_KEY")
    assert scores(pool_of(source), ["planted"]) == [1.0]


def test_files_of_a_worker_are_bounded(pool_of):
    pool = pool_of("""
        import resource

        def reward(response):
            return min(1e14, resource.getrlimit(getattr(resource, response))[0])
    """)
    names = ["RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"]
    assert scores(pool, names) == [16 * GIB, 4096, 0]


def test_a_program_that_reads_its_input_takes_no_request_away(pool_of):
    pool = pool_of("""
        def reward(response):
            return float(len(subprocess.run(["cat"], stdout=subprocess.PIPE, check=True).stdout))
    """)
    assert scores(pool, ["a"] * 5) == [0.0] * 5


# ---------------------------------------------------------------- blame


@pytest.mark.scenario(22)
def test_a_killed_worker_costs_none_of_the_responses_that_it_had(pool_of):
    pool = pool_of("gsm8k")
    outcomes(pool, ["#### 1"])
    [child] = children()
    child.suspend()
    for key in range(5):
        pool.submit(key, {"response": "#### 1", "answer": "1", "prompt": "?"})
    until(lambda: pool._core.workers[0].calls)
    child.kill()
    found = {}
    while len(found) < 5:
        found |= ended(pool, 5.0)
    assert [(each.failure, each.value.correct) for each in found.values()] == [(None, True)] * 5


@pytest.mark.scenario(22)
@pytest.mark.parametrize(("how", "failure"), [("ctypes.string_at(0)", "crash"), ("time.sleep(600)", "timeout")])
def test_one_of_many_responses_of_a_call_is_found_and_blamed_alone(pool_of, how, failure):
    pool = pool_of(
        f"""
        import ctypes

        def reward(responses):
            if "bad" in responses:
                {how}
            return [1.0] * len(responses)
        """,
        timeout_s=1.0,
    )
    outcomes(pool, ["warm"])
    found = outcomes(pool, ["good"] * 9 + ["bad"] + ["good"] * 10)
    assert [each.value and each.value.score for each in found] == [1.0] * 9 + [None] + [1.0] * 10
    assert found[9].failure is Failure[failure] and found[9].proven


def group_of(responses):
    """A group of a prompt with these texts as responses; the token of each is its index."""
    samples = [
        Sample(
            prompt_id=5,
            sample_index=index,
            token_ids=[0, index],
            response_mask=[False, True],
            rollout_logprobs=[0.0, -0.5],
            token_versions=[0, 0],
            finish_reason=FinishReason.stop,
        )
        for index in range(len(responses))
    ]
    return SampleGroup(prompt=Prompt(prompt_id=5, token_ids=[0], text="?", answer="1"), samples=samples)


def scorer_of(function, responses, **config):
    config = {"incorrect": -1.0, "num_workers": 1, "retry_pause_s": 0.01, "outage_wait_s": 0.0} | config
    config = RewardConfig(function=function, **config)
    return closing(Scorer(config, max_new_tokens=5, decode=lambda tokens: responses[tokens[0]]))


@pytest.mark.scenario(22)
def test_a_response_is_not_wrong_because_something_else_killed_its_worker(write):
    responses = ["good"] * 39 + ["victim", "guilty"]
    function = write("""
        def reward(response):
            if response == "victim":
                os.kill(os.getpid(), 9)  # as the kernel does when the memory of the machine is used up
            if response == "guilty":
                os._exit(1)
            return True
    """)
    group = group_of(responses)
    with scorer_of(function, responses) as scorer:
        scorer.score([group])
        metrics = scorer.take_stats().metrics()
    assert [sample.reward for sample in group.samples] == [1.0] * 39 + [None, -1.0]
    assert [metrics[f"reward/{name}"] for name in ("crashes", "timeouts", "errors")] == [6, 0, 0]
    assert (metrics["reward/retries"], metrics["reward/unscored"]) == (4, 1)


@pytest.mark.scenario(20)
def test_too_many_timeouts_end_the_run_with_their_number(write):
    responses = ["good"] * 6 + ["hang"] * 3
    function = write("def reward(response):\n    if response == 'hang': time.sleep(600)\n    return 1.0\n")
    with scorer_of(function, responses, timeout_s=0.3, max_failed_fraction=0.2, min_failed=2) as scorer:
        few = group_of(responses[:7])
        scorer.score([few])
        assert few.rewards == [1.0] * 6 + [-1.0]
        scorer.take_stats()
        expected = (
            r"failed on 3 of 9 responses, more than reward\.max_failed_fraction=0\.2 \(calls: timeouts 3, crashes 0, "
            r"errors 0\): prompt 5/6: no answer"
        )
        with pytest.raises(RewardError, match=expected):
            scorer.score([group_of(responses)])


def test_a_function_that_always_hangs_ends_the_run_before_the_step_does(write, monkeypatch):
    monkeypatch.setattr("rollout.rewards.scorer.EARLY", 10)
    responses = ["hang"] * 200
    with scorer_of(write("def reward(response): time.sleep(600)\n"), responses, timeout_s=0.1, min_failed=2) as scorer:
        group = group_of(responses)
        for sample in group.samples:
            scorer.submit(group.prompt, sample)
        with pytest.raises(RewardError, match=r"failed on 3 of 3 responses, more than"):
            while scorer.unfinished:
                scorer.poll(5.0)


# ---------------------------------------------------------------- what a function returns


@pytest.mark.scenario(21)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        *(
            (f"{{'score': 1.0, {name!r}: 0.5}}", f"the key {name!r} is the name of a metric of Parity's")
            for name in sorted(RESERVED_METRICS)
        ),
        ("{'score': 1.0, 'hard/accuracy': 0.5}", "the key 'hard/accuracy' is the name of a metric of Parity's"),
        ("1e39", "the result must lie in [-1e+15, 1e+15], got 1e+39"),
        ("-1e300", "the result must lie in"),
        ("{'score': 1.0, 'length': 1e300}", "length must lie in"),
        ("10 ** 400", "OverflowError"),
        ("{'score': 1.0, 'correct': 1}", "'correct' must be a bool, got int"),
    ],
)
def test_a_value_that_cannot_be_trained_on_is_an_error(returned, message):
    custom = CustomReward(function=lambda: eval(returned), calling=Calling.single, parameters={})
    [reply] = custom.work().run([{}])
    assert message in reply["error"]


@pytest.mark.scenario(21)
def test_text_that_no_json_can_hold_costs_no_worker(pool_of):
    pool = pool_of("""
        def reward(response):
            if response == "raise": raise ValueError("\\ud800" * 10_000)
            return {"score": 1.0, "\\ud800": 2.0}
    """)
    raised, metric = outcomes(pool, ["raise", "metric"])
    assert raised.failure is Failure.error and len(raised.message) < 2000
    assert metric.value.metrics == {"?": 2.0}


@pytest.mark.parametrize("fault", ["line", "flood", "score"])
def test_what_a_worker_writes_is_bounded(pool_of, monkeypatch, fault):
    monkeypatch.setattr("rollout.processes.child_process.MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr("rollout.processes.child_process.MAX_UNHEARD", 100)
    monkeypatch.setattr("rollout.processes.child_process.DEATH_S", 1.0)  # it writes on though nobody reads
    text = {"line": b"x" * (1 << 16), "flood": b"null\n" * 1000, "score": b'[{"score":1e39}]\n'}[fault]
    pool = pool_of(f"""
        def reward(response):
            while response == "bad":
                for descriptor in range(3, 30):
                    try:
                        os.write(descriptor, {text!r})
                    except OSError:
                        continue
            return 1.0
    """)
    before = psutil.Process().memory_info().rss
    bad, good = outcomes(pool, ["bad", "good"])
    assert bad.failure is Failure.crash and good.value.score == 1.0
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_a_line_that_nobody_asked_for_is_not_taken_for_the_next_answer(pool_of):
    pool = pool_of("""
        import threading

        def late():
            for descriptor in range(3, 30):
                try:
                    os.write(descriptor, b'[{"score":-7}]\\n')
                except OSError:
                    continue

        def reward(response):
            if response == "bad":
                threading.Timer(0.2, late).start()
            return 1.0
    """)
    assert scores(pool, ["bad"]) == [1.0]
    time.sleep(1.0)  # the line is there by then; if it is not, the test proves nothing and passes
    assert scores(pool, ["good"]) == [1.0]


@pytest.mark.scenario(23)
@pytest.mark.parametrize("rule", RULES)
def test_the_answer_of_any_response_is_read_in_no_time(rule):
    """A worker reads the answers of many responses within one deadline."""
    pieces = ["\\boxed{", "{", "}", "####", "9", "-", "Answer:", " ", "\x00", "\ud800", "1,234", "\\text{", "$"]
    for text in [piece * (1 << 20) for piece in pieces] + ["\\boxed{" * 1000 + "}" * 999]:
        begin = time.process_time()
        RULES[rule].extract(text)
        assert time.process_time() - begin < 1.0


# ---------------------------------------------------------------- workers that do not start


@pytest.mark.scenario(22)
@pytest.mark.parametrize("fails", ["raise OSError('the disk is busy')", "os._exit(1)", "time.sleep(600)"])
def test_a_function_that_fails_to_load_once_does_not_end_the_run(pool_of, tmp_path, monkeypatch, fails):
    """The second of three loads fails: that of the worker which replaces the first."""
    monkeypatch.setattr("rollout.user_code.pool.START_TIMEOUT_S", 3.0)
    pool = pool_of(f"""
        with open({str(tmp_path / "loads")!r}, "a+") as loads:
            loads.write("x")
            number = loads.tell()
        if number == 2:
            {fails}

        def reward(response):
            if response == "exit" and number == 1: os._exit(3)
            return 1.0
    """)
    assert scores(pool, ["good", "exit", "good"]) == [1.0] * 3
    assert (tmp_path / "loads").read_text() == "xxx"


@pytest.mark.parametrize("name", ["parity-child-writes", "parity-child-reads", "parity-user-code"])
def test_a_thread_that_cannot_be_had_for_a_moment_costs_nothing(pool_of, monkeypatch, name):
    monkeypatch.setattr("rollout.processes.child_process.START_PAUSES_S", (0.1, 0.1))
    start, refused = threading.Thread.start, []

    def refuse_twice(thread):
        if thread.name == name and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_twice)
    pool = pool_of("\ndef reward(response): return 1.0\n")
    assert scores(pool, ["a", "b"]) == [1.0, 1.0]
    assert len(refused) == 2 and len(children()) == 1


def test_an_error_of_the_pool_loses_no_outcome(pool_of):
    pool = pool_of("\ndef reward(response): return 1.0\n")
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    until(lambda: not pool._core.done.empty())
    pool._core.done.put(UserCodeError("reward.function=own", "a worker did not start"))
    with pytest.raises(UserCodeError, match="did not start"):
        pool.poll(1.0)
    assert list(ended(pool)) == [0]


def test_a_fault_of_the_pool_is_told_to_every_later_call(pool_of, monkeypatch):
    pool = pool_of("\ndef reward(response): return 1.0\n")
    monkeypatch.setattr("rollout.user_code.outage.Outage.note_success", lambda self, item: {}[item])
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    for _ in range(2):
        with pytest.raises(UserCodeError, match="pool of its processes failed: KeyError"):
            outcomes(pool, ["b"])


def test_a_variable_that_another_thread_removes_is_no_fault_of_the_pool(monkeypatch):
    """`os.environ.items()` raises KeyError then."""
    keys = type(os.environ).__iter__

    def changing(self):
        yield from ["REMOVED_BY_ANOTHER_THREAD", *keys(self)]

    monkeypatch.setattr(type(os.environ), "__iter__", changing)
    assert (
        "REMOVED_BY_ANOTHER_THREAD" not in child_environment() and with_remedy("PATH is not set") == "PATH is not set"
    )


def test_a_suspended_keeper_ends_with_its_worker(pool_of):
    pool = pool_of("\ndef reward(response):\n    hide()\n    return 1.0\n")
    outcomes(pool, ["a"])
    os.kill(children()[0].ppid(), signal.SIGSTOP)
    pool.close()
    assert not hidden() and not children()
