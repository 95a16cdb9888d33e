"""The few API calls that a hollow node needs, on asyncio, with a list+watch that never loses an object.

The API server ends watches of clients that cannot keep up, on busy cores several times a minute. So the
stream resumes at the last version it has seen, and lists again where that version is too old; what vanished
in between is reported as deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from kvplace.kube.session import Sockets

Json = dict[str, Any]
Change = tuple[Literal["seen", "deleted"], Json]

STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


class ApiRefused(Exception):
    """The API server answered with an error status."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"{method} {path}: {status}: {message}")


class KubeClient:
    """JSON over one pool of connections."""

    def __init__(self, url: str, ca_file: Path, token: str) -> None:
        self._url = url
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._exchanges: set[asyncio.Future[Json]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self._url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=32, socket_factory=self._sockets.open),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            await self._sockets.hang_up()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client inside `async with`")
        return self._session

    async def request(
        self, method: str, path: str, body: Json | None = None, content_type: str = "application/json"
    ) -> Json:
        """Send one request and return the answer; raises `ApiRefused`, or aiohttp's errors of the
        connection.

        A request that was begun is carried out even if the caller is cancelled.
        """
        exchange = asyncio.ensure_future(self._exchange(method, path, body, content_type))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanged)
        return await asyncio.shield(exchange)

    async def persist(
        self, method: str, path: str, body: Json, content_type: str = "application/json"
    ) -> bool:
        """Send a request until it is answered; False when its object is gone or is another one by now."""
        while True:
            try:
                await self.request(method, path, body, content_type)
            except ApiRefused as refused:
                if refused.status in {404, 409}:
                    return False
                if refused.status < 500 and refused.status != 429:
                    raise
            except (aiohttp.ClientError, OSError):
                pass
            else:
                return True
            await asyncio.sleep(0.2)

    def _exchanged(self, exchange: asyncio.Future[Json]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            # Retrieved on purpose: a caller that was cancelled meanwhile does not want it.
            exchange.exception()

    async def _exchange(self, method: str, path: str, body: Json | None, content_type: str) -> Json:
        payload = None if body is None else msgspec.json.encode(body)
        async with self.session.request(
            method,
            path,
            data=payload,
            headers={"Content-Type": content_type},
            timeout=aiohttp.ClientTimeout(total=60),
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise ApiRefused(method, path, answer.status, _message(content))
            decoded: Json = msgspec.json.decode(content)
            return decoded

    async def list_and_watch(self, path: str, field_selector: str) -> AsyncGenerator[Change, None]:
        """Yield every object of a collection as it is and at every change, without end.

        Errors of the connection end a watch, not the stream. Several changes may come as one. A caller that
        stops early closes the generator (`contextlib.aclosing`).
        """
        known: dict[str, Json] = {}
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.request("GET", f"{path}?fieldSelector={field_selector}")
                    present = {item["metadata"]["uid"]: item for item in listed["items"]}
                    for uid in known.keys() - present.keys():
                        yield "deleted", known[uid]
                    for item in present.values():
                        yield "seen", item
                    known = present
                    version = listed["metadata"]["resourceVersion"]
                async with contextlib.aclosing(self._watch(path, field_selector, version)) as events:
                    async for event in events:
                        version = event["object"]["metadata"]["resourceVersion"]
                        uid = event["object"]["metadata"].get("uid", "")
                        match event["type"]:
                            case "ADDED" | "MODIFIED":
                                known[uid] = event["object"]
                                yield "seen", event["object"]
                            case "DELETED":
                                known.pop(uid, None)
                                yield "deleted", event["object"]
            except ApiRefused as refused:
                if refused.status == 410:
                    version = ""
                else:
                    await asyncio.sleep(0.5)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.2)

    async def _watch(self, path: str, field_selector: str, version: str) -> AsyncGenerator[Json, None]:
        query: Mapping[str, str] = {
            "watch": "true",
            "fieldSelector": field_selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
        }
        async with self.session.get(path, params=query) as answer:
            if answer.status != 200:
                raise ApiRefused("WATCH", path, answer.status, _message(await answer.read()))
            try:
                async for line in _lines(answer.content):
                    event: Json = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiRefused("WATCH", path, status.get("code", 500), status.get("message", ""))
                    yield event
            finally:
                # A stream left in the middle cannot be used again and need not be shut down politely.
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield whole lines of any length."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _message(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]
