"""A cluster in memory as doctor reads it, which may change between two reads."""

from __future__ import annotations

from typing import Any, TypeVar

from kvplace.core.ledger import Ledger
from kvplace.kube.object_client import Document, ObjectClient
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord
from kvplace.kube.watches import EVERYTHING, LEDGERS, NODES, PODS, ApiKind, Kind, Selector
from tests.doctor.examples import WORKER, pod
from tests.kube.example_claims import claim, taking

K = TypeVar("K")
R = TypeVar("R")

CLAIMED = (LedgerRecord(WORKER, Ledger().after(taking(claim("db", 0, 8))), "2"),)
UNCLAIMED = (LedgerRecord(WORKER, Ledger(), "1"),)
RUNS, GONE = (pod("db", pinned=True),), ()
VMI = {"metadata": {"name": "db", "namespace": "default"}, "status": {"activePods": {"db": "worker"}}}


class Changing(ObjectClient):
    """A cluster that has changed at some reads of its lists."""

    def __init__(
        self, ledgers: list[tuple[LedgerRecord, ...]], pods: list[tuple[PodRecord, ...]], *, is_vmi: bool
    ) -> None:
        self.answers: dict[Kind[Any, Any], list[Any]] = {LEDGERS: ledgers, PODS: pods}
        self.is_vmi = is_vmi

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        if kind is NODES:
            return (NodeRecord(WORKER, "uid"),)  # type: ignore[return-value]
        answers = self.answers.get(kind, [()])
        return answers.pop(0) if len(answers) > 1 else answers[0]  # type: ignore[no-any-return]

    async def read_version(self) -> str:
        return "v1.36.3"

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return None

    async def read_metadata(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return None

    async def read_list(self, kind: ApiKind, **_: str) -> tuple[Document, ...]:
        return (VMI,) if self.is_vmi and kind.resource == "virtualmachineinstances" else ()

    async def read_list_as(self, form: type[R], kind: ApiKind, **_: str) -> tuple[R, ...]:
        return ()

    async def create(self, kind: ApiKind, document: Document, **_: Any) -> Document:
        return {"status": {"allowed": True}}
