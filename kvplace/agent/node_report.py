"""The agent's report about its node: filled in by its components, published by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvplace.agent.metrics import ENFORCES
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import Condition, PodReport


class NodeReport:
    """The status of the node's NodeTopology as its components fill it in.

    A value that is equal to the one it replaces changes nothing and costs no write. Until all is known, what
    an earlier agent has published stays: a pod that is missing from the status has ended, and `serve` gives
    its CPUs to others.
    """

    def __init__(self) -> None:
        self._pods: dict[PodUid, PodReport] = {}
        self._conditions: dict[str, Condition] = {}
        self._enforcement: Enforcement | None = None
        self._is_complete = False
        self._in_use: MemoryInUse | None = None
        self._devices: DeviceReport | None = None
        self._devices_unknown: str | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def pods(self) -> Mapping[PodUid, PodReport]:
        """The entries of `status.pods`, by UID."""
        return MappingProxyType(self._pods)

    @property
    def conditions(self) -> Mapping[str, Condition]:
        """The conditions by their type."""
        return MappingProxyType(self._conditions)

    @property
    def enforcement(self) -> Enforcement | None:
        """How other containers are kept off owned CPUs; None until the containers of the node are known."""
        return self._enforcement

    @property
    def is_complete(self) -> bool:
        """Whether every pod with a claim that runs here has an entry."""
        return self._is_complete

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change."""
        self._listeners.append(listener)

    def put_pod(self, report: PodReport) -> None:
        """Set the entry of a pod."""
        if self._pods.get(report.uid) != report:
            self._pods[report.uid] = report
            self._notify()

    def drop_pod(self, uid: PodUid) -> None:
        """Remove the entry of a pod that is gone."""
        if self._pods.pop(uid, None) is not None:
            self._notify()

    def complete(self) -> None:
        """Note that every pod has been checked since the containers of the node are known."""
        if not self._is_complete:
            self._is_complete = True
            self._notify()

    def put_condition(self, condition: Condition) -> None:
        """Set the condition of that type."""
        if self._conditions.get(condition.type) != condition:
            self._conditions[condition.type] = condition
            self._notify()

    def drop_condition(self, kind: str) -> None:
        """Remove a condition that has no meaning any more."""
        if self._conditions.pop(kind, None) is not None:
            self._notify()

    @property
    def in_use(self) -> MemoryInUse | None:
        """The memory that something else than VMs with claims uses; None until it has been measured."""
        return self._in_use

    def use_memory(self, in_use: MemoryInUse) -> None:
        """Set the memory that something else than VMs with claims uses."""
        if self._in_use != in_use:
            self._in_use = in_use
            self._notify()

    @property
    def devices(self) -> DeviceReport | None:
        """The devices of the node; None while they are unknown."""
        return self._devices

    @property
    def devices_unknown(self) -> str | None:
        """Why the devices are unknown, empty where they are known; None until they have been read for."""
        return self._devices_unknown

    def use_devices(self, devices: DeviceReport | None, unknown: str = "") -> None:
        """Set the devices of the node, or why they are unknown."""
        if (self._devices, self._devices_unknown) != (devices, unknown):
            self._devices, self._devices_unknown = devices, unknown
            self._notify()

    def enforce(self, how: Enforcement) -> None:
        """State how other containers are kept off owned CPUs from now on; NONE while nothing does."""
        if self._enforcement is not how:
            self._enforcement = how
            ENFORCES.set(how is not Enforcement.NONE)
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
