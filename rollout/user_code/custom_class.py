"""A class of the user's own, named in the config as `path/to/file.py:Name`: a choice with keys (`Custom`).

The file is run where the config is read, and in each process that gets the config. A process runs it once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, signature
from operator import attrgetter
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

from algorithms.config import NOT_SET, Checked, ConfigError, CorrectionSpec, Custom, Problem
from algorithms.config.custom import PARTS, USE
from rollout.user_code.custom_code import code_digest, custom_problem, own_files, own_line, run_file

Kind = TypeVar("Kind", bound=Custom)
_PLACES: dict[type, tuple[str, str]] = {}
"""Class of a file that was run -> absolute path of the file, and the digest of it."""
_ASKED: Mapping[str, Any] = {
    "problems": [Problem],
    "conflicts": [Problem],
    "use_problems": [Problem],
    "source_problem": Problem | None,
    "notes": [str],
    "spec": CorrectionSpec,
    "text": str,
    "readings": [tuple],
}
"""Method that is called beside computing -> the type of its result; in brackets, that of each part."""


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
    if problem := _unusable(found, kind):
        raise ValueError(f"{problem} (class {name} of {path})")
    found.source = choice
    if vars(found).get("__reduce__") is not _reduced:
        for part in {found, *_classes(module, module.__name__)} - set(_PLACES):
            _PLACES[part] = (str(path), digest)
            if issubclass(part, Enum):
                part.__reduce_ex__ = _member_reduced  # type: ignore[method-assign, assignment]
        for method in (name for name in _ASKED if hasattr(found, name)):
            setattr(found, method, _asked(getattr(found, method), _ASKED[method]))
        found.__reduce__, found.__setstate__ = _reduced, _filled  # type: ignore[method-assign, assignment, attr-defined]
    _PLACES[found] = (str(path), digest)
    return found


def _classes(holder: object, module: str, prefix: str = "") -> Iterator[type]:
    """The classes that a module defines, and those within them."""
    for name, value in vars(holder).items():
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (module, f"{prefix}{name}"):
            yield value
            yield from _classes(value, module, f"{prefix}{name}.")


def _asked(call: Callable[..., Any], wanted: Any) -> Callable[..., Any]:
    """`call`, a method that raises a ConfigError with class, file and line if it fails or returns something else."""
    kind, is_many = (wanted[0], True) if isinstance(wanted, list) else (wanted, False)

    @wraps(call)
    def asked(self: Custom, *given: Any, **more: Any) -> Any:
        parts: list[Any] = []
        try:
            result = call(self, *given, **more)
            for part in result if is_many else [result]:
                if not isinstance(part, kind):
                    raise TypeError(f"it must give {getattr(kind, '__name__', kind)}, and gave {type(part).__name__}")
                parts.append(part)
        except (Exception, SystemExit) as error:
            if parts and kind is Problem:  # of a value that breaks a rule anything can follow
                return parts
            if isinstance(error, ConfigError) and error.problems[0].key == self.source:
                raise
            rule = f"must be a class whose {call.__name__}() succeeds: {_described(self, error, call)}"
            raise ConfigError([Problem(key=self.source, rule=rule, value=NOT_SET)]) from error
        return parts if is_many else result

    return asked


def _described(made: Custom, error: BaseException, call: Callable[..., Any]) -> str:
    """An error of `call` with the last line of the user's own, or with the first one of the method or the class."""
    code = call.__code__
    first = f'File "{_PLACES[type(made)][0]}", line 1\nFile "{code.co_filename}", line {code.co_firstlineno}\n'
    return f"{type(error).__name__}: {error}{own_line(first + traceback.format_exc())}"


def _unusable(kind: type[Custom], base: type[Custom]) -> str:
    """What a class lacks that is to be used as a `base`, as a rule; "" if it lacks nothing."""
    if "__dataclass_fields__" not in vars(kind):
        return "must name a dataclass: write @dataclass(kw_only=True) above it"
    asked = {name: call for each in kind.__mro__ for name, call in vars(each).items() if _is_abstract(call)}
    for name, call in asked.items():
        if _is_abstract(getattr(kind, name)):
            return f"must name a class with a method {name}"
        given = signature(call).parameters.values()
        by_name = [each.name for each in given if each.kind is Parameter.KEYWORD_ONLY]
        try:
            signature(getattr(kind, name)).bind(*range(len(given) - len(by_name)), **dict.fromkeys(by_name))
        except TypeError as error:
            return f"must name a class with a method {name}{signature(call)}: {error}"
    taken = {USE, *dir(base)} - {spec.name for spec in fields(base)}
    if shadowing := [spec.name for spec in fields(kind) if spec.name in taken]:
        return f"must name a class whose keys have names of their own: {shadowing[0]} means something in every class"
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
    except (Exception, SystemExit) as error:
        return f"must be a class whose __post_init__ succeeds: {_described(made, error, type(made).__post_init__)}"
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
    """How pickle writes an instance: its file, because no module of its name can be imported, and then its values,
    which are read when the file has been run: their types can stand in it, or beside it."""
    values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
    return _restored, (*_PLACES[type(self)], type(self).__name__, self.source), values


def _restored(path: str, digest: str, name: str, source: str) -> Custom:
    _refuse_changed(path, digest, source)
    kind = load_class(f"{path}:{name}", Custom)
    kind.source = source
    return object.__new__(kind)


def _filled(self: Custom, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        object.__setattr__(self, key, value)
    if rule := finish(self):
        raise ValueError(f"{self.source}: {rule}")


def _member_reduced(self: Enum, protocol: int) -> tuple[Any, ...]:
    """How pickle writes a member of an enumeration in a user's file."""
    return _member, (*_PLACES[type(self)], type(self).__qualname__, self.value)


def _member(path: str, digest: str, name: str, value: object) -> Enum:
    _refuse_changed(path, digest, name)
    found: Enum = attrgetter(name)(run_file(Path(path), digest))(value)
    return found


def _refuse_changed(path: str, digest: str, what: str) -> None:
    if code_digest(path) != digest:
        where = f"{path} is not as it was when the config was read: it has changed, or this machine has another"
        raise ValueError(f"{what}: {where}. Start the run again, with the same file on each machine.")


def _is_abstract(call: object) -> bool:
    return getattr(call, "__isabstractmethod__", False) is True
