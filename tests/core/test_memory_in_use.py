"""The use of a node's memory by others: rounded, published, read, and taken from the memory for VMs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.free_resources import NOTHING_IN_USE, MemoryInUse, Used, free_of, in_use, read_memory_in_use
from kvplace.core.ledger import Ledger
from kvplace.core.scalars import Bytes, NumaId
from tests.core.machines import GIB, make_numa_node, make_package, make_topology

N0, N1 = NumaId(0), NumaId(1)
TWO_MIB = Bytes(2 << 20)
TOPOLOGY = make_topology(
    [make_package(0, 0b1111)],
    [make_numa_node(0, 0b11, 64 * GIB, {TWO_MIB: 1024}), make_numa_node(1, 0b1100, 64 * GIB)],
    [0b1111],
    [0b1, 0b10, 0b100, 0b1000],
)


def used(taken: int, pages: int = 0, memory: int = 64 * GIB) -> Used:
    return Used(Bytes(memory), Bytes(taken), {TWO_MIB: (1024, pages)} if pages else {})


def test_vms_get_what_others_leave() -> None:
    others = MemoryInUse({N0: Bytes(10 * GIB)}, {N0: {TWO_MIB: 24}})
    before, after = (free_of(TOPOLOGY, Ledger(), holds) for holds in ((), (others.claim(),)))
    assert dict(before.memory)[N0] - dict(after.memory)[N0] == 10 * GIB
    assert dict(after.memory)[N1] == 64 * GIB
    assert dict(after.pages_by_node) == {(N0, TWO_MIB): 1000}
    assert (after.cpus, after.pool, after.uses) == (before.cpus, before.pool, before.uses)


def test_one_part_at_least_is_kept_for_the_host_and_huge_pages_that_nothing_uses_are_not() -> None:
    assert in_use({N0: used(0), N1: used(1)}, NOTHING_IN_USE) == MemoryInUse(
        {N0: Bytes(2 * GIB), N1: Bytes(2 * GIB)}
    )


def test_what_is_in_use_is_rounded_up() -> None:
    found = in_use({N0: used(5 * GIB, pages=17)}, NOTHING_IN_USE)
    assert found == MemoryInUse({N0: Bytes(6 * GIB)}, {N0: {TWO_MIB: 32}})


def test_small_changes_are_not_published_and_large_ones_are() -> None:
    before = MemoryInUse({N0: Bytes(6 * GIB)}, {N0: {TWO_MIB: 32}})
    for gibibytes, pages in ((6, 32), (5, 17), (3, 2)):
        assert in_use({N0: used(gibibytes * GIB, pages)}, before) == before
    assert in_use({N0: used(7 * GIB, 33)}, before) == MemoryInUse({N0: Bytes(8 * GIB)}, {N0: {TWO_MIB: 48}})
    assert in_use({N0: used(GIB, 0)}, before) == MemoryInUse({N0: Bytes(2 * GIB)})


@given(
    st.integers(1, 1 << 42),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.integers(1, 4096),
)
def test_what_is_published_covers_what_is_used_and_fits_the_node(
    memory: int, shares: list[float], total: int
) -> None:
    published = NOTHING_IN_USE
    for share in shares:
        taken, pages = int(memory * share), int(total * share)
        measured = {N0: Used(Bytes(memory), Bytes(taken), {TWO_MIB: (total, pages)})}
        published = in_use(measured, published)
        assert taken <= published.memory[N0] <= memory
        assert pages <= published.huge_pages.get(N0, {}).get(TWO_MIB, 0) <= total
        assert in_use(measured, published) == published


def test_what_is_written_is_read_again() -> None:
    found = MemoryInUse({N0: Bytes(3 * GIB), N1: Bytes(1)}, {N0: {TWO_MIB: 3}, N1: {}})
    assert found.document()["0"] == {"memory": "3Gi", "hugePages": {"2Mi": 3}}
    assert read_memory_in_use(found.document(), "status.inUse") == found
    assert read_memory_in_use(None, "status.inUse") == NOTHING_IN_USE


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], r"status.inUse is \[\]; it must be an object by NUMA node"),
        ({"x": {}}, "status.inUse has the key 'x'; it must be the id of a NUMA node"),
        ({"0": 5}, "status.inUse.0 is 5; it must be an object"),
        ({"0": {"memory": "much"}}, "status.inUse.0.memory: "),
        ({"0": {"memory": "2Ei"}}, "status.inUse.0.memory is '2Ei', more than 1Ei"),
        ({"0": {"hugePages": {"2Mi": -1}}}, "status.inUse.0.hugePages"),
    ],
)
def test_another_form_is_one_sentence_that_names_its_place(document: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        read_memory_in_use(document, "status.inUse")
