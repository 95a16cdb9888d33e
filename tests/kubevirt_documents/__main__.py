"""Makes the documents again, with the KubeVirt that the tests build."""

from __future__ import annotations

from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from tests.kubevirt_documents import DOMAINS, domains


def main() -> None:
    launcher_side = LauncherSide(built(KUBEVIRT))
    for name in domains.NAMES:
        documents = domains.made(name, launcher_side)
        (DOMAINS / f"{name}.vmi.json").write_text(documents.vmi, encoding="utf-8")
        (DOMAINS / f"{name}.domain.xml").write_text(documents.domain, encoding="utf-8")


if __name__ == "__main__":
    main()
