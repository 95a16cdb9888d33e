"""Reading OCI archives as a container runtime does: by digest, from index to layers."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReadImage:
    """The description of the one image of an archive, every digest and size checked."""

    reference: str
    digest: str
    config: Json
    layers: tuple[bytes, ...]
    """Unpacked."""


def read_archive(path: Path) -> ReadImage:
    """Read an archive; fails on a blob that is missing, has another size or another digest."""
    with tarfile.open(path) as archive:

        def content(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        def blob(descriptor: Json) -> bytes:
            algorithm, _, digest = descriptor["digest"].partition(":")
            found = content(f"blobs/{algorithm}/{digest}")
            assert hashlib.new(algorithm, found).hexdigest() == digest
            assert len(found) == descriptor["size"]
            return found

        assert json.loads(content("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        described, by_digest = json.loads(content("index.json"))["manifests"]
        manifest = json.loads(blob(described))
        config = json.loads(blob(manifest["config"]))
        layers = tuple(
            gzip.decompress(blob(layer)) if layer["mediaType"].endswith("+gzip") else blob(layer)
            for layer in manifest["layers"]
        )
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    reference = described["annotations"]["io.containerd.image.name"]
    digest = described["digest"]
    assert by_digest["digest"] == digest
    assert by_digest["annotations"]["io.containerd.image.name"] == f"{reference.rpartition(':')[0]}@{digest}"
    return ReadImage(reference, digest, config, layers)
