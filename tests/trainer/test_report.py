"""trainer/report/page.py: what is on the page, what cannot get onto it, and the page in a real browser."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from PIL import Image
from run_directory import step_metrics, write_run

from rollout.types import FinishReason
from trainer.report.charts import draw
from trainer.report.data import RunData, evaluation_rows, load_run, sample_tables, show, thin, tiles
from trainer.report.page import render, write_report
from trainer.report.sections import SECTIONS
from trainer.tracking.tracker import SampleRow

CHROMIUM = browser.find_chromium()
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH")

DRAWN = "document.documentElement?.dataset.charts !== undefined"
ATTACK = "</pre></script><script>window.attacked = 1</script><img src=x onerror='window.attacked=2'>{{ 7*7 }}<!--"


def hostile_sample(text: str) -> SampleRow:
    return SampleRow(
        prompt_id=99, sample_index=0, prompt=text, response=text * 9, answer=text, reward=0.0, correct=False,
        advantage=0.0, num_response_tokens=1, finish_reason=FinishReason.stop, policy_version=1,
        rollout_logprob_mean=-1.0, k3=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_run(tmp_path_factory.mktemp("runs") / "first", extra_samples=(hostile_sample(ATTACK),))
    write_report(made)
    return made


def make_run(rows: list[dict[str, Any]], **other: Any) -> RunData:
    empty: dict[str, Any] = {
        "samples": [],
        "config": {},
        "environment": {},
        "status": {},
        "accounting": {},
        "remarks": [],
    }
    return RunData(name="made", rows=rows, **(empty | other))


class Elements(HTMLParser):
    """Every element with its attributes, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for found, attrs in self.found if found == tag]


def test_headline_numbers() -> None:
    rows = [
        {"step": 1, "reward/mean": 0.25, "mismatch/k3": 2e-6, "mismatch/k3_floor": 1e-6, "time/step_s": 3.0,
         "time/rollout_s": 1.5, "eval/accuracy": 0.4, "eval/policy_version": 0, "sync/gb_per_s": 0.5},
        {"step": 2, "reward/mean": 0.5, "mismatch/k3": 4e-6, "mismatch/k3_floor": None, "time/step_s": 2.0,
         "time/rollout_s": 1.0},
        {"step": 3, "reward/mean": 0.75, "mismatch/k3": 9e-6, "time/step_s": 1.0, "time/rollout_s": 0.5,
         "eval/accuracy": 0.9, "eval/policy_version": 3},
    ]  # fmt: skip
    shown = {tile.label: (tile.before, tile.value, tile.detail) for tile in tiles(make_run(rows))}
    assert shown == {
        "Held-out, greedy": ("40.0 %", "90.0 %", "+50.0 points"),
        "Reward": ("0.25", "0.75", "+0.5, first to last step"),
        "Mismatch K3": ("", "4.00e-06", "median, rounding floor 1.00e-06"),
        "Time per step": ("", "2 s", "median, rollout 50 %"),
        "Weight sync": ("", "0.5 GB/s", "median"),
    }
    # The policy before its first update stands at step 0.
    assert [row["step"] for row in evaluation_rows(make_run(rows))] == [0, 3]


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(0.5, "percent", "50.0 %"), (0.99998, "percent", "99.9980 %"), (1.0, "percent", "100.0 %"),
     (3.14159e-6, "exponent", "3.14e-06"), (12345.6, "number", "12,346"), (0.012345, "number", "0.0123")],
)  # fmt: skip
def test_numbers_for_people(value: float, form: str, text: str) -> None:
    assert show(value, form) == text


def test_every_metric_of_a_step_has_its_chart(run_dir: Path) -> None:
    drawing = draw(load_run(run_dir))
    assert [section.title for section in drawing.sections] == [section.title for section in SECTIONS]
    shown = {series.key for section in drawing.sections for chart in section.charts for series in chart.series}
    logged = set(step_metrics(1, 2, random.Random(0)))
    not_drawn = {
        "mismatch/k1", "rollout/policy_version", "rollout/num_samples", "rollout/groups_generated", "rollout/rounds",
        "rollout/groups_dropped/never", "sync/bytes", "sync/seconds", "time/step_s", "perf/unattributed_frac",
        "eval/policy_version",
    }  # fmt: skip
    assert shown == logged - not_drawn


def test_phases_stand_with_their_share_of_the_limit_and_with_what_it_assumes(run_dir: Path) -> None:
    run = load_run(run_dir)
    [tile] = [tile for tile in tiles(run) if tile.label == "Share of the hardware's limit"]
    rollout_s = statistics.median(run.values("time/rollout_s"))
    assert f"rollout {rollout_s:.3g} s at {100 * 0.1 / rollout_s:.1f} %" in tile.detail
    assert "MFU" in tile.detail
    assert "96 GFLOP/s" in render(run)
    [shown] = [chart for section in draw(run).sections for chart in section.charts if chart.id == "memory"]
    assert [series.label for series in shown.series[1:]] == ["driver", "engine 0", "policy 0"]


def test_a_missing_metric_only_costs_its_chart() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "reward/mean": 0.5, "policy/entropy": None},
        {"step": 2, "reward/mean": 1},
    ]
    drawing = draw(make_run(rows))
    assert list(drawing.figures) == ["reward"]
    html = render(make_run(rows))
    assert "Policy entropy" not in html and "Reward of the training samples" in html


def test_no_chart_leaves_a_hole_beside_it() -> None:
    rows = [{"step": 1, "time/rollout_s": 1.0, "sync/gb_per_s": 1.0, "reward/mean": 1, "eval/accuracy": 1}]
    sections = {section.title: section.charts for section in draw(make_run(rows)).sections}
    assert [(chart.id, chart.wide) for chart in sections["Where the time goes"]] == [("time", True), ("sync", True)]
    assert [chart.wide for chart in sections["Learning"]] == [False, False]


def test_gaps_stay_gaps_and_stacks_add_up() -> None:
    rows = [
        {"step": 1, "time/rollout_s": 1.0, "time/train_s": None, "time/sync_s": 0.5, "mismatch/k3": None},
        {"step": 2, "time/rollout_s": 2.0, "time/train_s": 1.0, "time/sync_s": 0.5, "mismatch/k3": 1e-6},
    ]
    data = draw(make_run(rows)).figures["time"].select_one({"name": "time/0"}).data_source.data
    assert list(data["time/sync_s:bottom"]) == [1.0, 3.0] and list(data["time/sync_s:top"]) == [1.5, 3.5]
    assert np.isnan(data["mismatch/k3"][0]), "null must be NaN, which is drawn as a gap"


def test_a_long_run_gets_a_moving_mean() -> None:
    rows = [{"step": step, "policy/entropy": None if step == 150 else 1.0 + step % 2} for step in range(1, 301)]
    figure = draw(make_run(rows)).figures["entropy"]
    mean = figure.select_one({"name": "entropy/0"})
    assert mean.glyph.y == "policy/entropy:mean"
    assert np.allclose(mean.data_source.data["policy/entropy:mean"][5:-5], 1.5, atol=0.11)
    assert figure.select_one({"name": "entropy/0/dots"}).glyph.y == "policy/entropy"


def test_thinning_keeps_every_peak() -> None:
    rows = [{"step": step, "mismatch/k3": 1.0 if step % 1000 == 7 else 1e-6} for step in range(1, 10_001)]
    kept = thin(rows, 500)
    assert len(kept) == 500 and kept == sorted(kept)
    assert sum(rows[index]["mismatch/k3"] == 1.0 for index in kept) == 10
    assert thin(rows[:500], 500) == list(range(500))
    drawn = draw(make_run(rows)).figures["k3"].select_one({"name": "k3/0"}).data_source.data
    assert len(drawn["step"]) == 2000
    assert np.isclose(np.mean(drawn["mismatch/k3:mean"]), 1e-3, rtol=0.1), "the mean is over all steps"


def test_samples_are_sorted_by_mismatch() -> None:
    samples = [
        {"step": 1, "k3": 1e-6},
        {"step": 1, "k3": None},
        {"step": 1, "k3": 5e-6},
        {"step": 2},
        {"step": 3, "k3": 1},
    ]
    first, last = sample_tables(make_run([], samples=samples))
    assert (first.step, [row["k3"] for row in first.rows]) == (1, [5e-6, 1e-6, None])
    assert last.step == 3
    assert len(sample_tables(make_run([], samples=samples[:3]))) == 1


def test_text_of_a_model_is_only_text(run_dir: Path) -> None:
    page = Elements((run_dir / "report.html").read_text(encoding="utf-8"))
    assert not page.named("img") and len(page.named("script")) == 3
    assert any(ATTACK in text for text in page.text)
    assert "49" not in "".join(text for text in page.text if "7*7" in text)
    for tag, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)


def test_names_and_values_of_a_config_are_only_text() -> None:
    config = {"run": {"recipe": ATTACK}, ATTACK: {ATTACK: ATTACK}, "defaults": [{"override /correction": ATTACK}]}
    rows = [{"step": 1, f"rollout/groups_dropped/{ATTACK}": 3, "rollout/groups_kept": 1, "rollout/groups_generated": 4}]
    page = Elements(render(make_run(rows, config=config, environment={ATTACK: ATTACK}, remarks=[ATTACK])))
    assert not page.named("img") and len(page.named("script")) == 3
    assert sum(ATTACK in text for text in page.text) >= 6


def test_the_page_asks_for_nothing(run_dir: Path) -> None:
    page = Elements((run_dir / "report.html").read_text(encoding="utf-8"))
    for tag, attributes in page.found:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
    policies = [meta["content"] for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policies and str(policies[0]).startswith("default-src 'none'; script-src 'sha256-")
    assert (run_dir / "report.html").stat().st_size < 3_000_000


def test_broken_files_are_named(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run_dir, broken)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward/me')
    (broken / "samples.jsonl").unlink()
    (broken / "config.yaml").write_text("a: [")
    text = " ".join(Elements(write_report(broken).read_text(encoding="utf-8")).text)
    assert "metrics.jsonl line 41 is not a JSON object and is left out" in text
    assert "samples.jsonl is missing" in text and "config.yaml cannot be read" in text
    assert "completed, 40 steps" in text


def test_a_run_without_steps_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No step has finished yet" in write_report(tmp_path).read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing"):
        write_report(tmp_path / "nowhere")


def test_a_broken_off_run_is_not_called_completed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=4)
    (run_dir / "status.json").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "completed, 4 of 4 steps" in write_report(run_dir).read_text(encoding="utf-8")
    (run_dir / "metrics.jsonl").write_text("".join(lines[:3]))
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert '<span class="status open">3 of 4 steps</span>' in html


def colour_share(image: Path, wanted: str) -> int:
    """Number of pixels within a small distance of the colour "#rrggbb"."""
    target = np.array([int(wanted[i : i + 2], 16) for i in (1, 3, 5)])
    pixels = np.asarray(Image.open(image).convert("RGB"), dtype=int)
    return int((np.abs(pixels - target).max(axis=2) < 12).sum())


async def plot_box(page: browser.Page, chart: str) -> dict[str, float]:
    return json.loads(
        await page.evaluate(
            f"""(() => {{ const card = document.querySelector('figure[data-chart="{chart}"]');
            card.scrollIntoView({{block: 'center'}}); const box = card.querySelector('.plot').getBoundingClientRect();
            return JSON.stringify({{x: box.x, y: box.y, width: box.width, height: box.height}}); }})()"""
        )
    )


async def steps_shown(page: browser.Page) -> set[str]:
    shown = await page.evaluate("[...document.querySelectorAll('.at')].map((at) => at.textContent).join()")
    return set(shown.split(","))


async def page_box(page: browser.Page, box: dict[str, float]) -> dict[str, float]:
    """The same box in coordinates of the whole page, for a screenshot."""
    return {**box, "y": box["y"] + await page.evaluate("window.scrollY")}


async def visit(file: Path, out: Path) -> None:
    assert CHROMIUM is not None
    async with browser.open_page(CHROMIUM, file, out / "profile") as page:
        await page.wait_for(DRAWN)
        num_charts = await page.evaluate("document.querySelectorAll('figure[data-chart]').length")
        assert num_charts == sum(len(section.charts) for section in SECTIONS)
        assert await page.evaluate("Bokeh.documents[0].roots().length") == num_charts
        assert await page.evaluate("window.attacked") is None
        assert await steps_shown(page) == {"step 40"}

        # Every curve is really painted, in the colours of both themes.
        box = await plot_box(page, "k3")
        for dark, colour, paper in ((False, "#0068b8", "#ffffff"), (True, "#5aa9f5", "#181c23")):
            await page.look(width=1200, height=900, dark=dark)
            await asyncio.sleep(0.5)
            shot = await page.screenshot(out / "k3.png", clip=await page_box(page, box))
            assert colour_share(shot, colour) > 500, f"no curve of colour {colour}"
            assert colour_share(shot, paper) > 0.5 * box["width"] * box["height"]
        await page.look(width=1200, height=900)

        # The cursor on one chart reads the values of all of them.
        await page.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        await page.wait_for("document.querySelector('figure[data-chart=k3] .at').textContent !== 'step 40'")
        (shown, *others) = await steps_shown(page) - {"step 20"}
        assert not others and re.fullmatch(r"step (1[6-9]|2\d)", shown), shown
        step = int(shown.split()[1])
        expected = load_run(file.parent).rows[step - 1]["mismatch/k3"]
        read = await page.evaluate("document.querySelector('[data-name=\"k3/0\"] b').textContent")
        assert float(read) == pytest.approx(expected, rel=6e-3)

        # A click on a name hides its curve, a second one brings it back.
        button = "document.querySelector('[data-name=\"k3/0\"]')"
        curve = "Bokeh.documents[0].get_model_by_name('k3/0').visible"
        assert await page.evaluate(f"{button}.click(), {curve}") is False
        assert await page.evaluate(f"{button}.click(), {curve}") is True

        # A drag zooms all charts, a double click resets them.
        span = "(({start, end}) => end - start)(Bokeh.documents[0].get_model_by_name('{}').x_range)".replace(
            "{}", "reward"
        )
        whole = await page.evaluate(span)
        middle = box["y"] + box["height"] / 2
        await page.mouse("mousePressed", box["x"] + 0.4 * box["width"], middle, clicks=1)
        for part in (0.45, 0.5, 0.6):
            await page.call(
                "Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + part * box["width"], y=middle,
                button="left", buttons=1,
            )  # fmt: skip
        await page.mouse("mouseReleased", box["x"] + 0.6 * box["width"], middle, clicks=1)
        await page.wait_for(f"{span} < {0.4 * whole}")
        for clicks in (1, 2):
            await page.mouse("mousePressed", box["x"] + 0.5 * box["width"], middle, clicks=clicks)
            await page.mouse("mouseReleased", box["x"] + 0.5 * box["width"], middle, clicks=clicks)
        await page.wait_for(f"{span} === {whole}")

        # A phone: nothing is wider than the screen.
        await page.look(width=400, height=900)
        await asyncio.sleep(0.5)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        assert not page.problems, page.problems
        assert [url for url in page.requests if not url.startswith(("file://", "data:", "about:"))] == []


@needs_browser
def test_in_a_browser(run_dir: Path, tmp_path: Path) -> None:
    asyncio.run(visit(run_dir / "report.html", tmp_path))


@needs_browser
def test_a_run_of_one_step_in_a_browser(tmp_path: Path) -> None:
    async def look() -> None:
        assert CHROMIUM is not None
        run_dir = write_run(tmp_path / "run", num_steps=1)
        async with browser.open_page(CHROMIUM, write_report(run_dir), tmp_path / "profile") as page:
            await page.wait_for(DRAWN)
            assert await steps_shown(page) == {"step 0", "step 1"} or await steps_shown(page) == {"step 1"}
            assert not page.problems, page.problems

    asyncio.run(look())


@needs_browser
def test_a_script_in_the_page_could_not_run(run_dir: Path, tmp_path: Path) -> None:
    """The second line of defence: even unescaped text of a model would be stopped by the page's policy."""

    async def look() -> None:
        assert CHROMIUM is not None
        html = (run_dir / "report.html").read_text(encoding="utf-8")
        (tmp_path / "bad.html").write_text(html.replace("<main>", f"<main>{ATTACK}-->", 1), encoding="utf-8")
        async with browser.open_page(CHROMIUM, tmp_path / "bad.html", tmp_path / "profile") as page:
            await page.wait_for(DRAWN)
            assert await page.evaluate("window.attacked") is None
            assert any("Content Security Policy" in problem for problem in page.problems)

    asyncio.run(look())
