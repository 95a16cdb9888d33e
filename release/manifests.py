"""The manifests of a release: those of the project, with images named by repository and digest.

They are text that people read, so only the lines change that name an image.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from release.images import ReleasedImage

PROJECT = Path(__file__).resolve().parent.parent
MANIFESTS = PROJECT / "manifests"
_PRIVATE = shutil.ignore_patterns("certificates")


class ImageNotNamed(Exception):
    """The manifests do not name an image as a release expects them to."""


def copy_manifests(folder: Path, images: Iterable[ReleasedImage]) -> None:
    """Copy the manifests into a new folder and let them name the images of a release."""
    shutil.copytree(MANIFESTS, folder, ignore=_PRIVATE)
    for image in images:
        written = [_name_image(path, image) for path in sorted(folder.rglob("*")) if path.is_file()]
        if not any(written):
            raise ImageNotNamed(f"no file below {MANIFESTS} names kvplace/{image.name} with its tag")


def _name_image(path: Path, image: ReleasedImage) -> bool:
    text = path.read_text()
    tagged = re.escape(f"kvplace/{image.name}")
    # In a kustomization, and where a setting names the image as a whole.
    entry = rf"^(?P<indent> *)- name: {tagged}\n +newTag: \S+$"
    changed = re.sub(
        entry,
        lambda found: (
            f"{found['indent']}- name: kvplace/{image.name}\n"
            f"{found['indent']}  newName: {image.repository}\n"
            f"{found['indent']}  digest: {image.digest}"
        ),
        text,
        flags=re.MULTILINE,
    )
    changed = re.sub(
        rf"(?<==){tagged}:\S+$", f"{image.repository}@{image.digest}", changed, flags=re.MULTILINE
    )
    if changed == text:
        return False
    path.write_text(changed)
    return True
