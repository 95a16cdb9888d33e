"""Refusals of many nodes become few texts, each true of every node that gets it."""

from __future__ import annotations

from kvplace.core.cluster.node_choice import grouped
from kvplace.core.placement import Reason, Refusal
from kvplace.core.scalars import NodeName


def lacking(best: int, where: str, *, never: bool = False) -> Refusal:
    return Refusal(
        Reason.NO_NUMA_NODE_FITS,
        f"no NUMA node with 8 free CPUs, best {best} on {where}",
        {"needed": 8, "best": best, "missing": 8 - best, "where": where},
        never,
    )


def unusable(why: str) -> Refusal:
    return Refusal(Reason.NO_TOPOLOGY, why, {}, never=True)


def test_all_nodes_that_lack_the_same_get_the_text_of_the_one_that_lacks_least() -> None:
    groups = grouped(
        {
            NodeName("w-1"): lacking(4, "numa 0"),
            NodeName("w-17"): lacking(6, "numa 1"),
            NodeName("w-2"): lacking(0, "numa 3"),
        }
    )
    text = "no NUMA node with 8 free CPUs, best 6 on w-17 numa 1"
    assert groups.texts == {"w-1": text, "w-17": text, "w-2": text}
    assert set(groups.curable) == groups.texts.keys()
    assert groups.summary == f"3 nodes: {text}"


def test_of_equal_nodes_the_first_by_name_is_named() -> None:
    groups = grouped({NodeName("b"): lacking(6, "numa 1"), NodeName("a"): lacking(6, "numa 0")})
    assert groups.summary == "2 nodes: no NUMA node with 8 free CPUs, best 6 on a numa 0"


def test_refusals_that_time_may_fix_and_others_are_two_groups_the_larger_first() -> None:
    groups = grouped(
        {
            NodeName("a"): lacking(6, "numa 0"),
            NodeName("b"): lacking(2, "numa 0", never=True),
            NodeName("c"): lacking(4, "numa 0", never=True),
        }
    )
    assert groups.curable == ["a"]
    assert set(groups.texts) == {"a", "b", "c"}
    assert groups.summary == (
        "2 nodes: no NUMA node with 8 free CPUs, best 4 on c numa 0; "
        "1 node: no NUMA node with 8 free CPUs, best 6 on a numa 0"
    )


def test_nodes_that_cannot_be_used_for_different_reasons_keep_their_own() -> None:
    groups = grouped(
        {
            NodeName("a"): unusable("its ledger cannot be read"),
            NodeName("b"): unusable("nothing describes it"),
        }
    )
    assert groups.texts == {"a": "its ledger cannot be read", "b": "nothing describes it"}
    assert groups.summary == "1 node: its ledger cannot be read; 1 node: nothing describes it"


def test_where_the_scope_is_the_machine_the_node_itself_is_named() -> None:
    groups = grouped(
        {
            NodeName("w"): Refusal(
                Reason.NO_NODE_FITS,
                "no machine with 9 free CPUs, best 8 on the machine",
                {"needed": 9, "best": 8, "missing": 1, "where": "the machine"},
                never=False,
            )
        }
    )
    assert groups.summary == "1 node: no machine with 9 free CPUs, best 8 on w"


def test_without_refusals_there_are_no_groups() -> None:
    groups = grouped({})
    assert (groups.texts, groups.curable, groups.summary) == ({}, [], "")
