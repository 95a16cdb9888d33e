"""The Go programs of the control plane: which modules there are, and how each is built."""

from __future__ import annotations

from pathlib import Path

from harness.go_build import GoModule

_HERE = Path(__file__).parent

KUBERNETES = GoModule(
    _HERE / "kubernetes",
    contents="etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubectl",
    # Without a version the server calls itself v0.0.0-master, which some clients refuse.
    ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3",
)
HELM = GoModule(
    _HERE / "helm",
    contents="helm",
    ldflags="-s -w -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1"
    " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=36",
    packages="tool",
)
PUBLISHING = GoModule(
    _HERE / "publishing", contents="crane with its registry, krew and its validator", packages="tool"
)
ALERTS = GoModule(_HERE / "alerts", contents="Prometheus' evaluation of alerting rules")
PROMETHEUS_OPERATOR = GoModule(_HERE / "prometheus-operator", contents="only its files, for its CRDs")
KUBEVIRT = GoModule(
    _HERE / "kubevirt",
    contents="KubeVirt's virt-controller, admission and hooks client",
    # The tags of node_programs/kubevirt_node: nine of ten packages are then compiled once for both.
    tags="netgo osusergo selinux",
)


def folder_with_kubectl(programs: Path, inside: Path) -> Path:
    """Make a folder for PATH; the program of all Kubernetes components is kubectl when it is called so."""
    folder = inside / "bin"
    folder.mkdir()
    (folder / "kubectl").symlink_to(programs / "kubernetes")
    return folder
