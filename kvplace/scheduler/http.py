"""The extender's verbs as HTTP routes, over HTTP/1.1 by aiohttp and over HTTP/2 by `listener`.

Bad input gets 400 with one sentence. kube-scheduler does not read the body of an error; the sentence is for
the log and for users of curl.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import msgspec
from aiohttp import web

from kvplace.core.errors import BadBody, KvplaceError, http_status_of
from kvplace.core.scalars import NodeName
from kvplace.scheduler.extender_protocol import (
    MAX_BODY,
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    NodeVictims,
    PreemptionArgs,
    preemption_answer,
    read_binding_args,
    read_extender_args,
    read_preemption_args,
)
from kvplace.scheduler.metrics import REJECTED_CALLS

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_TOO_LARGE = f"the body is larger than {MAX_BODY} bytes; set nodeCacheCapable: true for the extender"


@dataclass(frozen=True, slots=True)
class ExtenderReply:
    """An answer in any version of HTTP."""

    status: int
    content_type: str
    body: bytes

    @classmethod
    def failed(cls, status: int, sentence: str) -> Self:
        """Answer with an error."""
        return cls(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())

    @classmethod
    def too_large(cls) -> Self:
        """Answer to a body above the limit."""
        return cls.failed(http_status_of(BadBody(_TOO_LARGE)), _TOO_LARGE)


class Verbs(Protocol):
    """The calls of kube-scheduler to an extender."""

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer with the nodes that can hold a pod."""
        ...

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score each node for a pod."""
        ...

    async def preempt(self, args: PreemptionArgs) -> Mapping[NodeName, NodeVictims]:
        """Answer with victims that make a pod fit."""
        ...

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Bind a pod to its node."""
        ...


class Routes:
    """/v1/filter, /v1/prioritize, /v1/preempt and /v1/bind of one extender."""

    def __init__(self, extender: Verbs) -> None:
        self.verbs: dict[str, Callable[[bytes], Awaitable[ExtenderReply]]] = {
            "/v1/filter": _verb("filter", read_extender_args, extender.filter),
            "/v1/prioritize": _verb("prioritize", read_extender_args, extender.prioritize),
            "/v1/preempt": _verb("preempt", read_preemption_args, extender.preempt, preemption_answer),
            "/v1/bind": _verb("bind", read_binding_args, extender.bind),
        }

    async def __call__(self, method: str, path: str, body: bytes) -> ExtenderReply:
        """Answer one request."""
        verb = self.verbs.get(path)
        if verb is None:
            return ExtenderReply.failed(404, f"{path} is not one of {', '.join(self.verbs)}")
        if method != "POST":
            return ExtenderReply.failed(405, f"{path} takes POST only")
        return await verb(body)


def extender_application(routes: Routes) -> web.Application:
    """Serve the routes over HTTP/1.1; bodies above 8 MiB are not read."""
    application = web.Application(client_max_size=MAX_BODY)
    application.add_routes([web.post(path, _handler(verb)) for path, verb in routes.verbs.items()])
    return application


_A = TypeVar("_A", ExtenderArgs, BindingArgs, PreemptionArgs)
_R = TypeVar("_R")


def _verb(
    name: str,
    read: Callable[[bytes], _A],
    answer: Callable[[_A], Awaitable[_R]],
    written: Callable[[_R], object] = lambda result: result,
) -> Callable[[bytes], Awaitable[ExtenderReply]]:
    async def reply(body: bytes) -> ExtenderReply:
        about: dict[str, object] = {}
        try:
            args = read(body)
            about = args.about
            result = await answer(args)
        except KvplaceError as error:
            REJECTED_CALLS.labels(name).inc()
            log.warning("%s refused: %s", name, error, extra=about)
            return ExtenderReply.failed(http_status_of(error), str(error))
        except Exception:
            log.exception("%s failed", name, extra=about)
            return ExtenderReply.failed(500, f"{name} failed; see the log of kvplace serve")
        return ExtenderReply(200, "application/json", _encode(written(result)))

    return reply


def _handler(
    verb: Callable[[bytes], Awaitable[ExtenderReply]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            reply = await verb(await request.read())
        except web.HTTPRequestEntityTooLarge:
            reply = ExtenderReply.too_large()
        return web.Response(
            status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type}
        )

    return handle
