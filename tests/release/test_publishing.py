"""Publishing as the page describes it: images in a registry, and the plugin as krew installs it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.control_plane.programs import folder_with_kubectl
from harness.control_plane.registry import running_registry
from harness.node_programs.programs import system_program
from kvplace import __version__
from release.images import IMAGES
from tests.docs.blocks import block, command_lines

# The first test waits for the release to be made.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def registry(publishing_programs: Path, tmp_path: Path) -> Iterator[str]:
    with skipped_if_not_installed():
        system_program("skopeo", package="skopeo")
    with running_registry(publishing_programs, tmp_path) as address:
        yield address


def run(
    *command: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_images_that_are_pushed_by_the_page_are_pulled_by_the_digests_that_were_printed(
    registry: str, publishing_programs: Path, released: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    assert digests.keys() == IMAGES.keys()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / __version__).symlink_to(released)
    # The registry of this test has no certificate; those of the page's readers have.
    configuration = tmp_path / ".config" / "containers" / "registries.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')

    pushing = block("docs/install.md", "for image in serve hook agent; do\n    skopeo")
    pushing = pushing.replace("registry.example", registry)
    run("sh", "-ec", pushing, folder=tmp_path, environment={"HOME": str(tmp_path)})

    crane = publishing_programs / "crane"
    for name, digest in digests.items():
        image = f"{registry}/kvplace/{name}"
        assert run(crane, "digest", f"{image}:{__version__}").strip() == digest
        run(crane, "validate", "--remote", f"{image}@{digest}")


def test_krew_accepts_the_manifest_and_installs_the_plugin_by_the_command_of_the_page(
    publishing_programs: Path, kubernetes_programs: Path, released: Path, tmp_path: Path
) -> None:
    in_krews_index = tmp_path / "kvplace.yaml"
    in_krews_index.symlink_to(released / "kvplace.krew.yaml")
    run(publishing_programs / "validate-krew-manifest", "-skip-install", f"-manifest={in_krews_index}")

    programs = folder_with_kubectl(kubernetes_programs, tmp_path)
    (programs / "kubectl-krew").symlink_to(publishing_programs / "krew")
    root = tmp_path / "krew"
    path = f"{root}/bin:{programs}:/usr/bin:/bin"
    environment = {"KREW_ROOT": str(root), "PATH": path, "HOME": str(tmp_path)}
    (command,) = command_lines(block("docs/releasing.md", "kubectl krew install"))
    run(*shlex.split(command), folder=released, environment=environment)
    assert run("kubectl", "kvplace", "--version", environment=environment) == f"kvplace {__version__}\n"
