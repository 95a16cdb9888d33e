"""Asking the map as browsers and scripts do."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from harness.certificates import Certificates
from kvplace.service.settings import Address
from tests.web.stage import VIEWER

AS_VIEWER = {"Authorization": f"Bearer {VIEWER}"}
Json = dict[str, Any]


class Visitor:
    """A user with a client of his own."""

    def __init__(self, address: Address, session: aiohttp.ClientSession, tls: ssl.SSLContext) -> None:
        self.url = f"https://{address}"
        self.http = session
        self.tls = tls

    async def ask(
        self, path: str, method: str = "GET", **options: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send a request; returns status, body and headers."""
        async with self.http.request(
            method, self.url + path, ssl=self.tls, allow_redirects=False, **options
        ) as answer:
            return answer.status, await answer.read(), answer.headers.copy()

    async def json(self, path: str, **headers: str) -> tuple[int, Json]:
        status, body, _ = await self.ask(path, headers=headers or AS_VIEWER)
        return status, json.loads(body)

    @contextlib.asynccontextmanager
    async def events(self, position: str, **headers: str) -> AsyncIterator[Any]:
        """Follow the changes; gives an iterator of (event, id, document), heartbeats as (None, "", {})."""
        async with self.http.get(
            f"{self.url}/api/events?since={position}", ssl=self.tls, headers={**AS_VIEWER, **headers}
        ) as answer:
            assert answer.status == 200, await answer.text()
            yield _events(answer)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str | None, str, Json]]:
    fields: dict[str, str] = {}
    async for raw in answer.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            yield None, "", {}
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            fields = {}


@contextlib.asynccontextmanager
async def visitor(
    address: Address, certificates: Certificates, certificate: Any = None
) -> AsyncIterator[Visitor]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield Visitor(address, session, certificates.as_client(certificate))
