"""A class of the user's own, named in the config as `path/to/file.py:Name`: a choice with keys (`Custom`).

The file is run where the config is read, and in each process that gets the config. A process runs it once.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

from algorithms.config import Checked, ConfigError, Custom
from algorithms.config.custom import PARTS
from rollout.processes.custom_code import code_digest, custom_problem, own_files, own_line, run_file

Kind = TypeVar("Kind", bound=Custom)
_PLACES: dict[type[Custom], tuple[str, str]] = {}
"""Class that was loaded -> absolute path of its file, and the digest of it."""


def load_class(choice: str, kind: type[Kind]) -> type[Kind]:
    """Run the file of a `path.py:Name` and return the class, a dataclass that is a subclass of `kind`.

    Its instances can go to other processes: each runs the file for itself, and refuses one that has changed since.
    Raises ValueError, with the rule that is broken, for a file that fails and for a name that is no such class.
    """
    if problem := custom_problem(choice):
        raise ValueError(problem)
    file, _, name = choice.rpartition(":")
    path = Path(file).resolve()
    digest = code_digest(str(path)) or ""
    try:
        module = run_file(path, digest)
    except (Exception, SystemExit) as error:
        line = own_line(traceback.format_exc()) or f" ({path})"
        raise ValueError(f"must name a file that Python can run: {type(error).__name__}: {error}{line}") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, kind) and found is not kind):
        others = [n for n, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind)]
        has = ", ".join(n for n in others if n != kind.__name__) or "none"
        raise ValueError(f"must name a subclass of {kind.__name__} in {path}, which has {has}")
    if problem := _unusable(found):
        raise ValueError(f"{problem} (class {name} of {path})")
    found.source = choice
    found.__reduce__ = _reduced  # type: ignore[method-assign, assignment]
    _PLACES[found] = (str(path), digest)
    return found


def _unusable(kind: type[Custom]) -> str:
    """What a class lacks, as a rule; "" if it lacks nothing."""
    if "__dataclass_fields__" not in vars(kind):
        return "must name a dataclass: write @dataclass(kw_only=True) above it"
    if lacks := [name for name in dir(kind) if getattr(getattr(kind, name, None), "__isabstractmethod__", False)]:
        return f"must name a class with a method {lacks[0]}"
    if bare := [spec.name for spec in fields(kind) if spec.default is MISSING and spec.default_factory is MISSING]:
        return f"must name a class whose fields have defaults: {bare[0]} has none"
    named = {name.split(".")[0] for _, name, _, _ in Formatter().parse(kind.formula) if name is not None}
    if unknown := sorted(named - PARTS - {spec.name for spec in fields(kind)}):
        return f"must name a class whose formula holds keys and {', '.join(sorted(PARTS))} alone: it holds {unknown[0]}"
    return ""


def finish(made: Custom) -> str:
    """Call the `__post_init__` of a user's class, whose instance was made of values that were read -> the rule that it
    breaks; "" if none."""
    if type(made).__post_init__ is Checked.__post_init__:
        return ""
    try:
        made.__post_init__()
    except ConfigError:  # what `problems` yields is reported by itself
        return ""
    except Exception as error:
        return f"must be a class whose __post_init__ succeeds: {type(error).__name__}: {error}"
    return ""


def class_files(config: object) -> dict[str, str]:
    """Path of the file of each choice of the user's own in `config` -> digest of the file when it was run; and of each
    module beside such a file that this process has imported -> digest of now."""
    files = dict(_PLACES[type(choice)] for choice in own_choices(config) if type(choice) in _PLACES)
    if not files:  # most runs have none, and looking through all modules takes time
        return {}
    beside = tuple(f"{Path(path).parent}/" for path in files)
    return {path: digest for path, digest in own_files().items() if path.startswith(beside)} | files


def own_choices(config: object) -> Iterator[Custom]:
    """The choices of the user's own in a config, in its order."""
    if isinstance(config, Custom):
        yield config
    parts = [getattr(config, spec.name) for spec in fields(config)] if is_dataclass(config) else []
    for part in config if isinstance(config, list) else parts:
        yield from own_choices(part)


def _reduced(self: Custom) -> tuple[Any, ...]:
    """How pickle writes an instance: its file and its values, because no module of its name can be imported."""
    values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
    return _restored, (*_PLACES[type(self)], type(self).__name__, self.source, values)


def _restored(path: str, digest: str, name: str, source: str, values: Mapping[str, Any]) -> Custom:
    if code_digest(path) != digest:
        where = f"{path} is not as it was when the config was read: it has changed, or this machine has another"
        raise ValueError(f"{source}: {where}. Start the run again, with the same file on each machine.")
    kind = load_class(f"{path}:{name}", Custom)
    kind.source = source
    made = object.__new__(kind)
    for key, value in values.items():
        object.__setattr__(made, key, value)
    if rule := finish(made):
        raise ValueError(f"{source}: {rule}")
    return made
