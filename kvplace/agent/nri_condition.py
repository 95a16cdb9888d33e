"""The agent's report about cpusets on a node with an NRI runtime; pure."""

from __future__ import annotations

from collections.abc import Collection

from kvplace.agent.conditions import TopologyCondition, TopologyReason
from kvplace.agent.nri_container import KnownContainer
from kvplace.agent.repair_history import PERIOD_S
from kvplace.core.quantity import counted
from kvplace.kube.conditions import Condition


def enforced_condition(
    runtime: str, containers: Collection[KnownContainer], *, why_away: str, obstacle: str
) -> Condition:
    """Return whether every container has its cpuset.

    `why_away` is why there is no runtime now, `obstacle` why the writes of others are not noticed.
    """
    if why_away:
        return Condition(
            TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.RUNTIME_UNAVAILABLE, why_away
        )
    undone = [known.container for known in containers if known.history.given_up]
    if undone:
        names = ", ".join(sorted(f"{found.namespace}/{found.pod}/{found.name}" for found in undone))
        why = f"Another program keeps setting the cpuset of {names}; repaired once in {PERIOD_S:g} s."
        return Condition(TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.REPAIRS_UNDONE, why)
    problems = [text for known in containers if (text := known.problem or known.limit)]
    if problems:
        why = f"{counted(len(problems), 'container')}: {problems[0]}."
        return Condition(TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.CGROUPS_NOT_SET, why)
    if obstacle:
        why = f"{obstacle}; then restart the agent. Until then it does not notice what others write."
        return Condition(TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.CHANGES_NOT_REPORTED, why)
    how = f"{runtime} asks for the CPUs of every container through NRI."
    return Condition(TopologyCondition.CPUSETS_ENFORCED, True, TopologyReason.CONNECTED, how)
