"""The errors that kvplace raises, as one small tree, and the meaning of each kind.

    KvplaceError
      Refused              the answer is no; not a fault, never retried
      Conflict             another writer was first: read again and decide again
      Unavailable          try again later
      Absent               there is nothing of the name that was given
      Misconfigured        an operator or user must change something
        BadAnnotation      a request or a result on a VM, VMI or pod
        BadTopology        a machine description or a sysfs tree
        BadDomainXml       a libvirt domain document
        BadBody            JSON that came over the wire or from a file
        Forbidden          the API server denies a right that we need
      Corrupt              an invariant is broken: stop and report it

Only `Conflict` and `Unavailable` are worth another try. The tables at the end are the one place
where an error becomes an exit code, an HTTP status or a gRPC status.
"""

from __future__ import annotations

from enum import IntEnum


class KvplaceError(Exception):
    """Base of every error that kvplace raises on purpose; `str()` is one sentence for a person."""


class Refused(KvplaceError):
    """The answer is no; without a change the next answer is no, too."""


class Conflict(KvplaceError):
    """Another writer was first; the decision was made on stale state."""


class Unavailable(KvplaceError):
    """A component that is needed does not answer now."""


class Absent(KvplaceError):
    """There is no object of the given name, or the cluster does not serve its kind."""


class Misconfigured(KvplaceError):
    """The input is wrong and only its author can correct it."""


class BadAnnotation(Misconfigured):
    """An annotation with an impossible, unknown or contradictory value."""

    def __init__(self, key: str, value: str, fix: str) -> None:
        self.key = key
        self.value = value
        self.fix = fix
        shown = value if len(value) <= 80 else value[:77] + "..."
        super().__init__(f"annotation {key}: {shown!r}: {fix}")


class BadTopology(Misconfigured):
    """A machine description that contradicts itself or cannot be read."""


class BadDomainXml(Misconfigured):
    """A document that is not a libvirt domain that can be rewritten."""


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
    TIMED_OUT = 5
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
    (Absent, 404),
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
    """Find the exit code of a command that ends in this error."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def http_status_of(error: KvplaceError) -> int:
    """Find the HTTP status for a request that ended in this error."""
    return next(status for kind, status in _HTTP_STATUSES if isinstance(error, kind))


def grpc_status_of(error: KvplaceError) -> GrpcStatus:
    """Find the gRPC status for a call that ended in this error."""
    return next(status for kind, status in _GRPC_STATUSES if isinstance(error, kind))
