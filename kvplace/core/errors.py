"""What can go wrong, as one small tree, and what each kind means to whoever meets it.

    KvplaceError
      Refused              the answer is no; not a fault, never retried
      Conflict             somebody was faster: read again and decide again
      Unavailable          try again later
      Misconfigured        an operator or user must change something
        BadAnnotation      a request or a result on a VM, VMI or pod
        BadTopology        a machine description or a sysfs tree
        BadDomainXml       a libvirt domain document
        BadBody            JSON that came over the wire or from a file
        Forbidden          the API server denies a right that we need
      Corrupt              an invariant is broken: stop and say so

Only `Conflict` and `Unavailable` are worth another try. The tables at the end are the one place
where an error becomes an exit code, an HTTP status or a gRPC status.
"""

from __future__ import annotations

from enum import IntEnum


class KvplaceError(Exception):
    """Base of every error that kvplace raises on purpose; `str()` is one sentence for a person."""


class Refused(KvplaceError):
    """The answer is no, and asking again without a change gives no again."""


class Conflict(KvplaceError):
    """Somebody wrote first; what we decided on is stale."""


class Unavailable(KvplaceError):
    """A part that we need does not answer now."""


class Misconfigured(KvplaceError):
    """The input is wrong and only its author can mend it."""


class BadAnnotation(Misconfigured):
    """An annotation that says something impossible, unknown or contradictory."""

    def __init__(self, key: str, value: str, mend: str) -> None:
        self.key = key
        self.value = value
        self.mend = mend
        shown = value if len(value) <= 80 else value[:77] + "..."
        super().__init__(f"annotation {key}: {shown!r}: {mend}")


class BadTopology(Misconfigured):
    """A machine description that contradicts itself or cannot be read."""


class BadDomainXml(Misconfigured):
    """A document that is not a libvirt domain we may rewrite."""


class BadBody(Misconfigured):
    """JSON of the wrong shape, size or encoding."""


class Forbidden(Misconfigured):
    """The API server denies us a verb on a resource."""


class Corrupt(KvplaceError):
    """An invariant does not hold, for instance a core with two owners."""


class ExitCode(IntEnum):
    """Exit codes of every kvplace command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    PARTLY_DONE = 4
    INTERRUPTED = 130


class GrpcStatus(IntEnum):
    """The gRPC status codes that the hook answers with (grpc/status.proto)."""

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


_EXIT_CODES: tuple[tuple[type[KvplaceError], ExitCode], ...] = (
    (Refused, ExitCode.DOES_NOT_FIT),
    (Misconfigured, ExitCode.USAGE),
    (KvplaceError, ExitCode.FAILED),
)

_HTTP_STATUSES: tuple[tuple[type[KvplaceError], int], ...] = (
    (BadBody, 400),
    (Misconfigured, 422),
    (Conflict, 409),
    (Refused, 409),
    (Unavailable, 503),
    (KvplaceError, 500),
)

_GRPC_STATUSES: tuple[tuple[type[KvplaceError], GrpcStatus], ...] = (
    (BadDomainXml, GrpcStatus.INVALID_ARGUMENT),
    (Misconfigured, GrpcStatus.FAILED_PRECONDITION),
    (Refused, GrpcStatus.FAILED_PRECONDITION),
    (Unavailable, GrpcStatus.UNAVAILABLE),
    (KvplaceError, GrpcStatus.INTERNAL),
)


def exit_code_of(error: KvplaceError) -> ExitCode:
    """Say which exit code a command ends with when this error reaches its top."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def http_status_of(error: KvplaceError) -> int:
    """Say which HTTP status answers a request that ended in this error."""
    return next(status for kind, status in _HTTP_STATUSES if isinstance(error, kind))


def grpc_status_of(error: KvplaceError) -> GrpcStatus:
    """Say which gRPC status answers a call that ended in this error."""
    return next(status for kind, status in _GRPC_STATUSES if isinstance(error, kind))
