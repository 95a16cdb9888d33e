"""Lists and watches of one resource of an API server: requests out, pages and lines of JSON in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Self, TypeVar

import msgspec

from kvplace.kube.api_errors import Expired, decoded, error_of_status, read_status
from kvplace.kube.concurrency import Turns
from kvplace.kube.list_watch import Change, Page
from kvplace.kube.objects import ObjectList, RawObject, WatchLine
from kvplace.kube.session import (
    JSON,
    METADATA_LIST,
    METADATA_ONLY,
    PAGE_LIMIT,
    TABLE,
    Call,
    Session,
    path_of,
)
from kvplace.kube.watches import Apply, Delete, Selector

O = TypeVar("O")  # noqa: E741
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
class Resource(Generic[R]):
    """Where a kind is served, and how its objects become records."""

    name: str
    path: str
    record: Callable[[msgspec.Raw], R]
    form: ListForm = ListForm.WHOLE

    @classmethod
    def of(
        cls,
        name: str,
        path: str,
        decoder: msgspec.json.Decoder[O],
        record: Callable[[O], R],
        *,
        form: ListForm = ListForm.WHOLE,
    ) -> Self:
        """Describe a resource with objects that the decoder reads; `record` raises UnusableAnswer then."""
        return cls(name, path, lambda raw: record(decoded(decoder, raw, name)), form)

    def path_in(self, namespace: str) -> str:
        """Return the path of the resource in a namespace; of all of its objects for an empty one."""
        if not namespace:
            return self.path
        version, _, plural = self.path.rpartition("/")
        return f"{version}{path_of('namespaces', namespace, plural)}"


class ApiListWatch(Generic[R]):
    """The selected objects of one resource, as `follow` reads them."""

    def __init__(
        self,
        session: Session,
        resource: Resource[R],
        selector: Selector,
        *,
        page_size: int,
        selection: Mapping[str, str] | None = None,
    ) -> None:
        """`selection` are the parameters of a request that select objects, in place of the selector's."""
        self._session = session
        self._resource = resource
        self._page_size = page_size
        self._path = resource.path_in(selector.namespace)
        labels = [*_equal(selector.labels), *map(str, selector.label_terms)]
        self._selection = selection or {
            parameter: ",".join(terms)
            for parameter, terms in (("labelSelector", labels), ("fieldSelector", _equal(selector.fields)))
            if terms
        }

    @property
    def name(self) -> str:
        return self._resource.name

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
        for item in (answer.rows if self._resource.form is ListForm.TABLE else answer.items) or ():
            await turns.spend(_READ_STEPS)
            records.append(self._resource.record(item))
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
        resource = self._resource
        event = decoded(_LINE, line, resource.name)
        if event.type == "ERROR":
            raise error_of_status(read_status(event.object), verb="watch", resource=resource.name)
        version = decoded(_VERSION, event.object, resource.name).metadata.resource_version
        if event.type == "BOOKMARK":
            return Change(None, version)
        content = event.object
        if resource.form is ListForm.TABLE:
            rows = decoded(_PAGE, content, resource.name).rows or ()
            content = rows[0] if rows else content
        record = resource.record(content)
        return Change(Delete(record) if event.type == "DELETED" else Apply(record), version)

    def _call(self, verb: str, query: dict[str, str]) -> Call:
        of_list, of_watch = self._resource.form.value
        return Call(
            verb,
            self._resource.name,
            self._path,
            query={**query, **self._selection},
            accept=of_list if verb == "list" else of_watch,
        )


def _equal(chosen: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in chosen.items()]
