"""The pins of kvplace's Containerfiles, and the reader for builds of the same images without an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.node_programs.containerfile import Containerfile, Copy

TEXT = """\
# A comment. FROM nothing
FROM registry/python:3.13 AS build
COPY constraints.txt ./
RUN apt-get update -q && apt-get install -q -y gcc
RUN awk '/^(alpha|beta)==/ {keep = 1} keep {print} keep && !/\\\\$/ {keep = 0}' constraints.txt >some.txt \\
 && sed -n '/^# -- build --$/,/^# -- tests --$/p' constraints.txt >build.txt \\
 && pip install -r build.txt \\
 && pip install --no-deps --target /opt/kvplace -r some.txt
COPY kvplace/core /opt/kvplace/kvplace/core

FROM registry/python:3.13
LABEL org.title="a program" \\
      org.licenses="Apache-2.0"
RUN apt-get update -q \\
 && apt-get install -q -y --no-install-recommends libc-bin libvirt0 \\
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/kvplace /opt/kvplace
COPY hooks/program other /usr/local/bin/
ENV PATH=/opt/kvplace/bin:$PATH DEBUG=1
USER 107:107
EXPOSE 8443 8081
ENTRYPOINT ["program"]
CMD ["serve", "now"]
"""
CONSTRAINTS = """\
# -- runtime --
alpha==1.0 \\
    --hash=sha256:00
beta==2.0 ; python_version < '3' \\
    --hash=sha256:01
gamma==3.0 \\
    --hash=sha256:02

# -- build --
delta==4.0 \\
    --hash=sha256:03

# -- tests --
"""


@pytest.fixture
def containerfile(tmp_path: Path) -> Containerfile:
    """Write a file with every instruction that kvplace's own have."""
    (tmp_path / "Containerfile").write_text(TEXT)
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS)
    return Containerfile.read(tmp_path / "Containerfile")


def test_the_last_stage_gives_the_command_of_a_container(containerfile: Containerfile) -> None:
    found = containerfile.configuration()
    assert (found.entrypoint, found.command) == (("program",), ("serve", "now"))
    assert found.environment["PATH"].startswith("/opt/kvplace/bin:/usr/local/bin:")
    assert found.environment["DEBUG"] == "1"
    assert (found.user, found.ports) == ("107:107", ("8443", "8081"))
    assert found.labels == {"org.title": "a program", "org.licenses": "Apache-2.0"}


def test_files_of_the_project_are_distinguished_from_files_of_another_stage(
    containerfile: Containerfile,
) -> None:
    assert containerfile.copies(of_last_stage=True) == [Copy(("hooks/program", "other"), "/usr/local/bin/")]
    assert containerfile.copies(of_last_stage=False) == [
        Copy(("constraints.txt",), "./"),
        Copy(("kvplace/core",), "/opt/kvplace/kvplace/core"),
    ]


def test_pins_are_those_installed_into_the_image_that_hold_for_this_python(
    containerfile: Containerfile, tmp_path: Path
) -> None:
    assert list(map(str, containerfile.pins(tmp_path / "constraints.txt"))) == ["alpha==1.0"]
    assert not containerfile.installs_kvplace_itself()


def test_a_file_that_installs_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text("FROM scratch\nRUN true\n")
    with pytest.raises(ValueError, match="installs no pins"):
        Containerfile.read(tmp_path / "Containerfile").pins(tmp_path / "constraints.txt")


def test_the_image_has_the_debian_packages_that_its_own_stage_installs(containerfile: Containerfile) -> None:
    assert containerfile.debian_packages() == ["libc-bin", "libvirt0"]


PROJECT = Path(__file__).resolve().parents[2]
OWN = ["images/serve/Containerfile", "images/agent/Containerfile", "hooks/Containerfile"]
SOURCES = """\
Types: deb
# http://snapshot.debian.org/archive/debian/20261103T000000Z
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
# http://snapshot.debian.org/archive/debian-security/20261103T000000Z
URIs: http://mirror.example/debian-security
Suites: trixie-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
"""`debian.sources` of Debian's official images, the bases of python:3.13-slim."""


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a RUN instruction in an environment of the given variables only."""
    return subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("file", OWN)
def test_an_image_is_built_on_a_base_that_is_named_by_its_digest_only(file: str) -> None:
    instructions = Containerfile.read(PROJECT / file).instructions
    bases = [found.arguments.partition(" AS ") for found in instructions if found.word == "FROM"]
    named = {name for _, _, name in bases}
    assert {base for base, _, _ in bases if base not in named} == {"${BASE}"}
    assert "BASE" in [found.arguments for found in instructions if found.word == "ARG"], "a base by default"
    (check,) = [found.arguments for found in instructions if "@sha256:" in found.arguments]
    for base, code in (("python@sha256:ab", 0), ("python:3.13-slim", 1), ("", 1)):
        done = shell(check, BASE=base)
        assert (done.returncode, "must name an image by its digest" in done.stderr) == (code, bool(code))


def snapshot_step(file: str) -> str:
    """Return the command that has apt install from a snapshot, which stands before every installation."""
    instructions = Containerfile.read(PROJECT / file).instructions
    (at,) = [n for n, found in enumerate(instructions) if "snapshot" in found.arguments]
    stages = [found.arguments.split() for found in instructions if found.word == "FROM"]
    name = stages[instructions[at].stage][-1]
    for number, found in enumerate(instructions):
        if "apt-get" in found.arguments:
            assert number > at
            assert found.stage == instructions[at].stage or stages[found.stage][0] == name
    return instructions[at].arguments


def test_only_images_whose_debian_packages_are_pinned_install_any() -> None:
    installing = [file for file in OWN if "apt-get" in (PROJECT / file).read_text()]
    assert installing == ["images/serve/Containerfile", "images/agent/Containerfile"]
    assert len({snapshot_step(file) for file in installing}) == 1


def test_debian_packages_come_from_the_snapshot_that_the_base_was_made_of(tmp_path: Path) -> None:
    parts, lists = tmp_path / "sources", tmp_path / "lists" / "partial"
    parts.mkdir()
    lists.mkdir(parents=True)
    sources = parts / "debian.sources"
    sources.write_text(SOURCES)
    step = snapshot_step("images/agent/Containerfile").replace("/etc/apt/sources.list.d", str(parts))
    assert shell(step).stderr == ""
    assert re.findall("^Check-Valid-Until: .*", sources.read_text(), re.MULTILINE) == [
        "Check-Valid-Until: no",
        "Check-Valid-Until: no",
    ]
    if not shutil.which("apt-get"):
        pytest.skip("apt-get reads the sources, and is only on Debian")
    asked = shell(
        "apt-get update --print-uris -o Dir::Etc::sourcelist=/dev/null"
        f" -o Dir::Etc::sourceparts={parts} -o Dir::State::lists={lists.parent}"
    )
    assert asked.stderr == ""
    fetched = re.findall(r"^'(\S+)/dists/\S+/InRelease'", asked.stdout, re.MULTILINE)
    assert sorted(set(fetched)) == [
        "http://snapshot.debian.org/archive/debian-security/20261103T000000Z",
        "http://snapshot.debian.org/archive/debian/20261103T000000Z",
    ]
    assert "mirror.example" not in asked.stdout


@pytest.mark.parametrize(
    "unknown", ["# http://snapshot.debian.org/archive/debian-security", "# http://snapshot"]
)
def test_a_base_that_names_no_snapshot_for_an_archive_is_refused(unknown: str, tmp_path: Path) -> None:
    sources = tmp_path / "debian.sources"
    sources.write_text(SOURCES.replace(unknown, "# unknown"))
    step = snapshot_step("images/serve/Containerfile").replace("/etc/apt/sources.list.d", str(tmp_path))
    done = shell(step, BASE="python@sha256:ab")
    assert done.returncode == 1
    assert "debian.sources of python@sha256:ab does not name a snapshot of each archive" in done.stderr
