"""Reserved CPUs of a node without an agent are its kubelet's, and the command reports a failure to ask."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import NodeName
from kvplace.kube.api_errors import ApiUnavailable, Denied
from kvplace.nodes.kubelet_reserved import reserved_by_kubelet
from tests.nodes.machines import TWO

NODE = NodeName("worker")


class Kubelet:
    """States what it was made with."""

    def __init__(self, says: dict[str, Any] | KvplaceError) -> None:
        self.says = says

    async def read_kubelet_configuration(self, node: str) -> dict[str, Any]:
        assert node == NODE
        if isinstance(self.says, KvplaceError):
            raise self.says
        return self.says


async def test_what_the_kubelet_reserves_is_reserved() -> None:
    reserved, said = await reserved_by_kubelet(Kubelet({"reservedSystemCPUs": "1,9"}), NODE, TWO)
    assert reserved == parse_cpu_list("1,9")
    assert said == "CPU 1,9 is reserved, as the kubelet's reservedSystemCPUs state"


@pytest.mark.parametrize(
    ("says", "because"),
    [
        ({}, "the kubelet of worker reserves no CPU (reservedSystemCPUs)"),
        ({"reservedSystemCPUs": "99"}, "the kubelet of worker reserves no CPU (reservedSystemCPUs)"),
        ({"reservedSystemCPUs": "a"}, "could not be read"),
        (Denied("get", "nodes/proxy", "no"), "were not read (you may not get nodes/proxy)"),
        (ApiUnavailable("the kubelet does not answer"), "could not be read (the kubelet does not answer)"),
    ],
)
async def test_otherwise_the_core_of_the_lowest_cpu_is_and_a_sentence_states_why(
    says: dict[str, Any] | KvplaceError, because: str
) -> None:
    reserved, said = await reserved_by_kubelet(Kubelet(says), NODE, TWO)
    assert reserved == parse_cpu_list("0,8")
    assert because in said
    assert said.endswith("CPU 0,8 is reserved, the core of the lowest CPU; --reserved names others")
