"""A headless Chromium that is told what to do over its own protocol (CDP), so that no driver has to be installed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-default-apps", "--disable-extensions", "--remote-debugging-port=0"),
    "--force-color-profile=srgb",
)
SECONDS = 60.0
"""For whatever is waited for: other tests keep the machine busy."""


def chromium() -> str | None:
    """Where it is installed; None: it is not."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page in the browser. `problems` has whatever its console and its scripts complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listener = asyncio.create_task(self._listen())
        self.problems: list[str] = []
        self.asked: list[str] = []
        """URLs that were asked for."""

    async def call(self, method: str, **words: Any) -> dict[str, Any]:
        """Call the protocol's `method`."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": words})
        async with asyncio.timeout(SECONDS):
            return await self._answers[number]

    async def open(self, url: str) -> None:
        """Show `url` in a window of a desktop's size, with light colours."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.size(width=1280, height=900)
        await self.prefer(dark=False)
        await self.call("Page.navigate", url=url)

    async def size(self, *, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    async def prefer(self, *, dark: bool) -> None:
        wanted = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=wanted)

    async def value(self, expression: str) -> Any:
        """What `expression` is in the page, as JSON can tell it."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until `expression` is true, and return it; raises `AssertionError` after `SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                while not (found := await self.value(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                return found
        shown = await self.value("document.body.innerText.slice(0, 800)")
        raise AssertionError(f"waited for {expression} in vain; {self.problems}; the page says: {shown}")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        words: dict[str, Any] = {"key": key}
        if len(key) == 1:
            words["text"] = key
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        if key in codes:
            words["windowsVirtualKeyCode"] = codes[key]
        if key == "Enter":
            words["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **words)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def close(self) -> None:
        self._listener.cancel()
        await self._socket.close()

    async def _listen(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said:
                    answer.set_exception(AssertionError(str(said["error"])))
                else:
                    answer.set_result(said["result"])
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.problems.append(
                    str([part.get("value", part.get("description")) for part in said["params"]["args"]])
                )
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{said['params']['entry']['text']} {said['params']['entry'].get('url', '')}")
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """Start a Chromium with a profile of its own; it and its files are gone at the end."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet, stdin=quiet)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                tab = Tab(await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0))
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            process.kill()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(SECONDS):
        while True:
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            if port := await asyncio.to_thread(_first_line, file):
                return int(port)
            await asyncio.sleep(0.05)


def _first_line(file: Path) -> str:
    """Empty while there is none."""
    return file.read_text().partition("\n")[0] if file.exists() else ""
