"""A node's programs are built from the versions that the documentation names."""

from __future__ import annotations

import subprocess

import pytest

from harness.build_cache import NotInstalled
from harness.node_programs.programs import NodePrograms, system_program


@pytest.mark.parametrize(
    ("program", "argument", "answer"),
    [
        ("containerd", "--version", "v2.2.9"),
        ("shim", "-v", "containerd-shim-runc-v2"),
        ("ctr", "--version", "ctr github.com/containerd/containerd/v2"),
        ("crictl", "--version", "crictl version"),
        ("runc", "--version", "runc version"),
        ("kubelet", "--version", "Kubernetes v1.36.3"),
        ("kube_proxy", "--version", "Kubernetes v1.36.3"),
        ("kube_scheduler", "--version", "Kubernetes v1.36.3"),
        ("virt_handler", "--help", "--hostname-override"),
        ("virt_chroot", "--help", "virt-chroot"),
    ],
)
def test_a_program_runs_and_prints_its_name_and_version(
    node_programs: NodePrograms, program: str, argument: str, answer: str
) -> None:
    done = subprocess.run(
        [getattr(node_programs, program), argument], capture_output=True, text=True, check=False
    )
    assert answer in done.stdout + done.stderr


@pytest.mark.parametrize("plugin", ["ptp", "host-local", "loopback"])
def test_a_network_plugin_states_which_versions_of_cni_it_speaks(
    node_programs: NodePrograms, plugin: str
) -> None:
    done = subprocess.run(
        [node_programs.cni_folder / plugin],
        env={"CNI_COMMAND": "VERSION"},
        input='{"cniVersion": "1.0.0"}',
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"1.0.0"' in done.stdout


def test_programs_that_call_each_other_find_each_other(node_programs: NodePrograms) -> None:
    for name in ("containerd-shim-runc-v2", "runc", "ctr", "crictl", "ip"):
        found = subprocess.run(
            ["sh", "-c", f"command -v {name}"],
            env={"PATH": node_programs.search_path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, name


def test_a_missing_program_of_the_system_is_named_with_its_package() -> None:
    with pytest.raises(NotInstalled, match="no kvplace-nonsense on this machine"):
        system_program("kvplace-nonsense", package="nonsense")
