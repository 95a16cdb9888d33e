"""Watch one object from a synchronous test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPSConnection
from typing import Any

from tests.control_plane.cluster import ControlPlane


@contextlib.contextmanager
def watch_one_object(
    plane: ControlPlane, collection: str, name: str, resource_version: str
) -> Iterator[Iterator[dict[str, Any]]]:
    """Open a watch on `collection` for the object `name`; yields its events, each waited for at most 60 s.

    With `resource_version` "0" the object's present state comes first as an ADDED event.
    """
    connection = HTTPSConnection(plane.url.removeprefix("https://"), context=plane.tls, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "GET",
            f"{collection}?watch=true&fieldSelector=metadata.name={name}&resourceVersion={resource_version}",
            headers={"Authorization": f"Bearer {plane.admin.token}"},
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield (json.loads(line) for line in iter(answer.readline, b""))
