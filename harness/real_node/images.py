"""The images that a real node has from its start; there is no registry to pull others from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.build_cache import Say, say_to_stderr
from harness.node_programs.image import Image, archive
from harness.node_programs.kvplace_images import agent_image, hook_image, serve_image
from harness.node_programs.launcher_image import launcher
from harness.node_programs.small_images import busybox, container_disk, kube_scheduler

# The disk that vm-templates/ boot. On a node of the tests it has an idle guest.
_TEMPLATE_DISK = "quay.io/containerdisks/debian:12"


def node_images(*, kvplace: bool = True) -> list[Image]:
    """Name them all, or all but kvplace's own."""
    disk = container_disk()
    return [
        *(busybox(), disk, replace(disk, reference=_TEMPLATE_DISK), launcher(), kube_scheduler()),
        *((hook_image(), serve_image(), agent_image()) if kvplace else ()),
    ]


def node_image_archives(say: Say = say_to_stderr, *, kvplace: bool = True) -> list[Path]:
    """Return their archives, built unless they are cached."""
    return [archive(image, say) for image in node_images(kvplace=kvplace)]
