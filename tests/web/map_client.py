"""Asking the map as browsers and scripts do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

Json = dict[str, Any]


class Visitor:
    """A user with a client of his own."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        """`url` is what `kvplace web` prints."""
        self.url = url.rstrip("/")
        self.http = session

    async def ask(
        self, path: str, method: str = "GET", **options: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send a request; returns status, body and headers."""
        async with self.http.request(method, self.url + path, allow_redirects=False, **options) as answer:
            return answer.status, await answer.read(), answer.headers.copy()

    async def json(self, path: str, **headers: str) -> tuple[int, Json]:
        status, body, _ = await self.ask(path, headers=headers)
        return status, json.loads(body)

    @contextlib.asynccontextmanager
    async def events(self, position: str, **headers: str) -> AsyncIterator[Any]:
        """Follow the changes; gives an iterator of (event, id, document)."""
        async with self.http.get(f"{self.url}/api/events?since={position}", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            yield _events(answer)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str, Json]]:
    fields: dict[str, str] = {}
    async for raw in answer.content:
        line = raw.decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            fields = {}


@contextlib.asynccontextmanager
async def visitor(url: str) -> AsyncIterator[Visitor]:
    async with aiohttp.ClientSession() as session:
        yield Visitor(url, session)
