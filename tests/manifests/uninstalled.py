"""The objects that an uninstallation must not leave behind, and a ledger that it must not stop at."""

from __future__ import annotations

from harness.control_plane.cluster import ControlPlane

KINDS = (
    "customresourcedefinitions",
    "clusterroles",
    "clusterrolebindings",
    "namespaces",
    "mutatingwebhookconfigurations",
    "validatingwebhookconfigurations",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
)
LEDGER = """
apiVersion: kvplace.io/v1alpha1
kind: NodeLedger
metadata: {name: worker}
spec:
  owners: {"1": uid}
  claims: {uid: {namespace: a, pod: b, policy: exclusive, cpus: "1", owned: "1"}}
"""
"""A ledger with an owner: policies keep everybody from deleting it."""


def everything(cluster: ControlPlane) -> set[str]:
    """Name every object of the kinds that an installation makes for the whole cluster."""
    names = cluster.kubectl("get", ",".join(KINDS), "-o", "name").split()
    roles = cluster.kubectl("get", "rolebindings,roles", "-n", "kube-system", "-o", "name").split()
    return {*names, *roles}
