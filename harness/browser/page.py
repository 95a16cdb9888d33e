"""A page in a browser: the actions of a reader, and the page that he sees.

Every complaint of the browser, be it an exception of a script, a refusal of the content security policy
or an answer that failed, is kept in `complaints`, so that a test can expect none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from harness.browser.process import Browser
from harness.waiting import PATIENCE_S

_LARGEST_MESSAGE = 64 << 20
_KEYS: dict[str, tuple[str, int]] = {
    "Enter": ("\r", 13),
    "Tab": ("", 9),
    "Escape": ("", 27),
    "ArrowLeft": ("", 37),
    "ArrowUp": ("", 38),
    "ArrowRight": ("", 39),
    "ArrowDown": ("", 40),
    "End": ("", 35),
    "Home": ("", 36),
}
"""The text and the Windows code of keys that are not letters."""

Json = dict[str, Any]


class ScriptFailed(Exception):
    """An expression raised an exception in the page."""


class _Connection:
    """The DevTools protocol over one WebSocket: calls and events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self.events: list[Json] = []

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> Json:
        number = next(self._numbers)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_str(json.dumps({**message, "sessionId": session} if session else message))
        async with asyncio.timeout(PATIENCE_S):
            found = await answer
        if "error" in found:
            raise ScriptFailed(f"{method}: {found['error'].get('message')}")
        result: Json = found["result"]
        return result

    async def listen(self) -> None:
        async for message in self._socket:
            document = json.loads(message.data)
            waiting = self._answers.pop(document.get("id", 0), None)
            if waiting is None:
                self.events.append(document)
            elif not waiting.done():
                waiting.set_result(document)


class Page:
    """One page."""

    def __init__(self, connection: _Connection, session: str) -> None:
        self._connection = connection
        self._session = session

    async def call(self, method: str, **parameters: Any) -> Json:
        """Call a method of the protocol."""
        return await self._connection.call(method, self._session, **parameters)

    @property
    def complaints(self) -> list[str]:
        """The browser's complaints."""
        found = []
        for event in self._connection.events:
            parameters = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            if event.get("method") == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
        return found

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise ScriptFailed(f"{url}: {answer['errorText']}")
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Evaluate an expression in the page; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise ScriptFailed(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page, also after a navigation; returns its value."""
        as_value = f"(found => found instanceof Node || found)({expression})"
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    # A navigation ends every evaluation, and some of it starts only later.
                    with contextlib.suppress(ScriptFailed):
                        if found := await self.evaluate(as_value):
                            return found
                    await asyncio.sleep(0.03)  # pages do not report when something is shown
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText.slice(0, 2000)")
            raise AssertionError(
                f"never true: {expression}\ncomplaints: {self.complaints}\nshown: {shown}"
            ) from None

    async def text(self, selector: str) -> str:
        """Return the text that is shown in an element."""
        return str(await self.until(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """Press the primary button of a mouse in the middle of an element."""
        # In one expression: a page that draws itself anew replaces the element.
        x, y = await self.until(
            f"(one => {{ if (!one) return null; one.scrollIntoView({{block: 'center'}});"
            "const box = one.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other: a letter, or the name of a key."""
        for key in keys:
            text, code = _KEYS.get(key, (key, ord(key.upper()[0])))
            parameters: Json = {"key": key, "windowsVirtualKeyCode": code}
            await self.call(
                "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **parameters
            )
            await self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    async def write(self, text: str) -> None:
        """Type a text into the element with the focus."""
        await self.call("Input.insertText", text=text)

    async def see_as(
        self, *, scheme: str = "light", size: tuple[int, int] = (1280, 900), deficiency: str = "none"
    ) -> None:
        """Set the reader's colour scheme, the size of his window, and how he sees colours.

        Deficiencies have Chromium's names, such as `deuteranopia`.
        """
        await self.call("Emulation.setEmulatedVisionDeficiency", type=deficiency)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        width, height = size
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write the visible part, or the whole page, as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(answer["data"]))

    async def accessible(self, role: str) -> Sequence[str]:
        """List the names of everything of a role, as a screen reader gets them."""
        tree = await self.call("Accessibility.getFullAXTree")
        return [
            node["name"]["value"]
            for node in tree["nodes"]
            if not node.get("ignored") and node.get("role", {}).get("value") == role and "name" in node
        ]


@contextlib.asynccontextmanager
async def new_page(browser: Browser) -> AsyncIterator[Page]:
    """Open an empty page in a profile of its own, without cookies, while the block runs."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(browser.endpoint, max_msg_size=_LARGEST_MESSAGE) as socket,
    ):
        connection = _Connection(socket)
        listening = asyncio.create_task(connection.listen())
        try:
            context = (await connection.call("Target.createBrowserContext"))["browserContextId"]
            target = await connection.call("Target.createTarget", url="about:blank", browserContextId=context)
            attached = await connection.call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            page = Page(connection, attached["sessionId"])
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            await connection.call("Target.disposeBrowserContext", browserContextId=context)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
