"""Lists of any kind for commands: page by page, and once more when they expire on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from kvplace.kube.api_errors import Expired, Rejected
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.session import open_session
from kvplace.kube.watches import ApiKind
from tests.kube.api_stub import answer, api_stub, status

FIRST = answer({"metadata": {"continue": "more"}, "items": [{"a": 1}]})
LAST = answer({"metadata": {}, "items": [{"b": 2}]})
TOO_OLD = status(410, "The provided continue parameter is too old")


async def test_a_list_that_expires_between_two_pages_is_begun_again_once(tmp_path: Path) -> None:
    async with api_stub() as stub, await open_session(stub.kubeconfig(tmp_path)) as session:
        reader = ObjectClient(session)
        stub.script = [FIRST, TOO_OLD, FIRST, LAST]
        assert await reader.read_list(ApiKind("pods")) == ({"a": 1}, {"b": 2})
        assert [request.query.get("continue") for request in stub.asked] == [None, "more", None, "more"]
        stub.script = [FIRST, TOO_OLD, FIRST, TOO_OLD]
        with pytest.raises(Expired):
            await reader.read_list(ApiKind("pods"))


@given(st.lists(st.text(min_size=1), min_size=1))
def test_no_name_can_leave_its_place_in_the_path(segments: list[str]) -> None:
    try:
        path = ApiKind("pods").path(*segments)
    except UnicodeEncodeError:  # Lone surrogates are not text that JSON or HTTP could carry.
        return
    url = URL(f"https://host{path}", encoded=True)
    assert url.host == "host"
    assert path.count("/") == 3 + len(segments)
    assert not set(path) & set("?#%\\ ") - {"%"}


async def test_the_error_for_an_object_without_a_name_yet_names_none(tmp_path: Path) -> None:
    async with api_stub() as stub, await open_session(stub.kubeconfig(tmp_path)) as session:
        stub.script = [status(422, "no")]
        with pytest.raises(Rejected, match=r"^create pods: "):
            await ObjectClient(session).create(
                ApiKind("pods"), {"metadata": {"generateName": "trial-"}}, namespace="vms"
            )
