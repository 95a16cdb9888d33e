"""The web map as an aiohttp application: pages for people, JSON and events for the pages.

Everything is a GET that changes nothing, but for signing in and out. Every answer carries headers that allow
a browser nothing but this listener's own scripts and styles. Errors are one sentence, as JSON or on the
sign-in page.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import html
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from aiohttp import web

from kvplace.core.errors import BadBody, KvplaceError, Refused, http_status_of
from kvplace.core.scalars import NodeName
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS, WatchClient
from kvplace.nodes.cluster_free_blocks import ClusterFreeBlocks
from kvplace.nodes.node_cache import NodeCache
from kvplace.service.listening import while_connected
from kvplace.service.process import in_background
from kvplace.web.agents import Agents
from kvplace.web.documents import MAX_QUERY, VmiClient, node_document, search, vm_document
from kvplace.web.feed import Feed
from kvplace.web.files import File, page_files
from kvplace.web.gate import Gate, ReviewClient
from kvplace.web.metrics import REFUSED
from kvplace.web.node_rows import NodeRows
from kvplace.web.sessions import Sessions
from kvplace.web.settings import WebSettings
from kvplace.web.visitors import COOKIE, MAX_TOKEN, TurnedAway, Viewer, Visitors, is_from_elsewhere

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
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
"""Documents made at a time: each holds the event loop for milliseconds, and binds go on between them."""
_VIEWER = web.RequestKey("viewer", Viewer)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MapClient(ReviewClient, WatchClient, VmiClient, Protocol):
    """The cluster calls of the map."""


class WebMap:
    """The handlers of one replica."""

    def __init__(
        self,
        vmis: VmiClient,
        cache: NodeCache,
        agents: Agents,
        visitors: Visitors,
        rows: NodeRows,
        feed: Feed,
        cluster_name: str,
    ) -> None:
        self._vmis = vmis
        self._cluster_name = cluster_name
        self._cache = cache
        self._agents = agents
        self._visitors = visitors
        self._rows = rows
        self._feed = feed
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    def application(self) -> web.Application:
        """Put the routes together."""
        application = web.Application(client_max_size=2 * MAX_TOKEN, middlewares=[_with_sentences])
        viewers, documents = self._for_viewers, self._some_at_once
        application.add_routes(
            [
                web.get("/", viewers(self._page)),
                web.get("/login", self._login_page),
                web.post("/login", self._sign_in),
                web.post("/logout", self._sign_out),
                web.get("/files/{name}", self._file),
                web.get("/api/cluster", viewers(documents(self._cluster))),
                web.get("/api/nodes/{name}", viewers(documents(self._node))),
                web.get("/api/vms/{namespace}/{name}", viewers(documents(self._vm))),
                web.get("/api/search", viewers(documents(self._search))),
                web.get("/api/events", viewers(self._events)),
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
            raise _missing("there is no such file")
        return _served(request, file)

    async def _cluster(self, request: web.Request) -> web.StreamResponse:
        await self._feed.refresh()
        document = {
            "name": self._cluster_name,
            "position": self._feed.position,
            "person": request[_VIEWER].person.name,
            "signOut": request[_VIEWER].session is not None,
            "totals": self._rows.totals(),
            "nodes": self._rows.all(),
        }
        return await _json(request, document)

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        document = await node_document(self._cache, self._agents, self._vmis, NodeName(name))
        if document is None:
            raise _missing(f"the cluster has no node {name[:253]}")
        return await _json(request, document)

    async def _vm(self, request: web.Request) -> web.StreamResponse:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        document = await vm_document(self._cache, self._agents, self._vmis, namespace, name)
        if document is None:
            raise _missing(f"no running VM or pod {namespace[:63]}/{name[:253]} requests cores")
        return await _json(request, document)

    async def _search(self, request: web.Request) -> web.StreamResponse:
        query = request.query.get("q", "")
        if len(query) > MAX_QUERY:
            raise BadBody(f"q is longer than {MAX_QUERY} characters")
        return await _json(request, await search(self._cache, query))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        viewer = request[_VIEWER]
        position = request.headers.get("Last-Event-ID") or request.query.get("since", "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
        reader = viewer.person.name
        with self._feed.stream(reader), contextlib.suppress(ConnectionResetError):  # the reader went away
            async with while_connected(request):
                await response.prepare(request)
                # States at once that the stream is open, which browsers would show with the first event only.
                await response.write(b"retry: 2000\n\n")
                await self._write_changes(response, viewer, position)
        return response

    async def _write_changes(self, response: web.StreamResponse, viewer: Viewer, position: str) -> None:
        asked_at = time.monotonic()
        async with contextlib.aclosing(self._feed.follow(position)) as messages:
            async for message in messages:
                await response.write(message)
                if time.monotonic() - asked_at >= self._feed.heartbeat_s:
                    if not await self._still_may(viewer):
                        break
                    asked_at = time.monotonic()

    async def _still_may(self, viewer: Viewer) -> bool:
        """Whether a stream goes on; it ends where that is unknown; its page then asks why."""
        try:
            return await self._visitors.still_may(viewer)
        except KvplaceError:
            return False

    async def _login_page(self, request: web.Request) -> web.StreamResponse:
        return _login(200, "") if self._visitors.sign_in else _to("./")

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        if not self._visitors.sign_in:
            return _to("./")
        if is_from_elsewhere(request):
            return _login(403, "this form was sent by another site")
        try:
            session, cookie = await self._visitors.sign_in_with(await _token_in_form(request))
        except TurnedAway as refusal:
            return _login(refusal.status, str(refusal))
        except KvplaceError as error:
            return _login(_status_of(error), str(error))
        answer = _to("./")
        answer.set_cookie(
            COOKIE, cookie, max_age=int(self._visitors.seconds_left(session)),
            path="/", secure=True, httponly=True, samesite="Strict",
        )  # fmt: skip
        return answer

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        if is_from_elsewhere(request):
            return _login(403, "this form was sent by another site")
        answer = _to("login")
        answer.del_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="Strict")
        return answer

    def _some_at_once(self, handler: _Handler) -> _Handler:
        """Let a handler answer a few requests at a time; the others wait, and all else goes on."""

        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._at_once:
                return await handler(request)

        return handle

    def _for_viewers(self, handler: _Handler) -> _Handler:
        """Let a handler answer viewers only."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                request[_VIEWER] = await self._visitors.viewer_of(request)
            except TurnedAway as refusal:
                if request.path != "/":
                    return web.json_response({"error": str(refusal)}, status=refusal.status)
                if refusal.status == 401 and self._visitors.sign_in:
                    return _to("login")
                return _login(refusal.status, str(refusal), form=self._visitors.sign_in)
            return await handler(request)

        return handle


@contextlib.asynccontextmanager
async def web_map(
    cluster: MapClient, cache: NodeCache, free_blocks: ClusterFreeBlocks, settings: WebSettings
) -> AsyncIterator[web.Application]:
    """Make the application, and search for changes while the block runs."""
    sessions = None if settings.behind_proxy else Sessions(settings.tls.key)
    visitors = Visitors(Gate(cluster, settings.holds_s), sessions)
    agent_pods = Store(AGENT_PODS, AGENTS)
    agents = Agents(agent_pods)
    rows = NodeRows(cache, free_blocks, agents)
    feed = Feed(rows, streams=settings.streams, heartbeat_s=settings.heartbeat_s)
    watching = (agent_pods.run(cluster), agents.announce(cache.nodes.records.keys()), feed.run())
    async with in_background(*watching):
        yield WebMap(cluster, cache, agents, visitors, rows, feed, settings.cluster_name).application()


@web.middleware
async def _with_sentences(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except KvplaceError as error:
        status = _status_of(error)
        if status == 503:
            REFUSED.labels("busy").inc()
        response = web.json_response({"error": str(error)}, status=status)
    except web.HTTPException as error:
        response = web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    return response


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Put the headers on an answer, unless its handler has set one of them; for `on_response_prepare`."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


class _Missing(Refused):
    """There is nothing of that name."""


def _missing(sentence: str) -> _Missing:
    return _Missing(sentence)


def _status_of(error: KvplaceError) -> int:
    return 404 if isinstance(error, _Missing) else http_status_of(error)


async def _token_in_form(request: web.Request) -> str:
    """Read the token of our own form; empty where there is none, whatever else a stranger has sent."""
    try:
        form = (await request.read()).decode("ascii", "replace")
    except web.HTTPRequestEntityTooLarge:
        return ""
    return parse_qs(form).get("token", [""])[0].strip()


def _to(where: str) -> web.Response:
    return web.Response(status=303, headers={"Location": where})


def _login(status: int, sentence: str, *, form: bool = True) -> web.Response:
    page = page_files()["login.html" if form else "refused.html"].content.decode()
    return web.Response(
        status=status, text=page.replace("{sentence}", html.escape(sentence)), content_type="text/html"
    )


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
        # In a thread: a large cluster takes milliseconds, which binds would wait for.
        body = await asyncio.to_thread(gzip.compress, body, 3)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers=headers)


def _takes_zipped(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")
