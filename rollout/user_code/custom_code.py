"""User code, named in the config as `path/to/file.py:name`. Only the processes that run a function load it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from rollout.similar_file import similar_file

MOST_FUNCTIONS = 5
"""Functions of a file that a message names."""
FOREIGN = (
    "<",
    *(f"{Path(__file__).parents[2] / name}/" for name in ("algorithms", "rollout", "trainer")),
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)
"""Beginnings of the files whose code is not the user's own: Parity, Python, packages."""
Definition = type[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def is_custom(function: str) -> bool:
    """True if a config value names a file and an object in the file."""
    return ":" in function


def code_digest(path: str) -> str | None:
    """xxh3-128 of a file, 32 hex digits; None if it cannot be read."""
    try:
        return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
    except OSError:
        return None


def own_files() -> dict[str, str]:
    """Path of each file of the user's own that this process has imported -> its `code_digest`."""
    paths = {getattr(module, "__file__", None) or "<" for module in list(sys.modules.values())}
    own = {path: code_digest(path) for path in sorted(paths) if not path.startswith(FOREIGN)}
    return {path: digest for path, digest in own.items() if digest is not None}


def own_line(trace: str) -> str:
    """The last line of a traceback that is in a file of the user's own, as an addition to a message; "" for none."""
    lines = [found for found in _TRACE_LINE.findall(trace) if not found[0].startswith(FOREIGN)]
    return f" ({lines[-1][0]}:{lines[-1][1]})" if lines else ""


def custom_problem(function: str) -> str | None:
    """The problem with a `path.py:name`, as far as it can be seen without running the file; None if there is none."""
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        return "must have the form path/to/file.py:function"
    if not Path(path).is_file():
        return f"must name an existing file; there is no {Path(path).absolute()}"
    return None


def function_problem(function: str, built_in: Collection[str]) -> str | None:
    """The rule that a choice between the names of `built_in` and a `path.py:name` breaks, or None."""
    if is_custom(function):
        return custom_problem(function)
    return None if function in built_in else f"must be one of {', '.join(sorted(built_in))}, or path.py:function"


def similar_custom(function: str, *kinds: Definition) -> str:
    """A sentence with the `path.py:name` that a value probably means; empty if nothing is similar.

    Of a missing file it is a similar one beside it, of a file without a name what it defines of the `kinds`, or its
    functions; the file is not run.
    """
    if not is_custom(function):
        names = _defined(function, *(kinds or (ast.FunctionDef, ast.AsyncFunctionDef)))
        meant = " or ".join(f"{function}:{name}" for name in names[:MOST_FUNCTIONS])
        return f"Did you mean {meant}?" if meant else ""
    path, _, name = function.rpartition(":")
    meant = similar_file(path, (".py",)) if custom_problem(function) else ""
    return f"{meant[:-1]}:{name}?" if meant.endswith("?") else meant


def _defined(path: str, *kinds: Definition) -> list[str]:
    """Names of the definitions of these kinds that a Python file defines; none if `path` is no such file."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):  # no file, a NUL in it, no Python
        return []
    return [node.name for node in tree.body if isinstance(node, kinds)]


def is_async_function(function: str) -> bool:
    """True if the file of a `path.py:name` defines the name with `async def`; the file is not run."""
    path, _, name = function.rpartition(":")
    return path != "" and name in _defined(path, ast.AsyncFunctionDef)


def load_function(function: str, *, key: str, arguments: Mapping[str, Any] | None = None) -> object:
    """Run the file and return the function, with the `arguments` of the config given to it.

    Raises ValueError, naming the config `key`, if the name is not defined or has no such parameter.
    """
    if problem := custom_problem(function):
        raise ValueError(f"{key}={function} {problem}")
    file, _, name = function.rpartition(":")
    path = Path(file).resolve()
    module = run_file(path, code_digest(str(path)))
    found = getattr(module, name, None)
    if not callable(found):
        has = ", ".join(sorted(n for n, value in vars(module).items() if inspect.isfunction(value))) or "no function"
        raise ValueError(f"{key}={function}: {path.name} has no function {name!r}; it has {has}")
    if not arguments:
        return found
    parameters = inspect.signature(found).parameters
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        section = key.partition(".")[0]
        raise ValueError(
            f"{section}.arguments.{unknown[0]} is no parameter of {name}, which has {', '.join(parameters)}"
        )
    return partial(found, **arguments)


@cache
def run_file(path: Path, digest: str | None) -> ModuleType:
    """The module that the file makes; it is run once per process while its content, of this `digest`, is the same."""
    # Modules beside the file, and in the working directory, can be imported; their directories come last on the path,
    # so that they hide no module of Parity. A module of that name beside another file of the user is not this file's.
    others = {str(Path(other).parent) for other in own_files()} - {str(path.parent), str(Path.cwd())}
    later = [place for place in sys.path if place in others]
    sys.path[:] = [place for place in sys.path if place not in later and place != str(path.parent)]
    sys.path += [place for place in (str(path.parent), str(Path.cwd())) if place not in sys.path] + later
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or "<"
        has_own = any((path.parent / f"{name.partition('.')[0]}{end}").exists() for end in (".py", "/__init__.py"))
        if has_own and not file.startswith((*FOREIGN, f"{path.parent}/")):
            del sys.modules[name]
    # Under its own name, if no other module has it, processes that the function starts can import it.
    own = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    name_of_module = path.stem if own is not None and own.origin == str(path) else f"parity_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = sys.modules[name_of_module] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    with redirect_stdout(sys.stderr):  # stdout is that of the command: a plan, a config, a table
        spec.loader.exec_module(module)
    return module
