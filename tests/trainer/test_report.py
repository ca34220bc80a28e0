"""trainer/report/page.py: what is on the page, what cannot get onto it, and what several runs show together.

The pages in a real browser: test_report_browser.py.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_directory import ATTACK, hostile_sample, make_run, step_metrics, step_responses, write_run

from trainer.cli.commands import run as parity
from trainer.report.charts import draw
from trainer.report.data import RunData, load_run, load_runs, show, thin
from trainer.report.headline import config_difference
from trainer.report.page import contents, render, render_runs, write_comparison, write_report
from trainer.report.phases import speeds
from trainer.report.samples import coloured, heldout_tables, prompt_frame, sample_tables, worst_samples
from trainer.report.sections import SECTIONS
from trainer.report.spec import Chart, Section
from trainer.rundir.events import Event, Severity, events_of_row

SAMPLE = {"step": 1, "prompt_id": 1, "sample_index": 0, "prompt": "p", "response": "r", "answer": "a", "k3": 1.0}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_run(tmp_path_factory.mktemp("runs") / "first", extra_samples=(hostile_sample(ATTACK),))
    write_report(made)
    return made


def figures(run: RunData) -> dict[str, Any]:
    return draw(*contents([run]))


def charts_of(sections: list[Section]) -> dict[str, Chart]:
    return {chart.id: chart for section in sections for chart in section.charts}


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


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(0.5, "percent", "50.0 %"), (0.99998, "percent", "99.9980 %"), (1.0, "percent", "100.0 %"),
     (3.14159e-6, "exponent", "3.14e-06"), (12345.6, "number", "12,346"), (0.012345, "number", "0.0123")],
)  # fmt: skip
def test_numbers_for_people(value: float, form: str, text: str) -> None:
    assert show(value, form) == text


def test_every_metric_of_a_step_has_its_chart(run_dir: Path) -> None:
    sections, tables = contents([load_run(run_dir)])
    own = ["Where the mismatch sits"]
    assert [section.title for section in sections if section.title not in own] == [part.title for part in SECTIONS]
    assert [section.title for section in sections][2:3] == own
    shown = {s.key for chart in charts_of(sections).values() if chart.x is None for s in chart.series}
    logged = set(step_metrics(2, 2, random.Random(0)))
    not_drawn = {
        "mismatch/k1", "rollout/policy_version", "rollout/num_samples", "rollout/groups_generated", "rollout/rounds",
        "rollout/groups_dropped/never", "sync/bytes", "sync/seconds", "time/step_s", "perf/unattributed_frac",
        "eval/policy_version",
    }  # fmt: skip
    assert shown == logged - not_drawn
    # Every chart says how to read it, every axis that is not over steps has a name, and every column is there.
    for chart in charts_of(sections).values():
        assert chart.note.endswith("."), chart.id
        assert chart.x is None or chart.x.label
        assert all(np.isfinite(tables[s.table].columns[s.key]).any() for s in chart.series), chart.id


def test_phases_stand_with_their_share_of_the_limit_and_with_what_it_assumes(run_dir: Path) -> None:
    run = load_run(run_dir)
    [tile] = [tile for tile in speeds(run) if tile.label == "Share of the hardware's limit"]
    rollout_s = statistics.median(run.values("time/rollout_s"))
    assert f"rollout {rollout_s:.3g} s at {100 * 0.1 / rollout_s:.1f} %" in tile.detail
    assert "MFU" in tile.detail
    assert "96 GFLOP/s" in render(run)
    [shown] = [chart for section in contents([run])[0] for chart in section.charts if chart.id == "memory"]
    assert [series.label for series in shown.series[1:]] == ["driver", "engine 0", "policy 0"]


def test_a_missing_metric_only_costs_its_chart() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "reward/mean": 0.5, "policy/entropy": None},
        {"step": 2, "reward/mean": 1},
    ]
    assert list(figures(make_run(rows))) == ["reward"]
    html = render(make_run(rows))
    assert "Policy entropy" not in html and "Reward of the training samples" in html


def test_gaps_stay_gaps_and_stacks_add_up() -> None:
    rows = [
        {"step": 1, "time/rollout_s": 1.0, "time/train_s": None, "time/sync_s": 0.5, "mismatch/k3": None},
        {"step": 2, "time/rollout_s": 2.0, "time/train_s": 1.0, "time/sync_s": 0.5, "mismatch/k3": 1e-6},
    ]
    data = figures(make_run(rows))["time"].select_one({"name": "time/0"}).data_source.data
    assert list(data["time/sync_s:bottom"]) == [1.0, 3.0] and list(data["time/sync_s:top"]) == [1.5, 3.5]
    assert np.isnan(data["mismatch/k3"][0]), "null must be NaN, which is drawn as a gap"


@pytest.mark.parametrize(
    ("chart", "values", "axis"),
    [
        ("ess", (0.999965, 1.0), (0.952, 1.002)),  # 5 points, and none of them far above 100 %
        ("ess", (0.2, 0.9), (math.nan, math.nan)),
        ("weights", (0.0, 1e-5), (0, 0.05)),
        ("weights", (0.0, 0.2), (0, math.nan)),
        ("reward", (0.9999, 1.0001), (0.975, 1.025)),
        ("reward", (0.0, 0.001), (math.nan, math.nan)),
        ("loss", (-1e-9, 1e-9), (-0.005, 0.005)),
        ("k3", (1.0e-6, 1.1e-6), (3.3166e-7, 3.3166e-6)),
        ("k3", (1e-6, 1e-4), (math.nan, math.nan)),
    ],
)
def test_an_axis_does_not_magnify_what_is_no_difference(
    chart: str, values: tuple[float, float], axis: tuple[float, float]
) -> None:
    keys = {"ess": "mismatch/ess/raw_token", "weights": "mismatch/is/clip_frac_hi", "reward": "reward/mean",
            "loss": "loss/policy", "k3": "mismatch/k3"}  # fmt: skip
    made = figures(make_run([{"step": step, keys[chart]: value} for step, value in enumerate(values, start=1)]))[chart]
    assert (made.y_range.start, made.y_range.end) == pytest.approx(axis, rel=1e-3, nan_ok=True)


def test_a_long_run_gets_a_moving_mean() -> None:
    rows = [{"step": step, "policy/entropy": None if step == 150 else 1.0 + step % 2} for step in range(1, 301)]
    figure = figures(make_run(rows))["entropy"]
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
    drawn = figures(make_run(rows))["k3"].select_one({"name": "k3/0"}).data_source.data
    assert len(drawn["step"]) == 2000
    assert np.isclose(np.mean(drawn["mismatch/k3:mean"]), 1e-3, rtol=0.1), "the mean is over all steps"


def test_samples_are_sorted_by_mismatch() -> None:
    samples = [{"step": 1, "k3": 1e-6}, {"step": 1, "k3": None}, {"step": 1, "k3": 5e-6}, {"step": 3, "k3": 1}]
    last, first = sample_tables(make_run([], samples=samples))
    assert (first.title, [row["k3"] for row in first.rows]) == ("Step 1", [5e-6, 1e-6, None])
    assert last.title == "Step 3"
    assert len(sample_tables(make_run([], samples=samples[:3]))) == 1


def test_what_a_user_returns_and_asks_for_has_charts() -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.5, "eval/chars": 3.0, "eval/hard/accuracy": 0.25, "eval/num_prompts": 9.0},
        {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "reward/chars": 4.0, "reward/form/tags": 1.0, "own/A": 2.0,
         "episode/turns_mean": 2.0, "mismatch/rs/mine_frac": 0.1, "mismatch/rs/token_frac": 0.1, "eval/pass@2": 0.5,
         "eval/accuracy": 1,
         "eval/hard/accuracy": 0.5, "eval/hard/accuracy_sampled": 0.5, "eval/hard/num_prompts": 9.0},
    ]  # fmt: skip
    for runs in ([make_run(rows)], [make_run(rows), make_run(rows)]):
        sections, tables = contents(runs)
        [own] = [section for section in sections if section.title == "Your numbers"]
        shown = {series.key: tables[series.table].columns[series.key] for c in own.charts for series in c.series}
        assert set(shown) == {
            "reward/chars", "eval/chars", "reward/form/tags", "own/A", "mismatch/rs/mine_frac", "eval/pass@2",
            "eval/hard/accuracy", "eval/hard/accuracy_sampled",
        }  # fmt: skip
        assert (list(shown["eval/hard/accuracy"]), list(shown["reward/chars"])) == ([0.25, 0.5], [4.0])
        assert "turns" in charts_of(sections)
    pairs = {c.title: [series.label for series in c.series] for s in contents([make_run(rows)])[0] for c in s.charts}
    assert pairs["reward/chars"] == ["training samples", "held-out"]
    assert pairs["Held-out accuracy of hard"] == ["greedy", "sampled"]


def test_held_out_responses_stand_side_by_side(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    with (run_dir / "evaluations.jsonl").open("a") as file:
        for row in ({"step": 1}, {"step": 2, "greedy": "x", "prompt": ""}, *step_responses(1, text="in between")):
            file.write(json.dumps({"step": 1} | row) + "\n")
        file.write(json.dumps({"step": 2} | step_responses(2, text=ATTACK)[2]) + "\n")  # a resumed run made it again
    run = load_run(run_dir)
    tables = heldout_tables(run)
    assert [table.title for table in tables] == [
        "wrong, then right", "right, then wrong", "wrong, then wrong", "right, then right"
    ]  # fmt: skip
    assert [[row["response"] for row in table.rows[0]] for table in tables] == [
        ["0", "1"], ["2", "1"], ["3", "3"], ["3", ATTACK]
    ]  # fmt: skip
    html = render(run)
    page = Elements(html)
    assert ATTACK in page.text and not page.named("img") and "in between" not in html
    assert "chars 1.5" in page.text and "evaluations.jsonl line 9 is not a row of a run" in html
    once = replace(run, evaluations={0: run.evaluations[0]})
    assert [(table.title, table.of) for table in heldout_tables(once)] == [("wrong", 2), ("right", 2)]


def test_samples_of_all_steps_are_picked_by_chance_reward_mismatch_and_length() -> None:
    samples = [
        {**SAMPLE, "step": step, "sample_index": index, "reward": step / 10, "k3": index / 1000, "by_k3": index > 3,
         "num_response_tokens": 10 * step + index}
        for step in range(1, 21) for index in range(8)
    ]  # fmt: skip
    tables = {table.title: table for table in sample_tables(make_run([], samples=samples))}
    assert list(tables)[:2] == ["Step 20", "Step 1"]
    rows = {title.removesuffix(", all steps"): table.rows for title, table in tables.items()}
    assert {row["reward"] for row in rows["Highest reward"]} == {2.0}
    assert {row["reward"] for row in rows["Lowest reward"]} == {0.1}
    assert {row["k3"] for row in rows["Largest mismatch"]} == {0.007}
    assert rows["Longest"][0]["num_response_tokens"] == 207
    assert len({row["step"] for row in rows["At random"]}) > 3 and not any(row["by_k3"] for row in rows["At random"])
    assert (tables["At random, all steps"].of, len(rows["At random"])) == (80, 6)


def test_what_a_tool_wrote_is_told_from_what_was_sampled() -> None:
    segments = [{"sampled": True, "text": "2+3="}, {"sampled": False, "text": ATTACK}, 7, {"text": []}]
    samples = [
        {**SAMPLE, "segments": segments, "reward_parts": {"chars": 4.0, "bad": "x"}},
        {**SAMPLE, "segments": 3, "reward_parts": [1]},
    ]
    html = render(make_run([], samples=samples))
    assert '<span class="t">2+3=</span><span class="t off">&lt;/pre&gt;' in html
    assert "chars 4" in html and not Elements(html).named("img")


def test_text_of_a_model_is_only_text(run_dir: Path) -> None:
    page = Elements((run_dir / "report.html").read_text(encoding="utf-8"))
    assert not page.named("img") and len(page.named("script")) == 3
    assert sum(text == ATTACK for text in page.text) >= 4, "two tokens, and prompt and answer of the table"
    assert "49" not in "".join(text for text in page.text if "7*7" in text)
    for tag, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)


def test_names_and_values_of_a_config_are_only_text() -> None:
    config = {"run": {"recipe": ATTACK}, ATTACK: {ATTACK: ATTACK}, "defaults": [{"override /correction": ATTACK}]}
    rows = [{"step": 1, f"rollout/groups_dropped/{ATTACK}": 3, "rollout/groups_kept": 1, "rollout/groups_generated": 4}]
    run = make_run(rows, config=config, environment={ATTACK: ATTACK}, remarks=[ATTACK])
    page = Elements(render(run))
    assert not page.named("img") and len(page.named("script")) == 3
    assert sum(ATTACK in text for text in page.text) >= 6
    other = replace(run, name=ATTACK, config={})
    page = Elements(render_runs([run, other]))
    assert not page.named("img") and len(page.named("script")) == 3
    assert sum(ATTACK in text for text in page.text) >= 5


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
    assert "metrics.jsonl line 42 is not a JSON object and is left out" in text
    assert "samples.jsonl is missing" in text and "config.yaml cannot be read" in text
    assert "completed, 40 steps" in text


BROKEN_SAMPLES = (
    {"step": 1},
    {"step": 1, "prompt": None, "response": 7, "answer": [], "prompt_id": {}, "sample_index": None, "k3": "high"},
    {**SAMPLE, "tokens": {"first": math.inf, "num_tokens": 1, "texts": ["a"], "rollout_logprobs": [0], "deltas": [0]}},
    {**SAMPLE, "tokens": {"first": 0, "num_tokens": 1, "texts": ["a"], "rollout_logprobs": [10**400], "deltas": [1]}},
    {**SAMPLE, "tokens": [1]},
    {**SAMPLE, "k3": 10**400, "reward": math.nan, "correct": "maybe", "finish_reason": []},
)
BROKEN_METRICS = (
    {"step": 10**400, "reward/mean": 1},
    {"step": 1.5},
    {"step": True},
    {"step": "2"},
    {"step": 1, "reward/mean": math.inf, "mismatch/k3": 10**400, "time/step_s": 0, "time/train_s": 1e308},
    {"step": 2, "reward/mean": {}, "eval/accuracy": -(10**300), "time/step_s": 1e29, "rollout/groups_dropped/x": []},
)
BROKEN_FILES = {
    "config.yaml": "\n".join(
        ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    ),
    "environment.json": '{"memory_bytes": 1' + "0" * 400 + ', "argv": 7, "started_at": {}, "n": ' + "[" * 5000,
    "accounting.json": '{"assumptions": 7}',
    "status.json": '{"status": ["x"]}',
}


@pytest.mark.scenario(29)
def test_a_broken_run_has_a_page(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run_dir, broken)
    for name, text in BROKEN_FILES.items():
        (broken / name).write_text(text)
    for name, rows in (("samples.jsonl", BROKEN_SAMPLES), ("metrics.jsonl", BROKEN_METRICS)):
        with (broken / name).open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows) + "[" * 100_000 + "\n" + '{"step": 3}{\n')
    started = time.monotonic()
    text = " ".join(Elements(write_report(broken).read_text(encoding="utf-8")).text)
    assert time.monotonic() - started < 60
    assert "config.yaml cannot be read (its aliases stand for" in text
    assert "samples.jsonl line" in text and "is not a row of a run and is left out" in text
    assert "more lines are left out" in text
    assert parity(["report", str(broken), str(run_dir), "-o", str(tmp_path / "both.html")]) == 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["step", "kind", "text", "reward/mean", "eval/accuracy", "time/step_s", "time/train_s", "mismatch/k3", "prompt",
     "response", "answer", "prompt_id", "sample_index", "k3", "tokens", "correct", "by_probability", "by_position",
     "segments", "reward_parts", "reward", "by_k3", "num_response_tokens",
     "joint", "joint_edges", "sync/gb_per_s", "perf/step_floor_frac", "rollout/groups_dropped/x"]
)  # fmt: skip
STEPS = st.fixed_dictionaries({"step": st.integers(0, 9)})


def test_rows_of_any_json_have_a_page(tmp_path: Path, run_dir: Path) -> None:
    histogram = json.loads((run_dir / "histograms.jsonl").read_text().splitlines()[0])

    @settings(max_examples=15)
    @given(st.lists(st.tuples(STEPS, st.dictionaries(KEYS, VALUES)), max_size=6), VALUES)
    def check(pairs: list[tuple[dict[str, Any], dict[str, Any]]], other: Any) -> None:
        rows = [step | row for step, row in pairs] + [SAMPLE | row for _, row in pairs]
        rows += [histogram | row for _, row in pairs]
        rows += [SAMPLE | {"set": "heldout", "greedy": {"response": "r"} | row} for _, row in pairs]
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "histograms.jsonl", "events.jsonl"):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in ("config.yaml", "environment.json", "accounting.json", "status.json"):
            (tmp_path / name).write_text(json.dumps({"run": other, "correction": {"cap": other}, "status": other}))
        assert write_report(tmp_path).is_file()

    check()


def test_events_and_failures_of_the_reward_function_are_on_the_page(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/timeouts": 0.0}, {"step": 2, "reward/timeouts": 3.0, "reward/outage_s": 63.0}]
    events = [*events_of_row(2, rows[1]), Event(step=2, kind="guard", severity=Severity.warn, text=ATTACK)]
    for name, found in (("metrics", rows), ("events", [*(event.record() for event in events), {"step": 2}])):
        lines = [json.dumps({"reward/errors": 0.0} | row) + "\n" for row in found]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    run = load_run(tmp_path)
    page = render(run)
    assert "events.jsonl line 3" in page and len(run.events) == 2
    assert "failed for 63 s" in page and "window.attacked = 1</script><img" not in page
    assert [series.key for series in charts_of(contents([run])[0])["failures"].series] == ["reward/timeouts"]
    quiet = replace(run, rows=run.rows[:1], events=[])
    assert "What happened" not in render(quiet)
    assert "failures" not in charts_of(contents([quiet])[0]) | charts_of(contents([quiet, quiet])[0])


def test_what_all_prompts_share_is_shown_once() -> None:
    texts = [
        "You answer questions about numbers. What is 12 + 5? Answer with one short sentence, please.",
        "You answer questions about numbers. What is 13 + 6? Answer with one short sentence, please.",
    ]
    frame = prompt_frame(make_run([], samples=[{"step": 1, "prompt": text} for text in texts]))
    assert frame == ("You answer questions about numbers. What is ", " Answer with one short sentence, please.")
    assert [frame.inside(text) for text in texts] == ["…12 + 5?…", "…13 + 6?…"], "12 and 13 begin alike"
    alone = prompt_frame(make_run([], samples=[{"step": 1, "prompt": texts[0]}] * 2))
    assert alone == ("", "") and alone.inside(texts[0]) == texts[0]
    short = prompt_frame(make_run([], samples=[{"step": 1, "prompt": f"What is {number}?"} for number in (1, 2)]))
    assert short == ("", "")


def test_long_text_is_cut_on_the_page(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "long")
    tokens = {"first": 0, "num_tokens": 9999, "texts": ["y" * 9999] * 9999,
              "rollout_logprobs": [-1.0] * 9999, "deltas": [0.1] * 9999}  # fmt: skip
    with (tmp_path / "long" / "samples.jsonl").open("a") as file:
        for row in ({"response": "x" * 20_000_000}, {"tokens": tokens, "k3": 9.0}):
            file.write(json.dumps({**SAMPLE, "step": 40, **row}) + "\n")
    html = write_report(tmp_path / "long").read_text(encoding="utf-8")
    assert "and 19,950,000 more characters" in html and "5903 tokens after" in html
    assert len(html) < 5_000_000


def test_a_page_that_cannot_be_made_is_one_sentence(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "samples.jsonl").unlink()
    (tmp_path / "run" / "samples.jsonl").symlink_to("/proc/self/mem")  # a read answers EIO, as a bad sector does
    assert parity(["report", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == (
        "parity report: the page cannot be written: OSError: [Errno 5] Input/output error\n"
    )


def test_a_run_without_steps_and_no_run(tmp_path: Path) -> None:
    for rows, shown in (("", "0 steps"), ('{"step": 0, "eval/accuracy": 0.25}\n', "25.0 %")):
        (tmp_path / "metrics.jsonl").write_text(rows)
        html = write_report(tmp_path).read_text(encoding="utf-8")
        assert "No step has finished yet" in html and shown in html
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing"):
        write_report(tmp_path / "nowhere")


def test_a_broken_off_run_is_not_called_completed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=4)
    (run_dir / "status.json").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "completed, 4 of 4 steps" in write_report(run_dir).read_text(encoding="utf-8")
    (run_dir / "metrics.jsonl").write_text("".join(lines[:4]))
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert '<span class="status open">3 of 4 steps</span>' in html


def test_runs_are_compared_curve_by_curve(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "runs" / "first", num_steps=20, seed=8, cap=3.0)
    (other / "histograms.jsonl").unlink()
    runs = load_runs([run_dir, other])
    assert [run.name for run in runs] == [f"{run_dir.parent.name}/first", "runs/first"], "told apart by what is above"
    sections, tables = contents(runs)
    charts = charts_of(sections)
    assert [(s.label, s.table, s.run) for s in charts["k3"].series] == [
        (runs[0].name, "rows/0", 0), (runs[1].name, "rows/1", 1)
    ]  # fmt: skip
    assert (len(tables["rows/0"].columns["step"]), len(tables["rows/1"].columns["step"])) == (40, 20)
    assert charts["ess-1"].title == "Effective sample size: applied weights"
    assert len(charts["by_probability"].series) == 1, "the other run has no histograms"
    notes = [chart.note for chart in charts.values() if chart.note]
    assert len(notes) == len(set(notes)) and charts["ess"].note and not charts["ess-1"].note
    keys = [key for key, _ in config_difference(runs)]
    assert keys == ["run.seed", "run.num_steps", "correction.cap"] or set(keys) == {
        "run.seed", "run.num_steps", "correction.cap"
    }  # fmt: skip
    page = write_comparison([run_dir, other], tmp_path / "both.html")
    text = " ".join(Elements(page.read_text(encoding="utf-8")).text)
    assert "2 runs compared" in text and "correction.cap" in text and "3.0" in text
    assert f"{runs[1].name}: histograms.jsonl is missing" in text


def test_bins_of_a_run_add_up() -> None:
    def row(step: int, k3: float) -> dict[str, Any]:
        axis = {"edges": [1.0, 0.5, 0.0], "counts": [30.0, 10.0], "k3": [k3, 5 * k3], "abs_logdiff": [0.1, 0.2]}
        return {
            "step": step,
            "by_probability": axis,
            "by_position": axis | {"edges": [1.0, 2.0, None]},
            "joint_edges": [0.0, 0.5, 1.0],
            "joint": [[1, 1, 39.0], [0, 1, 1.0]],
        }

    rows = [row(step, 1e-6 if step < 4 else 3e-6) for step in range(8)]
    wrong = {"step": 9, "by_probability": "?"}
    run = make_run([], histograms=[*rows, wrong])
    sections, tables = contents([run])
    # From the least probable bin to the most probable one; two steps of each quarter.
    assert list(tables["by_probability/0"].columns["k3"]) == pytest.approx([5e-6, 1e-6])
    assert list(tables["by_probability/1"].columns["k3"]) == pytest.approx([15e-6, 3e-6])
    assert list(tables["by_probability/1"].columns["tokens"]) == [0.25, 0.75]
    assert list(tables["by_probability/1"].columns["share"]) == pytest.approx([0.625, 0.375])
    assert tables["by_position/1"].labels == ("token 1 to 1", "token 2")
    cells = tables["joint/0"].columns
    assert sorted(zip(cells["left"], cells["bottom"], cells["count"], strict=True)) == [
        (0.5, 0.0, 2.0),
        (0.5, 0.5, 78.0),
    ]
    assert "1 lines have another shape and are left out (step 9)" in render(run)
    assert {"by_probability-share", "joint-1"} <= set(charts_of(sections))


def test_tokens_are_coloured_by_delta() -> None:
    kept = {
        "first": 2, "num_tokens": 9, "texts": ["a", "b", "c", "d"], "rollout_logprobs": [-0.5, -0.5, -0.5, None],
        "deltas": [0.02, -3.0, 1e-5, None],
    }  # fmt: skip
    samples = [
        {"step": 1, "k3": 1e-6},
        {"step": 2, "k3": 2e-6, "tokens": kept},
        {"step": 1, "k3": 9e-6, "tokens": kept},
    ]
    run = make_run([], samples=[*samples, {"step": 3, "k3": 1.0, "tokens": {**kept, "deltas": [1.0]}}])
    worst = worst_samples(run)
    assert [sample.row["k3"] for sample in worst] == [9e-6, 2e-6], "worst first, without what cannot be read"
    assert [token.kind for token in worst[0].tokens] == ["p3", "m5", "", "off"]
    assert worst[0].tokens[0].said == "Δ +0.02: p 0.607 in the rollout, 0.619 in training"
    assert (worst[0].num_before, worst[0].num_after) == (2, 3)
    assert not worst[0].is_short, "a table shows the text of the whole response instead"
    whole = coloured({"tokens": {**kept, "first": 0, "num_tokens": 4}})
    assert whole is not None and whole.is_short
    assert coloured(samples[0]) is None


def test_the_command_writes_where_it_says(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "other", num_steps=2)
    monkeypatch.chdir(tmp_path)
    assert parity(["report", str(other / "metrics.jsonl"), "-o", "one.html"]) == 0
    assert parity(["report", str(run_dir), "other", str(run_dir)]) == 0
    assert capsys.readouterr().out == "one.html\ncomparison.html\n"
    assert "2 runs compared" in Path("comparison.html").read_text(encoding="utf-8")
    assert "runs compared" not in Path("one.html").read_text(encoding="utf-8")
    Path("plain").touch()
    assert Path("one.html").stat().st_mode == Path("plain").stat().st_mode  # a page is for sharing
    assert parity(["report", str(tmp_path), "--colour", "--out=nowhere/x.html"]) == 2
    refused = capsys.readouterr().err
    assert "3 problems, nothing was started" in refused
    assert "must be the directory of a run" in refused and "Runs in it, the newest first: other." in refused
    assert "--colour" in refused and "must lie in an existing directory" in refused
    assert parity(["report", str(run_dir), "-o", "one.html"]) == 0, "an older page is replaced"
    kept = (other / "metrics.jsonl").read_bytes()
    assert parity(["report", str(run_dir), "-o", str(other / "metrics.jsonl")]) == 2
    assert "--out must be a new file or an older page" in capsys.readouterr().err
    assert (other / "metrics.jsonl").read_bytes() == kept


def test_the_directory_of_a_sweep_is_its_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    for number, steps in ((0, 2), (2, 3), (10, 4)):
        write_run(sweep / str(number), num_steps=steps)
    (sweep / "1").mkdir()  # it has not begun
    assert parity(["report", str(sweep)]) == 0
    page = sweep / "comparison.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = " ".join(Elements(page.read_text(encoding="utf-8")).text)
    assert "3 runs compared" in text and text.index("2 of 2 steps") < text.index("3 of 3 steps") < text.index("4 of 4")
    other = write_run(tmp_path / "other", num_steps=2)
    assert parity(["report", str(sweep), str(other), "-o", str(tmp_path / "four.html")]) == 0
    assert "4 runs compared" in (tmp_path / "four.html").read_text(encoding="utf-8")
