"""A browser for tests: /usr/bin/chromium without a window, driven over the DevTools protocol by aiohttp."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

CHROMIUM: Final = Path("/usr/bin/chromium")
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)
USED: Final = ("button", "textbox", "searchbox", "combobox", "spinbutton", "checkbox", "tab", "link", "Canvas")
START_S: Final = 60.0
ANSWER_S: Final = 30.0


class Page:
    """One tab. `errors`: what it wrote to the console as an error, or raised; `requests`: addresses that it asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Events that come before it are kept."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])
                self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.errors.append(json.dumps(values["args"]))

    async def value(self, expression: str) -> Any:
        """What an expression is in the page; of a promise, what it becomes."""
        found = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(ANSWER_S):
            while not await self.value(expression):  # noqa: ASYNC110 - the page sends no event for it
                await asyncio.sleep(0.05)

    async def press(self, key: str, code: int = 0) -> None:
        """Press one key. `code`: of Windows, for keys that the browser itself acts on."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def usable(self) -> list[str]:
        """The names by which a screen reader knows what can be used."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [one["name"]["value"] for one in nodes if not one["ignored"] and one["role"]["value"] in USED]

    async def size(self, width: int, height: int = 900) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def slow(self, latency_ms: int) -> None:
        """Every answer comes this much later."""
        condition = {"offline": False, "latency": latency_ms, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.send("Network.emulateNetworkConditions", **condition)

    async def colours(self, scheme: str) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.send("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Page]:
    """A tab of a browser of its own, at an address."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        quiet = asyncio.subprocess.DEVNULL
        argv = (str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank")
        browser = await asyncio.create_subprocess_exec(*argv, stdout=quiet, stderr=quiet)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    tab = next(one for one in await reply.json() if one["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
                        await page.send(f"{domain}.enable")
                    await page.size(1280)
                    await page.send("Page.navigate", url=address)
                    yield page
        finally:
            browser.kill()
            await browser.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(START_S):
        while not file.exists() or not file.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
