"""The extender's verbs as HTTP routes.

Bad input gets 400 with one sentence. kube-scheduler does not read the body of an error, so the sentence
is for the log and for people with curl.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from kvplace.core.errors import BadBody, KvplaceError, http_status_of
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.metrics import REJECTED_CALLS
from kvplace.scheduler.wire import MAX_BODY, read_binding_args, read_extender_args

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


def extender_application(extender: Extender) -> web.Application:
    """Serve /v1/filter, /v1/prioritize and /v1/bind; bodies above 8 MiB are refused unread."""
    application = web.Application(client_max_size=MAX_BODY)
    application.add_routes(
        [
            web.post("/v1/filter", _route("filter", read_extender_args, extender.filter)),
            web.post("/v1/prioritize", _route("prioritize", read_extender_args, extender.prioritize)),
            web.post("/v1/bind", _route("bind", read_binding_args, extender.bind)),
        ]
    )
    return application


def _route(
    verb: str, read: Callable[[bytes], Any], answer: Callable[[Any], Awaitable[Any]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            args = read(await _body(request))
            result = await answer(args)
        except KvplaceError as error:
            REJECTED_CALLS.labels(verb).inc()
            log.warning("%s refused: %s", verb, error)
            return web.Response(status=http_status_of(error), text=f"{error}\n")
        return web.Response(body=_encode(result), content_type="application/json")

    return handle


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BadBody(
            f"the body is larger than {MAX_BODY} bytes; set nodeCacheCapable: true for the extender"
        ) from None
