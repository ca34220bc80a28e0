"""A bundle: the tokens of one step of any trainer, in one safetensors file, from which the mismatch can be judged.

    lengths           [N] int32      response tokens of each response
    rollout_logprobs  [R] float32    log-prob of each token from the engine, nats, at the sampling temperature
    old_logprobs      [R] float32    log-prob of the same token from the trainer, with the weights that sampled it

All other tensors are optional:

    mask              [R] uint8      1 where the model sampled the token; without it everywhere
    advantages        [R] float32    what the loss multiplies with; without it the loss is not judged
    logprobs          [R] float32    log pi_theta of the loss, where it is not old_logprobs: after an optimizer step
    versions          [R] int32      optimizer steps of the weights that sampled each token
    token_ids         [R] int32
    rewards           [N] float32
    groups            [N] int64      equal for the responses of one group
    prompt_lengths    [N] int32      tokens of the prompt of each response
    prompt_ids        [P] int32      ids of the prompts, one after the other: with token_ids, `parity diagnose` can read
    support_sizes     [R] int32      number of tokens from which truncated sampling drew; 0 for the whole vocabulary
    support_ids       [K] int32      their ids, one token after the other: both log-probs are then those among them
    route_lengths     [N] int32      tokens of prompt and response whose experts are known: the first ones
    routes            [Q, L, E]      integers: the experts that the engine chose for them, of each layer with experts
    route_weights     [Q, L, E] float16    the factors of the experts' outputs, where the trainer takes the engine's

The metadata of the file are texts: `format` (FORMAT), `producer`, and where known `step`, `version` (optimizer steps of
the weights at the start of the step), `temperature`, `trainer_dtype`, `rollout_dtype`, `quantization` and `routing`
(replay or weights where the trainer used the engine's experts). R: response tokens of all responses, one after the
other; N: responses; P: tokens of all prompts; K: sum of support_sizes; Q: sum of route_lengths. A response token takes
8 bytes, and 29 with everything but supports and routes. Nothing in the file is executed. docs/bundle.md shows how to
write one in another trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.rundir.run_dir import StartError

FORMAT = "parity-bundle-1"
"""Value of `format`; other versions are refused."""
REQUIRED = ("lengths", "rollout_logprobs", "old_logprobs")
OF_TOKENS = {
    "rollout_logprobs": torch.float32, "old_logprobs": torch.float32, "mask": torch.uint8,
    "advantages": torch.float32, "logprobs": torch.float32, "versions": torch.int32, "token_ids": torch.int32,
    "support_sizes": torch.int32,
}  # fmt: skip
"""Tensor [R] -> the type in which it is written; another one of the same kind is read too."""
OF_RESPONSES = {
    "lengths": torch.int32, "rewards": torch.float32, "groups": torch.int64, "prompt_lengths": torch.int32,
    "route_lengths": torch.int32,
}  # fmt: skip
"""Tensor [N] -> the type in which it is written."""
OF_PROMPTS = {"prompt_ids": torch.int32}
"""Tensor [P] -> the type in which it is written."""
OF_SUPPORTS = {"support_ids": torch.int32}
"""Tensor [K] -> the type in which it is written."""
OF_ROUTES = {"routes": torch.uint8, "route_weights": torch.float16}
"""Tensor [Q, L, E] -> the type in which it is written; experts beyond 255 keep the type that they have."""
KINDS = OF_TOKENS | OF_RESPONSES | OF_PROMPTS | OF_SUPPORTS | OF_ROUTES
NUMBERS = ("step", "version", "temperature")
"""Metadata that are numbers."""


class BundleError(StartError):
    """A file is no bundle: the message names the file and all that is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bundle:
    """The tensors of a bundle, on the host; None where the file has none."""

    lengths: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor | None = None
    advantages: Tensor | None = None
    logprobs: Tensor | None = None
    versions: Tensor | None = None
    token_ids: Tensor | None = None
    rewards: Tensor | None = None
    groups: Tensor | None = None
    prompt_lengths: Tensor | None = None
    prompt_ids: Tensor | None = None
    support_sizes: Tensor | None = None
    support_ids: Tensor | None = None
    route_lengths: Tensor | None = None
    routes: Tensor | None = None
    route_weights: Tensor | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts of the file, without `format`."""

    def number(self, name: str) -> float | None:
        """A number of the metadata; None if the file does not have it."""
        text = self.metadata.get(name)
        return None if text is None else float(text)

    def lags(self) -> Tensor | None:
        """[R] int64, optimizer steps since the weights that sampled each token; None where nobody knows."""
        if self.versions is None:
            return None
        versions, newest = self.versions.to(torch.int64), self.number("version")
        return ((int(versions.max()) if newest is None else int(newest)) - versions).clamp_min(0)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything that is there."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                yield each.name, value


def routes_note(bundle: Bundle) -> str | None:
    """A sentence on routes that the trainer used and the bundle does not have."""
    if bundle.routes is not None or "routing" not in bundle.metadata:
        return None
    return (
        f"The trainer used the experts that the engine chose (policy.routing={bundle.metadata['routing']}), and this "
        "has no routes: parity replay <run.dir> step=N bundle=FILE routes=true writes them"
    )


def route_bytes(bundle: Bundle) -> int:
    """Bytes of the routes. Raises BundleError if there are none."""
    if bundle.routes is None:
        raise BundleError(
            "the step has no routes: its model is dense, policy.routing=live, or a version of Parity that left them "
            "out wrote the dump. Leave routes= out"
        )
    return sum(each.nbytes for each in (bundle.routes, bundle.route_weights) if each is not None)


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write `bundle` to the file `path`, which is replaced. Raises BundleError if its tensors do not fit each other."""
    tensors = dict(bundle.tensors())
    if problems := list(_problems(tensors, bundle.metadata)):
        raise BundleError(f"{path} was not written: {'; '.join(problems)}")
    kinds = KINDS if bundle.routes is None else KINDS | {"routes": bundle.routes.dtype}
    written = {name: tensor.detach().cpu().to(kinds[name]).contiguous().clone() for name, tensor in tensors.items()}
    save_file(written, path, metadata={**bundle.metadata, "format": FORMAT})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it, and a bundle is for others


def read_bundle(path: Path) -> Bundle:
    """Read the bundle in the file `path`. Raises BundleError with everything that is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path} is no safetensors file that can be read: {error}") from error
    if metadata.pop("format", None) != FORMAT:
        raise BundleError(f"{path} is no bundle: its metadata have no format={FORMAT} (docs/bundle.md)")
    if problems := list(_problems(tensors, metadata)):
        raise BundleError(f"{path} is no bundle that can be used: {'; '.join(problems)}")
    return Bundle(**tensors, metadata=metadata)


def _problems(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about everything that is wrong."""
    for name in REQUIRED:
        if name not in tensors:
            yield f"the tensor {name} is missing"
    for name, tensor in tensors.items():
        if name not in KINDS:
            yield f"{name} is not known; a bundle has {', '.join(KINDS)}"
        elif tensor.dim() != (wanted := 3 if name in OF_ROUTES else 1):
            dimensions = "three dimensions" if wanted == 3 else "one dimension"
            yield f"{name} must have {dimensions}, not shape {list(tensor.shape)}"
        elif tensor.dtype.is_floating_point != KINDS[name].is_floating_point:
            yield f"{name} must be of type {KINDS[name]} or one of its kind, not {tensor.dtype}"
    for name in NUMBERS:
        if name in metadata and _as_number(metadata[name]) is None:
            yield f"{name} in the metadata must be a number, not {metadata[name]!r}"
    lengths = tensors.get("lengths")
    if lengths is None or lengths.dim() != 1 or lengths.dtype.is_floating_point:
        return
    if not len(lengths) or int(lengths.min()) < 0:
        yield "lengths must be of one response at least, and none below 0"
        return
    sizes = [
        (OF_TOKENS, int(lengths.sum(dtype=torch.int64)), "sum of lengths"),
        (OF_RESPONSES, len(lengths), "number of lengths"),
    ]
    for counts_name, ids_name, least, kinds in (
        ("prompt_lengths", "prompt_ids", 1, OF_PROMPTS),
        ("support_sizes", "support_ids", 0, OF_SUPPORTS),
        ("route_lengths", "routes", 0, OF_ROUTES),
    ):
        counts = tensors.get(counts_name)
        if (counts is None) != (ids_name not in tensors):
            yield f"{counts_name} and {ids_name} belong together: one of them is missing"
        elif counts is not None and len(counts) and int(counts.min()) < least:
            yield f"{counts_name} must be at least {least}"
        elif counts is not None:
            sizes.append((kinds, int(counts.sum(dtype=torch.int64)), f"sum of {counts_name}"))
    kept = tensors.get("support_ids")
    if kept is not None and len(kept) and int(kept.min()) < 0:
        yield "support_ids must be at least 0"
    for names, wanted, of in sizes:
        for name in names:
            fits = name in tensors and tensors[name].dim() == (3 if name in OF_ROUTES else 1)
            if fits and len(tensors[name]) != wanted:
                yield f"{name} has {len(tensors[name]):,} entries, the {of} is {wanted:,}"
    routes, weights = tensors.get("routes"), tensors.get("route_weights")
    if weights is not None and (routes is None or weights.shape != routes.shape):
        yield "route_weights must have the shape of routes"
    if routes is not None and "prompt_lengths" not in tensors:
        yield "routes need prompt_lengths and prompt_ids beside them"


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
