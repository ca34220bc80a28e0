"""trainer/run/notices.py: what a run says once about its rewards, and what it says nothing about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from algorithms.config import AdvantageConfig, Estimator
from rollout.task_config import ArithmeticDataConfig, RewardConfig
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig
from trainer.run.notices import IDLE_STEPS, Notices
from trainer.rundir.events import Severity

GRPO = TrainConfig(model=ArithmeticModelConfig(), data=ArithmeticDataConfig())
OWN = replace(GRPO, reward=RewardConfig(function="partial.py:reward"))
PARTIAL: dict[str, float | None] = {
    "reward/min": 0.0,
    "reward/max": 0.8,
    "reward/generated_accuracy": 0.0,
    "rollout/zero_variance_frac": 0.25,
    "optim/grad_norm": 0.1,
    "mismatch/kept_frac": 1.0,
}
FLAT = PARTIAL | {"reward/max": 0.0, "rollout/zero_variance_frac": 1.0}


def told(config: TrainConfig, rows: list[dict[str, float | None]]) -> list[tuple[int, Severity, str]]:
    """(step, severity, text) of all events of these rows."""
    notices = Notices(config)
    events = [event for step, row in enumerate(rows, start=1) for event in notices.observe(step, row)]
    return [(event.step, event.severity, event.text) for event in events]


def test_partial_credit_below_the_threshold_is_told_once() -> None:
    [(step, severity, text)] = told(OWN, [FLAT, PARTIAL, PARTIAL])
    assert (step, severity) == (2, Severity.info)
    assert text.startswith(
        "the rewards of this step differ (0 to 0.8), but none of its responses is correct: a number "
    )
    assert "from reward.correct=1 on" in text and "accuracy is 0" not in text
    assert "without 'correct', lower" in text, "a function that returns 'correct' is not helped by a lower number"
    assert told(OWN, [PARTIAL | {"reward/generated_accuracy": 0.01}, PARTIAL]) == [], "some response was correct"
    assert Notices(OWN, is_resumed=True).observe(3, PARTIAL) == []
    assert told(GRPO, [PARTIAL]) == [], (
        "a built-in function judges by itself: there, only a penalty makes rewards differ"
    )


def test_a_warning_when_all_groups_are_without_spread() -> None:
    assert told(GRPO, [FLAT] * (IDLE_STEPS - 1) + [PARTIAL] + [FLAT] * (IDLE_STEPS - 1)) == []
    [(step, severity, text)] = told(GRPO, [FLAT] * 3 * IDLE_STEPS)
    assert (step, severity) == (IDLE_STEPS, Severity.warn)
    assert "in each group all are equal" in text and "batch.group_size" in text


@pytest.mark.parametrize("grad_norm", [0.0, 0.1, None])
def test_without_a_group_as_baseline_the_gradient_decides(grad_norm: float | None) -> None:
    config = replace(GRPO, advantage=AdvantageConfig(estimator=Estimator.reinforce))
    found = told(config, [FLAT | {"optim/grad_norm": grad_norm}] * IDLE_STEPS)
    assert [text.startswith("the gradient was 0 in the last 3 steps") for _, _, text in found] == [True] * (
        grad_norm == 0
    )


def test_a_correction_that_rejects_every_token_is_named() -> None:
    rejected = PARTIAL | {"optim/grad_norm": 0.0, "mismatch/kept_frac": 0.0}
    [(_, severity, text)] = told(replace(GRPO, reward=RewardConfig(function="partial.py:reward")), [rejected] * 3)[1:]
    assert severity is Severity.warn and "the correction rejects every token" in text


def test_each_way_in_which_a_reward_fails_on_responses_is_told_once() -> None:
    failed = PARTIAL | {"reward/generated_accuracy": 0.5, "reward/timeouts": 13.0, "reward/errors": 1.0}
    lost = failed | {"reward/unscored": 2.0}
    found = told(OWN, [PARTIAL | {"reward/generated_accuracy": 0.5}, failed, failed, lost, lost])
    [(step, severity, text), (later, _, more)] = found
    assert (step, later, severity) == (2, 4, Severity.warn)
    assert "2 left a response without a reward" in more
    assert text == (
        "calls of the reward function failed in this step: 13 took longer than reward.timeout_s; 1 raised, or gave no "
        "number. Every step counts them in reward/timeouts, reward/errors"
    )


def test_calls_that_hang_explain_each_step_that_they_make_slow() -> None:
    hung = PARTIAL | {"reward/generated_accuracy": 0.5, "reward/timeouts": 1.0, "time/step_s": 40.0}
    slow, quick = hung | {"time/reward_s": 31.0}, hung | {"time/reward_s": 1.0}
    waits = slow | {"reward/timeouts": 0.0}
    found = told(OWN, [quick, quick, slow, waits, slow])
    assert [(step, severity) for step, severity, _ in found] == [
        (1, Severity.warn), (3, Severity.info), (5, Severity.info),
    ]  # fmt: skip
    assert "31 s of its 40 s" in found[1][2] and "1 took longer than reward.timeout_s" in found[1][2]
    assert "of its" not in found[0][2]
