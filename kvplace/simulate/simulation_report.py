"""The outcomes of simulations as JSON for programs, and as means for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from kvplace.core.node_topology import API_VERSION
from kvplace.core.percentiles import Percentiles
from kvplace.core.refusal import Reason
from kvplace.simulate.cluster_state import ClusterState
from kvplace.simulate.scenario import Scenario
from kvplace.simulate.simulation import Outcome, Splits

KIND = "SimulationReport"


def report_document(
    scenario: Scenario, outcomes: Sequence[Outcome], *, interrupted: bool = False
) -> dict[str, Any]:
    """Write the outcomes as JSON; everything but the seconds is the same for equal scenarios."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "nodes": len(scenario.nodes),
        "memoryPerCpu": round(scenario.memory_per_cpu),
        **({"interrupted": "not all simulations were run to their end"} if interrupted else {}),
        "runs": [_run_document(outcome) for outcome in outcomes],
    }


def _run_document(outcome: Outcome) -> dict[str, Any]:
    taken = Percentiles.of(outcome.seconds)
    document: dict[str, Any] = {"strategy": outcome.strategy.value}
    if outcome.seed is not None:
        document["seed"] = outcome.seed
    if not outcome.complete:
        document["complete"] = False
    first = outcome.first_refusal
    return document | {
        "arrived": outcome.arrived,
        "placed": outcome.placed,
        "refused": outcome.refused,
        "refusedCpus": outcome.refused_cpus,
        "refusedWhileFree": {
            "node": outcome.refused_while_node_free,
            "cluster": outcome.refused_while_cluster_free,
        },
        "reasons": {reason.value: count for reason, count in _ordered(outcome.reasons)},
        "numaSplits": _splits_document(outcome.numa),
        "l3Splits": _splits_document(outcome.l3),
        "moves": {"vms": outcome.made_room, "moves": outcome.moves, "bytes": outcome.bytes_moved},
        "firstRefusal": None
        if first is None
        else {"placedBefore": outcome.placed_before_refusal} | _state_document(first),
        "end": _state_document(outcome.end),
        "secondsPerDecision": {"median": taken.p50, "p99": taken.p99},
    }


def _splits_document(splits: Splits) -> dict[str, int]:
    return {"forced": splits.forced, "avoidable": splits.avoidable}


def _state_document(state: ClusterState) -> dict[str, float]:
    return {
        "cpusUsed": round(state.cpus_used, 6),
        "memoryUsed": round(state.memory_used, 6),
        "cpusStranded": round(state.cpus_stranded, 6),
        "memoryStranded": round(state.memory_stranded, 6),
    }


def _ordered(reasons: Counter[Reason]) -> list[tuple[Reason, int]]:
    return sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0].value))


def summary(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Give the means over the seeds of one strategy, as pairs of a title and a value."""
    refusals = [outcome.first_refusal for outcome in outcomes if outcome.first_refusal is not None]
    ends = [outcome.end for outcome in outcomes]
    reasons = sum((outcome.reasons for outcome in outcomes), Counter[Reason]())
    taken = Percentiles.of([second for outcome in outcomes for second in outcome.seconds])

    def mean(number: Callable[[Outcome], int]) -> str:
        return f"{fmean(map(number, outcomes)):.1f}".removesuffix(".0")

    return [
        ("VMs placed / refused", f"{mean(lambda o: o.placed)} / {mean(lambda o: o.refused)}"),
        ("vCPUs of refused VMs", mean(lambda o: o.refused_cpus)),
        ("most frequent reason", _ordered(reasons)[0][0].value if reasons else "-"),
        ("refused while a node had CPUs and memory free", mean(lambda o: o.refused_while_node_free)),
        ("refused while the cluster had CPUs free", mean(lambda o: o.refused_while_cluster_free)),
        (
            "split over NUMA nodes, forced / avoidable",
            f"{mean(lambda o: o.numa.forced)} / {mean(lambda o: o.numa.avoidable)}",
        ),
        (
            "split over L3 groups, forced / avoidable",
            f"{mean(lambda o: o.l3.forced)} / {mean(lambda o: o.l3.avoidable)}",
        ),
        ("moves / VMs placed by them", f"{mean(lambda o: o.moves)} / {mean(lambda o: o.made_room)}"),
        ("used at the first refusal, CPUs / memory", _used(refusals)),
        ("stranded at the first refusal, CPUs / memory", _stranded(refusals)),
        ("used at the end, CPUs / memory", _used(ends)),
        ("stranded at the end, CPUs / memory", _stranded(ends)),
        ("decision, median / p99", f"{taken.p50 * 1e3:.2f} / {taken.p99 * 1e3:.2f} ms"),
    ]


def _used(states: Sequence[ClusterState]) -> str:
    return _shares([state.cpus_used for state in states], [state.memory_used for state in states])


def _stranded(states: Sequence[ClusterState]) -> str:
    return _shares([state.cpus_stranded for state in states], [state.memory_stranded for state in states])


def _shares(cpus: Sequence[float], memory: Sequence[float]) -> str:
    return f"{fmean(cpus):.1%} / {fmean(memory):.1%}" if cpus else "-"
