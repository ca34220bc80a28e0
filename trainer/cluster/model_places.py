"""Where each machine of the cluster has the model: a directory that all can read, or each machine's copy from the hub.

The driver resolves a name on the hub to a directory of its own cache. Another machine with another cache fetches the
same commit into that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rollout.data.hub import fetch_model, limit_silence
from rollout.group.actor_calls import call_on, is_here


class ModelPlaceError(RuntimeError):
    """A machine of the cluster cannot read the model; the message names the machine and the way out."""


def model_places(path: Path, nodes: Sequence[str], *, timeout_s: float) -> Mapping[str, Path]:
    """Ray node id -> directory of the model there, for each of `nodes`.

    Args:
        path: directory of the model on this machine.
        nodes: Ray node ids of workers, with repetitions.
        timeout_s: seconds in which all of them find or fetch it.

    Raises ModelPlaceError.
    """
    places = {node: path for node in nodes if is_here(node)}
    calls = {node: call_on(node, place_here, path) for node in dict.fromkeys(nodes) if node not in places}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    for node, call in calls.items():
        try:
            places[node] = ray.get(call, timeout=0)
        except GetTimeoutError as error:
            raise ModelPlaceError(_text(node, path, f"it was not there after {timeout_s:.0f} s")) from error
        except RayTaskError as error:
            raise ModelPlaceError(_text(node, path, f"{type(error.cause).__name__}: {error.cause}")) from error
        except RayError as error:
            raise ModelPlaceError(_text(node, path, str(error).splitlines()[0])) from error
    return places


def place_here(path: Path) -> Path:
    """The directory of the model on this machine: `path`, or the commit that it names, fetched from the hub.

    Raises FileNotFoundError for a directory, or a model of the hub, that this machine neither has nor gets.
    """
    if path.is_dir():
        return path
    name = hub_name(path)
    if name is None:
        raise FileNotFoundError(f"there is no {path}")
    limit_silence()
    repository, commit = name
    fetch = partial(fetch_model, repository, revision=commit)
    try:
        return Path(fetch())
    except OSError:  # the hub cannot be reached, or must not be: what lies in the cache of this machine is taken
        return Path(fetch(local_files_only=True))


def hub_name(path: Path) -> tuple[str, str] | None:
    """(repository, commit) of a directory in a cache of the hub, .../models--org--name/snapshots/commit; else None."""
    folder = path.parent.parent.name
    if path.parent.name != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/"), path.name


def _text(node: str, path: Path, reason: str) -> str:
    [address] = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node]
    return (
        f"phase placement: the machine {address} of the cluster cannot read the model: {reason}. Put the model into a "
        f"directory that all machines share, name it in model.path, or let the machine reach the hub (here: {path})"
    )
