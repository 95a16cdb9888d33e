"""Of the nodes that could hold a VM the one is taken where it sits best, then as the operator wants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.node_choice import MAX_SCORE, Candidate, Strategy, best_candidate, quality, scores
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.topology import NumaNode, Package, Topology

MACHINE = Topology(
    packages=(Package(0, 0b0011), Package(1, 0b1100)),
    numa_nodes=tuple(
        NumaNode(node, 1 << node, 0, {}, {other: 10 + 11 * abs(other - node) for other in range(4)})
        for node in range(4)
    ),
    l3_groups=(1, 2, 4, 8),
    cores=(1, 2, 4, 8),
)


def candidate(node: str, cpus: int, free_cpus: int = 4) -> Candidate:
    placement = Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(),
        cpus=cpus,
        owned=cpus,
        emulator_cpus=0,
        io_thread_cpus=(),
        numa_nodes=MACHINE.nodes_of(cpus),
        memory={},
        huge_pages={},
        packages=MACHINE.packages_of(cpus),
        l3_groups=tuple(index for index, l3 in enumerate(MACHINE.l3_groups) if l3 & cpus),
        numa_memory=NumaMemory.PREFERRED,
    )
    return Candidate(node, MACHINE, placement, free_cpus)


candidates = st.lists(
    st.builds(candidate, st.sampled_from("abcdefgh"), st.integers(1, 15), st.integers(1, 4)),
    unique_by=lambda one: one.node,
    min_size=1,
)
strategies = st.sampled_from(Strategy)


def test_how_a_vm_sits_is_told_by_sockets_nodes_distance_and_caches() -> None:
    assert quality(MACHINE, candidate("a", 0b0001).placement) == (1, 1, 0, 1)
    assert quality(MACHINE, candidate("a", 0b0011).placement) == (1, 2, 21, 2)
    assert quality(MACHINE, candidate("a", 0b1001).placement) == (2, 2, 43, 2)


def test_one_socket_goes_before_one_node_more_and_nearness_before_fullness() -> None:
    crossing, apart, near = candidate("a", 0b0110, 4), candidate("b", 0b1011, 4), candidate("c", 0b0011, 1)
    for strategy in Strategy:
        assert best_candidate([crossing, apart, near], strategy) is near
        assert best_candidate([apart, crossing], strategy) is crossing


def test_where_vms_sit_alike_pack_takes_the_fullest_node_and_spread_the_emptiest() -> None:
    full, empty = candidate("b", 1, free_cpus=2), candidate("a", 1, free_cpus=9)
    assert best_candidate([empty, full], Strategy.PACK) is full
    assert best_candidate([full, empty], Strategy.SPREAD) is empty


def test_of_equal_nodes_the_first_by_name_is_taken_and_of_none_none() -> None:
    assert best_candidate([candidate("b", 1), candidate("a", 1)], Strategy.PACK) == candidate("a", 1)
    assert best_candidate([], Strategy.PACK) is None


@given(candidates, strategies, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_nodes(
    found: list[Candidate], strategy: Strategy, chance: object
) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert best_candidate(shuffled, strategy) is best_candidate(found, strategy)
    assert scores(shuffled, strategy) == scores(found, strategy)


@given(candidates, strategies)
def test_scores_go_from_ten_for_the_best_down_to_zero_in_the_order_of_the_choice(
    found: list[Candidate], strategy: Strategy
) -> None:
    given_scores = scores(found, strategy)
    best = best_candidate(found, strategy)
    assert best is not None
    assert given_scores.keys() == {one.node for one in found}
    assert given_scores[best.node] == MAX_SCORE
    assert all(0 <= score <= MAX_SCORE for score in given_scores.values())
    ranked = sorted(found, key=lambda one: one.rank(strategy))
    told = [given_scores[one.node] for one in ranked]
    assert told == sorted(told, reverse=True)
    for one in found:
        for other in found:
            if one.rank(strategy)[:-1] == other.rank(strategy)[:-1]:
                assert given_scores[one.node] == given_scores[other.node]


def test_without_candidates_nobody_gets_a_score() -> None:
    assert scores([], Strategy.PACK) == {}
