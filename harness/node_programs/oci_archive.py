"""Container images as OCI archives, written without a container engine.

An archive is a tar file of an OCI image layout: `oci-layout`, `index.json`, and one blob each for the
manifest, the configuration and every layer. `ctr images import` reads it. The same input gives the same
bytes, so a runtime stores a layer that several images share only once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MEDIA_TYPE = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class ImageConfiguration:
    """The command of a container of the image, unless its pod sets another."""

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
    """Attributes of files of a layer that their folder cannot have without root.

    Paths are relative to the layer's root. All other entries belong to root.
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
        member.mtime = 0
        shared = member.isdir() and member.mode & stat.S_ISVTX
        member.mode = member.mode if shared else member.mode & ~0o022 | (0o755 if member.isdir() else 0)
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


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer as a file named by its digest, and the digest of its content unpacked."""

    path: Path
    diff_id: str
    media_type: str

    @classmethod
    def plain(cls, path: Path) -> LayerFile:
        """Take a layer as `write_layer` wrote it."""
        return cls(path, path.name, f"{_MEDIA_TYPE}.layer.v1.tar")

    @classmethod
    def compressed(cls, path: Path, folder: Path) -> LayerFile:
        """Compress such a layer into a folder; equal layers give equal files, whenever that is done."""
        unnamed = folder / f"{path.name}.gz"
        with (
            path.open("rb") as content,
            unnamed.open("wb") as raw,
            gzip.GzipFile(fileobj=raw, filename="", mode="wb", compresslevel=6, mtime=0) as packed,
        ):
            shutil.copyfileobj(content, packed, 1 << 20)
        with unnamed.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return cls(unnamed.rename(folder / digest), path.name, f"{_MEDIA_TYPE}.layer.v1.tar+gzip")


def write_archive(
    target: Path,
    reference: str,
    layers: Sequence[LayerFile],
    configuration: ImageConfiguration,
    *,
    created: str = "",
) -> str:
    """Write an image of layers, lowest first, and return its digest.

    The reference must be whole, as a container runtime resolves it: with a registry and a tag. A runtime that
    imports the archive finds the image by tag and by digest. `created` is a date as RFC 3339 writes it.
    """
    image = {
        "architecture": "amd64",
        "os": "linux",
        **({"created": created} if created else {}),
        "config": configuration.document(),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.diff_id}" for layer in layers]},
    }
    described_layers = [
        {
            "mediaType": layer.media_type,
            "digest": f"sha256:{layer.path.name}",
            "size": layer.path.stat().st_size,
        }
        for layer in layers
    ]
    config, config_blob = _described("config.v1", image)
    document = {"schemaVersion": 2, "mediaType": f"{_MEDIA_TYPE}.manifest.v1+json"}
    manifest, manifest_blob = _described(
        "manifest.v1", {**document, "config": config, "layers": described_layers}
    )
    digest = str(manifest["digest"])
    repository, tag = reference.rsplit(":", 1)
    by_tag = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": tag}
    by_digest = {"io.containerd.image.name": f"{repository}@{digest}"}
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA_TYPE}.index.v1+json",
        "manifests": [{**manifest, "annotations": names} for names in (by_tag, by_digest)],
    }
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json(index))
        for blob in (manifest_blob, config_blob):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        for layer in layers:
            member = tarfile.TarInfo(f"blobs/sha256/{layer.path.name}")
            member.size = layer.path.stat().st_size
            with layer.path.open("rb") as content:
                archive.addfile(member, content)
    return digest


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
