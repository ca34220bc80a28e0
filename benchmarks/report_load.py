"""How long the report of a run takes to open, and the pictures of docs/reading_a_report.md.

    python benchmarks/report_load.py [RUN ...] [--images docs/images]

Opens in headless Chromium (on the PATH) the page of the first run and, with several, the page that compares them;
without a run it trains arithmetic_grpo with the torch engine, with a bfloat16 and with an int8 rollout. Writes a
table: size, charts, seconds until every chart is drawn, by the clock and in processor time of the page; the median of
repeats. --images writes the pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "trainer"))

import browser  # noqa: E402 - the tests' own driver of Chromium

from trainer.report.page import write_comparison  # noqa: E402

DRAWN = "document.documentElement?.dataset.charts !== undefined"
WIDTH = 1240
REPEATS = 5
COLOURS = 96
"""Of a picture: text and charts need no more, and the file is a third."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """How one page opened."""

    name: str
    num_bytes: int
    num_charts: int
    clock_s: float
    processor_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A part of a page, from the top of one element to the bottom of another."""

    name: str
    first: str
    last: str
    dark: bool = False


OF_ONE = (
    Picture(name="report_mismatch", first="[data-section^=Where] h2", last="[data-chart=joint-1]"),
    Picture(name="report_tokens", first=".tokens-section h2", last=".tokens-section .sample:nth-of-type(3)"),
)
OF_SEVERAL = (Picture(name="report_runs", first="h1", last="[data-chart=k3]", dark=True),)


async def measure(path: Path, name: str, *, images: Path | None, pictures: tuple[Picture, ...]) -> Loading:
    chromium = browser.find_chromium()
    if chromium is None:
        raise SystemExit("chromium is not on the PATH")
    found = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            found.append(await browser.loading(chromium, path, Path(scratch), until=DRAWN))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        async with browser.open_page(chromium, path, Path(scratch) / "profile", width=WIDTH) as page:
            await page.wait_for(DRAWN)
            num_charts = await page.evaluate("document.querySelectorAll('figure[data-chart]').length")
            if images is not None:
                for picture in pictures:
                    await take(page, picture, images)
        if page.problems:
            raise SystemExit(f"{name}: {page.problems}")
    return Loading(
        name=name,
        num_bytes=path.stat().st_size,
        num_charts=num_charts,
        clock_s=statistics.median(each.clock_s for each in found),
        processor_s=statistics.median(each.processor_s for each in found),
    )


async def take(page: browser.Page, picture: Picture, images: Path) -> None:
    """Write one picture as a PNG of few colours."""
    await page.look(width=WIDTH, height=900, dark=picture.dark)
    await asyncio.sleep(1.0)  # the charts take the colours of the theme
    edges = await page.evaluate(
        f"""(() => {{ const at = (what) => document.querySelector(what).getBoundingClientRect();
        return [at({picture.first!r}).top + scrollY, at({picture.last!r}).bottom + scrollY]; }})()"""
    )
    top, bottom = max(0.0, edges[0] - 18), edges[1] + 18
    path = images / f"{picture.name}.png"
    await page.screenshot(path, clip={"x": 0.0, "y": top, "width": float(WIDTH), "height": bottom - top})
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def train(directory: Path) -> list[Path]:
    """Two runs of the demo's recipe, a minute or two each."""
    runs = []
    for name, words in (("bfloat16", []), ("int8", ["rollout.quantization=int8"])):
        runs.append(directory / name)
        command = [
            sys.executable, "-m", "trainer", "train", "arithmetic_grpo", "rollout=torch", *words,
            "tracking.wandb=disabled", f"run.dir={runs[-1]}",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)  # noqa: S603
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--images", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch)
        runs = arguments.runs or train(directory)
        one = write_comparison(runs[:1], directory / "one.html")
        found = [asyncio.run(measure(one, "one run", images=arguments.images, pictures=OF_ONE))]
        if len(runs) > 1:
            several = write_comparison(runs, directory / "several.html")
            name = f"{len(runs)} runs"
            found.append(asyncio.run(measure(several, name, images=arguments.images, pictures=OF_SEVERAL)))
    lines = ["| page | size, MB | charts | drawn after, s | processor time, s |", "| --- | --- | --- | --- | --- |"]
    for page in found:
        size = f"{page.num_bytes / 1e6:.2f}"
        lines.append(f"| {page.name} | {size} | {page.num_charts} | {page.clock_s:.2f} | {page.processor_s:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
