"""trainer/rundir/redact.py: planted secrets never survive, our own keys always do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from rollout.config import SGLangConfig
from rollout.processes.secret_names import is_secret_name
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from trainer.config.components import ArithmeticModelConfig
from trainer.config.train import TrainConfig
from trainer.rundir.redact import REDACTED, redact, redact_argv, redact_text

PLANTED = "pl4nted-s3cret-value"


@dataclass
class Nested:
    name: str = "kept"
    hf_token: str = PLANTED
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "API_KEY", "admin-api-key", "hf_token", "access.token", "client_secret", "Password", "passwd",
        "credentials", "authorization", "auth", "wandb_key", "key",
    ],
)  # fmt: skip
def test_secret_names(key: str) -> None:
    assert is_secret_name(key)
    assert redact({key: PLANTED}) == {key: REDACTED}


@pytest.mark.parametrize("key", ["prompt_key", "answer_key", "data.prompt_key", "tokenizer_path", "model", "dir"])
def test_harmless_names(key: str) -> None:
    assert redact({key: "question"}) == {key: "question"}


def test_nested_values_are_found() -> None:
    value = {
        "a": [{"b": ({"secret": PLANTED},)}],
        "c": Nested(options={"auth": {"user": PLANTED, "retries": 3}, "api_keys": [PLANTED, PLANTED]}),
        "d": ["--api-key", PLANTED, "--port", "80", f"--token={PLANTED}"],
    }
    shown = redact(value)
    assert PLANTED not in json.dumps(shown)
    assert shown["c"]["name"] == "kept"  # type: ignore[index]
    assert shown["c"]["options"]["auth"]["retries"] == 3  # type: ignore[index]
    assert shown["d"][:4] == ["--api-key", REDACTED, "--port", "80"]  # type: ignore[index]


def test_a_train_config_keeps_everything_but_the_planted_secrets() -> None:
    config = TrainConfig(
        model=ArithmeticModelConfig(),
        data=ArithmeticDataConfig(),
        rollout=SGLangConfig(
            engine_args={
                "mem_fraction_static": 0.6,
                "hf_token": PLANTED,
                "nested": {"deep": [{"password": PLANTED}], "url": f"https://me:{PLANTED}@host/path"},
                "extra": ["--admin-api-key", PLANTED],
                "max_total_tokens": 4096,
            }
        ),
    )
    plain = asdict(config)
    shown = redact(plain)
    assert PLANTED not in json.dumps(shown, default=str)
    assert shown["rollout"]["engine_args"]["max_total_tokens"] == 4096  # type: ignore[index]
    assert shown["rollout"]["engine_args"]["nested"]["url"] == f"https://{REDACTED}@host/path"  # type: ignore[index]
    shown["rollout"]["engine_args"] = plain["rollout"]["engine_args"]  # type: ignore[index]
    assert shown == plain, "no key of our own configs may be changed"


def test_file_data_columns_survive(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    data = FileDataConfig(train_path=str(rows), eval_path=str(rows), prompt_key="problem", answer_key="solution")
    assert redact(data) == asdict(data)


def test_numbers_survive_unless_the_name_says_password() -> None:
    assert redact({"max_new_tokens": 64, "token_budget": 1.5, "auth": True, "api_key": None}) == {
        "max_new_tokens": 64, "token_budget": 1.5, "auth": True, "api_key": None,
    }  # fmt: skip
    assert redact({"password": 123456, "api_key": 42}) == {"password": REDACTED, "api_key": REDACTED}


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", PLANTED, "x"], ["--api-key", REDACTED, "x"]),
        ([f"--api-key={PLANTED}"], [f"--api-key={REDACTED}"]),
        ([f"+rollout.engine_args.api_key={PLANTED}"], [f"+rollout.engine_args.api_key={REDACTED}"]),
        (
            [f"rollout.engine_args={{api_key: {PLANTED}, tp_size: 1}}"],
            [f"rollout.engine_args={{api_key: {REDACTED}, tp_size: 1}}"],
        ),
        (["sampling.max_new_tokens=64"], ["sampling.max_new_tokens=64"]),
        (["data.prompt_key=problem"], ["data.prompt_key=problem"]),
        ([f"cluster.address=ray://me:{PLANTED}@host:1"], [f"cluster.address=ray://{REDACTED}@host:1"]),
        (["+password=123456"], [f"+password={REDACTED}"]),
        ([f"data.url=https://host/f?sig_token={PLANTED}&page=2"], [f"data.url=https://host/f?sig_token={REDACTED}&page=2"]),
    ],
)  # fmt: skip
def test_argv(argv: list[str], shown: list[str]) -> None:
    assert redact_argv(argv) == shown


def test_text() -> None:
    assert redact_text(f"Authorization: Bearer {PLANTED}") == f"Authorization: Bearer {REDACTED}"
    assert redact_text("token hf_" + "a" * 30) == f"token {REDACTED}"
    assert redact_text("see https://host/path") == "see https://host/path"
