"""A pool of real processes that score: what the tests of rewards have in common."""

import time

import psutil

from rollout.rewards.reward_pool import reward_pool
from rollout.task_config import RewardConfig
from rollout.user_code.pool import Ended


def pool_of_function(function, **config):
    """A pool that makes every call again at once, and waits for no outage, unless `config` says otherwise."""
    config = {"num_workers": 1, "timeout_s": 30.0, "retry_pause_s": 0.01, "outage_wait_s": 0.0} | config
    return reward_pool(RewardConfig(function=function, **config))


def ended(pool, timeout_s=1.0):
    """Key -> outcome of the calls that have ended since the last poll."""
    return dict(event for event in pool.poll(timeout_s) if isinstance(event, Ended))


def outcomes(pool, responses, *, answer="1", deadline_s=120.0):
    """The outcome of each response."""
    for key, response in enumerate(responses):
        pool.submit(key, {"response": response, "answer": answer, "prompt": "?"})
    found = {}
    end = time.monotonic() + deadline_s
    while len(found) < len(responses):
        assert time.monotonic() < end, f"only {sorted(found)} came back"
        found |= ended(pool)
    return [found[key] for key in range(len(responses))]


def scores(pool, responses):
    """The score of each response; None if its call has failed."""
    return [each.value and each.value.score for each in outcomes(pool, responses)]


def children():
    """The processes that run the function, each below its keeper."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if "rollout.rewards.child" in each.cmdline() and each.parent() in below]
