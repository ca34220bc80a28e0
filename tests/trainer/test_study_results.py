"""What a study concludes from made numbers, and that its page, picture and tables show every run."""

from __future__ import annotations

import asyncio
import csv
import functools
import json
import re
import shutil
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import browser
import numpy as np
import pytest
from test_study import grid_of

from trainer.study.config import StudyConfig
from trainer.study.grid import Cell, Study
from trainer.study.page import curves_table, write_study
from trainer.study.ranking import TITLES, apart, chance_apart, interval, rank, study_notes, table_rows
from trainer.study.results import (
    CHARTS,
    CellRecord,
    CellResult,
    Spread,
    Stage,
    cell_result,
    read_records,
    read_results,
    spread,
)


def result(
    mode: str,
    seed: int,
    scores: list[float],
    *,
    precision: str = "int8",
    stage: Stage = Stage.finished,
    error: str = "",
) -> CellResult:
    """A run of at most three steps with a held-out accuracy before the first step and after each."""
    rows = [metrics(step) | {"eval/accuracy": score} if step else before(score) for step, score in enumerate(scores)]
    cell = replace(a_cell(), mode=mode, precision=precision, seed=seed)
    return cell_result(cell, rows, stage, CellRecord(seconds=30.0, error=error), collapse_drop=0.1)


def before(score: float) -> dict[str, float]:
    """The row of the evaluation before training."""
    return {"step": 0, "eval/accuracy": score}


def metrics(step: int) -> dict[str, float]:
    """The row of a step, without held-out accuracy."""
    return {
        "step": step,
        "reward/mean": 0.5,
        "mismatch/k3": 1e-5 * step,
        "mismatch/prob_diff_max": 0.1 * step,
        "policy/entropy": 1.0 / step,
        "optim/grad_norm": 0.1 * step,
        "mismatch/ess/raw_token": 1 - 0.01 * step,
        "time/step_s": 2.0,
    }


@functools.cache
def a_cell() -> Cell:
    return grid_of(modes=["tis"], precisions=["int8"], seeds=[0]).cells[0]


def near(found: Spread | None, *, mean: float, low: float, high: float, count: int) -> bool:
    return found is not None and astuple(found) == pytest.approx((mean, low, high, count))


def three(mode: str, ends: list[float], **more: object) -> list[CellResult]:
    return [result(mode, seed, [0.3, 0.5, end], **more) for seed, end in enumerate(ends)]  # type: ignore[arg-type]


def test_modes_are_ranked_by_their_mean_and_share_places_where_ranges_overlap() -> None:
    results = [
        *three("tis", [0.90, 0.94, 0.92]),
        *three("mis", [0.91, 0.95, 0.99]),
        *three("ppo_is", [0.50, 0.60, 0.55]),
    ]
    ranking = rank(results)
    assert [row.mode for row in ranking.rows] == ["mis", "tis", "ppo_is"]
    assert [row.places for row in ranking.rows] == [(1, 2), (1, 2), (3, 3)]
    assert near(ranking.rows[0].score, mean=0.95, low=0.91, high=0.99, count=3)
    assert (ranking.pairs, ranking.parted) == (3, 2)
    # Of two equal modes with three seeds, all of one are above all of the other in 2 of the 20 orders.
    assert ranking.parted_by_chance == pytest.approx(3 * 2 / 20)


def test_precisions_are_ranked_by_themselves() -> None:
    results = [*three("tis", [0.2, 0.2, 0.2], precision="int4"), *three("tis", [0.9, 0.9, 0.9], precision="bfloat16")]
    assert [row.places for row in rank(results).rows] == [(1, 1), (1, 1)]


def test_one_seed_tells_nothing_apart() -> None:
    ranking = rank([result("tis", 0, [0.3, 0.9]), result("mis", 0, [0.3, 0.1])])
    assert [row.places for row in ranking.rows] == [(1, 2), (1, 2)]
    assert ranking.parted == 0
    assert any("One seed tells nothing apart" in note for note in study_notes(StudyConfig(), [], ranking))


def test_modes_that_took_the_same_steps_are_named_and_count_once() -> None:
    curves = {"tis": 0.9, "vanilla_is": 0.9, "ppo_is": 0.5}
    results = [result(mode, seed, [0.3, 0.4 + 0.1 * seed, end]) for mode, end in curves.items() for seed in (0, 1)]
    ranking = rank(results)
    assert ranking.same == (("int8", "tis", "vanilla_is"),)
    assert (ranking.pairs, ranking.parted) == (1, 1)
    assert any("int8: tis and vanilla_is were the same run" in note for note in study_notes(StudyConfig(), [], ranking))
    # Equal rewards and accuracies alone are not the same run: the gradients show that the weights differ.
    other = dict(results[2].curves) | {"grad": ((1, 0.5),)}
    assert rank([*results[:2], replace(results[2], curves=other), *results[3:]]).same == ()
    # The same end alone is not the same run.
    results[2] = result("vanilla_is", 0, [0.3, 0.41, 0.9])
    assert rank(results).same == ()


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (2, 4), (5, 5)])
def test_the_chance_of_parted_ranges_is_that_of_all_orders(counts: tuple[int, int]) -> None:
    from itertools import combinations

    total = sum(counts)
    orders = list(combinations(range(total), counts[0]))
    parted = 0
    for first in orders:
        second = [place for place in range(total) if place not in first]
        a, b = (spread(map(float, places)) for places in (first, second))
        assert a is not None and b is not None
        parted += apart(a, b)
    assert chance_apart(*counts) == pytest.approx(parted / len(orders))


def test_collapse_and_failure_are_counted() -> None:
    results = [
        result("tis", 0, [0.3, 0.5, 0.9, 0.95]),
        result("tis", 1, [0.3, 0.9, 0.92, 0.70]),
        result("tis", 2, [0.3, 0.4], stage=Stage.broken, error="engine 0: no answer"),
    ]
    [row] = (ranking := rank(results)).rows
    assert (row.planned, row.finished, row.failed, row.collapsed) == (3, 2, 1, 1)
    assert near(row.score, mean=0.825, low=0.70, high=0.95, count=2), "only of runs that ended"
    assert near(row.kept_of_best, mean=(1 + 0.7 / 0.92) / 2, low=0.7 / 0.92, high=1.0, count=2)
    assert near(row.worst_k3, mean=3e-5, low=3e-5, high=3e-5, count=2)
    [line] = table_rows(ranking)
    assert {"tis", "0.825 (0.700-0.950)", "0.880 (0.761-1.000)", "1 of 2", "2 of 3, 1 failed", "3.0e-05"} <= set(line)
    notes = study_notes(StudyConfig(), results, ranking)
    assert "tis-int8-seed2 FAILED after step 1 of 3: engine 0: no answer. It is not in the table." in notes


def test_a_table_has_a_row_per_mode_and_says_what_it_lacks() -> None:
    rows = table_rows(rank([result(mode, 0, [], stage=Stage.new) for mode in ("tis", "mis")]))
    assert [row[TITLES.index("mode")] for row in rows] == ["tis", "mis"]
    assert {len(row) for row in rows} == {len(TITLES)} and rows[0][-1] == "0 of 1"


def test_a_curve_is_the_mean_and_the_range_of_the_seeds_that_have_the_step() -> None:
    short = result("tis", 1, [0.1, 0.2], stage=Stage.broken)
    found = curves_table([result("tis", 0, [0.3, 0.4, 0.8]), short, result("mis", 0, [0.5])], "heldout").columns
    assert list(found["step"]) == [0, 1, 2]
    assert list(found["tis"]) == pytest.approx([0.2, 0.3, 0.8])
    assert (list(found["tis:low"]), list(found["tis:high"])) == ([0.1, 0.2, 0.8], [0.3, 0.4, 0.8])
    assert list(found["mis"]) == pytest.approx([0.5, np.nan, np.nan], nan_ok=True)


@pytest.fixture(scope="module")
def grid() -> Study:
    return grid_of(modes=["tis", "mis"], precisions=["bfloat16", "int8"], seeds=[0, 1])


@pytest.fixture(scope="module")
def study_dir(grid: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study in which one run failed half way, one has not begun, and the others ended."""
    directory = tmp_path_factory.mktemp("study")
    for number, cell in enumerate(grid.cells):
        if number == 5:
            continue
        run_dir = directory / cell.name
        run_dir.mkdir()
        scores = (0.5, 0.6 + 0.02 * number, 0.7)
        rows = [before(0.4), *(metrics(step) | {"eval/accuracy": scores[step - 1]} for step in (1, 2, 3))]
        kept = rows[:2] if number == 4 else rows
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        status = {"status": "failed" if number == 4 else "completed", "last_step": len(kept) - 1}
        (run_dir / "status.json").write_text(json.dumps(status))
        (run_dir / "report.html").write_text("<html></html>")
    records = {cell.name: CellRecord(seconds=20.0) for cell in grid.cells}
    records[grid.cells[4].name] = CellRecord(seconds=9.0, error="engine <0>: no answer")
    assert write_study(grid, directory, records, command="parity study arithmetic_grpo x=<y>") == ""
    return directory


def test_the_page_shows_every_run_and_curve_and_opens_offline(grid: Study, study_dir: Path) -> None:
    html = (study_dir / "study.html").read_text()
    for cell in grid.cells:
        assert cell.name in html
    assert f'<a href="{grid.cells[0].name}/report.html">' in html
    assert f'href="{grid.cells[5].name}/report.html"' not in html
    assert "6 of 8 runs finished, 1 failed" in html
    assert "engine &lt;0&gt;: no answer" in html and "engine <0>" not in html
    assert "parity study arithmetic_grpo x=&lt;y&gt;" in html
    for metric, precision in product(CHARTS, grid.config.precisions):
        assert f'data-chart="{metric}-{precision}"' in html
    names = set(re.findall(r'data-name="([^"]+)"', html))
    assert len(names) == len(CHARTS) * len(grid.config.precisions) * len(grid.config.modes)
    assert "Content-Security-Policy" in html
    outside = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"(src|href)=.(https?:)?//", outside), "nothing is fetched"


CHROMIUM = browser.find_chromium()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH")
def test_the_page_in_a_browser_hides_a_mode_everywhere(grid: Study, study_dir: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        assert CHROMIUM is not None
        async with browser.open_page(CHROMIUM, study_dir / "study.html", tmp_path / "profile") as page:
            await page.wait_for("document.documentElement?.dataset.charts !== undefined")
            assert await page.evaluate("Bokeh.documents[0].roots().length") == len(CHARTS) * len(grid.config.precisions)
            band = "Bokeh.documents[0].get_model_by_name('k3-int8/0/spread')"
            assert await page.evaluate(f"{band}.visible && {band}.glyph.type") == "VArea"
            await page.evaluate("document.querySelector('[data-toggle-run=\"0\"]').click()")
            hidden = "[...document.querySelectorAll('.legend [data-run=\"0\"]')].map((b) => b.ariaPressed).join()"
            assert set((await page.evaluate(hidden)).split(",")) == {"false"}
            assert await page.evaluate(f"{band}.visible") is False
            assert page.problems == []
            assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []

    asyncio.run(visit())


def test_the_numbers_are_beside_the_page(grid: Study, study_dir: Path) -> None:
    document = json.loads((study_dir / "study.json").read_text())
    assert document["recipe"] == "arithmetic_grpo" and document["command"].startswith("parity study")
    cells = {cell["name"]: cell for cell in document["cells"]}
    assert list(cells) == [cell.name for cell in grid.cells]
    assert cells[grid.cells[0].name]["heldout_last"] == 0.7
    assert cells[grid.cells[4].name]["stage"] == "broken" and cells[grid.cells[5].name]["stage"] == "new"
    assert len(document["ranking"]["rows"]) == 4
    curves = cells[grid.cells[0].name]["curves"]
    assert curves["heldout"] == [[0, 0.4], [1, 0.5], [2, 0.6], [3, 0.7]]
    assert cells[grid.cells[0].name]["heldout_first"] == 0.4
    assert {name: points[0] for name, points in curves.items() if name != "heldout"} == {
        "reward": [1, 0.5], "k3": [1, 1e-5], "worst": [1, 0.1], "entropy": [1, 1.0], "grad": [1, 0.1], "ess": [1, 0.99],
    }  # fmt: skip
    assert read_records(study_dir)[grid.cells[4].name] == CellRecord(seconds=9.0, error="engine <0>: no answer")
    html = (study_dir / "study.html").read_text()
    assert f"{grid.cells[4].name} FAILED after step 1 of 3" in html
    assert "1 of 8 runs have not ended" in html


def test_a_study_that_goes_on_with_less_keeps_its_finished_cells(grid: Study, study_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(study_dir, directory := tmp_path / "study")
    fewer = grid_of(modes=["mis"], precisions=["int8"], seeds=[0])
    for _ in range(2):
        assert write_study(fewer, directory, read_records(directory), command="parity study") == ""
    document = json.loads((directory / "study.json").read_text())
    finished = [cell.name for number, cell in enumerate(grid.cells) if number not in (4, 5)]
    names = [cell["name"] for cell in document["cells"]]
    assert names[0] == "mis-int8-seed0" and sorted(names) == sorted(finished)
    assert (directory / "study.html").read_text().count('data-chart="heldout-bfloat16"') == 1
    assert {(row["mode"], row["finished"]) for row in document["ranking"]["rows"]} >= {("tis", 2), ("mis", 1)}
    other = replace(fewer, words=("optim.lr=1",))
    assert [one.name for one in read_results(other, directory, {})] == ["mis-int8-seed0"], "runs of other overrides"
    (directory / "study.json").write_text('{"cells": [{"name": 1}]}')
    assert [one.name for one in read_results(fewer, directory, read_records(directory))] == ["mis-int8-seed0"]


def test_tables_have_every_run_and_every_point(grid: Study, study_dir: Path) -> None:
    with (study_dir / "study.csv").open(newline="") as file:
        runs = {row["name"]: row for row in csv.DictReader(file)}
    assert list(runs) == [cell.name for cell in grid.cells]
    first, failed, new = (runs[grid.cells[number].name] for number in (0, 4, 5))
    assert (first["mode"], first["seed"], float(first["heldout_last"]), first["stage"]) == ("tis", "0", 0.7, "finished")
    assert (failed["error"], new["heldout_last"]) == ("engine <0>: no answer", "")
    with (study_dir / "curves.csv").open(newline="") as file:
        points = [row for row in csv.DictReader(file) if row["metric"] == "eval/accuracy" and row["seed"] == "0"]
    of_first = [row for row in points if (row["mode"], row["precision"]) == ("tis", grid.cells[0].precision)]
    assert [(int(row["step"]), float(row["value"])) for row in of_first] == [(0, 0.4), (1, 0.5), (2, 0.6), (3, 0.7)]


def test_an_interval_draws_seeds_and_prompts() -> None:
    chance = np.random.default_rng(1)
    p, seeds, prompts = 0.7, 8, 400
    right = (chance.random((seeds, prompts)) < p).astype(int)
    low, high = interval(right.tolist()) or (0.0, 0.0)
    assert low < right.mean() < high
    # Independent answers, the worst case: draws of seeds, of prompts and of both each add the variance of the mean.
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(3 * p * (1 - p) / (seeds * prompts)), rel=0.2)
    one = interval(right[:1].tolist()) or (0.0, 0.0)
    assert one[1] - one[0] == pytest.approx(2 * 1.96 * np.sqrt(p * (1 - p) / prompts), rel=0.1), "over the prompts"
    same = interval([[1, 0] * 100, [1, 0] * 100]) or (0.0, 0.0)
    assert same[1] - same[0] == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 200), rel=0.1), "equal seeds add no prompts"
    apart = interval([[1] * 100, [0] * 100])
    assert apart == (0.0, 1.0), "the spread of the seeds counts"
    assert interval([]) is None and interval([[]]) is None and interval([[1], [1, 0]]) is None


def test_the_interval_is_that_of_the_answers_after_the_last_step(grid: Study, study_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(study_dir, directory := tmp_path / "study")
    for cell in grid.cells[:4]:
        rows = [
            {"step": step, "set": name, "prompt_id": number, "greedy": {"correct": step == 3 and number < 3}}
            for step in (0, 3) for name in ("heldout", "hard") for number in range(4)
        ]  # fmt: skip
        (directory / cell.name / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / grid.cells[1].name / "evaluations.jsonl").write_text('{"step": 3, "set": "heldout", "x\n')
    results = read_results(grid, directory, {})
    assert [list(one.heldout_right) for one in results[:3]] == [[1, 1, 1, 0], [], [1, 1, 1, 0]]
    ranking = rank(results)
    shown = {(row.mode, row.precision): row.interval for row in ranking.rows}
    known, unknown, partly = (shown[cell.mode, cell.precision] for cell in grid.cells[:3])
    assert known is not None and known[0] < 0.75 < known[1]
    assert unknown is None and partly is None, "one of its two seeds has no answers"
    assert any("bootstrap" in note for note in study_notes(StudyConfig(), results, ranking))
    [row] = [row for row in table_rows(ranking) if row[0] == "bfloat16" and "tis" in row]
    assert row[TITLES.index("95 %")] == f"{known[0]:.3f}-{known[1]:.3f}"
