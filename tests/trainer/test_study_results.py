"""What a study concludes from made numbers, and that its page, picture and tables show every run."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from dataclasses import astuple
from itertools import product
from pathlib import Path

import browser
import pytest
from test_study import grid_of

from trainer.study.cells import Stage
from trainer.study.config import StudyConfig
from trainer.study.grid import Grid
from trainer.study.output import StudyWriter, curves_csv
from trainer.study.ranking import apart, chance_apart, default_target, rank
from trainer.study.results import METRICS, CellResult, Spread, curve, spread
from trainer.study.run import CellRecord
from trainer.study.study_dir import read_records
from trainer.study.table import render_table, study_notes


def result(
    mode: str,
    seed: int,
    scores: list[float],
    *,
    precision: str = "int8",
    stage: Stage = Stage.finished,
    error: str = "",
) -> CellResult:
    """A run with a held-out accuracy before the first of its steps and after each."""
    rows = [
        {
            "step": step,
            "reward/mean": 0.5,
            "mismatch/k3": 1e-5 * step,
            "policy/entropy": 1.0 / step,
            "optim/grad_norm": 0.1 * step,
            "mismatch/ess/raw_token": 1 - 0.01 * step,
            "time/step_s": 2.0,
        }
        for step in range(1, len(scores))
    ]
    return CellResult(
        name=f"{mode}-{precision}-seed{seed}",
        mode=mode,
        precision=precision,
        seed=seed,
        stage=stage,
        last_step=len(rows),
        num_steps=len(rows),
        seconds=30.0,
        error=error,
        rows=rows,
        evaluations=[{"step": step, "eval/accuracy": score} for step, score in enumerate(scores)],
    )


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
    ranking = rank(results, StudyConfig())
    assert [row.mode for row in ranking.rows] == ["mis", "tis", "ppo_is"]
    assert [row.places for row in ranking.rows] == [(1, 2), (1, 2), (3, 3)]
    assert [row.like for row in ranking.rows] == [("tis",), ("mis",), ()]
    assert near(ranking.rows[0].score, mean=0.95, low=0.91, high=0.99, count=3)
    assert (ranking.pairs, ranking.parted) == (3, 2)
    # Of two equal modes with three seeds, all of one are above all of the other in 2 of the 20 orders.
    assert ranking.parted_by_chance == pytest.approx(3 * 2 / 20)


def test_precisions_are_ranked_by_themselves() -> None:
    results = [*three("tis", [0.2, 0.2, 0.2], precision="int4"), *three("tis", [0.9, 0.9, 0.9], precision="bfloat16")]
    assert [row.places for row in rank(results, StudyConfig()).rows] == [(1, 1), (1, 1)]


def test_one_seed_tells_nothing_apart() -> None:
    ranking = rank([result("tis", 0, [0.3, 0.9]), result("mis", 0, [0.3, 0.1])], StudyConfig())
    assert [row.places for row in ranking.rows] == [(1, 2), (1, 2)]
    assert ranking.parted == 0
    assert any("One seed tells nothing apart" in note for note in study_notes(StudyConfig(), [], ranking))


def test_modes_that_took_the_same_steps_are_named_and_count_once() -> None:
    curves = {"tis": 0.9, "vanilla_is": 0.9, "ppo_is": 0.5}
    results = [result(mode, seed, [0.3, 0.4 + 0.1 * seed, end]) for mode, end in curves.items() for seed in (0, 1)]
    ranking = rank(results, StudyConfig())
    assert ranking.same == (("int8", "tis", "vanilla_is"),)
    assert (ranking.pairs, ranking.parted) == (1, 1)
    assert any("int8: tis and vanilla_is were the same run" in note for note in study_notes(StudyConfig(), [], ranking))
    # The same end alone is not the same run.
    results[2] = result("vanilla_is", 0, [0.3, 0.41, 0.9])
    assert rank(results, StudyConfig()).same == ()


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


def test_collapse_failure_and_target_are_counted() -> None:
    results = [
        result("tis", 0, [0.3, 0.5, 0.9, 0.95]),
        result("tis", 1, [0.3, 0.9, 0.92, 0.70]),
        result("tis", 2, [0.3, 0.4], stage=Stage.broken, error="engine 0: no answer"),
    ]
    [row] = (ranking := rank(results, StudyConfig(target=0.9))).rows
    assert (row.planned, row.finished, row.failed, row.collapsed) == (3, 2, 1, 1)
    assert near(row.score, mean=0.825, low=0.70, high=0.95, count=2), "only of runs that ended"
    assert (row.reached, row.steps_to_target) == (2, Spread(mean=1.5, low=1, high=2, count=2))
    assert near(row.worst_k3, mean=3e-5, low=3e-5, high=3e-5, count=2)
    [line] = [line for line in render_table(ranking) if "tis" in line]
    assert "0.825 (0.700-0.950)" in line and "1 of 2" in line and "2 of 3, 1 failed" in line and "3.0e-05" in line
    notes = study_notes(StudyConfig(target=0.9), results, ranking)
    assert "tis-int8-seed2 FAILED after step 1 of 1: engine 0: no answer. It is not in the table." in notes
    # 90 % of the way from 0.3 to the best mean.
    assert default_target(results) == pytest.approx(0.3 + 0.9 * (0.825 - 0.3))
    assert default_target([result("tis", 0, [0.3, 0.2])]) is None, "nothing was learnt"


def test_a_table_has_a_row_per_mode_and_says_what_it_lacks() -> None:
    nothing = [
        CellResult(
            name=f"{mode}-int8-seed0", mode=mode, precision="int8", seed=0, stage=Stage.new, last_step=0, num_steps=3,
            seconds=0.0, error="",
        )
        for mode in ("tis", "mis")
    ]  # fmt: skip
    lines = render_table(rank(nothing, StudyConfig()))
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1, "columns are padded to one width"
    assert "0 of 1" in lines[2]


def test_a_curve_is_the_mean_and_the_range_of_the_seeds_that_have_the_step() -> None:
    heldout = next(metric for metric in METRICS if metric.id == "heldout")
    short = result("tis", 1, [0.1, 0.2], stage=Stage.broken)
    found = curve([result("tis", 0, [0.3, 0.4, 0.8]), short], heldout)
    assert found.steps == [0, 1, 2] and found.counts == [2, 2, 1]
    assert found.mean == pytest.approx([0.2, 0.3, 0.8])
    assert (found.low, found.high) == ([0.1, 0.2, 0.8], [0.3, 0.4, 0.8])


@pytest.fixture(scope="module")
def grid() -> Grid:
    return grid_of(modes=["tis", "mis"], precisions=["bfloat16", "int8"], seeds=[0, 1])


@pytest.fixture(scope="module")
def study_dir(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study in which one run failed half way, one has not begun, and the others ended."""
    directory = tmp_path_factory.mktemp("study")
    for number, cell in enumerate(grid.cells):
        if number == 5:
            continue
        run_dir = directory / cell.name
        run_dir.mkdir()
        made = result(cell.mode, cell.seed, [0.3, 0.5, 0.6 + 0.02 * number, 0.7], precision=cell.precision)
        rows = [{**row, "eval/accuracy": made.evaluations[row["step"]]["eval/accuracy"]} for row in made.rows]
        kept = rows[:1] if number == 4 else rows
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        status = {"status": "failed" if number == 4 else "completed", "last_step": len(kept)}
        (run_dir / "status.json").write_text(json.dumps(status))
        (run_dir / "report.html").write_text("<html></html>")
    records = {cell.name: CellRecord(seconds=20.0) for cell in grid.cells}
    records[grid.cells[4].name] = CellRecord(seconds=9.0, error="engine <0>: no answer")
    StudyWriter(grid, StudyConfig(), directory, command="parity study arithmetic_grpo x=<y>").write(records)
    return directory


def test_the_page_shows_every_run_and_curve_and_opens_offline(grid: Grid, study_dir: Path) -> None:
    html = (study_dir / "study.html").read_text()
    for cell in grid.cells:
        assert cell.name in html
    assert f'<a href="{grid.cells[0].name}/report.html">' in html
    assert f'href="{grid.cells[5].name}/report.html"' not in html
    assert "6 of 8 runs finished, 1 failed" in html
    assert "engine &lt;0&gt;: no answer" in html and "engine <0>" not in html
    assert "parity study arithmetic_grpo x=&lt;y&gt;" in html
    for metric, precision in product(METRICS, grid.precisions):
        assert f'data-chart="{metric.id}-{precision}"' in html
    names = set(re.findall(r'data-name="([^"]+)"', html))
    assert len(names) == len(METRICS) * len(grid.precisions) * len(grid.modes)
    assert "Content-Security-Policy" in html
    outside = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"(src|href)=.(https?:)?//", outside), "nothing is fetched"


CHROMIUM = browser.find_chromium()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH")
def test_the_page_in_a_browser_hides_a_mode_everywhere(grid: Grid, study_dir: Path, tmp_path: Path) -> None:
    async def visit() -> None:
        assert CHROMIUM is not None
        async with browser.open_page(CHROMIUM, study_dir / "study.html", tmp_path / "profile") as page:
            await page.wait_for("document.documentElement?.dataset.charts !== undefined")
            assert await page.evaluate("Bokeh.documents[0].roots().length") == len(METRICS) * len(grid.precisions)
            band = "Bokeh.documents[0].get_model_by_name('k3-int8/0/spread')"
            assert await page.evaluate(f"{band}.visible && {band}.glyph.type") == "VArea"
            await page.evaluate("document.querySelector('[data-toggle-run=\"0\"]').click()")
            hidden = "[...document.querySelectorAll('.legend [data-run=\"0\"]')].map((b) => b.ariaPressed).join()"
            assert set((await page.evaluate(hidden)).split(",")) == {"false"}
            assert await page.evaluate(f"{band}.visible") is False
            assert page.problems == []
            assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []

    asyncio.run(visit())


def test_the_numbers_are_beside_the_page(grid: Grid, study_dir: Path) -> None:
    document = json.loads((study_dir / "study.json").read_text())
    assert document["recipe"] == "arithmetic_grpo" and document["command"].startswith("parity study")
    cells = {cell["name"]: cell for cell in document["cells"]}
    assert list(cells) == [cell.name for cell in grid.cells]
    assert cells[grid.cells[0].name]["heldout_last"] == 0.7
    assert cells[grid.cells[4].name]["stage"] == "broken" and cells[grid.cells[5].name]["stage"] == "new"
    assert len(document["ranking"]["rows"]) == 4
    lines = list(csv.DictReader((study_dir / "study.csv").read_text().splitlines()))
    assert len(lines) == 6 * 3 + 1
    assert lines[0] == {
        "mode": "tis", "precision": "bfloat16", "seed": "0", "step": "1", "heldout": "0.5", "reward": "0.5",
        "k3": "1e-05", "entropy": "1.0", "grad_norm": "0.1", "ess": "0.99",
    }  # fmt: skip
    assert read_records(study_dir)[grid.cells[4].name] == CellRecord(seconds=9.0, error="engine <0>: no answer")
    markdown = (study_dir / "study.md").read_text()
    assert "| precision | place" in markdown
    assert f"{grid.cells[4].name} FAILED after step 1 of 3" in markdown
    assert "1 of 8 runs have not ended" in markdown


def test_a_study_that_grew_keeps_what_it_knows_of_other_cells(grid: Grid, study_dir: Path, tmp_path: Path) -> None:
    other = {"rloo-int8-seed9": CellRecord(seconds=1.5, error="x")}
    StudyWriter(grid, StudyConfig(), tmp_path, command="parity study").write(other)
    assert read_records(tmp_path)["rloo-int8-seed9"] == CellRecord(seconds=1.5, error="x")


def test_the_curves_of_no_runs_are_a_header() -> None:
    assert curves_csv([]) == "mode,precision,seed,step,heldout,reward,k3,entropy,grad_norm,ess\n"
