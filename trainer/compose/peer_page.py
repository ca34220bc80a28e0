"""The keys of other trainers as the end of docs/from_other_trainers.md: peers.yaml as Markdown.

    python -m trainer.compose.peer_page docs/from_other_trainers.md

replaces the end of the page, from the first generated heading on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from algorithms.config.rules import as_yaml
from trainer.compose.peers import as_text, parted, peers
from trainer.compose.port import own_defaults, translated
from trainer.config.paths import MAIN_CONFIG, config_dir
from trainer.text.yaml_text import load_yaml

BEGIN = "## Defaults that differ\n"
_INTRODUCTION = """
A script that is silent means these. Rows on the KL hold if the script turns a KL in the loss on, and rows on an engine
if it samples with one. `parity port` writes them out. The rows, and the keys below, are generated from
`trainer/compose/peers.yaml`.

| trainer | silent there | here it is | default here |
|---|---|---|---|
"""


def generated() -> str:
    """The end of the page, from `BEGIN` on."""
    head = "| there | value | here |\n|---|---|---|"
    tables = [f"\n## Keys of {peer.about}\n\n{head}\n{_rows(peer.keys)}" for peer in peers().values()]
    return f"{BEGIN}{_INTRODUCTION}{''.join(_different())}{''.join(tables)}"


def _different() -> Iterator[str]:
    """Yield a row for each default of another trainer whose words say something else than Parity's own defaults."""
    ours = {key: as_yaml(default) for key, default in own_defaults().items()}
    for entry in load_yaml((config_dir() / f"{MAIN_CONFIG}.yaml").read_text(encoding="utf-8"))["defaults"]:
        ours |= entry if isinstance(entry, dict) else {}
    for peer in peers().values():
        for key, words in translated(peer.usual, peer)[0].items():
            differ = [word for word in words if as_text(ours.get(word.partition("=")[0])) != word.partition("=")[2]]
            if differ and key not in peer.usual:
                values = ", ".join(f"`{ours.get(word.partition('=')[0], 'not set')}`" for word in differ)
                there = f"{key}={as_text(peer.value(key, peer.usual))}"
                yield f"| {peer.about} | `{there}` | `{' '.join(differ)}` | {values} |\n"


def _rows(keys: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for key, answers in keys.items():
        for value, text in answers.items():
            words, said = parted(text)
            here = "; ".join([f"`{words}`"] * bool(words) + [said] * bool(said))
            cells = (f"`{key}`", "" if value == ".*" else f"`{value}`", here)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(page.read_text(encoding="utf-8").partition(BEGIN)[0] + generated(), encoding="utf-8")
