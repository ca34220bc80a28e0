"""Hydra with the project's configs: the options of the groups, configs/, recipes/ and the user's own directory.

Hydra composes plain values: an unknown key or a wrong type does not stop Hydra, so that `read.py` can check the whole
result against the dataclasses and report all problems at once. `compose.py` composes inside a `hydra_session`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from rollout.processes.secret_names import is_secret_name
from trainer.compose.choices import plain_values
from trainer.config.paths import config_dir, recipe_dir
from trainer.config.train import GROUPS, PRESETS, TrainConfig

VERSION_BASE = "1.3"
"""Version of Hydra whose behaviour the configs expect."""
SCHEMA = "parity_schema"
"""Name of the config with all sections but the groups; first entry of configs/train.yaml."""
HYDRA_CONFIG = "hydra/config"
"""Hydra's own config, with its launchers, log handlers and help: empty, because Parity starts the runs itself."""


def sections() -> dict[str, object]:
    """Every section that is not a group, with its defaults."""
    return {name: plain_values(kind) for name, kind in get_type_hints(TrainConfig).items() if name not in GROUPS}


def options_of(group: str) -> dict[str, Any]:
    """Name -> config class, or preset, of every option of a group."""
    return {**GROUPS.get(group, {}), **PRESETS.get(group, {})}


class ParityOptions(ConfigSource):
    """The options of the groups, so that Hydra finds their names; `compose.py` takes their `content`.

    Hydra copies everything in its own ConfigStore several times in every composition.
    """

    of_files: ClassVar[dict[str, type]] = {}
    """group/path.py:Name -> class, of the running session."""

    @staticmethod
    def scheme() -> str:
        return "parity"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in GROUPS

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        return config_path in (SCHEMA, HYDRA_CONFIG) or config_path in self.of_files or name in options_of(group)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter is ObjectType.GROUP else sorted(options_of(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        package = "" if config_path in (SCHEMA, HYDRA_CONFIG) else config_path.partition("/")[0]
        none = OmegaConf.create()
        return ConfigResult(provider=self.provider, path=self.full_path(), config=none, header={"package": package})

    def content(self, config_path: str) -> dict[str, object]:
        """Keys and defaults of the config with this name."""
        group, _, name = config_path.partition("/")
        if config_path in (SCHEMA, HYDRA_CONFIG):
            return sections() if config_path == SCHEMA else {}
        return plain_values(self.of_files.get(config_path) or options_of(group)[name])


class ParitySearchPath(SearchPathPlugin):
    """Search path of Hydra: configs/, the recipe's directory ("main"), the user's directory, recipes/, the options."""

    own_dir: ClassVar[Path | None] = None
    """The user's directory of the running session."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("parity", f"file://{config_dir()}", SearchPathQuery(provider="main"))
        if self.own_dir is not None:
            search_path.append("config-dir", f"file://{self.own_dir.resolve()}")
        search_path.append("parity", f"file://{recipe_dir()}")
        search_path.append("parity", f"{ParityOptions.scheme()}://")


@functools.cache
def _register() -> None:
    """Make Hydra know the two plugins, once, for the life of this process."""
    OmegaConf.register_new_resolver("oc.env", _public_variable, replace=True)
    Plugins.instance().register(ParityOptions)
    Plugins.instance().register(ParitySearchPath)


def add_option(group: str, name: str, kind: type) -> None:
    """Make `group=name` choose the class `kind` of a file, until the end of the `hydra_session`."""
    ParityOptions.of_files[f"{group}/{name}"] = kind


def _public_variable(name: str, *default: str | None) -> str | None:
    """Value of `${oc.env:name}`: of any variable but a secret, because a config goes to files and to trackers."""
    if is_secret_name(name):
        raise ValueError(f"oc.env must not read {name}, whose name is that of a secret")
    value: str | None = oc.env(name, *default)
    return value


@contextmanager
def hydra_session(recipe: Path, own_dir: Path | None) -> Iterator[ConfigLoader]:
    """Hydra, initialised to compose the recipe in the file `recipe`."""
    _register()
    ParitySearchPath.own_dir = own_dir
    try:
        with initialize_config_dir(str(recipe.parent), job_name="parity", version_base=VERSION_BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        ParityOptions.of_files.clear()  # the next session reads the file again, and lists no option of this one
        ParitySearchPath.own_dir = None
