"""trainer/text/redact.py: planted secrets never survive, our own keys always do."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from rollout.processes.secret_names import is_secret_name
from rollout.sglang.config import SGLangConfig
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig
from trainer.text.redact import REDACTED, redact, redact_argv, redact_text

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
        "credentials", "authorization", "auth", "wandb_key", "key", "cookie", "Set-Cookie", "session", "sessionid",
        "session_id", "signature", "sig", "bearer", "passphrase", "pat", "GITHUB_PAT", "jwt",
    ],
)  # fmt: skip
def test_secret_names(key: str) -> None:
    assert is_secret_name(key)
    assert redact({key: PLANTED}) == {key: REDACTED}


@pytest.mark.parametrize(
    "key",
    [
        "prompt_key", "answer_key", "data.prompt_key", "tokenizer_path", "model", "dir", "author", "path", "XPATH",
        "pattern", "keyword", "sigma", "design", "PARITY_TEST_SESSION", "num_sessions",
    ],
)  # fmt: skip
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


HEX = "0123456789abcdef0123456789abcdef01234567"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\nqz==\n-----END RSA PRIVATE KEY-----"

SECRETS = [
    ("https://h/f?sv=2024&sig=pl4nted%2Bs3cret%3D&se=9", "pl4nted"),
    ("403 for url: https://h/f?X-Amz-Credential=pl4nted%2Fus&X-Amz-Date=2026", "pl4nted"),
    ("https://h/f?X-Amz-Date=2026&X-Amz-Signature=pl4nted0123abcdef", "pl4nted"),
    ("https://h/f?X-Amz-Security-Token=pl4nted//x", "pl4nted"),
    ("https://h/f?Expires=1&Signature=pl4nted~x__&Key-Pair-Id=K", "pl4nted"),
    ("<https://storage/o?GoogleAccessId=a&X-Goog-Signature=pl4nted>", "pl4nted"),
    ("https://h/f?access_token=pl4nted#top", "pl4nted"),
    ("https://me:pl4nted@h/path", "pl4nted"),
    ("git+https://pl4nted@github.com/o/r", "pl4nted"),
    ("redis://:pl4nted@h:6379/0", "pl4nted"),
    ('{"api_key": "pl4nted", "n": 1}', "pl4nted"),
    ("{'token': 'pl4nted'}", "pl4nted"),
    ('{"a": {"client_secret" : "pl4nted"}}', "pl4nted"),
    ('"{\\"api_key\\": \\"pl4nted\\"}"', "pl4nted"),
    ('{"cookie": "pl4nted"}', "pl4nted"),
    ('{"session": "pl4nted"}', "pl4nted"),
    ('{"signature": "pl4nted"}', "pl4nted"),
    ('{"bearer": "pl4nted"}', "pl4nted"),
    ('{"passphrase": "pl4nted"}', "pl4nted"),
    ('{"github_pat": "pl4nted"}', "pl4nted"),
    ("api_key=pl4nted", "pl4nted"),
    ("export WANDB_API_KEY=pl4nted", "pl4nted"),
    ("AWS_SECRET_ACCESS_KEY: pl4nted", "pl4nted"),
    ("password: pl4nted", "pl4nted"),
    ("passphrase = pl4nted", "pl4nted"),
    ("HF_TOKEN=pl4nted-x", "pl4nted"),
    ("Authorization: Bearer pl4nted-s3cret-value", "pl4nted"),
    ("Authorization: Basic cGw0bnRlZDp4eA==", "cGw0bnRlZDp4eA"),
    ("Authorization: Token pl4nted-s3cret", "pl4nted"),
    ("authorization: pl4nted-s3cret", "pl4nted"),
    ("'Authorization': 'Token pl4nted-s3cret'", "pl4nted"),
    ("Proxy-Authorization: Basic cGw0bnRlZDp4eA==", "cGw0bnRlZDp4eA"),
    ("sent Bearer pl4nted-s3cret-value", "pl4nted"),
    ("X-Api-Key: pl4nted", "pl4nted"),
    ("X-Auth-Token: pl4nted", "pl4nted"),
    ("Cookie: sid=pl4nted; theme=dark; id=pl4nted2", "pl4nted"),
    ("Set-Cookie: session=pl4nted; HttpOnly", "pl4nted"),
    (f"wandb login {HEX}", HEX),
    (f"wandb: ERROR key {HEX} rejected", HEX),
    (f"local-{HEX}", HEX),
    (f"got {JWT} instead", JWT),
    ("npm_" + "a1B2" * 9, "a1B2a1B2"),
    ("id ASIA" + "ABCD2345" * 2, "ABCD2345"),
    ("id AKIA" + "ABCD2345" * 2, "ABCD2345"),
    ("AIza" + "Sy_0-abcd" * 4, "Sy_0-abcd"),
    ("ghp_" + "a1" * 18, "a1a1a1"),
    ("ghs_" + "a1" * 18, "a1a1a1"),
    ("glpat-" + "a1_-" * 5, "a1_-"),
    ("xoxb-1234567890-abcdef", "1234567890"),
    ("sk-proj-a1B2c3D4e5F6g7H8", "a1B2c3"),
    ("sk_live_a1B2c3D4e5F6g7H8", "a1B2c3"),
    ("hf_" + "aB" * 17, "aBaBaB"),
    (PEM, "MIIEow"),
    (PEM.partition("qz")[0], "MIIEow"),
]

INNOCENT = [
    "KeyError: 'prompt'",
    "optim.lrr is not a key: did you mean optim.lr?",
    "unknown key: value",
    "policy.max_tokens_per_micro_batch must be >= 1, got 0",
    "data.prompt_key=problem",
    "{'prompt_key': 'problem', 'answer_key': 'answer'}",
    '{"max_new_tokens": 64, "eos_token_id": 2}',
    "TOKENIZERS_PARALLELISM=false",
    "tokenizer: Qwen/Qwen2.5-0.5B",
    f"commit {HEX}",
    f"model.revision={HEX}",
    "sha256:" + "0123456789abcdef" * 4,
    "https://huggingface.co/Qwen/Qwen2.5-0.5B/resolve/main/config.json",
    "http://127.0.0.1:30000/generate?stream=true&page=2",
    "git@github.com:owner/repo.git",
    "ray://127.0.0.1:10001",
    "file:///srv/ada/run/config.yaml",
    "Basic arithmetic, and bearer of news",
    "the bearer understands authentication and authorization",
    "the author: Ada Lovelace, authors: two",
    "a risk-averse-strategy-with-words",
    "sk-learn-estimators-and-transformers",
    "from huggingface_hub import hf_hub_download",
    "hf_transfer is not installed",
    "local-rank 0 and local-attention-window",
    "npm_config and npm run build",
    "eyJ is how a JWT begins",
    "-----BEGIN CERTIFICATE-----\nMIID\n-----END CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nMIID\n-----END PUBLIC KEY-----",
    "the secret of the run: patience",
    "a path: /usr/lib, a pattern: [a-z], sigma=0.1, sig. 3",
    "signature of f(x) -> y",
    "session 12 of 40; 3 sessions: done",
    "cookies and keys are mentioned, nothing is assigned",
    "monkeys = 12, keyboard: qwerty, keyword: if",
    "AssertionError: assert x == 'token'",
    "wandb: run run-20261123_0900-abc123 synced",
    'File "/srv/token_deltas.py", line 12, in step',
    "reward 0.41 | K3 3.1e-4 | kept 12/16",
    "What is 2 + 2? <think>4</think> #### 4",
    "10:20:30 engine-0: started in 20.1 s",
    "a\u2028b\x00c\ud83d",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_a_secret_is_taken_out_of_text(text: str, secret: str) -> None:
    assert secret in text
    for shown in (redact_text(text), json.dumps(redact({"rollout": {"engine_args": {"x": text}}}))):
        assert secret not in shown and REDACTED in shown


@pytest.mark.parametrize("text", INNOCENT)
def test_text_without_a_secret_stays_whole(text: str) -> None:
    assert redact_text(text) == text
    assert redact({"message": text}) == {"message": text}


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "key",
        "://",
        "a.",
        "eyJ-",
        "api_key",
        "?x",
        "wandb ",
        "sk-",
        "-----BEGIN PRIVATE KEY",
        "cookie:",
        "'\"",
        "=",
    ],
)
def test_the_time_grows_with_the_length_of_a_text_only(unit: str) -> None:
    """The message of an error can hold a response; a hundred thousand characters take no minute."""
    started = time.process_time()
    redact_text(unit * (200_000 // len(unit)))
    assert time.process_time() - started < 5.0
