"""Container images as OCI archives, written without a container engine.

An archive is a tar file of an OCI image layout: `oci-layout`, `index.json`, and one blob each for the
manifest, the configuration and every layer. `ctr images import` reads it. The same input gives the same
bytes, so a runtime stores a layer that several images share only once.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MEDIA_TYPE = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class ImageConfiguration:
    """What a container of the image runs unless its pod says otherwise."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()

    def document(self) -> dict[str, object]:
        """Return the member `config` of an image's configuration."""
        members: dict[str, object] = {
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.command),
            "Env": [f"{name}={value}" for name, value in self.environment.items()],
            "User": self.user,
            "Labels": dict(self.labels),
            "ExposedPorts": {port if "/" in port else f"{port}/tcp": {} for port in self.ports},
        }
        return {name: value for name, value in members.items() if value}


@dataclass(frozen=True, slots=True)
class Attributes:
    """What files of a layer are that the folder they come from cannot say without root.

    Paths are relative to the layer's root. Whatever is not named belongs to root.
    """

    owners: Mapping[str, int] = field(default_factory=dict)
    """The user and group of a file or folder, and of everything below it."""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    """The extended attribute security.capability of a program, as bytes below 128."""

    def owner(self, path: str) -> int:
        """Return the user and group that own a path."""
        above = [path, *map(str, Path(path).parents)]
        return next((self.owners[folder] for folder in above if folder in self.owners), 0)


def write_layer(root: Path, folder: Path, attributes: Attributes | None = None) -> Path:
    """Write everything below `root` as a layer into `folder`, in a file named by its SHA-256 digest."""
    attributes = attributes or Attributes()

    def described(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = attributes.owner(member.name)
        member.uname = member.gname = ""
        # Python compares the times of its sources with those in its bytecode, in whole seconds.
        member.mtime = int(member.mtime) if member.name.endswith(".py") else 0
        if capability := attributes.capabilities.get(member.name):
            member.pax_headers = {"SCHILY.xattr.security.capability": capability}
        return member

    unnamed = folder / "layer.tar"
    with tarfile.open(unnamed, "w", format=tarfile.PAX_FORMAT) as layer:
        for path in sorted(root.iterdir()):
            layer.add(path, arcname=path.name, filter=described)
    with unnamed.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return unnamed.rename(folder / digest)


def write_archive(
    target: Path, reference: str, layers: Sequence[Path], configuration: ImageConfiguration
) -> None:
    """Write an image of layers that `write_layer` made, lowest first.

    The reference must be whole, as a container runtime looks it up: with a registry and a tag.
    """
    described_layers = [
        {
            "mediaType": f"{_MEDIA_TYPE}.layer.v1.tar",
            "digest": f"sha256:{layer.name}",
            "size": layer.stat().st_size,
        }
        for layer in layers
    ]
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": configuration.document(),
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in described_layers]},
    }
    config, config_blob = _described("config.v1", image)
    document = {"schemaVersion": 2, "mediaType": f"{_MEDIA_TYPE}.manifest.v1+json"}
    manifest, manifest_blob = _described(
        "manifest.v1", {**document, "config": config, "layers": described_layers}
    )
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rsplit(":", 1)[1],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA_TYPE}.index.v1+json",
        "manifests": [{**manifest, "annotations": names}],
    }
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json(index))
        for blob in (manifest_blob, config_blob):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        for layer in layers:
            member = tarfile.TarInfo(f"blobs/sha256/{layer.name}")
            member.size = layer.stat().st_size
            with layer.open("rb") as content:
                archive.addfile(member, content)


def _described(kind: str, document: object) -> tuple[dict[str, object], bytes]:
    blob = _json(document)
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return {"mediaType": f"{_MEDIA_TYPE}.{kind}+json", "digest": digest, "size": len(blob)}, blob


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
