"""When pods are bound, as one watch of the API server sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPSConnection
from types import TracebackType
from typing import Self

import msgspec

from harness.control_plane.cluster import ControlPlane

_PATIENCE_S = 600.0
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Object(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: _Object


_decode = msgspec.json.Decoder(_Event).decode


class Bindings:
    """Follows the pods of a namespace in a thread of its own and notes when each one is bound.

    A pod enters the watch when it gets a node, and only its metadata is asked for: watching costs next to
    nothing.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        expected: int,
        *,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for `expected` bindings; `on_first` is called at the first one."""
        self.seen: dict[str, float] = {}
        """Time of the monotonic clock by pod."""
        self._plane = plane
        self._path = f"/api/v1/namespaces/{namespace}/pods?watch=1&fieldSelector=spec.nodeName!="
        self._expected = expected
        self._on_first = on_first
        self._complete = threading.Event()
        self._ended = threading.Event()
        self._watching = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bindings", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._watching.wait(_PATIENCE_S):
            raise TimeoutError("the watch of the pods did not begin")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._complete.is_set():
            self._thread.join()

    def wait(self) -> list[float]:
        """Wait until all pods are bound and answer the times, earliest first."""
        if not self._complete.wait(_PATIENCE_S):
            raise TimeoutError(f"{len(self.seen)} of {self._expected} pods were bound in {_PATIENCE_S:.0f} s")
        return sorted(self.seen.values())

    def _follow(self) -> None:
        version = "0"
        while not (self._ended.is_set() or self._complete.is_set()):
            connection = HTTPSConnection(
                self._plane.url.removeprefix("https://"), context=self._plane.tls, timeout=_PATIENCE_S
            )
            # The API server ends a watch with a late reader; it continues where it ended.
            with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
                headers = {"Authorization": f"Bearer {self._plane.admin.token}", "Accept": _METADATA_ONLY}
                connection.request("GET", f"{self._path}&resourceVersion={version}", headers=headers)
                answer = connection.getresponse()
                self._watching.set()
                for line in iter(answer.readline, b""):
                    now = time.monotonic()
                    event = _decode(line)
                    version = event.object.metadata.resource_version or version
                    if event.type in {"ADDED", "MODIFIED"}:
                        self._note(event.object.metadata.name, now)
                    if self._complete.is_set():
                        return

    def _note(self, pod: str, now: float) -> None:
        if not self.seen:
            self._on_first()
        self.seen.setdefault(pod, now)
        if len(self.seen) == self._expected:
            self._complete.set()
