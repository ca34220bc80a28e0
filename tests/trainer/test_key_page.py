"""docs/keys.md: current, with every key and its names elsewhere."""

from __future__ import annotations

from pathlib import Path

from test_keys import every_key

from trainer.compose.key_page import key_page

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == key_page(), "python -m trainer.compose.key_page > docs/keys.md"


def test_every_key_has_a_row() -> None:
    page = key_page()
    assert not [key for key in every_key() if f"| `{key}`" not in page]


def test_names_of_other_trainers_are_found() -> None:
    rows = {line.split("`")[1]: line for line in key_page().splitlines() if line.startswith("| `")}
    assert "`train_batch_size` (verl)" in rows["batch.prompts_per_step"]
    assert "total_epochs" not in rows["batch.prompts_per_step"]
    assert "`num_generations` (TRL)" in rows["batch.group_size"]
    assert "`clip_ratio_low` (verl)" in rows["loss.clip_low"]
    assert rows["run.max_hours"].rstrip("| ").endswith("counts too.")
    assert "dataset_config" not in rows["data.train_path"]  # a sentence that begins like words
