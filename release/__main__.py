"""`python -m release [VERSION]`: everything of a release in one folder, each file with its SHA-256 digest."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from harness.build_cache import BuildFailed
from harness.control_plane.programs import KUBERNETES
from harness.go_build import built
from harness.node_programs.image import layers_of
from harness.node_programs.kvplace_images import serve_image_with_client
from kvplace import __version__
from release.archives import write_tar_gz
from release.chart import write_chart
from release.checksums import UnusableKey, read_key, sign, write_checksums
from release.images import ReleasedImage, build_images
from release.manifests import ImageNotNamed, copy_manifests
from release.plugin import krew_manifest, write_plugin
from release.source_date import source_date

PROJECT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a release, or its images alone, and print the images and the folder; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.url is None and not options.images_only:
        parser.error("--url is required: the krew manifest names the address of the released files")
    if options.version not in (None, __version__):
        print(
            f"release: this checkout is version {__version__}, not {options.version}: set __version__ in "
            f"kvplace/__init__.py and the tags in manifests/ first (tests/manifests states which)",
            file=sys.stderr,
        )
        return 2
    folder: Path = options.folder or PROJECT / "dist" / __version__
    try:
        key = read_key(options.key) if options.key else None
        if options.images_only:
            images = build_images(folder, options.registry, __version__, source_date(PROJECT))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            images = _release(folder, options.registry, options.url, source_date(PROJECT))
        checksums = write_checksums(folder)
        if key is not None:
            sign(checksums, key)
    except (BuildFailed, UnusableKey, ImageNotNamed) as failed:
        print(f"release: {failed}", file=sys.stderr)
        return 1
    for image in images:
        print(f"{image.repository}:{image.tag}  {image.digest}  {image.size / 1e6:.1f} MB")
    print(folder)
    return 0


def _release(folder: Path, registry: str, url: str, date: datetime) -> list[ReleasedImage]:
    folder.mkdir(parents=True)
    _build_distributions(folder, date)
    images = build_images(folder, registry, __version__, date)
    with tempfile.TemporaryDirectory(prefix="kvplace-release-") as name:
        scratch = Path(name)
        copy_manifests(scratch / "manifests", images)
        _write_chart(folder / f"kvplace-chart-{__version__}.tgz", images, scratch, date)
        write_tar_gz(
            folder / f"kvplace-manifests-{__version__}.tar.gz", scratch / "manifests", "manifests", date
        )
        plugin = folder / f"kubectl-kvplace-{__version__}-linux-amd64.tar.gz"
        write_plugin(plugin, layers_of(serve_image_with_client()), scratch, date)
    digest = write_checksums(folder).read_text().partition(f"  {plugin.name}")[0].splitlines()[-1]
    manifest = krew_manifest(__version__, url, plugin, digest)
    (folder / "kvplace.krew.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    return images


def _write_chart(target: Path, images: list[ReleasedImage], scratch: Path, date: datetime) -> None:
    kubectl = scratch / "kubectl"
    kubectl.symlink_to(built(KUBERNETES) / "kubernetes")

    def render(folder: Path) -> list[dict[str, Any]]:
        answer = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True)
        return [document for document in yaml.safe_load_all(answer.stdout) if document]

    copy_manifests(scratch / "for-the-chart", images)
    chart = scratch / "chart"
    write_chart(chart, __version__, images, render, scratch / "for-the-chart")
    write_tar_gz(target, chart, "kvplace", date)


def _build_distributions(folder: Path, date: datetime) -> None:
    """Build wheel and source archive with the pinned tools of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    environment = {"SOURCE_DATE_EPOCH": str(int(date.timestamp()))}
    answer = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise BuildFailed(f"hatchling made no wheel:\n{answer.stderr.strip()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./make release",
        description="Make wheel, source archive, images, manifests, chart and kubectl plugin, with digests.",
    )
    parser.add_argument("version", nargs="?", help=f"must be that of this checkout: {__version__}")
    parser.add_argument(
        "--registry",
        default="docker.io/kvplace",
        metavar="PREFIX",
        help="what stands in front of the images' names (default: %(default)s)",
    )
    parser.add_argument(
        "--url",
        help="address of the folder with the released files; required unless --images-only",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="ECDSA key in PEM that signs SHA256SUMS")
    parser.add_argument("--folder", type=Path, help=f"default: dist/{__version__}")
    parser.add_argument("--images-only", action="store_true", help="only the images and their software lists")
    return parser


if __name__ == "__main__":
    sys.exit(main())
