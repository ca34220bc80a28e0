"""Calls of user code: one loop per process, the right one to blame, tries, outages; real processes and functions."""

import logging
import os
import subprocess
import sys
import textwrap
import time

import pytest

from algorithms.config import ConfigError
from rollout.task_config import RewardConfig
from rollout.user_code import pool as pool_module
from rollout.user_code.outage import OUTAGE_CALLS
from rollout.user_code.pool import Ended, Failure, Repeated, UserCodeError
from tests.rollout.reward_calls import children, outcomes, pool_of_function, scores


@pytest.fixture
def pool_of(tmp_path):
    """pool_of(source, ...) -> a pool with the function `reward` of `source`, closed after the test."""
    pools = []

    def build(source, **config):
        path = tmp_path / "own_reward.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        pools.append(pool_of_function(f"{path}:reward", **config))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def events_until_ended(pool, count):
    """All events until `count` calls have ended, and key -> time of its end."""
    found, ends = [], {}
    deadline = time.monotonic() + 120
    while len(ends) < count:
        assert time.monotonic() < deadline, f"only {sorted(ends)} ended"
        for event in pool.poll(0.1):
            found.append(event)
            if isinstance(event, Ended):
                ends[event.key] = time.monotonic()
    return found, ends


def submit(pool, responses):
    for key, response in enumerate(responses):
        pool.submit(key, {"response": response, "answer": "1", "prompt": "?"})


# ---------------------------------------------------------------- one loop that lives as long as the process


@pytest.mark.parametrize(
    "own",
    [
        "limit = asyncio.Semaphore(4)",
        "limit = asyncio.Lock()",
        "asyncio.get_running_loop()  # as a client does that is made when the file is imported\nlimit = asyncio.Lock()",
    ],
)
def test_what_belongs_to_a_loop_can_stand_at_module_level(pool_of, own):
    pool = pool_of(
        f"import asyncio\n{own}\n"
        "async def reward(response):\n"
        "    async with limit:\n"
        "        await asyncio.sleep(0.001)\n"
        "    return id(asyncio.get_running_loop()) % 1000003\n"
    )
    seen = scores(pool, ["a"] * 10)
    time.sleep(0.2)  # the next call is a later one
    assert len({*seen, *scores(pool, ["b"] * 40)}) == 1


def test_no_more_calls_are_open_than_allowed_over_all_processes(pool_of, tmp_path):
    source = f"""
        import asyncio, fcntl
        open_here = 0

        async def reward(response):
            global open_here
            open_here += 1
            with open({str(tmp_path / "open")!r}, "a") as log:
                log.write(f"{{open_here}}\\n")
            await asyncio.sleep(0.2)
            open_here -= 1
            return 1.0
    """
    pool = pool_of(source, num_workers=2, max_open_calls=6)
    assert scores(pool, ["a"] * 40) == [1.0] * 40
    assert max(int(line) for line in (tmp_path / "open").read_text().splitlines()) == 3


def test_a_function_that_computes_may_start_a_loop_of_its_own(pool_of):
    pool = pool_of("""
        import asyncio

        async def ask(response):
            await asyncio.sleep(0)
            return float(response)

        def reward(response):
            return asyncio.run(ask(response))
    """)
    assert scores(pool, ["1", "2", "3"]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_function_can_give_work_to_processes_of_its_own(pool_of, start):
    pool = pool_of(f"""
        import multiprocessing

        def score(response):
            return float(response)

        def reward(responses):
            with multiprocessing.get_context({start!r}).Pool(1) as processes:
                return processes.map(score, responses)
    """)
    assert scores(pool, ["1", "2"]) == [1.0, 2.0]


def test_the_file_of_a_function_can_hold_a_dataclass_whose_types_are_text(pool_of):
    pool = pool_of("""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Verdict:
            score: float

        def reward(response):
            return Verdict(float(response)).score
    """)
    assert scores(pool, ["1"]) == [1.0]


def test_an_object_that_is_called_with_await_is_an_async_function(pool_of):
    pool = pool_of("""
        import asyncio

        class Judge:
            async def __call__(self, response):
                await asyncio.sleep(0.3)
                return float(response)

        reward = Judge()
    """)
    assert scores(pool, ["1"]) == [1.0]
    begin = time.monotonic()
    assert scores(pool, ["2"] * 20) == [2.0] * 20
    assert time.monotonic() - begin < 4


# ---------------------------------------------------------------- blame


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("time.sleep(600)", "timeout"),
        ("sum(range(10 ** 12))", "timeout"),
        ("ctypes.string_at(0)", "crash"),
        ("os._exit(3)", "crash"),
    ],
)
@pytest.mark.parametrize("where", ["before", "after", "in a task"])
def test_of_many_open_calls_the_one_that_hangs_or_crashes_is_to_blame(pool_of, fault, failure, where):
    pool = pool_of(
        f"""
        import asyncio, ctypes, os, time

        async def fault():
            await asyncio.sleep(0.1)
            {fault}

        async def reward(response):
            if response == "bad":
                if {where!r} == "in a task":
                    await asyncio.gather(fault(), asyncio.sleep(5))
                if {where!r} == "after":
                    await asyncio.sleep(0.1)
                {fault}
            await asyncio.sleep(0.3)
            return 1.0
        """,
        timeout_s=2.0,
    )
    found = outcomes(pool, ["good"] * 9 + ["bad"] + ["good"] * 9)
    bad = found.pop(9)
    assert (bad.failure, bad.proven) == (Failure[failure], True)
    assert [each.value and each.value.score for each in found] == [1.0] * 18


def test_an_async_call_that_waits_too_long_is_ended_alone_and_proves_nothing(pool_of):
    pool = pool_of(
        """
        import asyncio, os

        async def reward(response):
            if response == "slow":
                await asyncio.sleep(600)
            await asyncio.sleep(0.5)
            return float(os.getpid())
        """,
        timeout_s=1.0,
        max_tries=2,
    )
    submit(pool, ["a", "slow", "b"])
    events, _ = events_until_ended(pool, 3)
    ended = {event.key: event.outcome for event in events if isinstance(event, Ended)}
    assert (ended[1].failure, ended[1].proven) == (Failure.timeout, False)
    assert [(event.key, event.failure) for event in events if isinstance(event, Repeated)] == [(1, Failure.timeout)]
    assert {ended[0].value.score, ended[2].value.score} == set(scores(pool, ["c"])), "the process lives on"


def test_a_call_that_does_not_let_itself_be_cancelled_is_ended_with_its_process(pool_of, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE_S", 1.0)
    pool = pool_of(
        """
        import asyncio

        async def reward(response):
            while response == "stubborn":
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
            return 1.0
        """,
        timeout_s=0.5,
        max_tries=1,
    )
    stubborn, good = outcomes(pool, ["stubborn", "good"])
    assert (stubborn.failure, stubborn.proven) == (Failure.timeout, False) and good.value.score == 1.0


@pytest.mark.parametrize("head", ["", "async "])
@pytest.mark.parametrize(
    "raised", ["asyncio.CancelledError('no')", "SystemExit('no')", "GeneratorExit('no')", "Panic('no')", "Mute('no')"]
)
def test_whatever_a_call_raises_is_an_error_of_the_call_alone(pool_of, head, raised):
    """Also what is no Exception, as the panic of a library in Rust, and what has no text."""
    pool = pool_of(
        f"""
        import asyncio, os
        class Panic(BaseException): pass
        class Mute(Exception):
            def __str__(self): return self.nothing
        {head}def reward(response):
            if response: raise {raised}
            return os.getpid()
        """,
        max_tries=1, timeout_s=60.0,
    )  # fmt: skip
    before, found, after = (outcomes(pool, [each])[0] for each in ("", "a", ""))
    text = "no" if "Mute" not in raised else "its own text cannot be made (AttributeError)"
    assert f"{text} (own_reward.py, line 7)" in found.message and found.failure is Failure.error
    assert before.value == after.value, "the process lives on"


# ---------------------------------------------------------------- tries


def test_a_call_that_fails_is_made_again_after_pauses_that_grow(pool_of):
    pool = pool_of(
        """
        tries = {}

        async def reward(response):
            tries[response] = tries.get(response, 0) + 1
            if tries[response] < int(response):
                raise ConnectionError("away")
            return 1.0
        """,
        max_tries=3,
        retry_pause_s=0.4,
    )
    begin = time.monotonic()
    submit(pool, ["1", "3", "4"])
    events, ends = events_until_ended(pool, 3)
    ended = {event.key: event.outcome for event in events if isinstance(event, Ended)}
    assert ended[0].value.score == ended[1].value.score == 1.0
    assert ended[2].failure is Failure.error and ended[2].message.startswith("ConnectionError: away (own_reward.py")
    assert sum(isinstance(event, Repeated) for event in events) == 4
    assert ends[1] - begin > 0.4 + 0.8


def test_one_bad_response_of_many_is_judged_alone_and_the_others_keep_their_rewards(pool_of):
    pool = pool_of("def reward(responses): return [1 / len(each) for each in responses]")
    found = outcomes(pool, ["a"] * 20 + [""] + ["a"] * 20)
    assert [each.failure for each in found] == [None] * 20 + [Failure.error] + [None] * 20


# ---------------------------------------------------------------- outages

JUDGE = """
    import os

    async def reward(response):
        if os.path.exists(AWAY):
            raise ConnectionError("away")
        return 1.0
"""


@pytest.mark.scenario(41)
def test_calls_wait_for_a_server_that_is_away_and_none_is_lost(pool_of, tmp_path, caplog):
    away = tmp_path / "away"
    pool = pool_of(JUDGE.replace("AWAY", repr(str(away))), max_tries=2, retry_pause_s=0.1, outage_wait_s=60.0)
    assert scores(pool, ["a"] * 4) == [1.0] * 4
    away.touch()
    submit(pool, ["a"] * 40)
    end = time.monotonic() + 3.0
    events = []
    while time.monotonic() < end:
        events += pool.poll(0.1)
    assert not [event for event in events if isinstance(event, Ended)]
    assert sum(isinstance(event, Repeated) for event in events) < 80, "one call at a time tries it"
    away.unlink()
    events, _ = events_until_ended(pool, 40)
    assert {event.outcome.failure for event in events if isinstance(event, Ended)} == {None}
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("every call fails, the last with ConnectionError: away" in text for text in told) == 1
    assert sum("The run waits until one succeeds, at most 60 s (reward.outage_wait_s)" in text for text in told) == 1
    assert sum("calls succeed again after" in text for text in told) == 1
    assert 2.0 < pool.take_outage_s() < 60.0 and pool.take_outage_s() == 0.0


@pytest.mark.parametrize("head", ["", "async "])
def test_a_file_that_ends_its_process_when_it_is_imported_is_named_with_the_line(pool_of, head):
    pool = pool_of(f"import sys\n{head}def reward(response):\n    return 1.0\nsys.exit('usage: no')\n")
    pool.submit(0, {"response": "", "answer": "1", "prompt": "?"})
    with pytest.raises(UserCodeError, match=r"SystemExit: usage: no \(own_reward.py, line 4\)"):
        while True:
            pool.poll(1.0)


@pytest.mark.scenario(41)
def test_an_outage_that_begins_with_single_failures_loses_nothing(pool_of, tmp_path):
    """The last successes come between the first failures, so that few calls fail in their first try afterwards."""
    away = tmp_path / "away"
    away.touch()
    pool = pool_of(
        f"""
        import asyncio, itertools, pathlib
        numbers = itertools.count()
        async def reward(response):
            await asyncio.sleep(0.01)
            number = next(numbers)
            if pathlib.Path({str(away)!r}).exists() and (number % 2 or number >= 24):
                raise ConnectionError("away")
            return 1.0
        """,
        max_open_calls=24, max_tries=3, retry_pause_s=0.1, outage_wait_s=60.0,
    )  # fmt: skip
    submit(pool, ["a"] * 24)
    end = time.monotonic() + 3.0
    events = []
    while time.monotonic() < end:
        events += pool.poll(0.1)
    away.unlink()
    assert sum(isinstance(event, Ended) for event in events) == 12
    events += events_until_ended(pool, 12)[0]
    assert {event.outcome.failure for event in events if isinstance(event, Ended)} == {None}


@pytest.mark.scenario(41)
def test_the_last_responses_of_a_step_wait_for_their_server(pool_of, tmp_path, caplog):
    """Too few are left to fail as often as an outage asks for: the call known to succeed shows that there is one."""
    away = tmp_path / "away"
    pool = pool_of(JUDGE.replace("AWAY", repr(str(away))), max_tries=3, retry_pause_s=0.1, outage_wait_s=60.0)
    assert scores(pool, ["a"] * 4) == [1.0] * 4
    away.touch()
    submit(pool, ["a", "b"])
    end = time.monotonic() + 3.0
    events = []
    while time.monotonic() < end:
        events += pool.poll(0.1)
    assert not [event for event in events if isinstance(event, Ended)]
    assert caplog.text.count("every call fails, the last with ConnectionError: away") == 1
    away.unlink()
    events = events_until_ended(pool, 2)[0]
    assert {event.outcome.failure for event in events if isinstance(event, Ended)} == {None}


@pytest.mark.parametrize("head", ["", "async "])
def test_the_last_response_of_a_step_fails_by_itself_where_others_succeed(pool_of, tmp_path, caplog, head):
    calls = tmp_path / "calls"
    pool = pool_of(
        f"""
        {head}def reward(response):
            open({str(calls)!r}, "a").write(response + " ")
            return float(response)
        """,
        max_tries=3, retry_pause_s=0.1, outage_wait_s=60.0,
    )  # fmt: skip
    begin = time.monotonic()
    assert [each.failure for each in outcomes(pool, ["1", "bad"])] == [None, Failure.error]
    assert calls.read_text() == "1 bad bad bad 1 bad ", "one that succeeds, and one try more"
    assert time.monotonic() - begin < 30 and "every call fails" not in caplog.text


def test_a_file_that_is_edited_between_two_workers_is_told(pool_of, tmp_path, caplog):
    beside = tmp_path / "beside.py"
    beside.write_text("VALUE = 1.0\n")
    pool = pool_of("import json, beside\ndef reward(response):\n    return beside.VALUE\n")
    assert scores(pool, ["a"]) == [1.0]
    before = pool.files
    assert sorted(before) == [str(beside), str(tmp_path / "own_reward.py")], "none of Parity, Python or a package"
    for child in children():
        child.kill()
    assert scores(pool, ["a"]) == [1.0]
    assert pool.files == before and "what now stands in" not in caplog.text
    beside.write_text("VALUE = 0.25\n")
    for child in children():
        child.kill()
    assert scores(pool, ["a"]) == [0.25]
    assert caplog.text.count(f"the run goes on with what now stands in {beside}") == 1
    assert pool.files[str(beside)] != before[str(beside)]


@pytest.mark.scenario(41)
def test_an_outage_that_lasts_too_long_ends_the_calls(pool_of, tmp_path):
    away = tmp_path / "away"
    away.touch()
    pool = pool_of(JUDGE.replace("AWAY", repr(str(away))), max_tries=2, retry_pause_s=0.1, outage_wait_s=1.0)
    begin = time.monotonic()
    found = outcomes(pool, ["a"] * 40)
    assert {each.failure for each in found} == {Failure.error}
    told = "no call succeeded for 1 s, the last failed with ConnectionError: away (own_reward.py, line 6)"
    assert any(each.message == told for each in found)
    assert 1.0 < time.monotonic() - begin < 30
    away.unlink()
    assert scores(pool, ["a"]) == [1.0], "the pool can go on"


@pytest.mark.parametrize("head", ["async def", "def"])
def test_a_row_of_bad_responses_longer_than_what_is_open_is_no_outage(pool_of, caplog, head):
    pool = pool_of(
        f"{head} reward(response):\n    return float(response)\n",
        max_open_calls=4, max_tries=2, retry_pause_s=0.1, outage_wait_s=5.0,
    )  # fmt: skip
    found = outcomes(pool, ["1", *["bad"] * 60, "1"])
    assert [each.value and each.value.score for each in found] == [1.0, *[None] * 60, 1.0]
    assert all("could not convert" in each.message for each in found[1:-1]), "none was given up for an outage"
    assert "every call fails" not in caplog.text


def test_single_failures_are_no_outage(pool_of, tmp_path):
    pool = pool_of(
        """
        async def reward(response):
            if response == "bad":
                raise ValueError("bad")
            return 1.0
        """,
        outage_wait_s=600.0,
    )
    found = outcomes(pool, ["bad"] * (OUTAGE_CALLS - 1))
    assert {each.failure for each in found} == {Failure.error}
    begin = time.monotonic()
    found = outcomes(pool, ["good", "good", "bad"] * 20 + ["bad"] * 40)
    assert [each.failure for each in found] == [None, None, Failure.error] * 20 + [Failure.error] * 40
    assert time.monotonic() - begin < 30, "a call that is known to succeed has shown whose fault it is"


@pytest.mark.parametrize("head", ["", "async "])
def test_a_busy_machine_makes_no_response_wrong(pool_of, head):
    """Code that has not had the seconds of its deadline on a CPU is not late; code that waits is."""
    pool = pool_of(
        f"""
        import time

        {head}def reward(response):
            if response == "wait":
                time.sleep(600)
            while response == "compute" and time.process_time() < 0.8 or time.process_time() < 0.1:
                pass
            return 1.0
        """,
        timeout_s=1.0,
    )
    outcomes(pool, ["warm"])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6 * (os.cpu_count() or 1))]
    try:
        compute, wait = outcomes(pool, ["compute", "wait"])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert compute.failure is None
    assert (wait.failure, wait.proven) == (Failure.timeout, True)


@pytest.mark.parametrize(
    "source",
    [
        "def reward(response, threshold, *, scale=1.0): return scale * (len(response) > threshold)",
        "async def reward(response, threshold, scale=1.0): return scale * (len(response) > threshold)",
        "def reward(responses, threshold, scale=1.0): return [scale * (len(each) > threshold) for each in responses]",
        "def reward(response, **more): return more['scale'] * (len(response) > more['threshold'])",
    ],
)
def test_further_parameters_have_the_values_of_the_config(pool_of, source):
    assert scores(pool_of(source, arguments={"threshold": 2, "scale": 4.0}), ["a", "abc"]) == [0.0, 4.0]


def test_an_argument_that_is_no_parameter_is_named(pool_of):
    pool = pool_of("def reward(response, threshold): return 1.0", arguments={"treshold": 2})
    with pytest.raises(UserCodeError, match=r"reward\.arguments\.treshold is no parameter of reward, which has resp"):
        scores(pool, ["a"])
    with pytest.raises(ConfigError, match=r"arguments must be \{\} with reward\.function=gsm8k"):
        RewardConfig(function="gsm8k", arguments={"threshold": 2})
