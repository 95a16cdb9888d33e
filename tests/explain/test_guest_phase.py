"""A VM whose guest does not run yet is called `Starting`, as in a list of VMs."""

from __future__ import annotations

from typing import TypeVar

import pytest

from kvplace.admission.stated_request import stated_request
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.request_json import PodRequest, write_request
from kvplace.explain.reading import explain_target, read_target
from kvplace.kube.object_client import Document, ObjectClient
from kvplace.kube.watches import ApiKind
from tests.admission.reviewed_objects import vmi
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

T = TypeVar("T")


class OneInstance(ObjectClient):
    """A VMI `db`, and nothing else."""

    def __init__(self, phase: str) -> None:
        self._vmi = {**vmi(), "status": {"phase": phase}}

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return self._vmi if kind.resource == "virtualmachineinstances" else None

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        return ()

    async def read_list_as(
        self, form: type[T], kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[T, ...]:
        return ()


@pytest.mark.parametrize(("phase", "state"), [("Scheduled", "Starting"), ("Running", "Running")])
async def test_the_phase_of_the_instance_states_whether_the_guest_runs(phase: str, state: str) -> None:
    cluster = FaultyCluster()
    cluster.create_node("worker", topology=TWO)
    request = write_request(PodRequest(request_with(4)))
    cluster.create_pod("launcher", vmi="db", node="worker", request=request)
    cluster.change_pod("default", "launcher", phase="Running")
    found = await explain_target(
        OneInstance(phase),
        cluster,
        read_target("vmi/db", "default"),
        lambda document, namespace: stated_request(document, namespace=namespace),
        Strategy.PACK,
    )
    assert (found.state, found.seats[0].vm.state.value) == (state, state)
