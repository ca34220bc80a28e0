"""Which run of W&B a run is, how W&B shows it (project, entity, name, group, tags, notes), and where the login is.

A value comes from the first of these that has one: the key of the config, the file that an earlier start left in the
run directory, the variable of W&B, the default. So a resumed run goes on in its W&B run in any environment. Nothing
here asks the network.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.config.outputs import WANDB_NAME, WANDB_RUN_GROUP, WANDB_RUN_ID, TrackingConfig
from trainer.rundir.run_dir import write_whole
from trainer.text.redact import redact

logger = logging.getLogger(__name__)

RUN_FILE = "wandb_run.json"
"""In run.dir: the fields of WandbRun."""
PROJECT = "parity"
MAX_NAME = 128
"""Characters of a name that W&B accepts."""
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbRun:
    """A run of W&B, as the arguments of wandb.init with these names."""

    id: str
    project: str
    entity: str | None
    name: str
    group: str | None
    tags: list[str]
    notes: str | None


def wandb_run(config: TrackingConfig, run_dir: Path, *, name: str) -> WandbRun:
    """The W&B run of the run in `run_dir`; `name` is its name by default. Secrets are redacted; writes nothing."""
    saved, variables = _saved(run_dir), os.environ
    tags = [tag.strip() for tag in variables.get("WANDB_TAGS", "").split(",") if tag.strip()]
    shown: Any = redact(
        {
            "name": config.name or saved.get("name") or variables.get(WANDB_NAME) or name[:MAX_NAME],
            "group": config.group or saved.get("group") or variables.get(WANDB_RUN_GROUP) or None,
            "tags": config.tags or saved.get("tags") or tags,
            "notes": config.notes or saved.get("notes") or variables.get("WANDB_NOTES") or None,
        }
    )
    return WandbRun(
        id=saved_run_id(run_dir) or variables.get(WANDB_RUN_ID) or new_run_id(),
        project=config.project or saved.get("project") or variables.get("WANDB_PROJECT") or PROJECT,
        entity=config.entity or saved.get("entity") or variables.get("WANDB_ENTITY") or None,
        **shown,
    )


def wandb_key_source() -> str | None:
    """The place of the key for W&B, or for the server in WANDB_BASE_URL: a variable or a file; None without a key."""
    for name in _KEY_VARIABLES:
        if os.environ.get(name):
            return f"${name}"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(os.path.expanduser(named))] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            login = netrc.netrc(str(path)).authenticators(host) if path.is_file() else None
        except (OSError, netrc.NetrcParseError) as error:
            logger.warning("W&B: %s cannot be read (%s)", path, error)
            continue
        if login is not None and login[2]:
            return str(path)
    return None


def default_name(recipe: str, run_dir: Path) -> str:
    """The name of a run that has no other."""
    return f"{recipe}/{run_dir.name}"


def keep_run(run_dir: Path, run: WandbRun) -> None:
    """Write down in `run_dir` which W&B run its run is. Raises OSError."""
    _write(run_dir, asdict(run))


def new_run_id() -> str:
    """An id that no other run has."""
    return os.urandom(4).hex()


def saved_run_id(run_dir: Path) -> str | None:
    """The W&B id in `run_dir`; None if W&B was never started there."""
    return _saved(run_dir).get("id") or None


def keep_run_id(run_dir: Path, run_id: str) -> None:
    """Write down the id that the W&B run of `run_dir` shall have. Raises OSError."""
    _write(run_dir, {**_saved(run_dir), "id": run_id})


def _saved(run_dir: Path) -> Mapping[str, Any]:
    """The content of the file; empty without it, and for one that cannot be read."""
    try:
        saved = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _write(run_dir: Path, record: Mapping[str, object]) -> None:
    write_whole(run_dir / RUN_FILE, json.dumps(record, indent=2) + "\n")
