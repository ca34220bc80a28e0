"""Where the W&B login of this machine is. Used by wandb_sink.py and by `parity doctor`; asks no network."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def wandb_key_source() -> str | None:
    """The place of the key for W&B, or for the server in WANDB_BASE_URL: a variable or a file; None without a key."""
    for name in _VARIABLES:
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
