"""KubeVirt in the tests' cluster: what tests of the whole way of a VM take for granted about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.kubevirt_parts import NAMESPACE, KubeVirt
from tests.kubevirt_documents import pods


def test_kubevirts_processes_have_the_rights_of_their_service_accounts_and_no_more(
    control_plane: ControlPlane, kubevirt: KubeVirt
) -> None:
    assert kubevirt.virt_controller.is_running
    for account in ("kubevirt-controller", "kubevirt-apiserver"):
        token = control_plane.service_account_token(NAMESPACE, account)
        with pytest.raises(RequestRefused, match=account) as refused:
            control_plane.request("GET", "/api/v1/namespaces/kube-system/secrets", token=token)
        assert refused.value.status == 403


@pytest.mark.parametrize("program", ["virt-controller", "webhooks"])
def test_a_process_of_kubevirt_ends_when_its_starter_lets_go(
    control_plane: ControlPlane, kubevirt_programs: Path, program: str
) -> None:
    kubeconfig = f"--kubeconfig={control_plane.kubeconfig}"
    flags = {"virt-controller": ["--listen=127.0.0.1", "--port=0"], "webhooks": []}[program]
    ended = subprocess.run(
        [kubevirt_programs / program, kubeconfig, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()


def test_the_pods_that_tests_read_are_those_that_kubevirt_makes(kubevirt: KubeVirt, namespace: str) -> None:
    """After a change of KubeVirt's version: `python -m tests.kubevirt_documents`."""
    assert pods.made(kubevirt, namespace) == {name: pods.kept(name) for name in pods.VMIS}
