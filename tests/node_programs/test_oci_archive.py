"""Archives of images, read back as a container runtime reads them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from harness.node_programs.oci_archive import (
    Attributes,
    ImageConfiguration,
    LayerFile,
    write_archive,
    write_layer,
)
from tests.node_programs.archives import read_archive

CAPABILITY = "\x01\0\0\x02\0\x04\0\0" + "\0" * 12


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small root file system with a program, a link, a module and a folder of a user."""
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "program").write_bytes(b"\x7fELF")
    (root / "bin" / "program").chmod(0o755)
    (root / "bin" / "alias").symlink_to("program")
    (root / "home" / "qemu").mkdir(parents=True)
    (root / "home" / "qemu" / "module.py").write_text("pass\n")
    return root


def members(layer: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        return {member.name: member for member in archive}


def test_an_archive_holds_every_layer_under_its_digest_and_the_command_of_a_container(
    root: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("upper")
    layers = [LayerFile.plain(write_layer(folder, tmp_path)) for folder in (root, other)]
    configuration = ImageConfiguration(
        entrypoint=("/bin/program",),
        command=("serve",),
        environment={"PATH": "/bin"},
        user="107:107",
        labels={"title": "a program"},
        ports=("8443", "53/udp"),
    )
    digest = write_archive(tmp_path / "image.tar", "docker.io/tests/program:1", layers, configuration)
    image = read_archive(tmp_path / "image.tar")
    assert image.digest == digest
    assert image.reference == "docker.io/tests/program:1"
    assert image.config["config"] == {
        "Entrypoint": ["/bin/program"],
        "Cmd": ["serve"],
        "Env": ["PATH=/bin"],
        "User": "107:107",
        "Labels": {"title": "a program"},
        "ExposedPorts": {"8443/tcp": {}, "53/udp": {}},
    }
    assert (image.config["os"], image.config["architecture"]) == ("linux", "amd64")
    assert [sorted(members(layer)) for layer in image.layers] == [
        ["bin", "bin/alias", "bin/program", "home", "home/qemu", "home/qemu/module.py"],
        ["file"],
    ]


def test_files_belong_to_root_unless_a_folder_above_them_has_an_owner(root: Path, tmp_path: Path) -> None:
    attributes = Attributes(owners={"home/qemu": 107}, capabilities={"bin/program": CAPABILITY})
    found = members(write_layer(root, tmp_path, attributes).read_bytes())
    assert {name: (member.uid, member.gid) for name, member in found.items() if member.uid} == {
        "home/qemu": (107, 107),
        "home/qemu/module.py": (107, 107),
    }
    assert {(member.uname, member.gname) for member in found.values()} == {("", "")}
    assert found["bin/program"].mode == 0o755
    assert found["bin/alias"].linkname == "program"
    assert found["bin/program"].pax_headers == {"SCHILY.xattr.security.capability": CAPABILITY}


def test_the_same_files_make_the_same_layer_whenever_they_were_written(root: Path, tmp_path: Path) -> None:
    first = write_layer(root, tmp_path)
    os.utime(root / "bin" / "program", (1, 1))
    os.utime(root / "bin", (2, 2))
    (root / "home" / "qemu" / "module.py").chmod(0o664)
    (root / "home" / "qemu").chmod(0o775)
    assert write_layer(root, tmp_path).name == first.name
    (root / "bin" / "program").write_bytes(b"changed")
    assert write_layer(root, tmp_path).name != first.name


def test_a_compressed_layer_holds_the_same_and_is_the_same_file_whenever_it_is_made(
    root: Path, tmp_path: Path
) -> None:
    layer = write_layer(root, tmp_path)
    folders = [tmp_path / name for name in ("once", "again")]
    for folder in folders:
        folder.mkdir()
    once, again = (LayerFile.compressed(layer, folder) for folder in folders)
    assert once.path.name == again.path.name
    written = write_archive(tmp_path / "image.tar", "a/b:1", [once], ImageConfiguration())
    image = read_archive(tmp_path / "image.tar")
    assert image.layers == (layer.read_bytes(),)
    assert image.digest == written
