"""The rights that a process uses: recorded by an HTTP server that is asked all that its components ask."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from kvplace.core.errors import Forbidden, KvplaceError
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.claimed_cpus import CLEARED
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.events import EventReason, EventRecord, ObjectReference
from kvplace.kube.migrations import MIGRATIONS, PlannedMigration
from kvplace.kube.object_records import (
    Condition,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    ResourceClaimRecord,
    ResourceTopologyRecord,
    TopologyRecord,
    TopologyStatus,
)
from kvplace.kube.session import open_session
from kvplace.kube.watches import (
    DEVICE_CLASSES,
    LEDGERS,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    SLICES,
    TOPOLOGIES,
    VMIS,
    Alive,
    Interrupted,
    Kind,
)
from kvplace.service.connections import Address
from kvplace.service.listening import listening
from tests.nodes.machines import EIGHT

KVPLACE = Path(__file__).resolve().parents[2] / "kvplace"
SOURCES = {
    "serve": ("admission/*", "controller/*", "kube/*", "nodes/*", "scheduler/*"),
    "agent": ("agent/*", "kube/events.py", "kube/store.py"),
}
"""The files with the cluster calls of a process."""
WATCHED: dict[str, tuple[Kind[Any, Any], ...]] = {
    "serve": (PODS, NODES, TOPOLOGIES, LEDGERS, VMIS, SLICES, RESOURCE_CLAIMS, DEVICE_CLASSES),
    "agent": (PODS, NODES, TOPOLOGIES, LEDGERS),
}
NOT_A_CALL = {"close", "list_watch", "read_all"}
"""Methods of `ApiCluster` that need no right of their own: `read_all` has that of a watch."""
OF_COMMANDS = {"annotate_vm"}
"""The methods that commands alone call, with the rights of the person who runs them."""

OF_COMPONENT = {"create_migration", "delete_migration"}
"""Methods that `serve` calls only with the component moves-between-nodes, which grants the rights."""

Right = tuple[str, str, str, str]
"""API group, resource, the one object it is limited to or "", verb."""

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v[^/]+(?:/namespaces/[^/]+)?/(?P<resource>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?"
)


_DENIED = re.compile(r"the API server denies (?P<verb>\w+) on (?P<resource>\S+) ")


def right_of(method: str, path: str, query: Mapping[str, str]) -> Right:
    """Name the right that a request needs, by the API server's own rules."""
    found = _PATH.fullmatch(path)
    assert found is not None, path
    resource = "/".join(part for part in (found["resource"], found["subresource"]) if part)
    verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method)
    if verb is None:
        verb = "get" if found["name"] else "watch" if query.get("watch") else "list"
    return (found["group"] or "", resource, "", verb)


def port_methods() -> set[str]:
    """List the methods by which `ApiCluster` asks the API server."""
    return {name for name in dir(ApiCluster) if not name.startswith("_")} - NOT_A_CALL - OF_COMMANDS


def methods_in_use(process: str) -> set[str]:
    """List the calls of the components of `kvplace serve` or `kvplace agent`."""
    sources = [path for pattern in SOURCES[process] for path in KVPLACE.glob(pattern) if path.suffix == ".py"]
    text = "\n".join(path.read_text() for path in sources if not path.name.endswith("_cluster.py"))
    of_commands = {name for name in OF_COMMANDS if re.search(rf"\w\.{name}\(", text)}
    assert not of_commands, f"{process} has no right for {of_commands}"
    return {name for name in port_methods() if re.search(rf"\w\.{name}\(", text)}


async def rights_in_use(folder: Path, process: str) -> set[Right]:
    """Call every method of the port that a process calls and return the rights that the requests need."""
    used: set[Right] = set()

    async def answer(request: web.Request) -> web.Response:
        right = right_of(request.method, request.path, request.query)
        used.add(right)
        if right[3] == "watch":
            return web.Response(status=410)
        spec: Any = {"owners": {}, "claims": {}}
        metadata = {"name": "a", "namespace": "b", "uid": "u", "resourceVersion": "1"}
        return web.json_response({"metadata": metadata, "spec": spec, "items": []})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with listening("stub", application, Address("127.0.0.1", 0)) as address:
        cluster = ApiCluster(await open_session(_kubeconfig(folder, address)))
        try:
            for call in calls_of(cluster, process):
                await call()
        finally:
            await cluster.close()
    return used


def _kubeconfig(folder: Path, address: Address) -> CredentialOptions:
    path = folder / "kubeconfig"
    content = {
        "clusters": [{"name": "stub", "cluster": {"server": f"http://{address}"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "me"}}],
        "current-context": "stub",
    }
    path.write_text(json.dumps(content))
    return CredentialOptions(kubeconfig=str(path))


async def denied_rights(cluster: ApiCluster, process: str) -> set[tuple[str, str]]:
    """Call the same methods and return the resources and verbs that the API server denies.

    It checks rights first, so the objects need not be there.
    """
    denied: set[tuple[str, str]] = set()
    for call in calls_of(cluster, process):
        try:
            await call()
        except Forbidden as error:
            denied.add(_denied(error))
        except KvplaceError:
            continue  # it was allowed, and there is no such object
    return denied


def _denied(error: Forbidden) -> tuple[str, str]:
    found = _DENIED.match(str(error))
    assert found is not None, error
    return found["resource"], found["verb"]


def calls_of(cluster: ApiCluster, process: str) -> list[Callable[[], Awaitable[object]]]:
    """List calls of every method of the port that a process calls; a watch raises how it was refused.

    `migrations` are the calls that `serve` makes with the component moves-between-nodes alone.
    """
    migration = PlannedMigration("b", "a", "vm", NodeName("worker"))
    if process == "migrations":
        return [
            lambda: cluster.read_all(MIGRATIONS),
            lambda: cluster.create_migration(migration),
            lambda: cluster.delete_migration("b", "a"),
        ]
    ledger = LedgerRecord(NodeName("worker"), Ledger(), "1", uid="u")
    pod = ObjectReference(kind="Pod", namespace="b", name="a", uid="u")
    node = NodeRecord(NodeName("worker"), "u")
    record = PodRecord("b", "a", PodUid("u"))
    resource_claim = ResourceClaimRecord("b", "a", resource_version="1")
    there = TopologyRecord(NodeName("worker"), EIGHT, resource_version="1")

    published = ResourceTopologyRecord(NodeName("worker"), "1", by_agent=True)
    resources: dict[str, Any] = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": "worker"},
        "zones": [],
    }

    async def watch(kind: Kind[Any, Any]) -> None:
        async with aclosing(cast(Any, cluster.watch(kind))) as events:
            async for event in events:
                if isinstance(event, Interrupted) and isinstance(event.failure, Forbidden):
                    raise event.failure
                if isinstance(event, Alive | Interrupted):
                    break

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "bind": lambda: cluster.bind("b", "a", PodUid("u"), NodeName("worker"), {}),
        "read_pod": lambda: cluster.read_pod("b", "a"),
        "read_disruption_budgets": cluster.read_disruption_budgets,
        "pods_at": lambda: cluster.pods_at("10.0.0.1", in_host_network=False),
        "read_vmi": lambda: cluster.read_vmi("b", "a"),
        "read_resource_claim": lambda: cluster.read_resource_claim("b", "a"),
        "write_claim_status": lambda: cluster.write_claim_status(resource_claim, CLEARED),
        "read_ledger": lambda: cluster.read_ledger(NodeName("worker")),
        "create_ledger": lambda: cluster.create_ledger(NodeName("worker")),
        "write_ledger": lambda: cluster.write_ledger(ledger, LedgerChange()),
        "delete_ledger": lambda: cluster.delete_ledger(ledger),
        "record_event": lambda: cluster.record_event(EventRecord(pod, EventReason.DOES_NOT_FIT, "a note")),
        "replace_placement": lambda: cluster.replace_placement("b", "a", PodUid("u"), {}),
        "set_pod_condition": lambda: cluster.set_pod_condition(record, Condition("a", True, "B", "c")),
        "request_cpus": lambda: cluster.request_cpus(record, 1),
        "nominate_node": lambda: cluster.nominate_node(record, NodeName("worker")),
        "write_topology": lambda: cluster.write_topology(node, EIGHT, None),
        "write_topology_status": lambda: cluster.write_topology_status(node.name, TopologyStatus(), "1"),
        "read_resource_topology": lambda: cluster.read_resource_topology(node.name),
        "write_resource_topology": lambda: cluster.write_resource_topology(node, resources, None),
        "annotate_node": lambda: cluster.annotate_node(NodeName("worker"), {"a": "b"}),
    }
    assert calls.keys() | {"watch"} | OF_COMPONENT == port_methods(), "call every method of the port here"
    shared = replace(ledger, is_whole=False)
    later: dict[str, Callable[[], Awaitable[object]]] = {
        "write_ledger": lambda: cluster.write_ledger(shared, LedgerChange()),
        "write_topology": lambda: cluster.write_topology(node, EIGHT, there),
        "write_resource_topology": lambda: cluster.write_resource_topology(node, resources, published),
    }
    watches = [partial(watch, kind) for kind in WATCHED[process]]
    names = sorted(methods_in_use(process) - {"watch"})
    return [*watches, *(found[name] for found in (calls, later) for name in names if name in found)]
