"""Watch one object from a synchronous test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from typing import Any

from harness.control_plane.cluster import ControlPlane


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


def wait_for(
    plane: ControlPlane, collection: str, name: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the object exists and `holds` is true of it, and return it as it is then."""
    with watch_one_object(plane, collection, name, "0") as events:
        for event in events:
            if event["type"] != "DELETED" and holds(event["object"]):
                found: dict[str, Any] = event["object"]
                return found
    raise AssertionError(f"the watch of {collection}/{name} ended before what was waited for came true")


def wait_until_gone(plane: ControlPlane, collection: str, name: str, resource_version: str) -> None:
    """Wait until the object, seen at `resource_version`, is deleted."""
    with watch_one_object(plane, collection, name, resource_version) as events:
        assert any(event["type"] == "DELETED" for event in events), f"{collection}/{name} is still there"


def condition(pod: dict[str, Any], kind: str) -> str:
    """Return the status of a condition, empty when it is not there."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "")


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a kubelet calls the pod Ready."""
    return condition(pod, "Ready") == "True"
