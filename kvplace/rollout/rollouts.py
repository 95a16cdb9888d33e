"""The rollouts of one namespace: opened, prepared, created, resumed, checked and deleted.

Scripts open a cluster with `open_rollouts`; the command line opens it by its own flags.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeAlias

from kvplace.core.errors import Absent, BadBody, Conflict, Forbidden, Refused, Unavailable
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName
from kvplace.core.strict_json import did_you_mean, json_object, shown
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.documents.rollout import name_problem
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import with_retries
from kvplace.kube.api_rollouts import ApiRollouts
from kvplace.kube.concurrency import together
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.reported_vms import LAUNCHERS, VMI_PHASES, VMS
from kvplace.kube.session import Session, open_session
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS, NAME_FIELD, NODE_FIELD, TOPOLOGIES, Selector
from kvplace.nodes.planning_cluster import PlanningCluster, read_planning_cluster
from kvplace.rollout.forecast import Forecast, forecast, unplanned
from kvplace.rollout.preflight import RolloutCluster, check, find_present
from kvplace.rollout.report import Report, report_of
from kvplace.rollout.run import (
    REPORT_OVERDUE_S,
    AgentReader,
    AgentReport,
    RolloutRun,
    is_gone,
    report_on,
    waiting_nodes,
    waiting_pods,
)
from kvplace.rollout.templates import Rollout, WantedVm, stored_rollout

_AT_ONCE = 16
_ATTEMPTS = 6


NodeReader: TypeAlias = Callable[[], Awaitable[PlanningCluster]]
"""Reads the nodes with their running and waiting VMs, for the forecast."""


@dataclass(frozen=True)
class Prepared:
    """A rollout that has been checked against the cluster, and its forecast."""

    rollout: Rollout
    missing: tuple[WantedVm, ...]
    """The VMs that are still to be made."""
    forecast: Forecast
    is_new: bool
    """Whether the cluster does not know the rollout yet."""

    @property
    def fits_nowhere(self) -> bool:
        """Whether it is new, and none of its VMs exists or fits."""
        return self.is_new and len(self.forecast.left_out) == len(self.rollout.vms)


class Rollouts:
    """Operations on the rollouts of one namespace."""

    def __init__(
        self,
        cluster: RolloutCluster,
        namespace: str,
        read_nodes: NodeReader,
        reported_on: AgentReader,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`now` is the time of the cluster; the start times of VMs are in it."""
        self.namespace = namespace
        self._cluster = cluster
        self._read_nodes = read_nodes
        self._reported_on = reported_on
        self._now = now

    async def prepare(self, rollout: Rollout, *, plan: bool = True) -> Prepared:
        """Check everything that can be known before a VM is made, and plan the missing VMs.

        Planning needs the right to read all nodes; without `plan` there is no forecast. Raises Refused or
        Misconfigured; nothing has been written then.
        """
        known = (await self._cluster.read_documents(rollout.namespace, rollout.name)).get(rollout.name)
        if known is not None and (different := _differences(known, rollout.text)):
            what = (
                "of other VMs" if "vms" in different else f"of these VMs with another {', '.join(different)}"
            )
            one = f"{rollout.name} -n {rollout.namespace}"
            raise Refused(
                f"there is a rollout {shown(rollout.name)} {what} in namespace {rollout.namespace}: "
                f"`kvplace rollout resume {one}` continues it as it was created, "
                f"`kvplace rollout delete {one}` removes it; or choose another name"
            )
        tracker = await find_present(self._cluster, rollout)
        missing = tuple(vm.wanted for vm in tracker.vms.values() if vm.stage is None)
        unchecked = await check(self._cluster, rollout, missing) if missing else ()
        asks = any(vm.template.request is not None for vm in missing)
        if plan and asks:
            foretold = forecast(await self._read_nodes(), missing)
        else:
            foretold = unplanned(missing, by_choice=not plan)
        foretold = replace(foretold, notes=(*unchecked, *foretold.notes))
        return Prepared(rollout, missing, foretold, known is None)

    async def begin(self, prepared: Prepared, *, everything: bool = False) -> RolloutRun:
        """Store the document of a new rollout and return its run, which makes the VMs.

        VMs that will not fit are left out, unless `everything` is to be made and may wait for room.
        """
        rollout = prepared.rollout
        if prepared.is_new:
            try:
                await self._cluster.store_document(rollout.namespace, rollout.name, rollout.text)
            except Conflict:
                raise Refused(
                    f"another client has just begun a rollout {shown(rollout.name)} in namespace "
                    f"{rollout.namespace}; choose another name"
                ) from None
        left_out = {} if everything else prepared.forecast.left_out
        return RolloutRun(self._cluster, rollout, self._reported_on, left_out)

    async def create(self, prepared: Prepared, *, everything: bool = False) -> Report:
        """Make the VMs and wait for them, as `RolloutRun.run` does."""
        return await (await self.begin(prepared, everything=everything)).run()

    async def stored(self, name: str) -> Rollout:
        """Read a rollout back from the cluster; raises Absent when there is none of that name."""
        found = await self._cluster.read_documents(self.namespace, name)
        if name not in found:
            near = did_you_mean(name, await self.names())
            fix = near or f"; `kvplace rollout list -n {self.namespace}` names them"
            raise Absent(f"namespace {self.namespace} has no rollout {shown(name)}{fix}")
        return stored_rollout(found[name], self.namespace, name)

    async def names(self) -> tuple[str, ...]:
        """Return the names of all rollouts of the namespace."""
        return tuple(sorted(await self._cluster.read_documents(self.namespace)))

    async def status(self, name: str) -> Report:
        """State how far a rollout is."""
        rollout = await self.stored(name)
        tracker = await find_present(self._cluster, rollout)
        for node in waiting_nodes(tracker):
            pods = waiting_pods(tracker, node, running_before=self._now().timestamp() - REPORT_OVERDUE_S)
            report = await report_on(node, self._reported_on)
            if report is None or (pods and is_gone(report, report, pods)):
                tracker.unmeasured.add(node)
        return report_of(name, rollout.namespace, tracker.vms.values(), {})

    def left_out(self, prepared: Prepared) -> Report:
        """Report a rollout that does not fit at all, and is not made."""
        rollout = prepared.rollout
        return report_of(rollout.name, rollout.namespace, (), prepared.forecast.left_out)

    async def count_vms(self, name: str) -> int:
        """Count the VMs that a deletion would take."""
        return len(await self._doomed(name))

    async def delete(
        self,
        name: str,
        *,
        timeout_s: float = 600.0,
        on_change: Callable[[int, int], None] = lambda left, of: None,
    ) -> int:
        """Delete a rollout's VMs, wait until they are gone, and forget it; returns how many there were.

        `on_change` is called with how many VMs are left, 0 while only their pods are, and how many there
        were. Raises Absent when there is nothing of that name, and Unavailable when VMs are left after the
        time.
        """
        doomed = await self._doomed(name)
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def delete(kind: str, vm: str, uid: str) -> None:
            async with at_once:
                await with_retries(
                    lambda: self._cluster.delete_vm(kind, self.namespace, vm, uid),
                    attempts=_ATTEMPTS,
                    retried=lambda error: isinstance(error, Unavailable),
                )

        answers = await asyncio.gather(*(delete(*one) for one in doomed), return_exceptions=True)
        for answer in answers:
            # A conflict is another VM that a user has made under the name meanwhile.
            if isinstance(answer, BaseException) and not isinstance(answer, Conflict):
                raise answer
        await self._wait_until_gone(name, timeout_s, lambda left: on_change(left, len(doomed)))
        await self._cluster.delete_document(self.namespace, name)
        return len(doomed)

    async def _doomed(self, name: str) -> list[tuple[str, str, str]]:
        """Read kind, name and UID of the VMs of a rollout; raises Absent when there is nothing of it.

        Raises Forbidden also where their pods may not be listed: a deletion waits until these are gone.
        """
        doomed = [] if name_problem(name) else await self._carrying(name)
        if not doomed and name not in await self._cluster.read_documents(self.namespace, name):
            near = did_you_mean(name, await self.names())
            raise Absent(f"namespace {self.namespace} has no rollout {shown(name)} and no VMs of one{near}")
        return doomed

    async def _carrying(self, name: str) -> list[tuple[str, str, str]]:
        ours = self._selector(name)
        await self._cluster.read_all(LAUNCHERS, ours)
        vms = {vm.name: vm for vm in await self._cluster.read_all(VMS, ours)}
        vmis = await self._cluster.read_all(VMI_PHASES, ours)
        found = [("VirtualMachine", vm.name, vm.uid) for vm in vms.values()]
        return found + [("VirtualMachineInstance", vmi.name, vmi.uid) for vmi in vmis if vmi.name not in vms]

    def _selector(self, name: str) -> Selector:
        return Selector({ROLLOUT_LABEL: name}, namespace=self.namespace)

    async def _wait_until_gone(self, name: str, timeout_s: float, on_change: Callable[[int], None]) -> None:
        changed, ours = asyncio.Event(), self._selector(name)
        vms, vmis, pods = Store(VMS, ours), Store(VMI_PHASES, ours), Store(LAUNCHERS, ours)

        async def follow() -> None:
            async with asyncio.TaskGroup() as group:
                for store in (vms, vmis, pods):
                    group.create_task(store.run(self._cluster))

        def is_left() -> bool:
            return bool(vms.records or vmis.records or pods.records)

        for store in (vms, vmis, pods):
            store.subscribe(lambda _before, _after: changed.set())
        following = asyncio.create_task(follow())
        try:
            async with asyncio.timeout(timeout_s):
                for store in (vms, vmis, pods):
                    await store.wait_until_synced()
                while is_left():
                    on_change(len({**vms.records, **vmis.records}))
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            after = f"after {timeout_s:.0f} s"
            for store in (vms, vmis, pods):
                if store.failure is not None:
                    raise Unavailable(
                        f"{after} the rest of rollout {shown(name)} is unknown: {store.failure}"
                    ) from None
            still = {**vms.records, **vmis.records}
            what = counted(len(still), "VM") if still else f"{counted(len(pods.records), 'pod')} of its VMs"
            raise Unavailable(
                f"{after} rollout {shown(name)} still has {what}; run delete again to wait longer"
            ) from None
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_rollouts(
    *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
) -> AsyncIterator[Rollouts]:
    """Open the cluster of a kubeconfig, or the cluster of this pod, while the block runs.

    Without `namespace` it is the context's.
    """
    async with await open_session(CredentialOptions(kubeconfig, context)) as session:
        yield rollouts_on(session, namespace or session.namespace)


def rollouts_on(session: Session, namespace: str) -> Rollouts:
    """Return the rollouts of a namespace; the session stays its owner's."""
    api = ApiCluster(session)

    async def read_nodes() -> PlanningCluster:
        return await read_planning_cluster(api, ObjectClient(session))

    async def reported_on(node: NodeName) -> AgentReport | None:
        found, has_pod = await together(
            api.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: node})), has_agent_pod(api, node)
        )
        spoken = [one for one in found if one.belongs_to_agent]
        return AgentReport(frozenset(spoken[0].pods), spoken[0].resource_version, has_pod) if spoken else None

    return Rollouts(
        ApiRollouts(session),
        namespace,
        read_nodes,
        reported_on,
        now=lambda: session.server_time,
    )


async def has_agent_pod(api: ApiCluster, node: NodeName) -> bool | None:
    """Return whether a pod of the agent is ready on a node; None without the right to see it."""
    try:
        pods = await api.read_all(AGENT_PODS, replace(AGENTS, fields={NODE_FIELD: node}))
    except Forbidden:
        return None
    return any(pod.is_ready for pod in pods)


def _differences(stored: str, text: str) -> list[str]:
    """Name the keys that differ in two documents; `vms` where one of them cannot be read."""
    try:
        one, other = json_object(stored, what="stored"), json_object(text, what="given")
    except BadBody:
        return ["vms"]
    return sorted(key for key in {**one, **other} if one.get(key) != other.get(key))
