"""Makes the documents again, with the KubeVirt that the tests build."""

from __future__ import annotations

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from tests.kubevirt_documents import DOMAINS, PODS, domains, pods

NAMESPACE = "documents-of-kubevirt"


def main() -> None:
    programs = built(KUBEVIRT)
    launcher_side = LauncherSide(programs)
    for name in domains.NAMES:
        documents = domains.made(name, launcher_side)
        (DOMAINS / f"{name}.vmi.json").write_text(documents.vmi, encoding="utf-8")
        (DOMAINS / f"{name}.domain.xml").write_text(documents.domain, encoding="utf-8")
    with ControlPlane() as plane:
        plane.create_namespace(NAMESPACE)
        with KubeVirt(plane, programs) as kubevirt:
            for name, text in pods.made(kubevirt, NAMESPACE).items():
                (PODS / f"virt-launcher-{name}.pod.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
