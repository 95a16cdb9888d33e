"""containerd takes the images, and their containers run what the images state, as their users."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.node_programs.image import Image, archive
from harness.node_programs.kvplace_images import agent_image, hook_image, serve_image
from harness.real_node.runtime import ContainerRuntime


@pytest.mark.parametrize(
    ("make", "arguments", "answer"),
    [
        pytest.param(serve_image, ["--version"], "kvplace 0.1.0", id="serve"),
        pytest.param(hook_image, ["--help"], "kvplace-hook ready", id="hook"),
        pytest.param(agent_image, ["--help"], "--enforcement", id="agent"),
    ],
)
def test_a_container_of_the_image_runs_its_command(
    container_runtime: ContainerRuntime, make: Callable[[], Image], arguments: list[str], answer: str
) -> None:
    image = make()
    container_runtime.import_image(archive(image))
    runc = container_runtime.programs.runc
    run = ("run", "--rm", "--read-only", f"--runc-binary={runc}", image.reference, f"try-{image.name}")
    assert answer in container_runtime.ctr(*run, *image.configuration.entrypoint, *arguments)
