"""Inputs that other allocators are known to answer wrongly, by the name of the one that does.

Each was found by reading or running the other: the kubelet, Koordinator, Crane, Katalyst, KubeVirt, Nova.
They stand here so that the same mistake cannot come in by a new way of searching.
"""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuId, NumaId
from kvplace.core.topology import Topology
from tests.captured import captured_folder
from tests.core.allocator.shapes import machine, slit
from tests.core.allocator.validity import key_of_valid
from tests.core.example_ledgers import with_vm
from tests.core.machines import GIB, make_numa_node, make_package, make_topology

THREE_CELLS = machine(
    packages=["0-23"],
    nodes=["0-7", "8-15", "16-23"],
    l3=["0-7", "8-15", "16-23"],
    cores=[str(cpu) for cpu in range(24)],
    memory=[8, 8, 8],
)
FOUR_CORES = machine(packages=["0-7"], nodes=["0-7"], l3=["0-7"], cores=["0-1", "2-3", "4-5", "6-7"])


def placed(on: Topology, free: Free, request: Request) -> Placement:
    """The placement, checked by every rule there is."""
    answer = place(on, free, request)
    assert isinstance(answer, Placement), answer
    key_of_valid(on, free, request, answer)
    return answer


def only(on: Topology, cpus: str) -> Free:
    """The empty machine with no more than these CPUs free."""
    return free_of(on, Ledger()).within(parse_cpu_list(cpus))


# Nova


def test_nova_false_yes_a_part_of_nine_on_cells_of_eight_is_never_called_a_fit() -> None:
    """Nova's cache, keyed by ids that a fit overwrites, fits cells of 4, 4 and 9; the 9 are not pinned."""
    ledger = Ledger()
    for name in ("a", "b"):
        ledger = with_vm(THREE_CELLS, ledger, name, Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    answer = place(
        THREE_CELLS, free_of(THREE_CELLS, ledger), Request(9, PinningOptions(scope=Scope.ONE_NUMA))
    )
    assert isinstance(answer, Refusal)
    assert answer.never
    assert answer.shortfall["missing"] == 1


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.SPREAD_NUMA])
def test_nova_false_yes_every_vcpu_of_seventeen_over_three_cells_is_pinned(scope: Scope) -> None:
    placement = placed(THREE_CELLS, free_of(THREE_CELLS, Ledger()), Request(17, PinningOptions(scope=scope)))
    assert len(placement.numa_nodes) == 3
    assert len(set(placement.vcpus)) == 17


@pytest.mark.parametrize("free_of_cells", [(8, 4, 6), (4, 6, 8), (6, 8, 4), (2, 8, 8), (8, 2, 7)])
def test_nova_false_no_a_fit_in_any_order_of_the_cells_is_found(free_of_cells: tuple[int, ...]) -> None:
    free = Free(
        cpus=(
            pool := mask_of(
                8 * cell + cpu for cell, count in enumerate(free_of_cells) for cpu in range(count)
            )
        ),
        pool=pool,
        memory=tuple((NumaId(cell), count * GIB) for cell, count in enumerate(free_of_cells)),
    )
    everything = sum(free_of_cells)
    placement = placed(
        THREE_CELLS, free, Request(everything, PinningOptions(scope=Scope.ANY), memory=everything * GIB)
    )
    assert placement.cpus == pool
    assert placement.memory == {cell: count * GIB for cell, count in enumerate(free_of_cells)}
    two = sorted(free_of_cells)[1:]
    for request in (
        Request(sum(two), PinningOptions(scope=Scope.ANY), memory=sum(two) * GIB),
        Request(2 * two[0], PinningOptions(scope=Scope.SPREAD_NUMA), memory=2 * two[0] * GIB),
    ):
        chosen = placed(THREE_CELLS, free, request).numa_nodes
        assert sorted(free_of_cells[cell] for cell in chosen) == two


def test_nova_stale_pins_cells_that_memory_rules_out_leave_no_pins_behind() -> None:
    """Nova pins two cells to the same CPUs, 16-19, when a later check rejects an order of cells."""
    half = parse_cpu_list("0-3,8-11,16-19")
    for poor in range(3):
        free = Free(half, half, memory=tuple((NumaId(cell), GIB * (cell != poor)) for cell in range(3)))
        placement = placed(THREE_CELLS, free, Request(8, PinningOptions(scope=Scope.ANY), memory=2 * GIB))
        rich = tuple(cell for cell in range(3) if cell != poor)
        assert placement.numa_nodes == rich
        assert placement.vcpus == tuple(8 * cell + cpu for cell in rich for cpu in range(4))
        assert placement.memory == dict.fromkeys(rich, GIB)


def test_nova_stale_pins_an_answer_knows_nothing_of_those_before_it() -> None:
    request = Request(8, PinningOptions(scope=Scope.ANY))
    answers = []
    for cpus in ("0-3,8-11", "8-11,16-19", "0-3,16-19", "0-3,8-11"):
        answers.append(placed(THREE_CELLS, only(THREE_CELLS, cpus), request))
        assert format_cpu_list(answers[-1].cpus) == cpus
    assert answers[0] == answers[-1]


def test_nova_permutations_ten_cells_and_one_vcpu_too_many_need_no_search() -> None:
    """Nova tries 10! orders of the cells, for a quarter of a minute."""
    ten = machine(
        packages=["0-79"],
        nodes=[f"{first}-{first + 7}" for first in range(0, 80, 8)],
        l3=["0-79"],
        cores=[str(cpu) for cpu in range(80)],
        memory=[8] * 10,
    )
    for scope, vcpus, memory in ((Scope.ANY, 81, 1), (Scope.SPREAD_NUMA, 80, 81), (Scope.SPREAD_NUMA, 81, 1)):
        answer = place(
            ten, free_of(ten, Ledger()), Request(vcpus, PinningOptions(scope=scope), memory=memory * GIB)
        )
        assert isinstance(answer, Refusal)


def test_nova_five_vcpus_take_two_whole_cores_before_the_orphans() -> None:
    """With CPUs 0 and 2 taken Nova gives out both orphaned siblings first and mixes the guest's threads."""
    placement = placed(FOUR_CORES, only(FOUR_CORES, "1,3-7"), Request(5))
    assert placement.cpus & parse_cpu_list("4-7") == parse_cpu_list("4-7")
    assert placement.vcpus[:4] == (4, 5, 6, 7)


def test_nova_whole_cores_for_an_odd_count_leave_the_odd_thread_to_the_emulator() -> None:
    """Nova allows odd counts with `require` and leaves the sibling to whoever comes next."""
    placement = placed(FOUR_CORES, only(FOUR_CORES, "1,2-7"), Request(5, PinningOptions(smt=Smt.REQUIRE)))
    assert placement.owned == placement.cpus == parse_cpu_list("2-7")
    assert placement.emulator_cpus == placement.cpus & ~mask_of(placement.vcpus)
    assert isinstance(
        place(FOUR_CORES, only(FOUR_CORES, "1,3-7"), Request(5, PinningOptions(smt=Smt.REQUIRE))), Refusal
    )


@pytest.mark.parametrize("order", list(permutations(["8,40", "0,32", "16,48", "1,33"]))[::5])
def test_nova_order_of_cores_does_not_depend_on_how_they_were_listed(order: tuple[str, ...]) -> None:
    """Nova sorts sibling sets by `<`, which is not an order of sets, and takes 16 and 48 first."""
    everything = "0-1,8,16,32-33,40,48"
    on = machine(packages=[everything], nodes=[everything], l3=[everything], cores=order)
    assert placed(on, free_of(on, Ledger()), Request(3)).vcpus == (0, 32, 1)


def test_nova_memory_of_vms_that_own_no_cpus_counts_on_their_node_too() -> None:
    """Nova counts memory by cell for guests with cells alone; the others eat it, and pinned ones die."""
    shares = Request(1, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.SHARE), memory=6 * GIB)
    ledger = with_vm(THREE_CELLS, Ledger(), "shares", shares)
    pinned = Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=3 * GIB)
    assert placed(THREE_CELLS, free_of(THREE_CELLS, ledger), pinned).numa_nodes == (1,)
    only_there = free_of(THREE_CELLS, ledger).within(parse_cpu_list("0-7"))
    assert isinstance(place(THREE_CELLS, only_there, pinned), Refusal)


# The kubelet's static policy


def test_kubelet_mask_a_vm_that_does_not_fit_a_socket_gets_no_cpus_of_another() -> None:
    """Asked to use node 0 the kubelet answers 0-2,4,6-8,10 for eight: two of them are of node 1."""
    even, odd = "0,2,4,6,8,10", "1,3,5,7,9,11"
    two_sockets = machine(
        packages=[even, odd],
        nodes=[even, odd],
        l3=[even, odd],
        cores=[f"{cpu},{cpu + 6}" for cpu in range(6)],
    )
    for scope in (Scope.ONE_SOCKET, Scope.ONE_NUMA, Scope.ONE_L3):
        answer = place(two_sockets, free_of(two_sockets, Ledger()), Request(8, PinningOptions(scope=scope)))
        assert isinstance(answer, Refusal)
        assert (answer.shortfall["best"], answer.shortfall["missing"]) == (6, 2)
        assert placed(
            two_sockets, free_of(two_sockets, Ledger()), Request(6, PinningOptions(scope=scope))
        ).packages == (0,)


def test_kubelet_and_koordinator_know_no_distances_and_take_far_nodes_for_near_ones() -> None:
    """Both count free CPUs and ids: of four equal nodes they take 0 and 1, which are far from each other."""
    four = machine(
        packages=["0-3,8-11", "4-7,12-15"],
        nodes=["0-3", "4-7", "8-11", "12-15"],
        l3=["0-3", "4-7", "8-11", "12-15"],
        cores=[f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)],
        distances=slit([10, 32, 12, 32], [32, 10, 32, 12], [12, 32, 10, 32], [32, 12, 32, 10]),
    )
    for scope in (Scope.ANY, Scope.ONE_SOCKET, Scope.SPREAD_NUMA):
        assert placed(four, free_of(four, Ledger()), Request(8, PinningOptions(scope=scope))).numa_nodes == (
            0,
            2,
        )


def test_kubelet_hybrid_a_cpu_in_use_is_not_given_away_a_second_time() -> None:
    """Averages make every core appear whole: of 9-23 the kubelet gives 8,16, and 8 is another container's."""
    hybrid = machine(
        packages=["0-23"],
        nodes=["0-23"],
        l3=["0-23"],
        cores=[*(f"{cpu},{cpu + 8}" for cpu in range(8)), *(str(cpu) for cpu in range(16, 24))],
    )
    for smt in Smt:
        placement = placed(hybrid, only(hybrid, "9-23"), Request(2, PinningOptions(smt=smt)))
        assert not (placement.cpus | placement.owned) & ~parse_cpu_list("9-23")


def test_kubelet_uneven_sockets_the_free_cpus_of_both_are_counted_truly() -> None:
    """Averages make the larger socket seem whole: of 2-7,9-11 the kubelet gives 0-7, two of them not free."""
    uneven = machine(
        packages=["0-7", "8-11"],
        nodes=["0-7", "8-11"],
        l3=["0-7", "8-11"],
        cores=[str(cpu) for cpu in range(12)],
    )
    placement = placed(uneven, only(uneven, "2-7,9-11"), Request(8, PinningOptions(scope=Scope.ANY)))
    assert placement.cpus.bit_count() == 8
    assert not placement.cpus & ~parse_cpu_list("2-7,9-11")
    assert isinstance(place(uneven, only(uneven, "2-7,9-11"), Request(8)), Refusal)


def test_kubelet_l3_the_half_group_that_just_fits_is_taken_and_the_whole_one_kept() -> None:
    """Node by node, the kubelet breaks the whole group of node 0 for a VM that fits the half on node 1."""
    two_nodes = machine(
        packages=["0-31"],
        nodes=["0-15", "16-31"],
        l3=["0-7", "8-15", "16-23", "24-31"],
        cores=[f"{cpu}-{cpu + 1}" for cpu in range(0, 32, 2)],
        distances=slit([10, 12], [12, 10]),
    )
    placement = placed(two_nodes, only(two_nodes, "0-7,16-19"), Request(4, PinningOptions(scope=Scope.ANY)))
    assert placement.cpus == parse_cpu_list("16-19")


# Koordinator and Crane


@pytest.mark.parametrize("smt", [Smt.REQUIRE, Smt.ISOLATE])
def test_koordinator_sibling_leak_the_siblings_of_whole_cores_go_to_no_other_client(smt: Smt) -> None:
    """Its exclusive policy binds only pods with the same policy: an ordinary pod is given the siblings."""
    ledger = with_vm(FOUR_CORES, Ledger(), "first", Request(3, PinningOptions(smt=smt)))
    whole = 0b1111 if smt is Smt.REQUIRE else 0b111111
    assert ledger.owned == whole
    for policy in (Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE, Policy.NUMA):
        free = free_of(FOUR_CORES, ledger)
        assert not placed(FOUR_CORES, free, Request(2, PinningOptions(policy=policy))).cpus & whole
        left = 8 - whole.bit_count()
        assert isinstance(place(FOUR_CORES, free, Request(left + 1, PinningOptions(policy=policy))), Refusal)


def test_crane_sparse_node_ids_are_ids_and_not_places_in_a_list() -> None:
    """Crane drops sparse ids and reads distances by place: of the nodes 0, 8 and 252, 0 and 252 are near."""
    nodes = {0: "0-3", 8: "4-7", 252: "8-11"}
    far = {(0, 8): 40, (0, 252): 11, (8, 252): 40}
    sparse = make_topology(
        packages=(make_package(3, parse_cpu_list("0-11")),),
        numa_nodes=tuple(
            make_numa_node(
                node,
                parse_cpu_list(cpus),
                memory=8 * GIB,
                distances={
                    node: 10,
                    **{b if a == node else a: d for (a, b), d in far.items() if node in (a, b)},
                },
            )
            for node, cpus in nodes.items()
        ),
        l3_groups=tuple(map(parse_cpu_list, nodes.values())),
        cores=tuple(1 << cpu for cpu in range(12)),
    )
    placement = placed(
        sparse, free_of(sparse, Ledger()), Request(8, PinningOptions(scope=Scope.ANY), memory=8 * GIB)
    )
    assert placement.numa_nodes == (0, 252)
    assert placement.memory == {0: 4 * GIB, 252: 4 * GIB}
    assert placement.packages == (3,)


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.ONE_SOCKET, Scope.ONE_NUMA])
def test_crane_worst_fit_the_node_that_just_fits_is_taken_and_the_empty_one_kept(scope: Scope) -> None:
    """Crane takes the NUMA node with the most free CPUs, and so leaves no whole one for large VMs."""
    placement = placed(
        THREE_CELLS, only(THREE_CELLS, "0-7,12-15,16-22"), Request(4, PinningOptions(scope=scope))
    )
    assert placement.cpus == parse_cpu_list("12-15")


def test_crane_accounts_memory_is_counted_as_memory_and_given_back_to_the_byte() -> None:
    """Crane writes memory from the CPUs' field, crashes over huge pages, and reserves too much elsewhere."""
    paged = machine(
        packages=["0-15"],
        nodes=["0-7", "8-15"],
        l3=["0-15"],
        cores=[str(cpu) for cpu in range(16)],
        memory=[8, 8],
        pages=[3, 5],
    )
    empty = free_of(paged, Ledger())
    request = Request(3, PinningOptions(scope=Scope.ONE_NUMA), memory=2 * GIB + 4097, huge_pages={GIB: 2})
    ledger = with_vm(paged, Ledger(), "vm", request)
    (claim,) = ledger.claims.values()
    (node,) = claim.memory
    taken = free_of(paged, ledger)
    assert dict(taken.memory) == {**dict(empty.memory), node: dict(empty.memory)[node] - 4097}
    assert taken.pages_by_node == {
        **empty.pages_by_node,
        (node, GIB): empty.pages_by_node[node, GIB] - 2,
    }
    assert free_of(paged, ledger.after(LedgerChange(releases=(claim.uid,)))) == empty
    none_of_that_size = Request(1, memory=Bytes(4 << 20), huge_pages={Bytes(2 << 20): 2})
    assert isinstance(place(paged, empty, none_of_that_size), Refusal)


# Katalyst and KubeVirt


def test_katalyst_l3_a_whole_group_on_another_node_is_better_than_two_parts_on_the_node_that_just_fits() -> (
    None
):
    """It aligns to L3 groups inside the NUMA node that its caller chose, where there may be none."""
    two_nodes = machine(
        packages=["0-15"],
        nodes=["0-7", "8-15"],
        l3=["0-3", "4-7", "8-11", "12-15"],
        cores=[str(cpu) for cpu in range(16)],
    )
    for scope in (Scope.ANY, Scope.ONE_NUMA, Scope.ONE_L3):
        placement = placed(
            two_nodes, only(two_nodes, "0-1,4-5,8-14"), Request(4, PinningOptions(scope=scope))
        )
        assert placement.cpus == parse_cpu_list("8-11")


def test_katalyst_greed_exactly_filled_groups_are_found_where_the_fullest_first_needs_more() -> None:
    """Free are 5, 4, 4 and 3 of groups of 6: eight fit two groups whole, and the 5 and 3 as well."""
    groups = machine(
        packages=["0-23"],
        nodes=["0-23"],
        l3=["0-5", "6-11", "12-17", "18-23"],
        cores=[str(cpu) for cpu in range(24)],
    )
    free = only(groups, "0-4,6-9,12-15,18-20")
    for vcpus, fewest in ((5, 1), (8, 2), (9, 2), (12, 3), (13, 3), (16, 4)):
        assert len(placed(groups, free, Request(vcpus)).l3_groups) == fewest
    left = free.cpus & ~placed(groups, free, Request(8)).cpus
    assert sorted((left & group).bit_count() for group in groups.l3_groups) in ([0, 0, 3, 5], [0, 0, 4, 4])


def test_kubevirt_huge_pages_are_split_as_the_nodes_have_them_and_not_in_halves() -> None:
    """KubeVirt gives every guest cell as much and asks no node: half of eight pages finds but three."""
    paged = machine(
        packages=["0-7"],
        nodes=["0-3", "4-7"],
        l3=["0-7"],
        cores=[str(cpu) for cpu in range(8)],
        memory=[8, 8],
        pages=[3, 5],
    )
    request = Request(6, PinningOptions(scope=Scope.SPREAD_NUMA), memory=8 * GIB, huge_pages={GIB: 8})
    placement = placed(paged, free_of(paged, Ledger()), request)
    assert placement.huge_pages == {0: {GIB: 3}, 1: {GIB: 5}}
    nine = Request(6, PinningOptions(scope=Scope.SPREAD_NUMA), memory=9 * GIB, huge_pages={GIB: 9})
    assert isinstance(place(paged, free_of(paged, Ledger()), nine), Refusal)


# What the kubelet's own tests expect


def test_wherever_the_kubelet_places_a_vm_it_is_placed_here_on_no_more_sockets_and_nodes() -> None:
    table = json.loads((captured_folder("tables") / "kubelet_static_policy.json").read_text())
    machines = {name: kubelet_machine(fixture["cpus"]) for name, fixture in table["topologies"].items()}
    compared = 0
    for row in table["allocate"]:
        if not row["expect"] or row["cpu_request"] != row["cpu_limit"]:
            continue
        on, expected = machines[row["topology"]], parse_cpu_list(row["expect"])
        cpus = parse_cpu_list(row["default_cpuset"]) & ~parse_cpu_list(row["reserved_effective"])
        cpus |= parse_cpu_list(row["assigned"].get(row["container"], ""))  # asked again by the same container
        for options, scope in product(row["options_variants"], (Scope.ANY, Scope.ONE_SOCKET, Scope.ONE_NUMA)):
            domains = on.packages if scope is Scope.ONE_SOCKET else on.numa_nodes
            if scope is not Scope.ANY and all(expected & ~domain.cpus for domain in domains):
                continue
            smt = Smt.REQUIRE if options.get("full_pcpus_only") else Smt.PREFER
            request = Request(
                int(row["cpu_request"].removesuffix("000m")), PinningOptions(scope=scope, smt=smt)
            )
            placement = placed(on, Free(cpus, cpus), request)
            assert len(placement.packages) <= len(on.packages_of(expected)), row["description"]
            assert len(placement.numa_nodes) <= len(on.nodes_of(expected)), row["description"]
            compared += 1
    assert compared > 20


def test_where_the_kubelet_lacks_cpus_a_vm_is_refused_here_too() -> None:
    table = json.loads((captured_folder("tables") / "kubelet_static_policy.json").read_text())
    refused = 0
    for row in table["allocate"]:
        if row["expect_error"]:
            on = kubelet_machine(table["topologies"][row["topology"]]["cpus"])
            cpus = parse_cpu_list(row["default_cpuset"]) & ~parse_cpu_list(row["reserved_effective"])
            whole = any(options.get("full_pcpus_only") for options in row["options_variants"])
            vcpus = int(row["cpu_request"].removesuffix("000m"))
            if whole and vcpus == 1:  # an odd count of whole cores is not an error here
                continue
            request = Request(
                vcpus, PinningOptions(scope=Scope.ANY, smt=Smt.REQUIRE if whole else Smt.PREFER)
            )
            assert isinstance(place(on, Free(cpus, cpus), request), Refusal), row["description"]
            refused += 1
    assert refused > 4


def kubelet_machine(rows: list[list[Any]]) -> Topology:
    """A fixture of the peer, rows of CPU, core, socket, NUMA node, cache; without caches, sockets are."""
    sets: list[dict[int, int]] = [{}, {}, {}, {}]
    for cpu, *places in rows:
        for level, place_of in zip(sets, places, strict=True):
            level[place_of] = level.get(place_of, 0) | 1 << cpu
    cores, packages, nodes, caches = sets
    l3_groups = caches if len(caches) >= len(packages) else packages
    return make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in sorted(packages.items())),
        numa_nodes=tuple(make_numa_node(number, cpus, memory=0) for number, cpus in sorted(nodes.items())),
        l3_groups=tuple(cpus for _, cpus in sorted(l3_groups.items())),
        cores=tuple(cpus for _, cpus in sorted(cores.items())),
    )


def test_a_sharing_vm_sits_on_whole_cores_however_many_groups_of_single_threads_come_first() -> None:
    groups = 20
    singles = [f"{first}-{first + 15}" for first in range(0, groups * 16, 16)]
    last = groups * 16
    on = machine(
        packages=[f"0-{last + 7}"],
        nodes=[f"0-{last + 7}"],
        l3=[*singles, f"{last}-{last + 7}"],
        cores=[f"{first}-{first + 1}" for first in range(0, last + 8, 2)],
    )
    # One thread of each core is free, in the last group both; another VM shares the first CPU.
    pool = mask_of((*range(0, last, 2), *range(last, last + 8)))
    free = Free(cpus=pool & ~1, pool=pool, uses=((CpuId(0), 1),))
    assert placed(on, free, Request(8, PinningOptions(policy=Policy.SHARE))).cpus == 0xFF << last
