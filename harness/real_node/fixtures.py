"""pytest fixtures of real nodes. They need root: elsewhere their tests are skipped; under CI they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.node_programs.image import archive
from harness.node_programs.programs import NodePrograms
from harness.node_programs.small_images import busybox
from harness.real_node.control_groups import NoControlGroups, hierarchies
from harness.real_node.runtime import ContainerRuntime
from harness.real_node.sandbox import Sandbox

_FIXTURES = {"sandbox_machine"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of a sandbox, so that `-m 'not real_node'` leaves it out."""
    if _FIXTURES & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.real_node)


@pytest.fixture(scope="session")
def sandbox_machine() -> None:
    """Require that this machine can hold sandboxes."""
    if os.geteuid() != 0:
        pytest.skip("a sandboxed node needs root")
    try:
        hierarchies(Path("/proc/self/mountinfo").read_text())
    except NoControlGroups as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def container_runtime(
    sandbox_machine: None, node_programs: NodePrograms, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContainerRuntime]:
    """Run containerd with NRI in a sandbox, without a kubelet; the image busybox:1 is there."""
    with Sandbox("runtime", tmp_path_factory.mktemp("runtime")) as sandbox:
        runtime = ContainerRuntime(sandbox, node_programs)
        runtime.import_image(archive(busybox()))
        yield runtime
