"""Writes of Secrets: whoever loses against another client learns it, also where the Secret is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplace.core.errors import Conflict, KvplaceError
from kvplace.kube.api_errors import NotFound
from kvplace.kube.secrets import ApiSecrets, Secret
from kvplace.kube.session import open_session
from tests.kube.api_stub import api_stub, status

THERE = Secret({"tls.crt": b""}, "7")


@pytest.mark.parametrize(
    ("before", "code", "expected"),
    [(THERE, 409, Conflict), (THERE, 404, Conflict), (None, 409, Conflict), (None, 404, NotFound)],
    ids=["changed", "deleted", "created", "no namespace"],
)
async def test_a_secret_that_is_no_longer_as_it_was_read_is_a_conflict(
    tmp_path: Path, before: Secret | None, code: int, expected: type[KvplaceError]
) -> None:
    async with api_stub() as stub:
        stub.script = [status(code, "no")]
        async with await open_session(stub.kubeconfig(tmp_path)) as session:
            with pytest.raises(expected):
                await ApiSecrets(session).write_secret("kvplace-system", "kvplace-ca", {}, before)
