"""Every error means one exit code, one HTTP status and one gRPC status, wherever it surfaces."""

from __future__ import annotations

import pytest

from kvplace.core import errors
from kvplace.core.errors import (
    Absent,
    BadAnnotation,
    BadBody,
    BadDomainXml,
    BadTopology,
    Conflict,
    Corrupt,
    ExitCode,
    Forbidden,
    GrpcStatus,
    KvplaceError,
    Misconfigured,
    Refused,
    Unavailable,
    exit_code_of,
    grpc_status_of,
    http_status_of,
)
from kvplace.core.ledger import OwnershipConflict

MEANINGS: list[tuple[KvplaceError, ExitCode, int, GrpcStatus]] = [
    (Refused("no"), ExitCode.DOES_NOT_FIT, 409, GrpcStatus.FAILED_PRECONDITION),
    (Conflict("late"), ExitCode.FAILED, 409, GrpcStatus.INTERNAL),
    (OwnershipConflict("late"), ExitCode.FAILED, 409, GrpcStatus.INTERNAL),
    (Absent("nothing"), ExitCode.FAILED, 404, GrpcStatus.INTERNAL),
    (Unavailable("away"), ExitCode.FAILED, 503, GrpcStatus.UNAVAILABLE),
    (Misconfigured("wrong"), ExitCode.USAGE, 422, GrpcStatus.FAILED_PRECONDITION),
    (BadAnnotation("cpu-set", "x", "fix"), ExitCode.USAGE, 422, GrpcStatus.FAILED_PRECONDITION),
    (BadTopology("wrong"), ExitCode.USAGE, 422, GrpcStatus.FAILED_PRECONDITION),
    (BadDomainXml("wrong"), ExitCode.USAGE, 422, GrpcStatus.INVALID_ARGUMENT),
    (BadBody("wrong"), ExitCode.USAGE, 400, GrpcStatus.FAILED_PRECONDITION),
    (Forbidden("no right"), ExitCode.USAGE, 422, GrpcStatus.FAILED_PRECONDITION),
    (Corrupt("broken"), ExitCode.FAILED, 500, GrpcStatus.INTERNAL),
    (KvplaceError("other"), ExitCode.FAILED, 500, GrpcStatus.INTERNAL),
]


@pytest.mark.parametrize(
    ("error", "code", "status", "grpc"), MEANINGS, ids=[type(error).__name__ for error, *_ in MEANINGS]
)
def test_an_error_means_the_same_everywhere(
    error: KvplaceError, code: ExitCode, status: int, grpc: GrpcStatus
) -> None:
    assert (exit_code_of(error), http_status_of(error), grpc_status_of(error)) == (code, status, grpc)


def test_every_error_of_the_tree_has_its_meaning_here() -> None:
    tree = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvplaceError)
    }
    assert tree <= {type(error) for error, *_ in MEANINGS}


def test_a_long_annotation_is_shortened_in_its_error_but_kept_for_programs() -> None:
    error = BadAnnotation("cpu-map", "x" * 5000, "is no map")
    assert len(str(error)) < 200
    assert error.value == "x" * 5000
