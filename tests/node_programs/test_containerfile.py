"""Containerfiles, read as far as the images of tests follow them."""

from __future__ import annotations

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


def test_the_last_stage_states_what_a_container_runs(containerfile: Containerfile) -> None:
    found = containerfile.configuration()
    assert (found.entrypoint, found.command) == (("program",), ("serve", "now"))
    assert found.environment["PATH"].startswith("/opt/kvplace/bin:/usr/local/bin:")
    assert found.environment["DEBUG"] == "1"
    assert (found.user, found.ports) == ("107:107", ("8443", "8081"))
    assert found.labels == {"org.title": "a program", "org.licenses": "Apache-2.0"}


def test_what_comes_from_the_project_is_distinguished_from_what_comes_from_another_stage(
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


def test_of_debian_the_image_has_what_its_own_stage_installs(containerfile: Containerfile) -> None:
    assert containerfile.debian_packages() == ["libc-bin", "libvirt0"]
