"""With the component dra-driver-cpu `serve` may write the allocations of that driver, and no others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, Json, RequestRefused
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Conflict, KvplaceError
from kvplace.core.scalars import PodUid
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.claimed_cpus import CLEARED, allocated_cpus, with_cpus
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_records import ResourceClaimRecord
from kvplace.kube.session import open_session
from tests.manifests.conftest import STRICTLY, overlay
from tests.manifests.policies import granted, refused

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
POD = PodUid("0c5c0000-0000-4000-8000-000000000001")
SHARE_ID = "5b6c0a0e-0000-4000-8000-000000000001"
LATER = "2030-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path, manifests: Path) -> Iterator[ControlPlane]:
    """Install kvplace with the component, and wait for its policy."""
    assert kubernetes_programs.is_dir()
    with ControlPlane(service_account_admission=True) as made:
        made.kubectl("apply", *STRICTLY, "-k", str(overlay(manifests, "dra-driver-cpu")))
        wait_for_policy(made)
        yield made


def wait_for_policy(made: ControlPlane) -> None:
    token = made.service_account_token("kvplace-system", "kvplace-serve")
    name = allocated(made, driver="gpu.example.com")
    change = {"status": {"reservedFor": None}}
    path = f"{CLAIMS}/{name}/status?dryRun=All"
    refused(lambda: made.request("PATCH", path, change, content_type=MERGE, token=token))


def test_one_agent_runs_on_each_node_and_the_label_of_the_node_decides_its_mode(
    plane: ControlPlane, manifests: Path
) -> None:
    rendered = yaml.safe_load_all(plane.kubectl("kustomize", str(overlay(manifests, "dra-driver-cpu"))))
    sets = {one["metadata"]["name"]: one["spec"] for one in rendered if one["kind"] == "DaemonSet"}
    usual, of_driver = sets.pop("kvplace-agent"), sets.pop("kvplace-agent-dra-driver-cpu")
    assert sets == {}
    pods = [one["template"]["spec"] for one in (usual, of_driver)]
    (term,) = pods[0].pop("affinity")["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {
        "matchExpressions": [{"key": "kvplace.io/dra-driver-cpu", "operator": "NotIn", "values": ["true"]}]
    }
    assert pods[1]["nodeSelector"].pop("kvplace.io/dra-driver-cpu") == "true"
    modes = [pod["containers"][0]["args"].pop(1) for pod in pods]
    assert modes == ["--enforcement=$(ENFORCEMENT)", "--enforcement=dra"]
    assert pods[0] == pods[1]


MERGE = "application/merge-patch+json"


def allocated(plane: ControlPlane, *, driver: str = "dra.cpu", users: int = 1, cpus: int = 4) -> str:
    """Make a ResourceClaim, and allocate a device of a driver to it as kube-scheduler does."""
    name = f"cpus-{secrets.token_hex(4)}"
    request = {"name": "cpus", "exactly": {"deviceClassName": driver}}
    plane.request("POST", CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}})
    result: Json = {"request": "cpus", "driver": driver, "pool": "worker", "device": "cpudevmachine"}
    if driver == "dra.cpu":
        result |= {"shareID": SHARE_ID, "consumedCapacity": {"dra.cpu/cpu": str(cpus)}}
    pods = [{"resource": "pods", "name": f"pod{n}", "uid": f"{POD[:-1]}{n + 1}"} for n in range(users)]
    allocation = {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": [result]}}
    status = {"status": {"allocation": allocation, "reservedFor": pods}}
    plane.request("PATCH", f"{CLAIMS}/{name}/status", status, content_type=MERGE)
    return name


def as_serve(plane: ControlPlane, name: str, *, account: str = "kvplace-serve") -> dict[str, Any]:
    """Hand CPUs over as `serve` does, with the rights of its service account; returns the claim's status."""
    kubeconfig = str(plane.service_account_kubeconfig("kvplace-system", account))

    async def run() -> None:
        cluster = ApiCluster(await open_session(CredentialOptions(kubeconfig=kubeconfig)))
        try:
            claim = await read(cluster, name)
            await hand_over(cluster, claim)
            with pytest.raises(Conflict):
                await cluster.write_claim_status(claim, CLEARED)
        finally:
            await cluster.close()

    asyncio.run(run())
    return dict(plane.request("GET", f"{CLAIMS}/{name}")["status"])


async def read(cluster: ApiCluster, name: str) -> ResourceClaimRecord:
    claim = await cluster.read_resource_claim("default", name)
    assert claim is not None
    return claim


async def hand_over(cluster: ApiCluster, claim: ResourceClaimRecord) -> None:
    status = with_cpus(claim, parse_cpu_list("2-3,34-35"), LATER) or {}
    version = await cluster.write_claim_status(claim, CLEARED)
    await cluster.write_claim_status(replace(claim, resource_version=version), status)


def test_serve_writes_the_cpus_of_a_claim_and_all_else_of_it_stays(plane: ControlPlane) -> None:
    name = allocated(plane)
    before = plane.request("GET", f"{CLAIMS}/{name}")["status"]
    after = as_serve(plane, name)
    (config,) = after["allocation"]["devices"].pop("config")
    assert config == {
        "source": "FromClaim",
        "requests": ["cpus"],
        "opaque": {
            "driver": "dra.cpu",
            "parameters": {"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": "2-3,34-35"}},
        },
    }
    assert after["allocation"].pop("allocationTimestamp") == LATER
    before["allocation"].pop("allocationTimestamp")
    assert after == before


def test_the_number_of_cpus_is_read_from_the_stored_claim(plane: ControlPlane) -> None:
    name = allocated(plane, cpus=6)

    async def run() -> int:
        kubeconfig = str(plane.service_account_kubeconfig("kvplace-system", "kvplace-serve"))
        cluster = ApiCluster(await open_session(CredentialOptions(kubeconfig=kubeconfig)))
        try:
            return allocated_cpus(await read(cluster, name), POD)
        finally:
            await cluster.close()

    assert asyncio.run(run()) == 6


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"driver": "gpu.example.com"}, "only ResourceClaims with devices of dra.cpu alone"),
        ({"users": 2}, "no ResourceClaim that several pods use"),
    ],
)
def test_serve_may_not_clear_claims_of_others(plane: ControlPlane, made: Any, why: str) -> None:
    name = allocated(plane, **made)
    token = plane.service_account_token("kvplace-system", "kvplace-serve")
    for change in ({"allocation": None, "reservedFor": None}, {"reservedFor": None}):
        with pytest.raises(RequestRefused, match=why):
            plane.request(
                "PATCH", f"{CLAIMS}/{name}/status", {"status": change}, content_type=MERGE, token=token
            )


def test_serve_may_not_allocate_devices_of_other_drivers(plane: ControlPlane) -> None:
    name = allocated(plane)
    status = plane.request("GET", f"{CLAIMS}/{name}")["status"]
    token = plane.service_account_token("kvplace-system", "kvplace-serve")
    cleared = {"status": {"allocation": None, "reservedFor": None}}
    plane.request("PATCH", f"{CLAIMS}/{name}/status", cleared, content_type=MERGE, token=token)
    status["allocation"]["devices"]["results"][0] |= {"driver": "gpu.example.com"}
    with pytest.raises(RequestRefused, match=r"devices of dra\.cpu alone"):
        plane.request("PATCH", f"{CLAIMS}/{name}/status", {"status": status}, content_type=MERGE, token=token)


@pytest.mark.parametrize(
    ("kept", "missing"),
    [
        ("resourceclaims/status", "resourceclaims/binding"),
        ("resourceclaims/binding", "resourceclaims/status"),
    ],
)
def test_one_of_the_two_rights_is_not_enough(plane: ControlPlane, kept: str, missing: str) -> None:
    name, account = allocated(plane), f"account-{secrets.token_hex(4)}"
    rules = [
        {"apiGroups": ["resource.k8s.io"], "resources": [kept], "verbs": ["patch"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
    ]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    plane.create_service_account("kvplace-system", account)
    plane.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": account}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "kvplace-system"}
    binding = {"metadata": {"name": account}, "roleRef": role, "subjects": [subject]}
    plane.request("POST", f"{rbac}/clusterrolebindings", binding)
    token = plane.service_account_token("kvplace-system", account)
    granted(lambda: plane.request("GET", f"{CLAIMS}/{name}", token=token))
    with pytest.raises(KvplaceError, match=f"cannot patch resource .*{missing}"):
        as_serve(plane, name, account=account)
