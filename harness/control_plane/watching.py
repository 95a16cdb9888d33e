"""Watch objects from a synchronous test.

Every wait ends after two minutes, however often the object changes meanwhile, and then shows the object. That
is below the time limit of a test, so its failure names the missing state. A watch that the API server ends
continues at the last version that was seen.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from http.client import HTTPException, HTTPSConnection
from typing import Any

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.pod_status import start_failures
from harness.waiting import PATIENCE_S, wait_until

_EXPIRED = 410
_NOT_YET = (429, 500, 503)
"""The API server starts, or reads the collection first, as after a change of its CRD."""
_PAUSE_S = 0.1


@contextlib.contextmanager
def watch(plane: ControlPlane, path: str, resource_version: str = "0") -> Iterator[Iterator[dict[str, Any]]]:
    """Watch a collection, or a part of it by the selectors in `path`; yields its events.

    With `resource_version` "0" the present state comes first as ADDED events. The iterator raises
    TimeoutError when the next event is not there after 120 s in all.
    """
    with contextlib.closing(_events(plane, path, resource_version)) as events:
        yield events


def watch_one_object(
    plane: ControlPlane, collection: str, name: str, resource_version: str
) -> contextlib.AbstractContextManager[Iterator[dict[str, Any]]]:
    """Watch the object `name` of a collection, as `watch` does."""
    return watch(plane, f"{collection}?fieldSelector=metadata.name={name}", resource_version)


def _events(plane: ControlPlane, path: str, version: str) -> Generator[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE_S
    joint = "&" if "?" in path else "?"
    while True:
        with contextlib.suppress(HTTPException, ConnectionError, ssl.SSLEOFError):  # the next one continues
            for event in _one_watch(plane, f"{path}{joint}watch=true&resourceVersion={version}", deadline):
                if event["type"] == "ERROR":
                    assert event["object"].get("code") == _EXPIRED, event
                    version = "0"
                else:
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event
        time.sleep(_PAUSE_S)


def _one_watch(plane: ControlPlane, path: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one watch until the API server ends it."""
    connection = HTTPSConnection(
        plane.url.removeprefix("https://"), context=plane.tls, timeout=_left(deadline)
    )
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {plane.admin.token}"})
        answer = connection.getresponse()
        if answer.status == _EXPIRED:
            yield {"type": "ERROR", "object": {"code": _EXPIRED}}
        elif answer.status not in _NOT_YET:
            assert answer.status == 200, f"{path}: {answer.status}: {answer.read()!r}"
            while (line := answer.readline()).endswith(b"\n"):
                yield json.loads(line)
                connection.sock.settimeout(_left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


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


def is_gone(plane: ControlPlane, collection: str, name: str) -> bool:
    """Whether there is no object of that name."""
    try:
        plane.request("GET", f"{collection}/{name}")
    except RequestRefused as refused:
        if refused.status != 404:
            raise
        return True
    return False


def wait_until_gone(plane: ControlPlane, collection: str, name: str) -> None:
    """Wait until an object is gone for good."""
    wait_until(lambda: is_gone(plane, collection, name), lambda: f"{collection}/{name} is still there")


def condition(pod: dict[str, Any], kind: str) -> str:
    """Return the status of a condition, empty when it is not there."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((str(entry["status"]) for entry in conditions if entry["type"] == kind), "")


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a kubelet calls the pod Ready."""
    return condition(pod, "Ready") == "True"
