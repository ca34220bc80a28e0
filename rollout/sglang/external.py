"""A server that Parity did not start, in the place of `rollout/sglang/server.py`: address and keys, no process.

No process is started or ended; `rollout/sglang/engine.py` undoes its changes to the server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.engine import EngineError
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.installation import check_release

if TYPE_CHECKING:
    from rollout.sglang.config import SGLangConfig

API_KEY = "PARITY_SGLANG_API_KEY"
ADMIN_API_KEY = "PARITY_SGLANG_ADMIN_API_KEY"
READY_INTERVAL_S = 0.5
ANSWER_TIMEOUT_S = 10.0
REFUSED_S = 10.0
"""Seconds after which a server that refuses the connection is given up: nobody listens there. One that accepts it may
still load its model, and is waited for."""
UNAUTHORIZED = 401

REFUSED_OPTIONS = ("dp_size", "pp_size", "ep_size", "quantization", "speculative_algorithm", "enable_lora")
"""Options under which the weights of a server cannot be verified; the values 1, false and null are allowed."""


class ExternalServer:
    """One server of `rollout.servers`. The keys are read from the environment once."""

    def __init__(self, address: str, *, index: int) -> None:
        self._index = index
        self._client = SGLangClient(
            address=address.rstrip("/"),
            api_key=os.environ.get(API_KEY, ""),
            admin_api_key=os.environ.get(ADMIN_API_KEY, "") or os.environ.get(API_KEY, ""),
        )

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def pids(self) -> tuple[int, ...]:
        """Empty: no process of the server belongs to Parity."""
        return ()

    @property
    def end_cause(self) -> str:
        """Empty: the end of such a server shows only at the next call."""
        return ""

    def client(self) -> SGLangClient:
        return self._client

    def start(self, *, timeout_s: float) -> None:
        """Wait until the server answers, for REFUSED_S where nobody listens. Raises EngineError."""
        begin = time.monotonic()
        while True:
            try:
                self.client().call("/model_info", timeout_s=min(ANSWER_TIMEOUT_S, timeout_s))
                return
            except ClientError as error:
                if error.status == UNAUTHORIZED:
                    raise EngineError(
                        self.error("start", f"{error}; set {API_KEY} and {ADMIN_API_KEY}", policy_version=0)
                    ) from error
                waited_s = time.monotonic() - begin
                if waited_s > (min(REFUSED_S, timeout_s) if error.is_refused else timeout_s):
                    cause = f"no answer within rollout.start_timeout_s={timeout_s}: {error}"
                    if error.is_refused:
                        cause = f"nobody listens after {waited_s:.0f} s: {error}"
                    raise EngineError(self.error("start", cause, policy_version=0)) from error
            time.sleep(READY_INTERVAL_S)

    def check(self, info: Mapping[str, Any], config: SGLangConfig) -> None:
        """Check that a server with this /server_info can serve the run. Raises EngineError naming the option."""
        check_release(str(info.get("version", "0")))
        # With "auto" the type is that of the checkpoint; the digests of the first sync verify the type.
        if info.get("dtype") not in ("auto", config.dtype.value):
            raise EngineError(f"the server computes in {info.get('dtype')}, rollout.dtype is {config.dtype.value}")
        if not info.get("skip_tokenizer_init"):
            raise EngineError("the server was not started with --skip-tokenizer-init: it would make text of responses")
        for option in REFUSED_OPTIONS:
            if info.get(option) not in (None, False, 1):
                raise EngineError(f"the server runs with {option}={info[option]!r}: its weights could not be verified")
        if info.get("enable_custom_logit_processor"):
            raise EngineError("the server runs with enable_custom_logit_processor: it executes code sent to it")

    def stop(self) -> None:
        """Does nothing: the server was running before the run."""

    def error(self, phase: str, cause: str, *, policy_version: int, lost: bool = False) -> str:
        """Text of an error; `lost` is accepted for the interface of SGLangServer and ignored."""
        return (
            f"engine {self._index} (sglang, policy version {policy_version}) {phase}: {cause}. "
            f"The server at {self.address} is not ours: look into its own log"
        )
