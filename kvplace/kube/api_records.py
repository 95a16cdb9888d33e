"""Records of the objects of an API server: lists, watches and writes, as requests and bounded answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Self, TypeVar

import msgspec

from kvplace.kube.api_errors import (
    NOT_JSON,
    Expired,
    NotFound,
    decoded,
    error_of_status,
    read_status,
    unreadable,
)
from kvplace.kube.calls import JSON, MERGE_PATCH, METADATA_LIST, METADATA_ONLY, TABLE, ApiCall
from kvplace.kube.concurrency import Turns
from kvplace.kube.list_watch import Change, Page, follow
from kvplace.kube.objects import ObjectList, RawObject, WatchLine
from kvplace.kube.session import PAGE_LIMIT, Session
from kvplace.kube.watches import EVERYTHING, ApiKind, Apply, Delete, Kind, Selector, WatchEvent

O = TypeVar("O")  # noqa: E741
K = TypeVar("K")
R = TypeVar("R")

_WATCH_S = 290
"""The server ends a watch after so long; the next one goes to a replica that is perhaps less busy."""

_READ_STEPS = 20
"""Steps of reading an object."""

_PAGE = msgspec.json.Decoder(ObjectList)
_LINE = msgspec.json.Decoder(WatchLine)
_VERSION = msgspec.json.Decoder(RawObject)


class ListForm(Enum):
    """The parts of objects that are requested: the Accept headers of a list and of a watch."""

    WHOLE = (JSON, JSON)
    METADATA = (METADATA_LIST, METADATA_ONLY)
    """Nothing but `metadata`: of a Node that is a quarter."""
    TABLE = (TABLE, TABLE)
    """The columns that kubectl prints, and `metadata`: little more, and the server computes them."""


@dataclass(frozen=True)
class RecordReader(Generic[R]):
    """How the objects of a kind become records."""

    record: Callable[[msgspec.Raw], R]
    """Raises an error of NOT_JSON for an object that is not of the form of its kind."""
    form: ListForm = ListForm.WHOLE

    @classmethod
    def of(
        cls, decoder: msgspec.json.Decoder[O], record: Callable[[O], R], form: ListForm = ListForm.WHOLE
    ) -> Self:
        """Make records of what a decoder reads."""
        return cls(lambda raw: record(decoder.decode(raw)), form)


class ApiListWatch(Generic[R]):
    """The selected objects of one kind, as `follow` reads them."""

    def __init__(
        self,
        session: Session,
        kind: ApiKind,
        reader: RecordReader[R],
        selector: Selector,
        *,
        page_size: int,
        selection: Mapping[str, str] | None = None,
    ) -> None:
        """`selection` are the parameters of a request that select objects, in place of the selector's."""
        self._session = session
        self._reader = reader
        self._page_size = page_size
        self._path = kind.path(namespace=selector.namespace)
        self.name = kind.resource
        labels = [*_equal(selector.labels), *map(str, selector.label_terms)]
        self._selection = selection or {
            parameter: ",".join(terms)
            for parameter, terms in (("labelSelector", labels), ("fieldSelector", _equal(selector.fields)))
            if terms
        }

    async def list_page(self, page: str) -> Page[R]:
        query = {"limit": str(self._page_size)}
        if page:
            query["continue"] = page
        body = await self._session.request(
            self._call("list", query), limit=PAGE_LIMIT, timeout_s=self._session.limits.page_s
        )
        answer = decoded(_PAGE, body, self.name)
        records = []
        turns = Turns()
        for item in (answer.rows if self._reader.form is ListForm.TABLE else answer.items) or ():
            await turns.spend(_READ_STEPS)
            records.append(self._record(item))
        return Page(tuple(records), answer.metadata.continue_, answer.metadata.resource_version)

    async def read_all(self) -> tuple[R, ...]:
        """Read the whole list once; one that expires between two pages is begun again, once."""
        try:
            return await self._pages()
        except Expired:
            return await self._pages()

    async def _pages(self) -> tuple[R, ...]:
        found: list[R] = []
        page = ""
        while True:
            answer = await self.list_page(page)
            found += answer.records
            page = answer.next_page
            if not page:
                return tuple(found)

    async def changes(self, resource_version: str) -> AsyncGenerator[Change[R]]:
        query = {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        lines = await self._session.open_stream(self._call("watch", query))
        try:
            yield Change(None, resource_version)
            while (line := await lines.next_line()) is not None:
                yield self._change(line)
        finally:
            await lines.close()

    def _change(self, line: bytes) -> Change[R]:
        event = decoded(_LINE, line, self.name)
        if event.type == "ERROR":
            raise error_of_status(read_status(event.object), verb="watch", resource=self.name)
        version = decoded(_VERSION, event.object, self.name).metadata.resource_version
        if event.type == "BOOKMARK":
            return Change(None, version)
        content = event.object
        if self._reader.form is ListForm.TABLE:
            rows = decoded(_PAGE, content, self.name).rows or ()
            content = rows[0] if rows else content
        record = self._record(content)
        return Change(Delete(record) if event.type == "DELETED" else Apply(record), version)

    def _record(self, content: msgspec.Raw) -> R:
        try:
            return self._reader.record(content)
        except NOT_JSON as error:
            raise unreadable(self.name, error) from error

    def _call(self, verb: str, query: dict[str, str]) -> ApiCall:
        of_list, of_watch = self._reader.form.value
        accept = of_list if verb == "list" else of_watch
        return ApiCall(verb, self.name, self._path, query={**query, **self._selection}, accept=accept)


def _equal(chosen: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in chosen.items()]


class ApiRecords:
    """The calls that all clusters behind an API server have: records of its objects, and writes."""

    def __init__(
        self,
        session: Session,
        readers: Mapping[Kind[Any, Any], RecordReader[Any]],
        *,
        writer: str,
        page_size: int,
    ) -> None:
        """`writer` is its field manager. Lists are read in pages of `page_size` objects."""
        self._session = session
        self._readers = readers
        self._written_by = {"fieldManager": writer}
        self._page_size = page_size

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects of a kind, as `WatchClient` states."""
        session = self._session
        return follow(self.list_watch(kind, selector), pause=session.pause, closed=lambda: session.closed)

    def list_watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> ApiListWatch[R]:
        """Return the selected objects of a kind in the form that `follow` takes."""
        selector.check(kind)
        return self._listed(kind.api, self._readers[kind], selector)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        """Read all selected objects of a kind once, page by page."""
        return await self.list_watch(kind, selector).read_all()

    def _listed(
        self, kind: ApiKind, reader: RecordReader[R], selector: Selector = EVERYTHING
    ) -> ApiListWatch[R]:
        return ApiListWatch(self._session, kind, reader, selector, page_size=self._page_size)

    async def _write(
        self,
        verb: str,
        kind: ApiKind,
        name: str,
        document: object,
        *subresource: str,
        namespace: str = "",
        accept: str = METADATA_ONLY,
        patch_type: str = MERGE_PATCH,
        dry_run: bool = False,
    ) -> bytes:
        """Write an object, or a subresource of it; a dry run stores nothing."""
        call = ApiCall.on(
            verb,
            kind,
            name,
            *subresource,
            namespace=namespace,
            query={**self._written_by, **({"dryRun": "All"} if dry_run else {})},
            document=document,
            accept=accept,
            patch_type=patch_type,
        )
        return await self._session.request(call)

    async def _delete(
        self, kind: ApiKind, name: str, *, namespace: str = "", still: Mapping[str, str] | None = None
    ) -> None:
        """Delete an object if it is still as stated; one that is gone already is not an error."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": still or {}}
        with contextlib.suppress(NotFound):
            await self._session.request(
                ApiCall.on("delete", kind, name, namespace=namespace, document=options, accept=METADATA_ONLY)
            )
