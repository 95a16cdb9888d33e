"""Many requests to an API server at once, and how many of each kind it has answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kube_stream import ApiRefused, KubeClient

Json = dict[str, Any]
Call = tuple[str, str, Json | None]
"""Method, path, body."""

_AT_ONCE = 16
_JSON = "application/json"
_CONTENT_TYPES = {"PATCH": "application/merge-patch+json"}


async def ask_all(plane: ControlPlane, calls: Iterable[Call]) -> None:
    """Send requests, sixteen at a time; a PATCH is a merge patch, and a DELETE of what is gone succeeds."""
    at_once = asyncio.Semaphore(_AT_ONCE)
    async with KubeClient(plane.url, plane.ca_file, plane.admin.token) as client:

        async def ask(method: str, path: str, body: Json | None) -> None:
            async with at_once:
                try:
                    await client.request(method, path, body, content_type=_CONTENT_TYPES.get(method, _JSON))
                except ApiRefused as refused:
                    if method != "DELETE" or refused.status != 404:
                        raise

        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(ask(*call))


_COUNTED = re.compile(r"apiserver_request_total\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_OF_ONE_OBJECT = {"GET": "get", "POST": "create", "PATCH": "patch", "APPLY": "patch", "PUT": "update"}
_RESOURCES = {
    "nodeledgers",
    "events",
    "pods",
    "virtualmachineinstances",
    "nodes",
}


def counted_requests(plane: ControlPlane) -> dict[str, float]:
    """Count the successful requests that concern one object since the API server began, by kind."""
    counted: dict[str, float] = {}
    for labels, value in _COUNTED.findall(plane.fetch_text(plane.url, "/metrics")):
        named = dict(_LABEL.findall(labels))
        if named["resource"] in _RESOURCES and named["verb"] in _OF_ONE_OBJECT and named["code"][0] == "2":
            what = "/".join(part for part in (named["resource"], named["subresource"]) if part)
            name = f"{_OF_ONE_OBJECT[named['verb']]} {what}"
            counted[name] = counted.get(name, 0.0) + float(value)
    return counted


def requests_since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return how many came since an earlier count; kinds without any are left out."""
    since = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return {name: count for name, count in since.items() if count > 0}
