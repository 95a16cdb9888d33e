"""kvplace's images as OCI archives for people: compressed, dated, each with the list of its software.

They need neither a container engine nor a registry: the interpreter, its libraries and the packages are
those of this environment, with packages that `./make` has installed by their hashes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from harness.node_programs.image import Image, layers_of
from harness.node_programs.kvplace_images import agent_image, hook_image, serve_image
from harness.node_programs.oci_archive import LayerFile, write_archive
from release.software_list import software_list

IMAGES: Mapping[str, Callable[[str], Image]] = {
    "serve": serve_image,
    "hook": hook_image,
    "agent": agent_image,
}


@dataclass(frozen=True, slots=True)
class ReleasedImage:
    """An image in its archive: its repository without a tag, and its digest for pulls."""

    name: str
    repository: str
    tag: str
    digest: str
    archive: Path
    software: Path

    @property
    def size(self) -> int:
        """Bytes of the archive: as many as a node pulls."""
        return self.archive.stat().st_size


def build_images(folder: Path, registry: str, tag: str, created: datetime) -> list[ReleasedImage]:
    """Write every image's archive and software list into a folder.

    `registry` is what stands in front of an image's name, as in `registry.example/kvplace`. Raises
    `BuildFailed` when something that belongs into an image is not installed here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvplace-layers-") as scratch:
        compressed: dict[str, LayerFile] = {}
        return [
            _build(folder, name, f"{registry}/{name}", tag, created, Path(scratch), compressed)
            for name in IMAGES
        ]


def _build(
    folder: Path,
    name: str,
    repository: str,
    tag: str,
    created: datetime,
    scratch: Path,
    compressed: dict[str, LayerFile],
) -> ReleasedImage:
    reference = f"{repository}:{tag}"
    image = IMAGES[name](reference)
    labels = {**image.configuration.labels, "org.opencontainers.image.version": tag}
    layers = layers_of(image)
    for layer in layers:
        if layer.name not in compressed:
            compressed[layer.name] = LayerFile.compressed(layer, scratch)
    archive = folder / f"kvplace-{name}-{tag}.oci.tar"
    digest = write_archive(
        archive,
        reference,
        [compressed[layer.name] for layer in layers],
        replace(image.configuration, labels=labels),
        created=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    software = folder / f"kvplace-{name}-{tag}.cdx.json"
    software.write_text(software_list(repository, tag, digest, layers, created) + "\n")
    return ReleasedImage(name, repository, tag, digest, archive, software)
