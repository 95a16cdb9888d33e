"""Callers of admission by their address: pods are refused, because API servers are not in the pod network.

Few API servers show a client certificate, and no NetworkPolicy can name them in every cluster: their packets
arrive from a node, from a tunnel of the network, or from a machine elsewhere. But the API server knows the
addresses of all pods. So a caller with the address of a running pod is refused, except in the namespaces of
programs through which API servers call (konnectivity-agent in kube-system). An address that a pod shares with
a node is the node's. Every doubt lets the caller in: the bounds of `http` hold for it.

An answer counts for some time, and there is one question at a time, so that callers cannot make the API
server read its pods more often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from ipaddress import ip_address
from typing import Protocol

from kvplace.core.errors import KvplaceError

_log = logging.getLogger(__name__)

_KEPT_S = 30.0
"""How long an answer counts; the kubelet reports the address of a pod after its containers have started."""
_PATIENCE_S = 2.0
"""The longest wait for an answer; the API server itself waits 10 s for a webhook."""
_MOST = 4096
"""Addresses that are remembered."""


class PodAddresses(Protocol):
    """The pods by their address."""

    async def pods_at(self, address: str, *, in_host_network: bool) -> tuple[str, ...]:
        """Name the pods with this first IP address that have not ended, as `namespace/name`."""
        ...


class Callers:
    """Decides which addresses may call admission."""

    def __init__(self, pods: PodAddresses, namespaces: Collection[str]) -> None:
        """Pods in `namespaces` may call."""
        self._pods = pods
        self._namespaces = frozenset(namespaces)
        self._known: dict[str, tuple[bool, float]] = {}
        """Answers by address, and until when each counts; the oldest is first."""
        self._asking = asyncio.Lock()

    async def may_call(self, host: str) -> bool:
        """Return whether a client with this address may call."""
        address = _plain(host)
        known = self._kept(address)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(_PATIENCE_S), self._asking:
                known = self._kept(address)
                if known is None:
                    known = await self._ask(address)
        except (KvplaceError, TimeoutError) as error:
            _log.warning(
                "admission lets %s in without knowing its pod: %s", address, str(error) or "no answer"
            )
            known = True
        self._known.pop(address, None)
        self._known[address] = known, asyncio.get_running_loop().time() + _KEPT_S
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return known

    def _kept(self, address: str) -> bool | None:
        answer, until = self._known.get(address, (None, 0.0))
        return answer if asyncio.get_running_loop().time() < until else None

    async def _ask(self, address: str) -> bool:
        found = await self._pods.pods_at(address, in_host_network=False)
        if not found or any(pod.partition("/")[0] in self._namespaces for pod in found):
            return True
        if await self._pods.pods_at(address, in_host_network=True):
            return True
        _log.warning(
            "admission refuses the pod %s (%s): if API servers call through it, name its namespace in "
            "--admission-client-namespace",
            found[0],
            address,
        )
        return False


def _plain(host: str) -> str:
    """Write an address as a pod's status has it."""
    address = ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
