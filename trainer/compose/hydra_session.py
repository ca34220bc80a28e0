"""Hydra with the project's configs: the groups, configs/, recipes/ and the user's own directory.

Hydra composes plain values: an unknown key or a wrong type does not stop Hydra, so that `read.py` can check the whole
result against the dataclasses and report all problems at once. `compose.py` composes inside a `hydra_session`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_type_hints

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from rollout.processes.secret_names import is_secret_name
from trainer.compose.choices import plain
from trainer.config.paths import config_dir, recipe_dir
from trainer.config.train import GROUPS, PRESETS, TrainConfig

VERSION_BASE = "1.3"
"""Version of Hydra whose behaviour the configs expect."""
_added: list[tuple[str, str]] = []
"""(group in Hydra's ConfigStore, name) of the options of files that the running session has added."""
SCHEMA = "parity_schema"
"""Name in Hydra's ConfigStore of the config with all sections but the groups; first entry of configs/train.yaml."""


def empty_root() -> DictConfig:
    """Every section that is not a group, with its defaults."""
    hints = get_type_hints(TrainConfig)
    return OmegaConf.create({name: plain(kind) for name, kind in hints.items() if name not in GROUPS})


@functools.cache
def register(own_dir: Path | None) -> None:
    """Register the groups and the YAML directories with Hydra, once, for the life of this process."""
    OmegaConf.register_new_resolver("oc.env", _public_variable, replace=True)
    store = ConfigStore.instance()
    store.store(name=SCHEMA, node=empty_root())
    for group, kinds in GROUPS.items():
        for name, option in {**kinds, **PRESETS.get(group, {})}.items():
            store.store(group=group, name=name, node=plain(option))

    class ParitySearchPath(SearchPathPlugin):
        """Search path of Hydra: configs/, the recipe's directory ("main"), the user's directory, recipes/."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.prepend("parity", f"file://{config_dir()}", SearchPathQuery(provider="main"))
            if own_dir is not None:
                search_path.append("config-dir", f"file://{own_dir.resolve()}")
            search_path.append("parity", f"file://{recipe_dir()}")

    Plugins.instance().register(ParitySearchPath)


def add_option(group: str, name: str, kind: type) -> None:
    """Make `group=name` choose the class `kind` of a file, until the end of the `hydra_session`.

    Hydra takes the / of its path for nested groups.
    """
    path, _, leaf = f"{group}/{name}".replace("//", "/").rpartition("/")
    ConfigStore.instance().store(group=path, name=leaf, node=plain(kind), package=group)
    _added.append((path, leaf))


def _public_variable(name: str, *default: str | None) -> str | None:
    """Value of `${oc.env:name}`: of any variable but a secret, because a config goes to files and to trackers."""
    if is_secret_name(name):
        raise ValueError(f"oc.env must not read {name}, whose name is that of a secret")
    value: str | None = oc.env(name, *default)
    return value


@contextmanager
def hydra_session(recipe: Path, own_dir: Path | None) -> Iterator[ConfigLoader]:
    """Hydra, initialised to compose the recipe in the file `recipe`."""
    register(own_dir)
    try:
        with initialize_config_dir(str(recipe.parent), job_name="parity", version_base=VERSION_BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        for path, leaf in _added:  # the next session reads the file again, and lists no option of this one
            functools.reduce(dict.__getitem__, path.split("/"), ConfigStore.instance().repo).pop(f"{leaf}.yaml", None)
        _added.clear()
