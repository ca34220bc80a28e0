"""One weight sync of one SGLang server: checked weights -> loaded, verified bit by bit, or WeightSyncError.

Pause, open the update, load the weights, close it, drop the prefix cache, ask SGLang for the digests of its weights,
compare, set the version, continue. Requests may be unfinished meanwhile. `rollout/sglang/engine.py` starts the sync;
`rollout/sglang/expected.py` makes the expected digests; `rollout/sglang/loader.py` reads the shared memory in the
server, and a server that cannot map the memory gets the bytes themselves, in SGLang's own format.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from rollout.config import Quantization
from rollout.engine import LayoutError, WeightReport, WeightSyncError
from rollout.sglang.client import ADMIN_ROUTES, ClientError, SGLangClient
from rollout.sglang.expected import SGLangLayout
from rollout.sglang.loader import LOADER
from rollout.types import AdapterSpec, PackedWeights, TensorSpec
from rollout.weights.adapter import last_part
from rollout.weights.fusion import EMBEDDING_NAME, TIED_NAME
from rollout.weights.packed_weights import check_weights, content_mark, dtype_name, split, unpack
from rollout.weights.shared_weights import WeightRegion

CLOSE_TIMEOUT_S = 30.0
"""Seconds for closing a session after a failure."""
LISTED_MISMATCHES = 5
WEIGHT_TAGS = ("weights",)
CACHE_TAGS = ("kv_cache", "cuda_graph")
"""SGLang's names of memory that can be released."""
PART_BYTES = 256 << 20
"""Largest number of bytes that are sent, or staged in shared memory, at a time; a larger tensor comes alone."""
ADAPTER_NAME = "policy"
"""SGLang's name of the adapter, which is the same for all versions of it."""
_OPTIONAL_ROUTES = {
    "/freeze_gc",
    "/load_lora_adapter_from_tensors",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
REQUIRED_ROUTES = ADMIN_ROUTES - _OPTIONAL_ROUTES | {"/generate", "/model_info", "/server_info"}
"""Routes without which an engine cannot be driven."""


class WeightUpdate:
    """Loads weights into one server, verifies them, and releases their memory. Does not handle processes and logs."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        device: str,
        dtype: torch.dtype,
        num_kv_heads: int,
        timeout_s: float,
        maps_memory: bool = True,
        quantization: Quantization = Quantization.none,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """`device` ("cpu" or "cuda") and `dtype` are the engine's; `timeout_s` bounds a whole sync.

        With an `adapter` the server has been started for one: it gets the frozen weights once, then adapters alone.

        `maps_memory` is True if the server has Parity's loader and can open memory of this machine's processes;
        `quantization` is the format of its projections. The constructor asks the server for its routes and parameters.
        Raises ClientError, or WeightSyncError if the server lacks a route.
        """
        self._client = client
        self._maps_memory = maps_memory
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        if missing := sorted(REQUIRED_ROUTES - client.routes(timeout_s=timeout_s)):
            raise WeightSyncError(f"the server lacks the routes {', '.join(missing)}: weights could not be verified")
        self._adapter = adapter
        if adapter is not None:
            self._name_adapter(adapter)
        held = self._held_digests()
        self.layout = SGLangLayout(
            parameters=tuple(held[0]),
            num_ranks=len(held),
            num_kv_heads=num_kv_heads,
            dtype=dtype_name(dtype),
            device=device,
            quantization=quantization,
        )
        self._released: set[str] = set()
        """SGLang's tags of the memory that is released."""
        self._staging: WeightRegion | None = None
        self._parts: list[PackedWeights] = []
        """What the server gets in this sync: frozen weights that it does not hold yet, then the adapter; or all."""
        self._base_mark = ""
        """`content_mark` of the frozen weights that the server is known to hold."""
        self._sources: dict[str, tuple[str, ...]] = {}
        """Engine parameter -> the tensors of this sync that make it up."""
        self._expected: list[dict[str, str]] = []

    def prepare(self, weights: PackedWeights) -> None:
        """Match the tensors with the engine's parameters and note the expected digests; sends no weights.

        `weights` have passed `check_weights`; the frozen weights of an adapter are checked here, when they are sent.
        The trainer has made the digests if it knew this layout. Raises WeightSyncError for missing or unknown tensors.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._parts, base = [weights], weights.base
        if (base is None) is not (self._adapter is None):
            sent, wanted = ("all weights", "an adapter") if base is None else ("an adapter", "all weights")
            raise WeightSyncError(f"policy version {weights.policy_version}: {sent} came, the engine wants {wanted}")
        if base is not None and content_mark(base.tensors) != self._base_mark:
            check_weights(base, held_version=base.policy_version)
            self._parts = [base, weights]
        self._sources, self._expected = {}, [{} for _ in range(self.layout.num_ranks)]
        for part in self._parts:
            for rank, digests in enumerate(self._expected_of(part, is_adapter=part.base is not None)):
                self._expected[rank] |= digests

    def _expected_of(self, part: PackedWeights, *, is_adapter: bool) -> list[dict[str, str]]:
        """Rank -> parameter -> digest of one part of a sync."""
        specs = {spec.name: spec for spec in part.tensors}
        where = f"policy version {part.policy_version}"
        try:
            expected = self.layout.expected(sent=specs, of_adapter=is_adapter)
            digests = part.engine_digests.get(self.layout)
            if digests is None:
                for spec, tensor in unpack(part):
                    expected.add(spec.name, tensor)
                digests = expected.result()
        except LayoutError as error:
            raise WeightSyncError(f"{where}: {error}") from error
        if expected.fusion.tied and not _same_bytes(specs[TIED_NAME], specs[EMBEDDING_NAME]):
            raise WeightSyncError(f"{where}: {TIED_NAME} differs from {EMBEDDING_NAME}, but the engine ties them")
        self._sources |= expected.fusion.sources
        return digests

    def load(self, weights: PackedWeights, *, keeps_cache: bool = False) -> WeightReport:
        """Replace all weights with the prepared ones, verify, set the version; returns the report.

        Unfinished requests are retracted: they continue with the new weights, which first read the tokens so far. With
        `keeps_cache` they continue with the cache of the old weights. The version is set after the verification, so a
        server that failed in between reports no valid version. Raises WeightSyncError (the engine does not hold the
        sent weights) or ClientError (the server refused or is gone).
        """
        begin, policy_version = time.monotonic(), weights.policy_version
        if len(self._parts) > 1:
            self._base_mark = ""  # half of it may be there after a failure
        self._send(keeps_cache=keeps_cache, policy_version=policy_version)
        loaded = time.monotonic()
        self.verify(policy_version=policy_version)
        verified = time.monotonic()
        if weights.base is not None:
            self._base_mark = content_mark(weights.base.tensors)
        self._post("/update_weight_version", {"new_version": str(policy_version), "abort_all_requests": False})
        self._post("/continue_generation", {"torch_empty_cache": self.layout.device == "cuda"})
        return WeightReport(
            policy_version=policy_version,
            num_tensors=len(weights.tensors),
            num_bytes=sum(spec.num_bytes for part in self._parts for spec in part.tensors),
            load_s=loaded - begin + (time.monotonic() - verified),
            verify_s=verified - loaded,
        )

    @property
    def has_released(self) -> bool:
        """True if some memory is released."""
        return bool(self._released)

    def release_memory(self) -> None:
        """Release the memory of weights and caches; the weights are lost. Raises ClientError.

        SGLang ends its process when the same memory is released or taken twice. On a CPU the routes work and no memory
        is released. Not yet run on a GPU.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._post("/release_memory_occupation", {"tags": [*WEIGHT_TAGS, *CACHE_TAGS]})
        self._released = {*WEIGHT_TAGS, *CACHE_TAGS}
        self._base_mark = ""

    def take_memory(self, tags: Sequence[str]) -> None:
        """Take the released memory among SGLang's `tags` again. Raises ClientError."""
        if released := [tag for tag in tags if tag in self._released]:
            self._deadline = time.monotonic() + self._timeout_s
            self._post("/resume_memory_occupation", {"tags": released})
            self._released -= set(released)

    def verify(self, *, policy_version: int) -> None:
        """Compare the engine's weights with the prepared ones, within the time of the sync; raises WeightSyncError.

        Frozen weights that the engine was found to hold are not digested again.
        """
        sent = self._expected[0] if self._expected else {}
        ranks = self._held_digests(skipped=[name for name in self.layout.parameters if sent and name not in sent])
        wrong = [
            f"{name}{f' of rank {rank}' if len(ranks) > 1 else ''}, made of {', '.join(self._sources[name])}: "
            f"sent {digest}, held {held.get(name, 'nothing')}"
            for rank, (held, expected) in enumerate(zip(ranks, self._expected, strict=False))
            for name, digest in expected.items()
            if held.get(name) != digest
        ]
        if not wrong and len(ranks) == len(self._expected):
            return
        reported = self._client.call("/model_info", timeout_s=self._deadline - time.monotonic())["weight_version"]
        if not self._expected:
            raise WeightSyncError(f"no weights have been sent yet; the engine reports version {reported!r}")
        if len(ranks) != len(self._expected):
            raise WeightSyncError(f"{len(ranks)} ranks reported digests, {len(self._expected)} hold weights")
        shown = "; ".join(wrong[:LISTED_MISMATCHES])
        more = f" and {len(wrong) - LISTED_MISMATCHES} more" if len(wrong) > LISTED_MISMATCHES else ""
        raise WeightSyncError(
            f"the engine does not hold the weights of policy version {policy_version} that it was sent (it reports "
            f"version {reported!r}). Digests disagree for {shown}{more}"
        )

    def _send(self, *, keeps_cache: bool, policy_version: int) -> None:
        self._post("/pause_generation", {"mode": "in_place" if keeps_cache else "retract"})
        with self._session():
            # Every request must be answered before the next is made.
            for payload in (payload for part in self._parts for payload in self._payloads(part)):
                self._post(
                    "/update_weights_from_tensor",
                    {
                        # One entry per tensor-parallel rank: each rank takes its share of the tensors.
                        "serialized_named_tensors": [payload] * self.layout.num_ranks,
                        "load_format": LOADER if self._maps_memory else None,
                        "flush_cache": False,
                        "weight_version": f"unverified-{policy_version}",
                    },
                )
        if not keeps_cache:
            self._post("/flush_cache", {})

    def _payloads(self, weights: PackedWeights) -> Iterator[str]:
        """Yield what crosses HTTP for one part of a sync."""
        adapter = None if weights.base is None else self._adapter
        is_quantized = self.layout.quantization is not Quantization.none and adapter is None
        if not self._maps_memory:
            yield from map(inline_weights, split(weights, max_bytes=PART_BYTES))
        elif weights.region is not None:
            yield describe_weights(weights, quantized=is_quantized, adapter=adapter)
        else:
            # SGLang takes an adapter whole.
            for part in split(weights, max_bytes=PART_BYTES) if adapter is None else [weights]:
                yield describe_weights(self._staged(part), quantized=is_quantized, adapter=adapter)

    def _staged(self, part: PackedWeights) -> PackedWeights:
        """The part in memory that the server can map, for weights that only this process can read."""
        if self._staging is None or self._staging.data.nbytes < part.data.nbytes:
            self._staging = WeightRegion(part.data.nbytes)
        if not self._staging.try_lock():
            raise WeightSyncError("the memory in which weights are staged is in use")
        # The server answers a request after reading its part, so the next part may take the same place.
        with self._staging.writing(part.policy_version) as data:
            data[: part.data.nbytes] = part.data
        return replace(part, region=self._staging.address)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """An update session; SGLang refuses updates outside of one."""
        self._post("/begin_weight_update", {})
        try:
            yield
        except BaseException:
            # Close the session, or the server refuses the next sync; the first error is the one to report.
            with suppress(ClientError):
                # A separate time limit, because the limit of the sync may have just run out.
                self._client.call("/end_weight_update", body={}, timeout_s=CLOSE_TIMEOUT_S)
            raise
        self._post("/end_weight_update", {})

    def _name_adapter(self, adapter: AdapterSpec) -> None:
        """Make the adapter known to SGLang, still without numbers: requests can name it, and each sync fills it."""
        ranks = len(self._held_digests())
        body = {
            "lora_name": ADAPTER_NAME,
            "config_dict": described_adapter(adapter),
            "serialized_named_tensors": [_pickled({})] * ranks,
            "pinned": True,
        }
        answer = self._post("/load_lora_adapter_from_tensors", body)
        if not answer.get("success"):
            raise WeightSyncError(f"the server did not take the adapter: {answer.get('error_message')}")

    def _held_digests(self, *, skipped: Sequence[str] = ()) -> list[dict[str, str]]:
        """Digests of each tensor-parallel rank, by parameter, without those that are `skipped`."""
        body: dict[str, object] = {"action": "checksum"}
        if skipped:
            body["skip_tensor_list"] = list(skipped)
        return [rank["checksums"] for rank in self._post("/weights_checker", body)["ranks"]]

    def _post(self, route: str, body: Mapping[str, object]) -> Any:
        return self._client.call(route, body=body, timeout_s=self._deadline - time.monotonic())


def described_adapter(adapter: AdapterSpec) -> dict[str, object]:
    """The adapter in the words of peft's adapter_config.json, as far as SGLang reads them."""
    modules = sorted({last_part(name) for name in adapter.layers})
    return {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": modules}


def describe_weights(weights: PackedWeights, *, quantized: bool = False, adapter: AdapterSpec | None = None) -> str:
    """The text that crosses HTTP instead of weights: place and layout of the tensors, in SGLang's own format.

    SGLang accepts pickled tensors only, from an exact list of types; the text is one tensor [n] uint8 that holds JSON.
    """
    if weights.region is None:
        raise ValueError("the weights are not in shared memory")
    request = {
        "region": asdict(weights.region),
        "policy_version": weights.policy_version,
        "quantized": quantized,
        "adapter": None if adapter is None else described_adapter(adapter),
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "offset": spec.offset}
            for spec in weights.tensors
        ],
    }
    description = torch.frombuffer(bytearray(json.dumps(request).encode()), dtype=torch.uint8)
    return _pickled([("description", description)])


def inline_weights(weights: PackedWeights) -> str:
    """The tensors as SGLang unpacks them without Parity's loader: pickled in base64, 4/3 of their bytes."""
    # Copies, because a pickled view would include the storage of the whole buffer.
    named = [(spec.name, tensor.clone()) for spec, tensor in unpack(weights)]
    return _pickled(named)


def _pickled(tensors: list[tuple[str, torch.Tensor]] | dict[str, torch.Tensor]) -> str:
    """Bytes from which SGLang's unpickler, which admits tensors only, makes named tensors."""
    return base64.b64encode(pickle.dumps(tensors)).decode()


def _same_bytes(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.dtype, one.shape, one.digest) == (other.dtype, other.shape, other.digest)
