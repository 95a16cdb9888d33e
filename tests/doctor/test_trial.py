"""The pod that the API server is to refuse, on trial: who has refused it, and why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplace.core.errors import KvplaceError
from kvplace.doctor.installation import ADMITTED
from kvplace.doctor.reading import read_installation
from kvplace.kube.api_errors import Denied, Rejected
from kvplace.kube.object_client import ApiKind, Document
from tests.doctor.changing import GONE, UNCLAIMED, Changing
from tests.doctor.examples import NOW

NO_RIGHT = 'pods is forbidden: User "eve" cannot create resource "pods" in API group "" in the namespace "a"'
RESTRICTED = 'pods "kvplace-doctor-x" is forbidden: violates PodSecurity "restricted:latest"'
OURS = 'admission webhook "pod.kvplace.io" denied the request: annotation kvplace.io/doctor'


class Refusing(Changing):
    """A cluster that answers the trial pod with an error."""

    def __init__(self, error: KvplaceError | None) -> None:
        super().__init__([UNCLAIMED], [GONE], is_vmi=False)
        self.error = error

    async def create(self, kind: ApiKind, document: Document, **options: Any) -> Document:
        if kind.resource == "pods" and self.error is not None:
            raise self.error
        return await super().create(kind, document, **options)


@pytest.mark.parametrize(
    ("error", "answer", "unread"),
    [
        (None, ADMITTED, ""),
        (Rejected(OURS), OURS, ""),
        (Denied("create", "pods", NO_RIGHT), "", "you may not create pods"),
        (
            Denied("create", "pods", RESTRICTED),
            "",
            f"the API server refuses a pod in namespace default: {RESTRICTED}",
        ),
    ],
)
def test_a_missing_right_and_a_refusal_by_others_are_distinguished(
    error: KvplaceError | None, answer: str, unread: str
) -> None:
    cluster = Refusing(error)
    found = asyncio.run(
        read_installation(cluster, cluster, namespace="default", client_version="1", now=lambda: NOW)
    )
    assert (found.admission_answer, found.denied.get("a trial pod", "")) == (answer, unread)
