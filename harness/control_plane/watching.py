"""Watch one object from a synchronous test.

Every wait ends after two minutes, however often the object changes meanwhile, and then shows the object. That
is below the time limit of a test, so its failure names the missing state.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse, HTTPSConnection
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.pod_status import start_failures
from harness.waiting import PATIENCE_S


@contextlib.contextmanager
def watch_one_object(
    plane: ControlPlane, collection: str, name: str, resource_version: str
) -> Iterator[Iterator[dict[str, Any]]]:
    """Open a watch on `collection` for the object `name`; yields its events.

    With `resource_version` "0" the object's present state comes first as an ADDED event. The iterator raises
    TimeoutError when the next event is not there after 120 s in all.
    """
    connection = HTTPSConnection(plane.url.removeprefix("https://"), context=plane.tls, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(
            "GET",
            f"{collection}?watch=true&fieldSelector=metadata.name={name}&resourceVersion={resource_version}",
            headers={"Authorization": f"Bearer {plane.admin.token}"},
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield _events(connection, answer)


def _events(connection: HTTPSConnection, answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.sock.settimeout(left)
        line = answer.readline()
        if not line:
            return
        yield json.loads(line)


def wait_for(
    plane: ControlPlane, collection: str, name: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the object exists and `holds` is true of it, and return it as it is then."""
    found: dict[str, Any] = {}
    with (
        watch_one_object(plane, collection, name, "0") as events,
        contextlib.suppress(TimeoutError),  # reported below, with the object
    ):
        for event in events:
            found = event["object"]
            if event["type"] != "DELETED" and holds(found):
                return found
            if failures := start_failures(found):
                raise AssertionError(f"{collection}/{name}: {'; '.join(failures)}")
    last = json.dumps(found.get("status", found), indent=1) if found else "it was never there"
    raise AssertionError(f"{collection}/{name} did not become what was waited for; at last:\n{last}")


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
