"""How answers of the API server become errors of core: HTTP status and Status object in, exceptions out.

409                                Conflict
422 by the ownership rule          OwnershipConflict
422 and 400 otherwise              Rejected (Misconfigured): the manifests do not match the cluster
404                                NotFound (Refused), with the resource
410                                Expired (Unavailable): the past that was asked for is forgotten
401 after fresh credentials        Unauthenticated (Forbidden)
403                                Denied (Forbidden), with the right that is missing if one is
429, 5xx, timeouts, connections    ApiUnavailable, with the pause that the server requests

`with_retries` is the one policy for further attempts:

Conflict         at once: the caller reads the new state first
Unavailable      after a pause; at least the server's Retry-After
anything else    never

Pauses grow exponentially with full jitter: each is a random part of its ceiling, so that clients that failed
together do not come back together.

Messages of the API server, kube-scheduler and virt-controller about a program that did not answer name an
address and a Go error. `unanswered` names the program instead, and `passes` states whether it may recover.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client import Counter
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Misconfigured, Refused, Unavailable
from kvplace.core.ledger import OwnershipConflict

T = TypeVar("T")

OWNERSHIP_RULE = "a CPU must be released before it gets another owner"
"""Message of the rule in manifests/crd/nodeledgers.yaml; recognises its refusals."""

LONGEST_ASKED_PAUSE_S = 60.0
"""A longer Retry-After is cut to this."""

_WEBHOOK = re.compile(r'failed calling webhook "(?P<name>[^"]+)": (?:failed to call webhook: )?(?P<cause>.+)')
_EXTENDER = re.compile(r'Post "[^"]*/v1/(?:filter|bind|preempt)": (?P<cause>.+)')
_ADDRESS = re.compile(r'^Post "[^"]*": ')
_OURS = ".kvplace.io"
_CERTIFICATE = ("x509:", "tls:")
_PASSING = re.compile(
    r"failed calling webhook|Internal error occurred|the object has been modified|etcdserver: |"
    r"[Tt]oo many requests|[Tt]imeout: |timed out|connection refused"
)

NOT_JSON = (msgspec.MsgspecError, RecursionError)
"""Errors of a decoder for bytes that are not JSON, have other types, or are nested too deeply."""


class ApiUnavailable(Unavailable):
    """The API server did not answer, or stated that it cannot now.

    `untouched` means that the request was certainly not carried out; otherwise the outcome is unknown.
    """

    def __init__(
        self, message: str, *, status: int = 0, retry_after: float | None = None, untouched: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds to wait as the server asks; None when it does not state."""
        self.untouched = untouched


class Expired(Unavailable):
    """The resource version or page that was asked for is no longer known: list again."""


class UnusableAnswer(Unavailable):
    """It is too large or not of the form of its kind; or a watch sends nothing at all, not even bookmarks."""


class NotFound(Refused):
    """There is no such object, or the API server does not serve its kind."""

    def __init__(self, what: str, resource: str = "") -> None:
        super().__init__(what)
        self.resource = resource


class Unauthenticated(Forbidden):
    """The API server does not accept our credentials."""


class Denied(Forbidden):
    """We lack a right; or a quota, a policy or the end of a namespace forbids it, with the same code."""

    def __init__(self, verb: str, resource: str, said: str) -> None:
        self.lacks_right = "cannot" in said  # the verb in RBAC's messages
        fix = "; its role lacks this right: apply the installation again" if self.lacks_right else ""
        super().__init__(f"the API server denies {verb} on {resource} ({said}){fix}")
        self.verb = verb
        self.resource = resource
        self.said = said
        """The API server's own message, which names the user."""


class Rejected(Misconfigured):
    """The API server finds the content of a write invalid."""


class ApiStatus(msgspec.Struct):
    """The part of meta/v1 Status that describes an error."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


_STATUS = msgspec.json.Decoder(ApiStatus)


def error_of_response(
    code: int, headers: Mapping[str, str], body: bytes, *, verb: str, resource: str, name: str = ""
) -> KvplaceError:
    """Turn an answer that is not 2xx into an error."""
    status = read_status(body)
    status.code = code
    return error_of_status(status, verb=verb, resource=resource, name=name, pause=headers.get("Retry-After"))


def error_of_status(
    status: ApiStatus, *, verb: str, resource: str, name: str = "", pause: str | None = None
) -> KvplaceError:
    """Turn a Status, from an answer or from within a watch, into an error."""
    what = f"{verb} {resource} {name}".rstrip()
    said = status.message or status.reason or f"HTTP {status.code}"
    match status.code:
        case 401:
            return Unauthenticated(
                f"{what}: the API server rejects the credentials ({said}); renew the token or kubeconfig"
            )
        case 403:
            return Denied(verb, resource, said)
        case 404:
            return NotFound(f"{what}: {said}", resource)
        case 409:
            return Conflict(f"{what}: {said}")
        case 410:
            return Expired(f"{what}: {said}")
        case 422 if OWNERSHIP_RULE in status.message:
            return OwnershipConflict(f"{what}: {said}")
        case code if code == 429 or code >= 500:
            return ApiUnavailable(
                f"{what}: the API server is not available, HTTP {code} ({said})",
                status=code,
                retry_after=_pause(pause, status),
                untouched=code == 429,
            )
        case _:
            return Rejected(f"{what}: the API server rejects it, HTTP {status.code} ({said})")


def read_status(body: bytes | msgspec.Raw) -> ApiStatus:
    """Read a Status object; other bytes become the message of one."""
    try:
        return _STATUS.decode(body)
    except NOT_JSON:
        return ApiStatus(message=bytes(body)[:200].decode("utf-8", "replace").strip())


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, resource: str) -> T:
    """Decode an answer of the API server; raises UnusableAnswer."""
    try:
        return decoder.decode(body)
    except NOT_JSON as error:
        raise unreadable(resource, error) from error


def unreadable(resource: str, error: Exception) -> UnusableAnswer:
    """Return the error for an answer that a decoder does not take."""
    return UnusableAnswer(f"{resource}: the API server's answer cannot be read ({error})")


def _pause(header: str | None, status: ApiStatus) -> float | None:
    if header is not None and header.isascii() and header.isdigit() and len(header) < 9:
        return min(float(header), LONGEST_ASKED_PAUSE_S)
    seconds = (status.details or {}).get("retryAfterSeconds")
    return min(float(seconds), LONGEST_ASKED_PAUSE_S) if type(seconds) is int and seconds > 0 else None


def unanswered(message: str) -> str:
    """State in one sentence which program did not answer, and where to check; empty where all did."""
    message = " ".join(message.split())
    if (found := _EXTENDER.search(message)) is not None:
        return _sentence("`kvplace serve`", "kube-scheduler", "", found["cause"])
    found = _WEBHOOK.search(message)
    if found is None:
        return ""
    name, cause = found["name"], _ADDRESS.sub("", found["cause"]).rstrip(")")
    if name.endswith(_OURS):
        return _sentence("`kvplace serve`", "the API server", f" (webhook {name})", cause)
    return f"webhook {name} does not answer the API server: {cause}"


def passes(message: str) -> bool:
    """Return whether an obstacle may pass by itself, as an outage does and a refusal does not."""
    return _PASSING.search(message) is not None


def _sentence(who: str, whom: str, at: str, cause: str) -> str:
    if any(word in cause for word in _CERTIFICATE):
        why = "`kubectl kvplace doctor` reports why"
        return f"{whom} does not accept the certificate of {who}{at}: {cause}; {why}"
    look = "`kubectl -n kvplace-system get pods` shows whether it runs"
    return f"{who} does not answer {whom}{at}: {cause}; {look}"


RETRIES = Counter(
    "kvplace_api_retries_total",
    "Calls that were tried again, after a conflict or because the API server was unavailable.",
    ["cause"],
)


@dataclass(frozen=True)
class Backoff:
    """How long the pauses are."""

    first_s: float = 0.2
    """Ceiling of the first pause; it doubles with each failure."""
    longest_s: float = 30.0
    jitter: Callable[[], float] = random.random
    """Returns a number from 0 up to 1."""

    def pause(self, failures: int, error: BaseException | None = None) -> float:
        """Return the seconds to wait after an error that followed this number of failures."""
        ceiling: float = min(self.first_s * 2 ** min(failures, 30), self.longest_s)
        asked = error.retry_after if isinstance(error, ApiUnavailable) else None
        return (asked or 0.0) + self.jitter() * ceiling


def is_retried(error: BaseException) -> bool:
    """Return whether another try may end better."""
    return isinstance(error, Conflict | Unavailable)


async def with_retries(
    call: Callable[[], Awaitable[T]],
    *,
    attempts: int | None = None,
    deadline: float | None = None,
    backoff: Backoff | None = None,
    retried: Callable[[KvplaceError], bool] = is_retried,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Make a call until it succeeds or is to be tried no more; returns its answer.

    Ends after this number of `attempts`, or when the next one would begin after `deadline`, a time of the
    running loop. `retried` can exclude more errors from further attempts. Raises the last error as it is.

    tenacity is used from the first failure, which it gets as its first attempt: it costs 50 µs a call, and
    nearly all calls succeed.
    """
    pauses = backoff or Backoff(longest_s=5.0)

    def retry(error: BaseException) -> bool:
        return isinstance(error, KvplaceError) and is_retried(error) and retried(error)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return 0.0 if isinstance(error, Conflict) else pauses.pause(state.attempt_number - 1, error)

    def stop(state: RetryCallState) -> bool:
        if attempts is not None and state.attempt_number >= attempts:
            return True
        return deadline is not None and asyncio.get_running_loop().time() + state.upcoming_sleep > deadline

    def count(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        RETRIES.labels("conflict" if isinstance(error, Conflict) else "unavailable").inc()

    try:
        return await call()
    except KvplaceError as error:
        if not retry(error):
            raise
        first: KvplaceError | None = error

    async def attempt() -> T:
        nonlocal first
        if first is not None:
            failed, first = first, None
            raise failed
        return await call()

    policy = AsyncRetrying(
        retry=retry_if_exception(retry), stop=stop, wait=wait, sleep=sleep, before_sleep=count, reraise=True
    )
    return await policy(attempt)
