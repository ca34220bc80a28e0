"""A headless Chromium that opens a local file and is driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

TIMEOUT_S = 120.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Page:
    """One tab: what it logged, what it requested, and the means to act on it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """Console errors and warnings, uncaught exceptions, refused resources."""
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._hear(event["method"], event["params"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], TIMEOUT_S)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not await self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; the page said {self.problems}"
            await asyncio.sleep(0.05)

    async def mouse(self, kind: str, x: float, y: float, *, clicks: int = 0) -> None:
        button = "left" if clicks else "none"
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    async def screenshot(self, path: Path, *, clip: dict[str, float] | None = None) -> Path:
        extra = {"clip": {**clip, "scale": 1}} if clip else {}
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **extra)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    async def processor_s(self) -> float:
        """Seconds of all tasks of the page's main thread; needs the Performance domain."""
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def open_page(chromium: str, file: Path, profile: Path, *, width: int = 1200) -> AsyncIterator[Page]:
    """Open `file` in a fresh browser that keeps its profile in `profile`; the browser is ended afterwards."""
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + TIMEOUT_S
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, "chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                tabs = await response.json(content_type=None)
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Runtime", "Log", "Network", "Page"):
                    await page.call(f"{domain}.enable")
                await page.look(width=width, height=900)
                await page.call("Page.navigate", url=file.resolve().as_uri())
                yield page
                listener.cancel()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


REFERENCE = """(() => {
    const numbers = (row) => Array.from({length: 40}, (_, column) => row * column % 97);
    const rows = Array.from({length: 3000}, (_, row) => ({ name: `row ${row}`, values: numbers(row) }));
    for (let turn = 0; turn < 3; turn++) {
        for (const row of JSON.parse(JSON.stringify(rows))) row.values.sort((a, b) => a - b);
    }
    const table = document.createElement("table");
    for (const row of rows) {
        const line = table.insertRow();
        for (const value of row.values.slice(0, 8)) line.insertCell().textContent = value;
    }
    document.body.append(table);
    return table.getBoundingClientRect().height;
})()"""
"""Work of the kinds that a report is: what a browser takes for it here is the unit of what it takes for a report."""


class Loading(NamedTuple):
    """What it took to open a page in a fresh browser."""

    clock_s: float
    processor_s: float
    """Of the page's main thread: what others do meanwhile is not counted."""
    reference_s: float
    """The same for REFERENCE, before the page was opened."""


async def loading(chromium: str, file: Path, scratch: Path, *, until: str) -> Loading:
    """Open `file` until the expression `until` is true; the browser's profile lies in `scratch`."""
    blank = scratch / "blank.html"
    blank.write_text("<!doctype html><body></body>", encoding="utf-8")
    async with open_page(chromium, blank, scratch / "profile") as page:
        await page.call("Performance.enable", timeDomain="threadTicks")
        await page.wait_for("document.body !== null")
        start = await page.processor_s()
        await page.evaluate(REFERENCE)
        before = await page.processor_s()
        await page.call("Page.navigate", url=file.resolve().as_uri())
        await page.wait_for(until)
        after = await page.processor_s()
        clock_s = float(await page.evaluate("performance.getEntriesByName('charts drawn')[0].startTime / 1000"))
    processor_s = after - before if after >= before else after  # a page may get a process of its own
    return Loading(clock_s, processor_s, before - start)
