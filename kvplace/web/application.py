"""The web map as an aiohttp application: pages for people, JSON and events for the pages.

Everything is a GET that changes nothing. Every answer carries headers that allow a browser nothing but this
listener's own scripts and styles. Errors are one sentence, as JSON. The pages are plain HTML, CSS and
JavaScript modules from this package. No build step makes them, they load nothing from elsewhere, and they
hold no facts about the cluster.

Every user of a machine can connect to 127.0.0.1. So all pages are below a path that cannot be guessed, and a
request without it gets nothing. A page of another site can send its reader's browser to 127.0.0.1 by a DNS
name of its own (DNS rebinding), and could then read the answers. Such a request has that name in its Host
header. So only `localhost` and loopback addresses are accepted there.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvplace.core.drawing.svg_blocks import DARK, LIGHT, Scheme
from kvplace.core.errors import Absent, BadBody, Forbidden, KvplaceError, http_status_of
from kvplace.core.scalars import NodeName
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS
from kvplace.nodes.node_cache import NodeCache, NodeClient, running_node_cache
from kvplace.service.connections import Address, ConnectionLimits
from kvplace.service.listening import listening
from kvplace.service.process import in_background
from kvplace.web.documents import MAX_QUERY, Agents, VmiClient, node_document, search, vm_document
from kvplace.web.feed import Feed
from kvplace.web.node_rows import NodeRows

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PALETTE = "colours.css"


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is served."""

    content: bytes
    zipped: bytes
    type: str
    etag: str


@cache
def page_files() -> dict[str, File]:
    """Read every file, by its name."""
    found = {
        path.name: path.read_bytes()
        for path in (files("kvplace.web") / "pages").iterdir()
        if path.name.rpartition(".")[2] in _TYPES
    }
    found[PALETTE] = palette().encode()
    return {name: _file(name, content) for name, content in sorted(found.items())}


def palette() -> str:
    """Write the colours as CSS variables: light, dark for readers who want it, and either when chosen."""
    return "\n".join(
        [
            f":root {{ {_variables(LIGHT)} color-scheme: light; }}",
            "@media (prefers-color-scheme: dark) {",
            f':root:not([data-theme="light"]) {{ {_variables(DARK)} color-scheme: dark; }}',
            "}",
            f':root[data-theme="dark"] {{ {_variables(DARK)} color-scheme: dark; }}',
            *(f".vm{index} {{ --vm: var(--vm{index}); }}" for index in range(len(LIGHT.vms))),
            "",
        ]
    )


def _variables(scheme: Scheme) -> str:
    colours = {
        "page": scheme.page,
        "package": scheme.package,
        "numa": scheme.numa,
        "l3": scheme.l3,
        "line": scheme.line,
        "ink": scheme.ink,
        "muted": scheme.muted,
        "hatch": scheme.hatch,
        "alarm": scheme.alarm,
        **{f"vm{index}": colour for index, colour in enumerate(scheme.vms)},
    }
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _file(name: str, content: bytes) -> File:
    digest = hashlib.sha256(content).hexdigest()[:20]
    kind = _TYPES[name.rpartition(".")[2]]
    return File(content, gzip.compress(content, 9, mtime=0), f"{kind}; charset=utf-8", f'"{digest}"')


_SECRET_BYTES = 24
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_ZIPPED_FROM = 4096
"""Shorter answers are not compressed."""
_AT_ONCE = 4
"""Documents made at a time: each holds the event loop for milliseconds, and watches continue between them."""
_LIMITS = ConnectionLimits(connections=128, idle_s=120.0, unread_bytes=1 << 20)


def new_secret() -> str:
    """Make the secret of one run, fit for a path."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def only_for_holders(secret: str) -> Middleware:
    """Make the middleware that refuses requests without the secret, for another host, or with a body.

    An empty secret lets every request for this machine pass: a proxy before the map decides then.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_this_machine(request.headers.get("Host", "")):
            raise Forbidden("the map answers only requests for localhost or 127.0.0.1")
        given = request.path.split("/", 2)[1]
        if secret and not hmac.compare_digest(given.encode(), secret.encode()):
            raise Forbidden("this is not the URL that `kvplace web` printed; each run has its own")
        if request.body_exists:
            raise BadBody("requests of the map have no body")
        return await handler(request)

    return check


def is_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine, on any port: an SSH tunnel may change it."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class MapClient(NodeClient, VmiClient, Protocol):
    """The cluster calls of the map."""


@dataclass(frozen=True, slots=True)
class MapSettings:
    """Where the map is, and how many may read it."""

    port: int = 0
    """On 127.0.0.1; 0 takes a free one."""
    secret: str = field(default_factory=new_secret)
    """The path before all pages; empty behind a proxy that authenticates readers."""
    cluster_name: str = ""
    """The name of the cluster on the pages."""
    streams: int = 64
    """How many pages may follow the changes at the same time."""
    heartbeat_s: float = 15.0
    """Pause between signs of life on a stream. Proxies cut idle connections."""


class WebMap:
    """The handlers of one run."""

    def __init__(self, vmis: VmiClient, cache: NodeCache, agents: Agents, rows: NodeRows, feed: Feed) -> None:
        self._vmis = vmis
        self._cache = cache
        self._agents = agents
        self._rows = rows
        self._feed = feed
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    def application(self, secret: str, cluster_name: str) -> web.Application:
        """Put the routes together, below the secret."""
        application = web.Application(middlewares=[_with_sentences, only_for_holders(secret)])
        root, documents = f"/{secret}" if secret else "", self._some_at_once

        async def cluster(request: web.Request) -> web.StreamResponse:
            return await self._cluster(request, cluster_name)

        application.add_routes(
            [
                web.get(f"{root}/", self._page),
                web.get(f"{root}/files/{{name}}", self._file),
                web.get(f"{root}/api/cluster", documents(cluster)),
                web.get(f"{root}/api/nodes/{{name}}", documents(self._node)),
                web.get(f"{root}/api/vms/{{namespace}}/{{name}}", documents(self._vm)),
                web.get(f"{root}/api/search", documents(self._search)),
                web.get(f"{root}/api/events", self._events),
            ]
        )

        async def end_streams(_: web.Application) -> None:
            self._feed.end()

        application.on_shutdown.append(end_streams)
        application.on_response_prepare.append(add_headers)
        return application

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return _served(request, page_files()["index.html"])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        file = page_files().get(request.match_info["name"])
        if file is None:
            raise Absent("there is no such file")
        return _served(request, file)

    async def _cluster(self, request: web.Request, name: str) -> web.StreamResponse:
        await self._feed.refresh()
        document = {
            "name": name,
            "position": self._feed.position,
            "outage": self._feed.outage(),
            "totals": self._rows.totals(),
            "nodes": self._rows.all(),
        }
        return await _json(request, document)

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        document = await node_document(self._cache, self._agents, self._vmis, NodeName(name))
        if document is None:
            raise Absent(f"the cluster has no node {name[:253]}")
        return await _json(request, document)

    async def _vm(self, request: web.Request) -> web.StreamResponse:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        document = await vm_document(self._cache, self._agents, self._vmis, namespace, name)
        if document is None:
            raise Absent(f"no running VM or pod {namespace[:63]}/{name[:253]} requests cores")
        return await _json(request, document)

    async def _search(self, request: web.Request) -> web.StreamResponse:
        query = request.query.get("q", "")
        if len(query) > MAX_QUERY:
            raise BadBody(f"q is longer than {MAX_QUERY} characters")
        return await _json(request, await search(self._cache, query))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        position = request.headers.get("Last-Event-ID") or request.query.get("since", "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
        with self._feed.stream(), contextlib.suppress(ConnectionResetError):  # the reader went away
            await response.prepare(request)
            # States at once that the stream is open, which browsers would show with the first event only.
            await response.write(b"retry: 2000\n\n")
            async with contextlib.aclosing(self._feed.follow(position)) as messages:
                async for message in messages:
                    await response.write(message)
        return response

    def _some_at_once(self, handler: Handler) -> Handler:
        """Let a handler answer a few requests at a time; the others wait, and all other work continues."""

        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._at_once:
                return await handler(request)

        return handle


@contextlib.asynccontextmanager
async def web_map(cluster: MapClient, settings: MapSettings) -> AsyncIterator[str]:
    """Serve the map while the block runs; enters when the cluster has been read, and gives the URL."""
    agent_pods = Store(AGENT_PODS, AGENTS)
    async with running_node_cache(cluster, decides=False) as cache:
        agents = Agents(agent_pods)
        rows = NodeRows(cache, agents)
        feed = Feed(rows, cache.stores, streams=settings.streams, heartbeat_s=settings.heartbeat_s)
        application = WebMap(cluster, cache, agents, rows, feed).application(
            settings.secret, settings.cluster_name
        )
        watching = (agent_pods.run(cluster), agents.announce(cache.nodes.records.keys()), feed.run())
        address = Address("127.0.0.1", settings.port)
        async with (
            in_background(*watching),
            listening("web", application, address, limits=_LIMITS) as bound,
        ):
            yield f"http://{bound}/{settings.secret}{'/' if settings.secret else ''}"


@web.middleware
async def _with_sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except KvplaceError as error:
        response = web.json_response(
            {"error": str(error)}, status=403 if isinstance(error, Forbidden) else http_status_of(error)
        )
    except web.HTTPException as error:
        response = web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    return response


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Put the headers on an answer, unless its handler has set one of them; for `on_response_prepare`."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _served(request: web.Request, file: File) -> web.Response:
    headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("If-None-Match") == file.etag:
        return web.Response(status=304, headers=headers)
    headers["Content-Type"] = file.type
    if _takes_zipped(request):
        return web.Response(body=file.zipped, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=file.content, headers=headers)


async def _json(request: web.Request, document: Mapping[str, Any]) -> web.Response:
    body = msgspec.json.encode(document)
    headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}
    if len(body) >= _ZIPPED_FROM and _takes_zipped(request):
        # In a thread: a large cluster takes milliseconds, and the watches continue.
        body = await asyncio.to_thread(gzip.compress, body, 3)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers=headers)


def _takes_zipped(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")
