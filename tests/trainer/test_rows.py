"""Files of rows that are read while they are written, and the process that holds a run directory."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.rundir.rows import follow_rows
from trainer.rundir.run_dir import lock_directory, lock_holder, release_directory


def test_rows_come_when_their_lines_are_whole_and_the_last_ones_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    looks = iter(["", '{"step": 1}\n{"st', 'ep": 2}\n', "damaged\n", '{"step": 3, "text": "a\u2028b"}\n{"step": 4'])
    written: list[str] = []

    def goes_on() -> bool:
        """Writes between two looks; its last call says that nothing more will come."""
        part = next(looks)
        written.append(part)
        if part:
            with path.open("a", encoding="utf-8") as file:
                file.write(part)
        return not part.endswith("4")

    found = []
    for row in follow_rows(path, goes_on=goes_on):
        found.append((row["step"], len(written)))
    assert found == [(1, 3), (2, 3), (3, 5)], "the file is opened after the second look; half a line is no row"


def test_a_file_that_never_comes_ends_with_its_writer(tmp_path: Path) -> None:
    assert list(follow_rows(tmp_path / "metrics.jsonl", goes_on=lambda: False)) == []


def test_the_holder_of_a_directory_is_known_while_it_holds_it(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    lock = lock_directory(tmp_path, key="run.dir")
    assert lock_holder(tmp_path) == os.getpid()
    release_directory(lock, tmp_path)
    assert lock_holder(tmp_path) is None
    (tmp_path / ".lock").write_text("1\n")  # of a run that was killed
    assert lock_holder(tmp_path) is None
