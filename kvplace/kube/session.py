"""HTTP to the API server: one aiohttp session, every answer bounded.

The official client's models cost a hundred times more than a typed decoder, so that client only renews OIDC
tokens (`oidc`). Errors are core's (`api_errors`). An answer is a
body of limited size, an object read from one, or a stream of lines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode
from weakref import WeakSet

import aiohttp
import msgspec
from prometheus_client import Counter
from yarl import URL

from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.kube.api_errors import (
    ApiUnavailable,
    NotFound,
    UnusableAnswer,
    decoded,
    error_of_response,
    with_retries,
)
from kvplace.kube.calls import JSON, METHODS, ApiCall
from kvplace.kube.credentials import CredentialOptions, Credentials, load_credentials
from kvplace.kube.watches import ApiKind

T = TypeVar("T")

_LAST_ROUNDS = 100
"""Rounds of the loop for closing sockets; a few are enough."""
API_ERRORS = Counter(
    "kvplace_api_errors_total",
    "Answers of the API server that were errors, by resource and HTTP status; status none: no answer.",
    ["verb", "resource", "status"],
)


class Sockets:
    """Opens sockets, as aiohttp's `socket_factory`, and closes the remaining ones."""

    def __init__(self) -> None:
        self._opened: WeakSet[socket.socket] = WeakSet()

    def open(self, address: tuple[Any, Any, int, str, Any]) -> socket.socket:
        """Make a socket that notices a half-open connection within about a minute.

        `address` is an entry of `socket.getaddrinfo`.
        """
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._opened.add(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return made

    async def hang_up(self) -> None:
        """End every connection that is still open, without a TLS shutdown.

        At the end of its stream a transport closes itself and its socket in every state.
        """
        for left in self._still_open():
            with suppress(OSError):
                left.shutdown(socket.SHUT_RDWR)
        for _ in range(_LAST_ROUNDS):
            if not self._still_open():
                return
            await asyncio.sleep(0)

    def _still_open(self) -> list[socket.socket]:
        return [opened for opened in self._opened if opened.fileno() != -1]


_log = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20
ANSWER_LIMIT = 16 * _MEBIBYTE
"""Most bytes of one object; etcd stores at most 1.5 MiB of it."""
PAGE_LIMIT = 256 * _MEBIBYTE
"""Most bytes of one page of a list."""
LINE_LIMIT = 16 * _MEBIBYTE
"""Most bytes of one event of a watch."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits and counts of a session."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    """For one object, from the first byte sent to the last one read."""
    page_s: float = 60.0
    """For one page of a list."""
    silence_s: float = 150.0
    """A watch without a line for so long counts as broken; bookmarks come every minute."""
    attempts: int = 4
    """Attempts of a request that the server has certainly not carried out (HTTP 429)."""
    connections: int = 128


class Session:
    """Connections to one API server."""

    def __init__(self, options: CredentialOptions, credentials: Credentials, limits: Limits) -> None:
        """Needs a running loop; use `open_session`."""
        self._options = options
        self._credentials = credentials
        self._limits = limits
        self._reloading = asyncio.Lock()
        self._closed = asyncio.Event()
        self._streams: set[LineStream] = set()
        self._sockets = Sockets()
        self._dated: tuple[str, float] = ("", 0.0)
        """When the newest answer was made, by the API server's clock and by the loop's."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=limits.connections,
                keepalive_timeout=75,
                socket_factory=self._sockets.open,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "kvplace"},
        )

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return self._credentials.server

    @property
    def namespace(self) -> str:
        """The namespace of calls that name none."""
        return self._credentials.namespace

    @property
    def server_time(self) -> datetime:
        """The API server's present time, as its answers state it; our own clock's where they do not."""
        said, then = self._dated
        try:
            moment = parsedate_to_datetime(said)
        except ValueError:
            return datetime.now(UTC)
        since = timedelta(seconds=asyncio.get_running_loop().time() - then)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) + since

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all streams, with ApiUnavailable, and close all connections."""
        self._closed.set()
        # Closing the connections alone would leave their readers waiting until the limit of silence.
        for stream in list(self._streams):
            await stream.close()
        await self._http.close()
        await self._sockets.hang_up()

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until the session is closed."""
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return

    async def request(
        self,
        call: ApiCall,
        *,
        limit: int = ANSWER_LIMIT,
        timeout_s: float | None = None,
        attempts: int | None = None,
    ) -> bytes:
        """Send one request and read its whole answer.

        Only a request that the server rejected for load is tried again; the server may request pauses of a
        minute. `attempts` replaces the number of the limits. Raises the errors of `api_errors`.
        """
        return await with_retries(
            lambda: self._request(call, limit, timeout_s or self._limits.answer_s),
            attempts=attempts or self._limits.attempts,
            retried=_is_untouched,
            sleep=self.pause,
        )

    async def read(
        self,
        kind: ApiKind,
        name: str,
        decoder: msgspec.json.Decoder[T],
        *,
        namespace: str = "",
        accept: str = JSON,
    ) -> T | None:
        """Read one object; None where there is none, or no such kind."""
        try:
            body = await self.request(ApiCall.on("get", kind, name, namespace=namespace, accept=accept))
        except NotFound:
            return None
        return decoded(decoder, body, kind.resource)

    async def open_stream(self, call: ApiCall) -> LineStream:
        """Open a watch; its answer comes line by line, and the caller closes it."""
        patience = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.connect_s, sock_read=self._limits.silence_s
        )
        try:
            response = await self._send(call, patience)
            if response.status != 200:
                async with response:
                    raise await _failure(response, call)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _error_of_transport(error, call) from error
        stream = LineStream(response, call, self._streams)
        self._streams.add(stream)
        return stream

    async def _request(self, call: ApiCall, limit: int, timeout_s: float) -> bytes:
        patience = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._limits.connect_s)
        try:
            async with await self._send(call, patience) as response:
                self._dated = (response.headers.get("Date", ""), asyncio.get_running_loop().time())
                if response.status >= 300:
                    raise await _failure(response, call)
                body = await _read_bounded(response, limit)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _error_of_transport(error, call) from error
        if body is None:
            raise UnusableAnswer(
                f"{call.verb} {call.resource} {call.name}: the answer is larger than {limit} bytes"
            )
        return body

    async def _send(self, call: ApiCall, patience: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Send; once more with credentials loaded again when the server does not accept the old ones.

        Or when we do not accept the server's certificate: its CA may have been replaced, in its file too.
        """
        used = self._credentials
        try:
            response = await self._send_as(used, call, patience)
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError):
            await self._reload(used)  # nothing was sent
            return await self._send_as(self._credentials, call, patience)
        if response.status != 401 or self._options.token is not None:
            return response
        response.release()
        await self._reload(used)
        return await self._send_as(self._credentials, call, patience)

    async def _send_as(
        self, credentials: Credentials, call: ApiCall, patience: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        if self.closed:
            raise ApiUnavailable(f"{call.verb} {call.resource}: the session is closed")
        headers = [("Accept", call.accept), *credentials.impersonation]
        if call.body is not None:
            headers.append(("Content-Type", call.patch_type if call.verb == "patch" else JSON))
        authorization = await credentials.authorization()
        if authorization is not None:
            headers.append(("Authorization", authorization))
        query = "?" + urlencode(call.query) if call.query else ""
        return await self._http.request(
            METHODS[call.verb],
            URL(f"{credentials.server}{call.path}{query}", encoded=True),
            data=call.body,
            headers=headers,
            timeout=patience,
            ssl=credentials.tls if credentials.tls is not None else True,
            proxy=credentials.proxy,
            server_hostname=credentials.server_hostname,
            allow_redirects=False,
        )

    async def _reload(self, refused: Credentials) -> None:
        async with self._reloading:
            if self._credentials is refused:
                _log.info("the API server and we no longer accept each other; loading the credentials again")
                self._credentials = await load_credentials(self._options)


class LineStream:
    """The lines of an answer without end."""

    def __init__(self, response: aiohttp.ClientResponse, call: ApiCall, siblings: set[LineStream]) -> None:
        """`siblings` are the streams of the same session; this one leaves them when it is closed."""
        self._response = response
        self._siblings = siblings
        self._call = call
        self._pending = bytearray()
        self._start = 0
        self._has_spoken = False

    async def next_line(self) -> bytes | None:
        """Return the next complete line; None when the server has ended the stream.

        An unfinished last line is dropped. Silence and a broken connection raise ApiUnavailable; silence from
        the beginning and a line over LINE_LIMIT raise UnusableAnswer.
        """
        searched = self._start
        while (end := self._pending.find(b"\n", searched)) < 0:
            del self._pending[: self._start]
            self._start = 0
            searched = len(self._pending)
            if searched > LINE_LIMIT:
                raise UnusableAnswer(
                    f"{self._call.verb} {self._call.resource}: an event is larger than {LINE_LIMIT} bytes"
                )
            try:
                chunk = await self._response.content.readany()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = _error_of_transport(error, self._call)
                if isinstance(error, TimeoutError) and not self._has_spoken:
                    raise UnusableAnswer(str(failure)) from error
                raise failure from error
            if not chunk:
                return None
            self._has_spoken = True
            self._pending += chunk
        line = bytes(self._pending[self._start : end])
        self._start = end + 1
        return line

    async def close(self) -> None:
        """Close the connection; lines that have not been read are lost."""
        self._siblings.discard(self)
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            # No TLS shutdown: the server may be gone, and its last bytes do not matter.
            connection.transport.abort()
        self._response.close()
        # The socket is closed in the loop's next round; after that nothing of the stream is left.
        await asyncio.sleep(0)


async def open_session(options: CredentialOptions | None = None, limits: Limits | None = None) -> Session:
    """Load the configuration and make a session; nothing is sent yet."""
    options = options or CredentialOptions()
    return Session(options, await load_credentials(options), limits or Limits())


async def _failure(response: aiohttp.ClientResponse, call: ApiCall) -> KvplaceError:
    API_ERRORS.labels(call.verb, call.resource, str(response.status)).inc()
    body = await _read_bounded(response, _MEBIBYTE) or b""
    return error_of_response(
        response.status, response.headers, body, verb=call.verb, resource=call.resource, name=call.name
    )


async def _read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Read a whole body; None when it is larger than the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            response.close()
            return None
    return bytes(body)


def _is_untouched(error: KvplaceError) -> bool:
    return isinstance(error, ApiUnavailable) and error.untouched


def _reason(error: OSError) -> str:
    """Return why no connection came about: asyncio's message repeats the address, aiohttp's shows objects."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or "it was closed during the handshake"


def _tls_reason(error: aiohttp.ClientConnectorSSLError) -> str:
    """Return the reason of OpenSSL: the messages of aiohttp and Python show objects and lines of C."""
    found = error.os_error
    reason = found.reason if isinstance(found, ssl.SSLError) else ""
    return reason.replace("_", " ").lower() if reason else str(found)


def _error_of_transport(error: Exception, call: ApiCall) -> KvplaceError:
    API_ERRORS.labels(call.verb, call.resource, "none").inc()
    what = f"{call.verb} {call.resource} {call.name}".rstrip()
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=cause):
            why = getattr(cause, "verify_message", "") or str(cause)
            return Misconfigured(
                f"{what}: TLS with the API server fails ({why}); check the CA in the kubeconfig"
            )
        case aiohttp.ClientConnectorSSLError():
            why = _tls_reason(error)
            return Misconfigured(
                f"{what}: TLS with the API server fails ({why}); check the server in the kubeconfig"
            )
        case aiohttp.InvalidURL():
            return Misconfigured(
                f"{what}: the API server's address is not valid ({error}); check the kubeconfig"
            )
        case TimeoutError():
            return ApiUnavailable(f"{what}: no answer from the API server in time")
        case aiohttp.ClientProxyConnectionError():
            return ApiUnavailable(
                f"{what}: no connection to the proxy before the API server ({_reason(error.os_error)})",
                untouched=True,
            )
        case aiohttp.ClientHttpProxyError():
            return ApiUnavailable(
                f"{what}: the proxy refuses a connection to the API server, HTTP {error.status} "
                f"({error.message})",
                untouched=True,
            )
        case aiohttp.ClientConnectorError():
            where, reason = f"{error.host}:{error.port}", _reason(error.os_error)
            return ApiUnavailable(
                f"{what}: no connection to the API server at {where} ({reason})", untouched=True
            )
        case _:
            return ApiUnavailable(f"{what}: the connection to the API server broke ({error!r})")
