"""slime and miles: the torch files of `--save-debug-train-data`, or `train_data/` of `--dump-details`.

slime writes one file per rollout, `{"format_version": 2, "rollout_id", "samples": [dict per response], ...}`. miles,
and slime before that, write one per rank, `{"rollout_id", "rank", "rollout_data": dict of lists}`; miles adds
"cp_rank", "cp_size" and "qkv_format". R: tokens of a response. Of each response:

    tokens               [prompt + R]
    response_lengths     R
    loss_masks           [R]   1 on the tokens that the model sampled
    rollout_log_probs    [R]   from the engine
    log_probs            [R]   from the trainer, before the first optimizer step
    advantages           [R]

In the files of miles, ranks of tensor parallelism repeat each other, those of early pipeline stages have no log_probs,
and each rank of context parallelism has its part of [R]. All ranks of a rollout together make the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer.replay.bundle import Bundle, BundleError
from trainer.replay.peers.rows import HOW, Problems, Response, Source, bundle_from, floats, integers, number

VERSION = 2
"""Value of slime's `format_version`; others are refused."""
NO_ENGINE = "no rollout_log_probs: the engine's log-probs were not returned in the rollout"
NO_TRAINER = (
    "no log_probs of the trainer: an early pipeline stage (give the directory of all ranks), or miles without the "
    "trainer's forward pass (run it with --get-mismatch-metrics, or without --use-rollout-logprobs and "
    "--skip-actor-forward-only)"
)
ROLLOUT_FILE = (
    "is a rollout file, written before the trainer scored it: there are no log_probs of the trainer. Run with "
    "--save-debug-train-data, and give that file"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One response in the file of one rank. P: tokens of its prompt."""

    place: str
    index: object
    """The trainer's number of the response; equal on all ranks that have it."""
    tokens: Tensor
    """[P+R] int32."""
    length: int
    """R."""
    mask: Tensor
    """[R] float32."""
    rollout_logprobs: Tensor | None
    """[R] float32, or this rank's part."""
    old_logprobs: Tensor | None
    advantages: Tensor | None
    reward: float | None
    padded: int
    """Tokens to which the sequence is padded before context parallelism cuts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which part of each response a file holds."""

    cp_rank: int = 0
    cp_size: int = 1


def read_slime(paths: Sequence[Path]) -> Bundle:
    """Read the step in the files `paths`: one of slime, or those of the ranks of one rollout.

    Raises BundleError with everything that is wrong with them.
    """
    problems = Problems(paths[0] if len(paths) == 1 else paths[0].parent, kind="train data of slime or miles")
    found: dict[tuple[object, bytes, int], list[tuple[Rank, Part]]] = {}
    rollouts: set[int] = set()
    more: dict[str, str] = {}
    producer = "slime"
    for path in paths:
        file = load_torch_file(path)
        where = "" if len(paths) == 1 else f"{path.name} "
        rollouts |= {int(each) for each in [number(file.get("rollout_id"))] if each is not None}
        rank = Rank(cp_rank=_whole(file.get("cp_rank"), 0), cp_size=_whole(file.get("cp_size"), 1))
        producer = "miles" if "cp_size" in file else producer
        if len(paths) == 1 and "rollout_data" in file:
            more = {"rank": str(file.get("rank"))}
        seen: Counter[tuple[object, bytes]] = Counter()
        for part in _parts(file, where, problems):
            name = (part.index, part.tokens.numpy().tobytes())
            # Twice in one file are two responses with the same words; in two files one response on two ranks.
            seen[name] += 1
            found.setdefault((*name, seen[name]), []).append((rank, part))
    if len(rollouts) > 1:
        problems.add(f"its files are of several rollouts: {', '.join(map(str, sorted(rollouts)))}")
    responses = [each for each in (_response(parts, problems) for parts in found.values()) if each is not None]
    if not found:
        problems.add("it has no response")
    source = Source(producer=producer, step=min(rollouts, default=None), more=more)
    return bundle_from(responses, source, problems)


def load_torch_file(path: Path) -> dict[object, object]:
    """The dict in the file `path`, tensors on the host; nothing in it is run.

    `weights_only` makes tensors, numbers, texts and containers, and nothing else. Raises BundleError for a file that is
    damaged or holds more.
    """
    try:
        foreign = get_unsafe_globals_in_checkpoint(path)
        if not foreign:
            # mmap: routed experts and the like may be many times as large as what is read.
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises a class of pickle's, and several others, for a damaged file
        raise BundleError(f"{path} is no torch file that can be read: {error}") from error
    if foreign:
        raise BundleError(
            f"{path} holds objects of {', '.join(sorted(foreign))}: only tensors, numbers, texts and containers are "
            f"loaded, because anything else can run code. In the trainer, make them plain numbers before the file is "
            f"written (float(x), x.tolist()), or write a bundle ({HOW})"
        )
    if not isinstance(found, dict):
        raise BundleError(f"{path} holds a {type(found).__name__}, not the dict that slime and miles write ({HOW})")
    return found


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _parts(file: dict[object, object], where: str, problems: Problems) -> Iterator[Part]:
    """The responses of a file of either layout; what cannot be used is noted."""
    columns, samples = file.get("rollout_data"), file.get("samples")
    if isinstance(columns, dict):
        yield from _of_columns(columns, where, problems)
    elif isinstance(samples, list) and file.get("format_version") is None:
        problems.add(f"{where}{ROLLOUT_FILE}")
    elif isinstance(samples, list) and file["format_version"] == VERSION:
        for number_, sample in enumerate(samples):
            if isinstance(sample, dict):
                part = _part(sample, f"{where}sample {number_}", sample.get("sample_index", number_), problems)
                yield from [] if part is None else [part]
            else:
                problems.add("is no dict", place=f"{where}sample {number_}")
    elif isinstance(samples, list):
        problems.add(f"{where}format_version is {file['format_version']!r}, not {VERSION}")
    else:
        problems.add(f"{where}has neither samples nor rollout_data")


def _of_columns(columns: dict[object, object], where: str, problems: Problems) -> Iterator[Part]:
    lengths = columns.get("response_lengths")
    size = len(lengths) if isinstance(lengths, list | tuple | Tensor) else 0
    if not size:
        problems.add(f"{where}has no response_lengths")
    # Lists of another length are of the whole rollout, not of this rank: raw_reward, for one.
    own = {
        name: each for name, each in columns.items() if isinstance(each, list | tuple | Tensor) and len(each) == size
    }
    for row in range(size):
        sample: dict[object, object] = {name: each[row] for name, each in own.items()}
        part = _part(sample, f"{where}response {row}", sample.get("sample_indices", (where, row)), problems)
        yield from [] if part is None else [part]


def _part(sample: dict[object, object], place: str, index: object, problems: Problems) -> Part | None:
    tokens, mask = integers(sample.get("tokens")), floats(_as_list(sample.get("loss_masks")))
    length = sample.get("response_lengths")
    length = int(length) if isinstance(length, int | Tensor) else None
    if tokens is None or length is None or not 0 <= length <= len(tokens):
        problems.add("tokens and response_lengths do not fit, or are missing", place=place)
        return None
    if mask is None or len(mask) != length:
        problems.add("loss_masks is not [response_lengths]", place=place)
        return None
    padded = sample.get("max_seq_lens")
    return Part(
        place=place,
        index=index,
        tokens=tokens,
        length=length,
        mask=mask,
        rollout_logprobs=floats(_as_list(sample.get("rollout_log_probs"))),
        old_logprobs=floats(_as_list(sample.get("log_probs"))),
        advantages=floats(_as_list(sample.get("advantages"))),
        # raw_reward is of the whole rollout, in another order; rewards have the group's mean taken off.
        reward=number(sample.get("local_raw_reward")),
        padded=padded if isinstance(padded, int) else len(tokens),
    )


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _response(parts: Sequence[tuple[Rank, Part]], problems: Problems) -> Response | None:
    """One response, from all the ranks that have it."""
    first = parts[0][1]
    engine = [(rank, part, part.rollout_logprobs) for rank, part in parts if part.rollout_logprobs is not None]
    trainer = [(rank, part, part.old_logprobs) for rank, part in parts if part.old_logprobs is not None]
    advantages = [(rank, part, part.advantages) for rank, part in parts if part.advantages is not None]
    if not engine:
        problems.add(NO_ENGINE, place=first.place)
    if not trainer:
        problems.add(NO_TRAINER, place=first.place)
    if not engine or not trainer:
        return None
    rollout = _joined(engine, "rollout_log_probs", problems)
    if rollout is None:  # what is missing of one is missing of the other
        return None
    old = _joined(trainer, "log_probs", problems)
    if old is None:
        return None
    begin = len(first.tokens) - first.length
    return Response(
        rollout_logprobs=rollout,
        old_logprobs=old,
        mask=first.mask != 0,
        advantages=_joined(advantages, "advantages", problems) if advantages else None,
        token_ids=first.tokens[begin:],
        reward=first.reward,
    )


def _joined(values: Sequence[tuple[Rank, Part, Tensor]], name: str, problems: Problems) -> Tensor | None:
    """[R] from the parts of all ranks of context parallelism; copies of tensor parallelism are taken once."""
    rank, part, _ = values[0]
    found = torch.full((part.length,), float("nan"))
    left = set(range(rank.cp_size))
    for holder, its_part, value in values:
        if holder.cp_rank not in left:
            continue
        left.remove(holder.cp_rank)
        places = cp_places(its_part, holder)
        if len(places) != len(value):
            problems.add(f"{name} has {len(value):,} entries, not {len(places):,}", place=its_part.place)
            return None
        found[places] = value
    if left:
        told = ", ".join(map(str, sorted(left)))
        problems.add(f"rank {told} of context parallelism is missing: give the directory of all", place=part.place)
        return None
    return found


def cp_places(part: Part, rank: Rank) -> Tensor:
    """Places in the response [R] of what a rank of context parallelism holds, int64.

    The padded sequence is cut into 2n chunks for n ranks; rank r has chunk r and chunk 2n - 1 - r. A log-prob belongs
    to the place that predicts it, one before its token.
    """
    if rank.cp_size == 1:
        return torch.arange(part.length)
    chunk = -(-part.padded // (2 * rank.cp_size))
    total = len(part.tokens)
    number_ = torch.arange(total - part.length - 1, total - 1) // chunk
    return ((number_ == rank.cp_rank) | (number_ == 2 * rank.cp_size - 1 - rank.cp_rank)).nonzero().flatten()
