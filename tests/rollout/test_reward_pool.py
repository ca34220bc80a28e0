"""The reward pool: real processes that hang, crash, lie or eat memory, and what becomes of everything else."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from rollout.user_code.pool import Failure, UserCodeError
from tests.rollout.reward_calls import children, ended, outcomes, pool_of_function, scores

OWN_SLEEP = f"600.{os.getpid()}"
"""Seconds by which the sleeping processes of these tests are told from those of other programs."""
HOSTILE = """
    import ctypes, os, time

    def reward(response, answer, prompt):
        match response:
            case "hang": time.sleep(600)
            case "hang in C": return 3 ** (10**9)
            case "exit": os._exit(3)
            case "segfault": ctypes.string_at(0)
            case "memory": return len(bytearray(64 << 30))
            case "raise": raise KeyError("no")
            case "nan": return float("nan")
            case "text": return "1.0"
            case "none": return None
            case "list": return [1.0]
            case "no score": return {"reward": 1.0}
            case "bad metric": return {"score": 1.0, "length": "long"}
            case "children":
                os.system("sleep OWN_SLEEP &")
                time.sleep(600)
            case "print": print("[{}]", flush=True)
            case "garbage" | "garbage\\n" | "[7]\\n" | '[{"score": "high"}]\\n' | "null\\n":
                for descriptor in range(3, 30):  # whoever holds the pipe to the trainer can write to it
                    try:
                        os.write(descriptor, response.encode())
                    except OSError:
                        continue
                time.sleep(600)
        return {"score": 0.5, "correct": True, "length": len(response)}
""".replace("OWN_SLEEP", OWN_SLEEP)


@pytest.fixture
def pool_of(tmp_path):
    """pool_of(source, name, ...) -> a pool with the function of `source`, closed after the test."""
    pools = []

    def build(source, name="reward", *, num_workers=2, **config):
        path = tmp_path / "own_reward.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        pools.append(pool_of_function(f"{path}:{name}", num_workers=num_workers, **config))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


@pytest.mark.scenario(20)
@pytest.mark.scenario(21)
@pytest.mark.scenario(22)
def test_whatever_a_function_does_costs_only_its_own_response(pool_of):
    pool = pool_of(HOSTILE, timeout_s=2.0)
    bad = {
        "hang": (Failure.timeout, "no answer within 2 s"),
        "hang in C": (Failure.timeout, "no answer within 2 s"),
        "children": (Failure.timeout, "no answer within 2 s"),
        "exit": (Failure.crash, "exit status 3"),
        "segfault": (Failure.crash, "SIGSEGV"),
        "memory": (Failure.error, "MemoryError"),
        "raise": (Failure.error, "KeyError: 'no'"),
        "nan": (Failure.error, "must be finite, got nan"),
        "text": (Failure.error, "must be a number, got str"),
        "none": (Failure.error, "must be a number, got NoneType"),
        "list": (Failure.error, "must be a number, got list"),
        "no score": (Failure.error, "a dict needs the key 'score', got ['reward']"),
        "bad metric": (Failure.error, "length must be a number, got str"),
        "garbage": (Failure.timeout, "no answer within 2 s"),
        "[7]\n": (Failure.crash, "the worker answered b'[7]': it is no message of a worker"),
        '[{"score": "high"}]\n': (Failure.crash, "it is no message of a worker"),
        "null\n": (Failure.crash, "it is no message of a worker"),
        "garbage\n": (Failure.crash, "the worker answered b'garbage'"),
    }
    responses = [each for name in bad for each in (name, "good")] + ["print", "good"]
    for response, outcome in zip(responses, outcomes(pool, responses), strict=True):
        failure, message = bad.get(response, (None, ""))
        assert outcome.failure is failure, (response, outcome)
        assert message in outcome.message
        if failure is None:
            found = outcome.value
            assert (found.score, found.correct, found.metrics) == (0.5, True, {"length": len(response)})
    assert len(children()) <= 2
    pool.close()
    assert not children()
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", OWN_SLEEP]]


@pytest.mark.scenario(20)
def test_two_hung_calls_do_not_starve_two_workers(pool_of):
    pool = pool_of(HOSTILE, timeout_s=3.0)
    outcomes(pool, ["good", "good"])
    begin = time.monotonic()
    found = outcomes(pool, ["hang", "hang", "good"])
    assert [each.failure for each in found] == [Failure.timeout, Failure.timeout, None]
    assert time.monotonic() - begin < 60


def test_a_killed_worker_is_replaced(pool_of):
    pool = pool_of(HOSTILE, num_workers=1)
    assert outcomes(pool, ["good"])[0].failure is None
    [child] = children()
    os.kill(child.pid, signal.SIGKILL)
    assert [each.failure for each in outcomes(pool, ["good", "good"])] == [None, None]


def test_a_worker_whose_keeper_is_late_ended_as_it_ended(pool_of):
    """The keeper gets no core for three seconds: the function has not closed its output."""
    pool = pool_of(
        """
        import os, signal

        def reward(response):
            os.kill(os.getppid(), signal.SIGSTOP)
            os._exit(3)
        """,
        num_workers=1,
    )

    ended = threading.Event()

    def resume():
        while not ended.wait(0.05):
            for each in psutil.Process().children():
                if each.status() == psutil.STATUS_STOPPED:
                    time.sleep(3.0)
                    each.resume()

    late = threading.Thread(target=resume)
    late.start()
    try:
        assert "exit status 3" in outcomes(pool, ["any"])[0].message
    finally:
        ended.set()
        late.join()


def test_a_fork_that_fails_for_a_moment_costs_nothing(pool_of, monkeypatch):
    pool = pool_of(HOSTILE, num_workers=1)
    popen, refused = subprocess.Popen, []

    def refuse_twice(*arguments, **options):
        if len(refused) < 2:
            refused.append(arguments)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*arguments, **options)

    assert outcomes(pool, ["exit"])[0].failure is Failure.crash  # its worker must be replaced
    monkeypatch.setattr("rollout.processes.child_process.START_PAUSES_S", (0.1, 0.1))
    monkeypatch.setattr("rollout.processes.child_process.subprocess.Popen", refuse_twice)
    assert [each.failure for each in outcomes(pool, ["good"] * 5)] == [None] * 5
    assert len(refused) == 2


def test_a_pool_that_cannot_start_a_worker_says_so_and_lives_on(pool_of, monkeypatch):
    pool = pool_of(HOSTILE, num_workers=1)
    with monkeypatch.context() as patch:

        def refuse(*arguments, **options):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        patch.setattr("rollout.processes.child_process.subprocess.Popen", refuse)
        patch.setattr("rollout.processes.child_process.START_PAUSES_S", (0.1, 0.1))
        pool.submit(99, {"response": "good", "answer": "1", "prompt": "?"})
        with pytest.raises(UserCodeError, match=r"a worker did not start: .*temporarily unavailable"):
            pool.poll(60.0)
        assert ended(pool, 60.0)[99].failure is Failure.crash
    assert outcomes(pool, ["good"])[0].failure is None


def test_a_row_that_is_nested_too_deep_costs_its_own_response(pool_of):
    pool = pool_of("def reward(responses, rows): return [float(len(r)) for r in responses]", num_workers=1)
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    for key, row in enumerate([{}, {"deep": deep}, {}]):
        pool.submit(key, {"response": "abc", "answer": "1", "prompt": "?", "row": row})
    found = {}
    while len(found) < 3:
        found |= ended(pool, 60.0)
    assert [found[key].value and found[key].value.score for key in range(3)] == [3.0, None, 3.0]
    assert found[1].failure is Failure.error and "row cannot be sent" in found[1].message


def test_a_file_of_the_working_directory_does_not_hide_a_package(pool_of, tmp_path, monkeypatch):
    for name in ("rollout", "trainer", "algorithms"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    (tmp_path / "helper.py").write_text("REWARD = 0.25\n")
    monkeypatch.chdir(tmp_path)
    pool = pool_of("from helper import REWARD\ndef reward(response): return REWARD\n", num_workers=1)
    assert scores(pool, ["a"]) == [0.25]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def reward(responses, answers): return [r == a for r, a in zip(responses, answers)]", [True, False]),
        ("async def reward(response, answer): return response == answer", [True, False]),
        ("def reward(response, **rest): return response == '1'", [True, False]),
    ],
)
def test_a_function_for_many_and_an_async_one_give_one_verdict_each(pool_of, source, expected):
    found = outcomes(pool_of(source), ["1", "2"] * 150)
    assert [each.value.correct for each in found] == expected * 150
    assert all(each.value.score is None for each in found)


def test_async_calls_overlap(pool_of):
    source = """
        import asyncio

        async def reward(response):
            await asyncio.sleep(0.5)
            return 1.0
    """
    pool = pool_of(source, num_workers=1)
    outcomes(pool, ["warm"])
    begin = time.monotonic()
    outcomes(pool, ["x"] * 32)
    assert time.monotonic() - begin < 8  # 16 s one after the other


def test_a_function_for_many_that_forgets_one_fails_for_all(pool_of):
    found = outcomes(pool_of("def reward(responses): return [1.0]"), ["a", "b", "c"])
    assert {each.failure for each in found} <= {Failure.error, None}
    assert any("need as many results, got 1" in each.message for each in found)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(response): return 1.0", "has no function 'reward'; it has other"),
        ("def reward(answer, text): return 1.0", "its parameters must be some of response, raw_response, answer"),
        ("def reward(response, answers): return 1.0", "its parameters must be some of"),
        (
            "def reward(data_source, solution_str, ground_truth): return 1.0",  # verl
            "Here data_source is row['data_source'], solution_str is response, ground_truth is answer.",
        ),
        ("def reward(prompts, completions, **kwargs): return [1.0]", "Here completions is responses."),  # TRL
        ("def reward(respnse, answer): return 1.0", "Here respnse is response."),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name' (own_reward.py, line 1)"),
        ("\nimport json\njson.loads('')", "(own_reward.py, line 3)"),  # not the line of a library
        ("def reward(:", "SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_with_its_name(pool_of, source, message):
    pool = pool_of(source)
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    with pytest.raises(UserCodeError, match=r"reward\.function=.*own_reward\.py:reward") as caught:
        while True:
            pool.poll(60.0)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "head", ["def reward(response, answer)", "def reward(responses, answers)", "async def reward(response, answer)"]
)
def test_what_a_function_raises_is_told_with_its_line(pool_of, head):
    pool = pool_of(f"from fractions import Fraction\n{head}:\n    scale = 0\n    return Fraction(1, scale)\n")
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    found = {}
    while not found:
        found = ended(pool, 60.0)
    assert found[0].message == "ZeroDivisionError: Fraction(1, 0) (own_reward.py, line 4)"


def test_of_a_task_group_the_first_cause_is_told(pool_of):
    pool = pool_of("""
        import asyncio

        async def ask():
            raise ConnectionError("refused")

        async def reward(response):
            async with asyncio.TaskGroup() as group:
                group.create_task(ask())
    """)
    pool.submit(0, {"response": "", "answer": "", "prompt": ""})
    found = {}
    while not found:
        found = ended(pool, 60.0)
    assert found[0].message == "ConnectionError: refused (own_reward.py, line 5)"


def test_workers_die_with_the_process_that_started_them(tmp_path):
    """Also with one that is killed and cannot clean up, and while they hang."""
    source = "import time\nfrom pathlib import Path\nPath(__file__).with_suffix('.loaded').touch()\n"
    (tmp_path / "hang.py").write_text(f"{source}def reward(response): time.sleep(600)\n", encoding="utf-8")
    script = textwrap.dedent(f"""
        import os, signal, time
        from tests.rollout.reward_calls import pool_of_function
        pool = pool_of_function("{tmp_path}/hang.py:reward", timeout_s=600.0)
        pool.submit(0, {{"response": "", "answer": "", "prompt": ""}})
        while not os.path.exists("{tmp_path}/hang.loaded"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run([sys.executable, "-c", script], timeout=120, check=False, cwd=Path(__file__).parents[2])
    end = time.monotonic() + 20
    own = f"{tmp_path}/hang.py:reward"
    while any(own in (each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < end
        time.sleep(0.1)


HEAVY = [r"\boxed{9^{9^{9^9}}}", r"\boxed{99999999!}", r"\boxed{\binom{10000000}{5000000}}"]
PIECES = [
    "####", "Answer:", "\\boxed{", "}", "{", "\\frac", "$", "\\", "1", "-", ",", ".", "^", "e9", "\n", " ", "\x00",
    "\u0661", "\ufffd", "__import__('os').system('kill -9 1')", "eval", "lambda:0", "\\sqrt", "(", ")", "[", "\\int",
    "\\begin{matrix}", "&", "\\\\", "\u202e", "\U0001f600", "9" * 50, "inf", "nan", "0x10", "\\text{", "=", "#",
]  # fmt: skip


@pytest.mark.scenario(23)
@pytest.mark.parametrize(("rule", "count"), [("gsm8k", 10_000), ("math_dapo", 10_000), ("math", 1_000)])
def test_a_hostile_corpus_is_scored_to_the_end(rule, count):
    """No crash, no leak, no starved pool, and nothing hostile is correct by accident."""
    generator = random.Random(rule)
    corpus = ["".join(generator.choices(PIECES, k=generator.randrange(40))) for _ in range(count)]
    heavy = HEAVY if rule == "math" else HEAVY * 10
    pool = pool_of_function(rule, num_workers=2, timeout_s=2.0)
    found = outcomes(pool, [*heavy, *corpus, "#### 424242 Answer: \\boxed{424242}"], answer="424242")
    assert len(children()) <= 2  # a worker that was just killed is replaced with the next response
    pool.close()
    assert not children()
    assert found[-1].value.correct
    assert not any(each.value and each.value.correct for each in found[:-1])
    failures = sum(each.failure is not None for each in found)
    assert failures <= (len(heavy) + count // 50 if rule == "math" else 0)
