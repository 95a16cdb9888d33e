"""The metrics of the agent."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Summary

from kvplace.service.process import Series

DRIFTS = Counter(
    "kvplace_agent_drifts_total",
    "Threads of a pod found where they had not been left; outcome is repaired, left (its CPUs cannot be had) "
    "or given-up (repairs were undone too often).",
    ["outcome"],
)
PODS = Gauge(
    "kvplace_agent_pods", "Pods with a placement that run here, by whether they are pinned.", ["pinned"]
)
NOT_PINNED = Series(
    Gauge(
        "kvplace_agent_not_pinned",
        "1 for each pod of this node with the condition kvplace.io/Pinned False, with its reason.",
        ["vm_namespace", "vm", "reason"],
    )
)
FAILED_CONDITIONS = Series(
    Gauge(
        "kvplace_agent_failed_condition",
        "1 for each condition of the NodeTopology, other than Ready, that is not True.",
        ["condition", "reason"],
    )
)
ENFORCES = Gauge(
    "kvplace_agent_enforces",
    "1 while this agent keeps other containers off the CPUs that pods own, else 0.",
)
LOOKS = Summary("kvplace_agent_sweep_seconds", "Time to check all threads of all pods once.")
WRITES = Counter("kvplace_agent_writes_total", "Writes about the node to the API server.", ["object"])
LIBVIRT_FAILURES = Counter(
    "kvplace_agent_libvirt_failures_total",
    "Pins that the libvirt of a pod did not take.",
)
CPUSET_REPAIRS = Counter(
    "kvplace_agent_cpuset_repairs_total",
    "Cgroups of containers that differed from the decision and were set again.",
)
NRI_ANSWERS = Summary(
    "kvplace_agent_nri_answer_seconds",
    "Time that a container runtime waited for the answer to a call.",
    ["call"],
)
