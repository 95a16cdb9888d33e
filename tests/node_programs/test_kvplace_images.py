"""kvplace's own images as the tests build them: the files of the Containerfiles, and they run."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import stat
import struct
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import click
import pytest
from packaging.utils import canonicalize_name

from harness.build_fixtures import skipped_if_not_installed
from harness.node_programs.image import Image, archive
from harness.node_programs.kvplace_images import (
    LEFT_OUT,
    LEFT_OUT_OF_CLIENT,
    PROJECT,
    agent_image,
    hook_image,
    serve_image,
)
from kvplace.cli.main import cli
from tests.node_programs.archives import read_archive

IMAGES = {
    "serve": (serve_image, PROJECT / "images" / "serve" / "Containerfile"),
    "hook": (hook_image, PROJECT / "hooks" / "Containerfile"),
    "agent": (agent_image, PROJECT / "images" / "agent" / "Containerfile"),
}


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image: the description in its archive, its Containerfile, and its files."""

    name: str
    image: Image
    containerfile: str
    members: dict[str, tarfile.TarInfo]
    root: Path
    packages: str
    """The folder of packages, relative to the root."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the image as its user and with its environment, and nothing of this machine."""
        if os.geteuid() != 0:
            pytest.skip("chroot needs root")
        configuration = self.image.configuration
        user = [f"--userspec={configuration.user}"] if configuration.user else []
        return subprocess.run(
            ["/usr/sbin/chroot", *user, self.root, *command],
            env=dict(configuration.environment),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture(scope="module", params=list(IMAGES))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """Build each image, and unpack it as a container runtime does: layer over layer."""
    make, containerfile = IMAGES[request.param]
    with skipped_if_not_installed():
        image = make()
    root = tmp_path_factory.mktemp(request.param)
    root.chmod(0o755)
    members: dict[str, tarfile.TarInfo] = {}
    for layer in read_archive(archive(image)).layers:
        with tarfile.open(fileobj=BytesIO(layer)) as files:
            members |= {member.name: member for member in files}
            files.extractall(root, filter="tar")
    if os.geteuid() == 0:  # as a container runtime does
        os.mknod(root / "dev" / "null", stat.S_IFCHR, os.makedev(1, 3))
        (root / "dev" / "null").chmod(0o666)
    (core,) = (path for path in members if path.endswith("/kvplace/core/__init__.py"))
    packages = core.removesuffix("/kvplace/core/__init__.py")
    return BuiltImage(request.param, image, containerfile.read_text(), members, root, packages)


def test_the_image_holds_the_files_of_kvplace_that_the_containerfile_copies_and_no_others(
    built: BuiltImage,
) -> None:
    wanted = {
        str(path.relative_to(PROJECT))
        for sources in re.findall(r"^COPY (kvplace.*) \S+$", built.containerfile, re.MULTILINE)
        for source in sources.split()
        for path in ([PROJECT / source] if source.endswith(".py") else (PROJECT / source).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    below = f"{built.packages}/"
    found = {
        name.removeprefix(below)
        for name, member in built.members.items()
        if name.startswith(f"{below}kvplace/") and member.isfile() and not name.endswith(".pyc")
    }
    templates = {name for name in found if name.startswith("kvplace/simulate/vm-templates/")}
    assert bool(templates) == (built.name == "serve")
    assert found - templates == wanted


def test_packages_have_the_pinned_versions(built: BuiltImage) -> None:
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", (PROJECT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {(canonicalize_name(name), version) for name, version in pins}
    found = {
        (canonicalize_name(match[1]), match[2])
        for name in built.members
        if (match := re.fullmatch(rf"{built.packages}/([\w.]+)-([\w.]+)\.dist-info/METADATA", name))
    }
    assert len(found) >= 4
    assert {name for name, _ in found} >= {"lxml"} or built.name == "agent"
    assert found - {("kvplace", importlib.metadata.version("kvplace"))} <= pinned


@pytest.mark.parametrize("command", [("--help",), ()], ids=["help", "nothing"])
def test_the_command_of_the_image_starts(built: BuiltImage, command: tuple[str, ...]) -> None:
    done = built.run(*built.image.configuration.entrypoint, *command)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "kvplace" in said
    assert done.returncode == 0 or not command


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    package = importlib.import_module(name.removesuffix(".*"))
    below = package.__path__ if name.endswith(".*") else []
    for module in pkgutil.walk_packages(below, f"{package.__name__}."):
        importlib.import_module(module.name)
"""
FOLDERS = {path.parent.name for path in (PROJECT / "kvplace").glob("*/__init__.py")}
STARTED = {
    "serve": tuple(f"kvplace.{folder}.*" for folder in sorted(FOLDERS - {"agent", "libvirt", "nri"})),
    "hook": ("kvplace.hook.*",),
    "agent": (
        *("kvplace.cli.agent_command", "kvplace.cli.main", "kvplace.agent.*", "kvplace.nri.*"),
        "kvplace.libvirt.pinning_process",
    ),
}


def test_everything_that_the_component_imports_is_in_the_image(built: BuiltImage) -> None:
    done = built.run(
        *("/usr/local/bin/python3", "-ISB", "-c", IMPORT_EVERYTHING),
        *(f"/{built.packages}", *STARTED[built.name]),
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_every_command_starts(built: BuiltImage) -> None:
    if built.name != "serve":
        return
    commands = cli.list_commands(click.Context(cli))
    for name in ("kvplace", "kubectl-kvplace", *(f"kvplace {command}" for command in commands)):
        done = built.run(*name.split(), "--help")
        assert (done.returncode, done.stderr) == (0, ""), name
        assert "Usage: " in done.stdout
    assert built.run("kvplace-hook", "--help").returncode == 0
    assert "explain" in built.run("kubectl_complete-kvplace", "expl").stdout


LOG_IN = """
import asyncio, os
os.environ["HOME"] = "/tmp"
from kvplace.core.errors import Misconfigured
from kvplace.kube.credentials import CredentialOptions, load_credentials
async def header():
    return await (await load_credentials(CredentialOptions(kubeconfig="/tmp/kubeconfig"))).authorization()
try:
    print(asyncio.run(header()))
except Misconfigured as error:
    print(error)
"""


def test_without_the_client_of_kubernetes_all_but_a_renewal_of_an_oidc_token_works(built: BuiltImage) -> None:
    if built.name == "hook":
        return
    assert list((built.root / built.packages).glob("kubernetes*")) == []
    api = "client.authentication.k8s.io/v1"
    issued = {"apiVersion": api, "kind": "ExecCredential", "status": {"token": "secret"}}
    issue = built.root / "usr" / "bin" / "issue"
    issue.write_text(f"#!/usr/local/bin/python3\nprint({json.dumps(json.dumps(issued))})\n")
    issue.chmod(0o755)
    program = {"apiVersion": api, "command": "/bin/issue", "interactiveMode": "Never"}
    config = {"client-id": "me", "idp-issuer-url": "https://127.0.0.1:1", "refresh-token": "secret"}
    for user, said in (
        ({"exec": program}, "Bearer secret"),
        ({"auth-provider": {"name": "oidc", "config": {"id-token": "e30.e30.x"}}}, "Bearer e30.e30.x"),
        (
            {"auth-provider": {"name": "oidc", "config": {**config, "id-token": "e30.eyJleHAiOjB9.x"}}},
            "context 'here' of kubeconfig /tmp/kubeconfig cannot be used: .*kvplace's images leave it out",
        ),
    ):
        document = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "here", "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
        }
        (built.root / "tmp" / "kubeconfig").write_text(json.dumps(document))
        done = built.run("python3" if built.name == "agent" else "/opt/kvplace/bin/python", "-c", LOG_IN)
        assert done.stderr == ""
        assert re.match(said, done.stdout), done.stdout


def test_files_that_no_program_loads_are_left_out_by_builder_and_containerfiles(built: BuiltImage) -> None:
    environment = Path(sysconfig.get_path("platlib"))
    for pattern in LEFT_OUT:
        assert next(environment.glob(pattern), None) is not None, f"{pattern} names nothing any more"
        assert list((built.root / built.packages).glob(pattern)) == []
    assert re.search(r"^COPY .*images/left-out\.txt", built.containerfile, re.MULTILINE)
    assert "sed '/^#/d' left-out.txt" in built.containerfile


def test_each_pattern_for_files_of_the_client_names_some() -> None:
    environment = Path(sysconfig.get_path("platlib"))
    for pattern in LEFT_OUT_OF_CLIENT:
        assert next(environment.glob(pattern), None) is not None, f"{pattern} names nothing any more"


def imports_of(module: str) -> set[str]:
    """Name the modules that a module of kvplace imports, at its start or inside its functions."""
    path = PROJECT / f"{module.replace('.', '/')}.py"
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.exists() else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inside if (PROJECT / f"{name.replace('.', '/')}.py").exists()}
            found |= {node.module, *modules}
    return found


def test_modules_that_the_agent_imports_late_are_in_the_image(built: BuiltImage) -> None:
    if built.name != "agent":
        return
    own = {f"kvplace.agent.{path.stem}" for path in (PROJECT / "kvplace" / "agent").glob("[a-z]*.py")}
    reached: set[str] = set()
    following = {"kvplace.cli.agent_command", *own}
    while following:
        reached |= following
        named = {name for module in following for name in imports_of(module)} - reached
        reached |= named
        following = {name for name in named if name.startswith(("kvplace.libvirt.", "kvplace.nri."))}
    assert {"kvplace.agent.process", "kvplace.libvirt.domain_pins"} <= reached
    command = ("/usr/local/bin/python3", "-ISB", "-c", IMPORT_EVERYTHING, f"/{built.packages}")
    done = built.run(*command, *sorted(reached))
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_process_that_the_agent_starts_to_talk_to_libvirt_finds_its_code(built: BuiltImage) -> None:
    if built.name != "agent":
        return
    interpreter = built.run("python3", "-c", "import sys; print(sys.executable)").stdout.strip()
    for code in (
        ("-m", "kvplace.libvirt.pinning_process"),
        ("-c", "from kvplace.libvirt.pinning_process import _Libvirt; _Libvirt()"),
    ):
        ended = built.run(interpreter, *code)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_nothing_is_compiled_at_a_start_and_no_bytecode_names_a_time(built: BuiltImage) -> None:
    tag = sys.implementation.cache_tag
    checked = 0
    for name in built.members:
        path = built.root / name
        bytecode = path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc"
        if not name.endswith(".py") or not (bytecode.exists() or "/kvplace/" in name):
            continue
        header = bytecode.read_bytes()[:8]
        assert struct.unpack("<I", header[4:]) == (1,), f"{name}: not of the kind that is never checked"
        checked += 1
    assert checked > 200


def test_bytecode_shows_the_paths_of_the_image_and_not_of_the_machine_that_built_it(
    built: BuiltImage,
) -> None:
    done = built.run("/usr/local/bin/python3", "-ISc", "import json; print(json.dumps.__code__.co_filename)")
    assert done.stdout.startswith("/usr/local/lib/python3.")
    names = [name for name in built.members if name.endswith(".pyc")]
    for name in names[:: max(1, len(names) // 100)]:
        assert sys.prefix.encode() not in (built.root / name).read_bytes(), name
