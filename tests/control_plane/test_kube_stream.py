"""The writes of a hollow node: the API server may refuse one for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.certificates import Authority
from harness.control_plane.kube_stream import ApiRefused, KubeClient


class AnswersInTurn(KubeClient):
    """A client with the outcomes of its requests, one after the other."""

    def __init__(self, ca_file: Path, *outcomes: Exception | None) -> None:
        super().__init__("https://127.0.0.1", ca_file, "token")
        self.outcomes = list(outcomes)

    async def request(self, *_: Any, **__: Any) -> dict[str, Any]:
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome
        return {}


def refused(status: int) -> ApiRefused:
    return ApiRefused("PATCH", "/pod", status, "refused")


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    return Authority(tmp_path, "ca").file


async def test_a_write_is_repeated_until_it_is_carried_out(ca_file: Path) -> None:
    client = AnswersInTurn(ca_file, aiohttp.ServerDisconnectedError(), refused(429), refused(500), None)
    assert await client.persist("PATCH", "/pod", {})
    assert client.outcomes == []


@pytest.mark.parametrize("status", [404, 409])
async def test_a_write_to_an_object_that_is_gone_or_another_one_is_given_up(
    ca_file: Path, status: int
) -> None:
    assert not await AnswersInTurn(ca_file, refused(status)).persist("PATCH", "/pod", {})


async def test_a_write_that_is_wrong_is_an_error(ca_file: Path) -> None:
    with pytest.raises(ApiRefused, match="422"):
        await AnswersInTurn(ca_file, refused(422)).persist("PATCH", "/pod", {})
