"""One run of a rollout: makes the VMs that are missing, in waves, and follows all of them to their goal.

Three watches report everything; nothing is polled. A run can be stopped or killed at any moment, and another
run continues from the objects in the cluster.

Only the agent of a node measures whether a VM is pinned. It reports on each VM within seconds. An agent
that was removed leaves its description of the node and its old reports behind, but it reports nothing new and
has no pod on the node. There VMs wait a short time for a late report; then running is their last stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Unavailable
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName
from kvplace.core.vm_stages import VmStage
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_errors import Backoff, unanswered, with_retries
from kvplace.kube.reported_vms import LAUNCHERS, VMI_PHASES, VMS
from kvplace.kube.store import Store
from kvplace.kube.watches import Kind, Selector
from kvplace.rollout.preflight import RolloutCluster
from kvplace.rollout.report import Counts, Report, count, report_of
from kvplace.rollout.templates import Rollout
from kvplace.rollout.tracker import MakingState, TrackedVm, Tracker, due, wave_ends

_GRACE_S = 10.0
REPORT_OVERDUE_S = 30.0
"""An agent that has reported nothing about a running VM for so long is gone."""
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The last report of a node's agent, and whether its pod is ready."""

    pods: AbstractSet[str] | None
    """The UIDs of the pods in its report; None where that may not be read."""
    written: str = ""
    """Changes with everything that it writes."""
    has_pod: bool | None = None
    """Whether a pod of the agent is ready on the node; None where that may not be read."""


AgentReader: TypeAlias = Callable[[NodeName], Awaitable[AgentReport | None]]
"""Reads the report of a node's agent; None where none describes the node."""


def is_gone(before: AgentReport | None, after: AgentReport | None, pods: AbstractSet[str]) -> bool:
    """Return whether two reports, or the same one twice, show that no agent measures these pods."""
    if before is None or after is None:
        return before is after
    if after.pods is None:
        return False
    if after.pods.isdisjoint(pods):
        return True
    # Something is reported about them, perhaps by an agent that has no ready pod any more.
    return after.has_pod is False and before.written == after.written


class Measuring:
    """Asks about every node where VMs run and wait to be pinned."""

    def __init__(self, tracker: Tracker, reported_on: AgentReader, on_change: Callable[[], None]) -> None:
        self._tracker = tracker
        self._reported_on = reported_on
        self._on_change = on_change
        self._asking: dict[NodeName, asyncio.Task[None]] = {}

    def ask_about_new_nodes(self) -> None:
        """Ask about the nodes that are new, without waiting for the answers."""
        for node in waiting_nodes(self._tracker):
            if node not in self._asking:
                self._asking[node] = asyncio.create_task(self._ask(node))

    async def close(self) -> None:
        """Ask no more."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, node: NodeName) -> None:
        """Ask as long as VMs wait on a node: its agent may also go while a rollout runs."""
        while pods := waiting_pods(self._tracker, node):
            before = await report_on(node, self._reported_on)
            await asyncio.sleep(_GRACE_S if before is None else REPORT_OVERDUE_S)
            pods &= waiting_pods(self._tracker, node)
            if not pods:
                continue
            after = await report_on(node, self._reported_on)
            if is_gone(before, after, pods) and pods & waiting_pods(self._tracker, node):
                self._tracker.unmeasured.add(node)
                break
        del self._asking[node]
        self._on_change()


def waiting_nodes(tracker: Tracker) -> set[NodeName]:
    """Return the nodes of running VMs that are to be pinned and have no report yet."""
    return {vm.observed.node for vm in tracker.vms.values() if _waits(vm)}


def waiting_pods(tracker: Tracker, node: NodeName, running_before: float = math.inf) -> set[str]:
    """Return the UIDs of the pods of such VMs on a node, if they ran before a moment."""
    return {
        uid
        for vm in tracker.vms.values()
        if vm.observed.node == node and _waits(vm)
        if vm.vmi is not None and (vm.vmi.running_since or 0.0) < running_before
        for uid, pod in vm.pods.items()
        if pod.node == node
    }


def _waits(vm: TrackedVm) -> bool:
    is_on_its_way = vm.stage is VmStage.RUNNING and vm.goal is VmStage.PINNED
    return is_on_its_way and bool(vm.observed.node) and not vm.observed.has_ended


async def report_on(node: NodeName, reported_on: AgentReader) -> AgentReport | None:
    """Read the report of a node's agent, through failures that pass."""
    try:
        return await with_retries(
            lambda: reported_on(node),
            attempts=_ATTEMPTS,
            retried=lambda error: isinstance(error, Unavailable),
        )
    except KvplaceError:
        return AgentReport(None)


_AT_ONCE = 16
"""Applications that the API server has to answer at the same time."""
_PATIENCE_S = 120.0
"""How long a VM is tried that the API server or KubeVirt cannot make: an upgrade of kvplace or of the API
server takes less, and a webhook that never answers costs no more. So long, too, a watch that worked may be
denied: an API server that starts denies requests until it has read the roles."""
_BACKOFF = Backoff(longest_s=5.0)
_OUTDATED = "the object has been modified"
"""In conflicts of the API server with itself, for example when several of it count VMs in one quota."""
_AFTER_CONFLICT_S = 0.5
"""Conflicts are otherwise tried again at once."""
_GATHERING_S = 0.1
"""Changes that come so shortly after another are checked together: each check is at all VMs."""


class RolloutRun:
    """Makes and follows the VMs of one rollout."""

    def __init__(
        self,
        cluster: RolloutCluster,
        rollout: Rollout,
        reported_on: AgentReader,
        left_out: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`left_out` are VMs that are not made, with the reason; they count as failed."""
        self._cluster = cluster
        self._rollout = rollout
        self._left_out = dict(left_out or {})
        self._clock = clock
        self._changed = asyncio.Event()
        self._stopped = False
        self._halted = asyncio.Event()
        """Nothing more is sent: the run was stopped, is complete, or its time is over."""
        self._tracker = Tracker(rollout, clock=clock, on_change=self._changed.set)
        self._measuring = Measuring(self._tracker, reported_on, self._changed.set)
        self._vms = [vm for name, vm in self._tracker.vms.items() if name not in self._left_out]
        self._ends = wave_ends(rollout.document.waves, len(self._vms))
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._applications: set[asyncio.Task[None]] = set()
        self._denials: dict[Kind[Any, Any], tuple[float, Forbidden]] = {}
        """The watches that are denied, each with the time when it ends the run."""

    @property
    def counts(self) -> Counts:
        """How far all VMs are at this moment."""
        return count(self._vms, len(self._left_out))

    @property
    def waits_for(self) -> str:
        """State the reasons of VMs that wait, in one clause; empty if none waits."""
        waiting = [vm for vm in self._vms if vm.status is MakingState.UNDER_WAY]
        stages = Counter(vm.stage for vm in waiting)
        parts = [
            f"{counted(number, 'VM')} still {'without an answer' if stage is None else stage.value}"
            for stage, number in stages.items()
        ]
        reasons = Counter(why for vm in waiting if (why := vm.waiting)).most_common(1)
        why = f" ({unanswered(reasons[0][0]) or reasons[0][0]})" if reasons else ""
        return f"{', '.join(parts)}{why}" if parts else ""

    def stop(self) -> None:
        """Create nothing more; `run` returns as soon as the API server has answered all calls."""
        self._stopped = True
        self._halted.set()
        self._changed.set()

    async def run(self) -> Report:
        """Make the VMs and follow them until all are ready or have failed, or the time is over.

        Raises Forbidden when a right to watch them is missing, or lost and not back after two minutes.
        """
        began = self._clock()
        deadline = began + self._rollout.document.timeout
        async with contextlib.AsyncExitStack() as watching:
            stores = await watching.enter_async_context(self._watching())
            timed_out = False
            try:
                while True:
                    patience_ends = self._tracker.lose_patience(_PATIENCE_S)
                    statuses = [vm.status for vm in self._vms]
                    if self._is_complete(statuses):
                        break
                    if self._clock() >= deadline:
                        timed_out = True
                        break
                    self._raise_forbidden()
                    if all(store.has_synced for store in stores):
                        self._make_more(statuses)
                        self._measuring.ask_about_new_nodes()
                    await self._wait(
                        min(deadline, patience_ends, *(moment for moment, _ in self._denials.values()))
                    )
            finally:
                self._halted.set()
                await asyncio.gather(*self._applications, return_exceptions=True)
                await self._measuring.close()
            return report_of(
                self._rollout.name,
                self._rollout.namespace,
                self._vms,
                self._left_out,
                timed_out=timed_out,
                interrupted=self._stopped and not self._is_settled(),
                duration=self._clock() - began,
            )

    def _is_settled(self) -> bool:
        return all(vm.status.is_settled for vm in self._vms)

    def _is_complete(self, statuses: Sequence[MakingState]) -> bool:
        if self._stopped or all(status.is_settled for status in statuses):
            return True
        limit = self._rollout.document.max_failures
        return (
            limit is not None
            and statuses.count(MakingState.FAILED) >= limit
            and MakingState.UNDER_WAY not in statuses
        )

    def _make_more(self, statuses: Sequence[MakingState]) -> None:
        document = self._rollout.document
        for number in list(due(statuses, self._ends, document.max_in_flight, document.max_failures)):
            vm = self._vms[number]
            vm.sent_at = self._clock()
            task = asyncio.create_task(self._make(vm))
            self._applications.add(task)
            task.add_done_callback(self._applications.discard)

    async def _make(self, vm: TrackedVm) -> None:
        async with self._at_once:
            if self._halted.is_set():
                vm.sent_at = None
                return
            vm.sent_at = self._clock()
            try:
                await with_retries(
                    lambda: self._cluster.apply_vm(self._rollout.manifest(vm.wanted)),
                    deadline=asyncio.get_running_loop().time() + _PATIENCE_S,
                    backoff=_BACKOFF,
                    retried=partial(self._is_tried_again, vm),
                    sleep=self._pause,
                )
                vm.is_stored = True
            except KvplaceError as error:
                if _may_pass(error) and self._halted.is_set():
                    vm.sent_at = None
                elif isinstance(error, Conflict) and not _may_pass(error):
                    vm.refusal = f"another client has written it: {error}"
                else:
                    vm.refusal = str(error)
            self._changed.set()

    def _is_tried_again(self, vm: TrackedVm, error: KvplaceError) -> bool:
        if not _may_pass(error):
            return False
        vm.obstacle = str(error)
        return not self._halted.is_set()

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, or until there is to be none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._halted.wait(), seconds or _AFTER_CONFLICT_S)

    async def _wait(self, moment: float) -> None:
        """Wait until something has changed, or the moment has come."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(_GATHERING_S, moment - self._clock()))
            await asyncio.sleep(_GATHERING_S)
        self._changed.clear()

    @contextlib.asynccontextmanager
    async def _watching(self) -> Any:
        selector = Selector({ROLLOUT_LABEL: self._rollout.name}, namespace=self._rollout.namespace)
        vms, vmis, pods = Store(VMS, selector), Store(VMI_PHASES, selector), Store(LAUNCHERS, selector)
        vms.subscribe(self._tracker.vm_changed)
        vmis.subscribe(self._tracker.vmi_changed)
        pods.subscribe(self._tracker.pod_changed)
        stores: tuple[Store[Any, Any], ...] = (vms, vmis, pods)
        tasks = [asyncio.create_task(self._follow(store)) for store in stores]
        try:
            yield stores
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, store: Store[Any, Any]) -> None:
        """Follow one kind; a watch that begins or ceases to work also wakes the run."""
        has_watched = False
        async for event in self._cluster.watch(store.kind, store.selector):
            had_synced = store.has_synced
            store.apply(event)
            if isinstance(store.failure, Forbidden):
                patience = _PATIENCE_S if has_watched else 0.0
                self._denials.setdefault(store.kind, (self._clock() + patience, store.failure))
            else:
                self._denials.pop(store.kind, None)
                has_watched = has_watched or (had_synced and store.failure is None)
            if store.failure is not None or store.has_synced != had_synced:
                self._changed.set()

    def _raise_forbidden(self) -> None:
        for moment, failure in self._denials.values():
            if self._clock() >= moment:
                raise failure


def _may_pass(error: KvplaceError) -> bool:
    """Return whether the same application may be accepted a moment later."""
    return isinstance(error, Unavailable) or (isinstance(error, Conflict) and _OUTDATED in str(error))
