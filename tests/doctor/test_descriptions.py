"""The reports about nodes without a good description: each fault once, with its correction."""

from __future__ import annotations

import pytest

from kvplace.core.ledger import Ledger
from kvplace.doctor.claim_checks import check_ledgers
from kvplace.doctor.installation import Installation
from kvplace.doctor.node_checks import check_descriptions
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_parts import Metadata
from kvplace.kube.object_records import LedgerRecord, NodeRecord, TopologyRecord
from kvplace.nodes.cluster_view import ClusterView, cluster_view
from tests.doctor.examples import NOW, WORKER
from tests.nodes.machines import TWO


def seen(view: ClusterView) -> Installation:
    return Installation(NOW, "0.1.0", {}, (SchedulableNode(metadata=Metadata("worker")),), view)


@pytest.mark.parametrize(
    ("cpu_map", "topology", "look_at"),
    [
        ('{"socket0": "0"}', None, "annotation cpu-map: `kubectl get node worker -o yaml`"),
        ("{}", TopologyRecord(WORKER, topology=TWO), "annotation cpu-map: `kubectl get node worker -o yaml`"),
        ("", TopologyRecord(WORKER, topology=None, problem="no cores"), "get nodetopology worker -o yaml"),
    ],
)
def test_of_a_node_that_is_badly_described_the_fix_names_what_describes_it(
    cpu_map: str, topology: TopologyRecord | None, look_at: str
) -> None:
    described = [] if topology is None else [topology]
    nodes = cluster_view([NodeRecord(WORKER, "uid", cpu_map=cpu_map)], described, [], [])
    (found,) = check_descriptions(seen(nodes))
    assert look_at in found.fix


def test_a_ledger_that_cannot_be_read_is_named_once() -> None:
    broken = LedgerRecord(WORKER, Ledger(), "1", problem="owners is a list")
    nodes = cluster_view([NodeRecord(WORKER, "uid")], [TopologyRecord(WORKER, topology=TWO)], [broken], [])
    assert list(check_descriptions(seen(nodes))) == []
    (found,) = check_ledgers(seen(nodes))
    assert (found.about, found.problem) == ("NodeLedger worker", "it cannot be read: owners is a list")
