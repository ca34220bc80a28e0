"""The training side, command line and Python API; each folder is a room. `run/loop.py` is the system on one page.

    from trainer import train, load_config, open_run, resume

These names are those of `trainer/api.py`, which is loaded when one of them is used: the command line and the ranks
import this package too.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.api import RunError, RunHandle, load_config, open_run, resume, train

__all__ = ["RunError", "RunHandle", "load_config", "open_run", "resume", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer import api

    return getattr(api, name)
