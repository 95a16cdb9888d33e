"""A container image as the layers that make it, and its archive, built once and kept."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.build_cache import Say, built_once, say_to_stderr
from harness.node_programs.oci_archive import (
    Attributes,
    ImageConfiguration,
    LayerFile,
    write_archive,
    write_layer,
)

# An archive of our own sources is another one after every change of them.
_UNUSED_DAYS = 0.25
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Layer:
    """Files of an image that are made, and kept, together."""

    name: str
    inputs: tuple[str, ...]
    """Everything that decides the files; the code of this folder counts without being named."""
    fill: Callable[[Path], Attributes]
    """Lays the files out in an empty folder that stands for `/`."""

    def fingerprint(self) -> str:
        """Return a digest of everything that decides the files."""
        sources = sorted(_HERE.glob("*.py"))
        return digest_of([*self.inputs, *(source.read_text() for source in sources)])


@dataclass(frozen=True, slots=True)
class Image:
    """A container image: its whole reference, with registry and tag, and its layers, lowest first."""

    reference: str
    layers: tuple[Layer, ...]
    configuration: ImageConfiguration

    @property
    def name(self) -> str:
        """The last part of the reference, without its tag."""
        return self.reference.rsplit(":", 1)[0].rsplit("/", 1)[-1]


def archive(image: Image, say: Say = say_to_stderr) -> Path:
    """Return the image's OCI archive, built unless it is cached: milliseconds when it is.

    Raises `BuildFailed` when a program that belongs into the image cannot be had.
    """
    contents = f"image {image.reference}"

    def build(folder: Path) -> None:
        say(f"building {contents}")
        layers = [LayerFile.plain(layer) for layer in layers_of(image, say)]
        write_archive(folder / "image.tar", image.reference, layers, image.configuration)

    fingerprints = [layer.fingerprint() for layer in image.layers]
    fingerprint = digest_of([image.reference, repr(image.configuration), *fingerprints])
    name = f"image-{image.name}"
    folder = built_once(name, fingerprint, build, contents=contents, unused_days=_UNUSED_DAYS, say=say)
    return folder / "image.tar"


def layers_of(image: Image, say: Say = say_to_stderr) -> list[Path]:
    """Return the image's layers, lowest first, each as a file named by its digest."""
    return [_layer(layer, say) for layer in image.layers]


def digest_of(parts: Iterable[str]) -> str:
    """Return a digest that changes when any part does."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _layer(layer: Layer, say: Say) -> Path:
    def build(folder: Path) -> None:
        root = folder / "root"
        root.mkdir()
        attributes = layer.fill(root)
        write_layer(root, folder, attributes)
        shutil.rmtree(root)

    contents = f"layer {layer.name}"
    name = f"layer-{layer.name}"
    folder = built_once(
        name, layer.fingerprint(), build, contents=contents, unused_days=_UNUSED_DAYS, say=say
    )
    (blob,) = folder.iterdir()
    return blob
