"""CPUs that the kubelet's own static policy holds are given to nobody, until it gives them back."""

from __future__ import annotations

from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.ledger import Ledger
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.scheduler.node_book import NodeBook
from tests.controller.replicas import EIGHT, asking_pod, replica

HELD = parse_cpu_list("2-3")
LEFT = EIGHT.cpus & ~HELD


def free_on(book: NodeBook) -> tuple[int, int]:
    free = book.free_on("n", Ledger())
    assert free is not None
    return free.cpus, free.pool


async def test_they_are_neither_free_nor_in_the_pool() -> None:
    cluster = MemoryCluster()
    cluster.create_node("n")
    cluster.put_topology("n", EIGHT, kubelet_cpus=HELD)
    async with replica(cluster) as one:
        assert free_on(one.book) == (LEFT, LEFT)
        assert one.book.largest_node == 6
        empty = one.book.state_of("n").empty
        assert empty is not None
        assert empty.cpus == LEFT


async def test_a_cpu_map_and_the_kubelet_narrow_a_node_together() -> None:
    cluster = MemoryCluster()
    cluster.create_node("n", cpu_map='{"socket0": ["1", "2", "5"]}')
    cluster.put_topology("n", EIGHT, kubelet_cpus=HELD)
    async with replica(cluster) as one:
        assert free_on(one.book) == (0b100010, 0b100010)


async def test_a_vm_gets_others_and_fits_again_when_the_kubelet_gives_them_back() -> None:
    cluster = MemoryCluster()
    cluster.create_node("n")
    cluster.put_topology("n", EIGHT, kubelet_cpus=HELD)
    async with replica(cluster) as one:
        small, large = asking_pod(cluster, "small", 3), asking_pod(cluster, "large", 5)
        assert (await one.filter(small)).names == ["n"]
        assert await one.bind(small, "n") == ""
        assert list(cpus_of(one.book.ledger_of("n").owned)) == [0, 1, 4]
        assert (await one.filter(large)).names == []
        cluster.put_topology("n", EIGHT)
        await one.until(lambda: free_on(one.book)[0] == EIGHT.cpus)
        assert (await one.filter(large)).names == ["n"]


async def test_reports_that_change_nothing_make_nobody_look_again() -> None:
    cluster = MemoryCluster()
    cluster.create_node("n")
    cluster.put_topology("n", EIGHT, kubelet_cpus=HELD)
    async with replica(cluster) as one:
        machine = one.book._machine("n")
        seen = one.book.topologies
        for held, looked_at_again in ((HELD, False), (0b1, True)):
            version = seen.records["n"].resource_version
            cluster.put_topology("n", EIGHT, kubelet_cpus=held)
            await one.until(lambda version=version: seen.records["n"].resource_version != version)
            assert (one.book._machine("n") is not machine) == looked_at_again
