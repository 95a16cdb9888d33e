"""The software in a container image, as a CycloneDX document (SBOM), read from the image's own files.

Python distributions name themselves in their metadata; a shared library is found in the package database
of this machine, which it was copied from. Equal images give equal documents.
"""

from __future__ import annotations

import email
import platform
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA$")
_LIBRARY = re.compile(r"^usr/lib/.*\.so(\.\d+)*$")
_EXPRESSION = re.compile(r"^[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*$")


def software_list(name: str, version: str, digest: str, layers: Iterable[Path], created: datetime) -> str:
    """Write the document of an image with these uncompressed layers."""
    component = Component(
        type=ComponentType.CONTAINER,
        name=name,
        version=version,
        bom_ref=f"{name}@{digest}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
    )
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"{name}@{digest}"))
    bom.metadata.timestamp = created
    bom.metadata.component = component
    for found in _components(layers):
        bom.components.add(found)
    bom.register_dependency(component, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _components(layers: Iterable[Path]) -> Iterator[Component]:
    libraries: set[str] = set()
    for layer in layers:
        with tarfile.open(layer) as files:
            for member in files:
                if _METADATA.search(member.name) and (content := files.extractfile(member)):
                    yield _distribution(content.read().decode(errors="replace"))
                elif _LIBRARY.match(member.name):
                    libraries.add(f"/{member.name}")
                elif re.fullmatch(r"usr/local/bin/python3\.\d+", member.name):
                    yield _component("generic", "python", platform.python_version(), "PSF-2.0")
    for package, version in sorted(_debian_packages(libraries)):
        yield _component("deb", package, version, "", namespace="debian")


def _distribution(metadata: str) -> Component:
    found = email.message_from_string(metadata)
    stated = found["License-Expression"] or found["License"] or ""
    return _component("pypi", found["Name"], found["Version"], stated.strip())


def _component(kind: str, name: str, version: str, stated: str, *, namespace: str = "") -> Component:
    url = PackageURL(type=kind, namespace=namespace or None, name=name, version=version)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=url.to_string(),
        purl=url,
        licenses=[_license(stated)] if stated else None,
    )


def _license(stated: str) -> DisjunctiveLicense | LicenseExpression:
    if _EXPRESSION.match(stated):
        return LicenseExpression(stated)
    return DisjunctiveLicense(name=stated.splitlines()[0][:200])


def _debian_packages(libraries: Iterable[str]) -> set[tuple[str, str]]:
    """Return package and version of every library that a package of this machine holds."""
    # Packages name a library by the path that they were built with: with or without the /usr in front.
    paths = [name for library in libraries for name in (library, library.removeprefix("/usr"))]
    if not paths:
        return set()
    owners = _dpkg("-S", *sorted(paths))
    packages = {line.partition(": ")[0] for line in owners.splitlines() if ": " in line}
    listed = _dpkg("-W", "-f=${Package} ${Version}\n", *sorted(packages)) if packages else ""
    return {(name, version) for name, _, version in (line.partition(" ") for line in listed.splitlines())}


def _dpkg(*arguments: str) -> str:
    command = ["dpkg-query", *arguments]
    # Half of the paths belong to no package, which makes the exit code 1.
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
