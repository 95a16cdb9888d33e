"""The sidecar's image holds everything that the hook imports: tried with what its Containerfile copies."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.conftest import PROJECT, HookProcess
from tests.hook.grpc_client import CALLBACKS, DEFINE, SocketCaller, define, domain_of
from tests.hook.machine import DOMAIN, ON_THIS_MACHINE, VMI

CONTAINERFILE = (PROJECT / "hooks/Containerfile").read_text()
COPIED = re.findall(r"^COPY (kvplace/\S+) /opt/kvplace/(kvplace/\S*)$", CONTAINERFILE, re.MULTILINE)
PACKAGES = re.search(r"awk '/\^\(([\w|]+)\)==/", CONTAINERFILE)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """`/opt/kvplace` as the build lays it out."""
    for source, target in COPIED:
        if (PROJECT / source).is_dir():
            shutil.copytree(PROJECT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / source, tmp_path / target)
    assert PACKAGES is not None
    for name in PACKAGES[1].split("|"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (tmp_path / name).symlink_to(Path(spec.origin).parent)
    return tmp_path


def test_the_image_has_five_parts_of_kvplace_and_four_packages() -> None:
    assert [target for _, target in COPIED] == [
        "kvplace/",
        "kvplace/core",
        "kvplace/domainxml",
        "kvplace/hook",
        "kvplace/linux",
    ]
    assert PACKAGES is not None
    assert set(PACKAGES[1].split("|")) == {"h2", "hpack", "hyperframe", "lxml"}


def test_the_pinned_packages_are_found_in_the_constraints_with_their_hashes() -> None:
    program = re.search(r"awk '([^']+)'", CONTAINERFILE)
    assert program is not None
    command = ["awk", program[1], str(PROJECT / "constraints.txt")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PACKAGES is not None
    for name in PACKAGES[1].split("|"):
        assert re.search(rf"^{name}==[\d.]+ \\\n    --hash=sha256:", listed, re.MULTILINE)
    assert len(re.findall(r"^\S+==", listed, re.MULTILINE)) == 4
    assert not listed.rstrip().endswith("\\")


def test_every_module_of_the_hook_can_be_imported_in_the_image(image: Path) -> None:
    names = [
        ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        for room in ("hook", "domainxml")
        for path in sorted((PROJECT / "kvplace" / room).glob("*.py"))
    ]
    lines = ["import sys", f"sys.path.insert(0, {str(image)!r})", *(f"import {name}" for name in names)]
    lines += ["import lxml.etree, kvplace", "print(kvplace.__file__)"]
    command = [sys.executable, "-ISB", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith(str(image))


def test_the_images_command_pins_a_domain_and_ends_at_shutdown(image: Path, hook: HookProcess) -> None:
    text = (PROJECT / "hooks/kvplace-hook").read_text()
    shebang, _, rest = text.partition("\n")
    assert shebang == "#!/usr/local/bin/python3 -ISB"
    command = image / "kvplace-hook"
    command.write_text(rest.replace("/opt/kvplace", str(image)))
    hook.pod.bind(ON_THIS_MACHINE)
    hook.program = [sys.executable, "-ISB", str(command)]
    hook.start()
    assert hook.run("ready").stderr == ""
    with SocketCaller(hook.socket) as caller:
        assert b"<vcpupin" in domain_of(caller.ask(DEFINE, define(DOMAIN, VMI)).message)
        assert caller.ask(CALLBACKS + "Shutdown").message == b""
    assert hook.wait() == 0
