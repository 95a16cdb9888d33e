"""Runs the blocks of docs/install.md one after the other, and keeps their output and time.

Every block of commands is run as it is written: in the checkout, or on every node where the page requires it.
There are four differences. Blocks in `ELSEWHERE` need something that this machine does not have. The node's
name replaces `worker-1`. The operator's folder lists one more component. The template's VM has the size of
this machine (`fit_this_machine`).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.install_page.page import Block, read_blocks

ELSEWHERE: Mapping[str, str] = {
    "for image in serve hook agent; do\n    skopeo": "a registry; tests/release runs one",
    "helm ": "the chart of a release; tests/release runs Helm",
    "kubectl kvplace describe-node": "a node without an agent; tests/real_node/test_describe_node.py runs it",
    "kubectl annotate node worker-1": "a node without an agent; tests/real_node/test_migration.py has one",
    "kubectl delete noderesourcetopologies": "the community's kind; tests/manifests installs it",
}
"""The things that a block needs and that are not here, by the beginning of the block."""
ON_EVERY_NODE = "for image in serve hook agent; do\n    ctr "
GATE_MADE = "--type=merge"
"""In the line that makes a list of feature gates where there is none."""
FOLDER = "my-cluster"


@dataclass(frozen=True, slots=True)
class Step:
    """A block that has been run."""

    section: str
    command: str
    """Its first line."""
    text: str
    """The whole block, as it stands on the page."""
    seconds: float
    printed: str


class CommandOfThePageFailed(Exception):
    """A block ended with an error; the message has the block and its output."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Follows the page with a shell that can reach real nodes."""

    shell: str
    """The lines that `./make node --without-kvplace` printed."""
    environment: Mapping[str, str]
    node: str
    """The name of the one node, which is a command as well."""
    component: Path
    """The programs that these nodes need besides."""

    def follow(self, checkout: Path, *sections: str) -> Iterator[Step]:
        """Run the blocks of sections of the checkout's page, one for each `next`.

        Raises `CommandOfThePageFailed`.
        """
        printed = ""
        for block in read_blocks(checkout, "docs/install.md"):
            if not block.section.startswith(sections):
                continue
            if "kind: Kustomization" in block.text and not (checkout / FOLDER).exists():
                self._write_folder(checkout, block.text)
            if not block.language and not block.text.startswith(tuple(ELSEWHERE)):
                step = self._follow(checkout, block, printed)
                printed = step.printed
                yield step

    def run(self, checkout: Path, script: str, stdin: Path | None = None) -> str:
        """Run a script in a checkout and return its output."""
        with (stdin or Path("/dev/null")).open("rb") as given:
            done = subprocess.run(
                ["sh", "-ec", f"{self.shell}{script}"],
                cwd=checkout,
                env=dict(self.environment),
                stdin=given,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            raise CommandOfThePageFailed(f"{script}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _follow(self, checkout: Path, block: Block, printed_before: str) -> Step:
        script = block.text.replace("worker-1", self.node)
        if GATE_MADE in script:  # one line for each answer to the question before
            script = next(
                line for line in script.splitlines() if (GATE_MADE in line) == (printed_before == "")
            )
        began = time.monotonic()
        if script.startswith(ON_EVERY_NODE):
            printed = self._on_the_node(checkout, script)
        else:
            printed = self.run(checkout, script)
        command = script.strip().partition("\n")[0]
        return Step(block.section, command, block.text, time.monotonic() - began, printed)

    def _write_folder(self, checkout: Path, kustomization: str) -> None:
        (checkout / FOLDER).mkdir()
        text = f"{kustomization}components: [../{self.component.name}]\n"
        (checkout / FOLDER / "kustomization.yaml").write_text(text)
        shutil.copytree(self.component, checkout / self.component.name)

    def _on_the_node(self, checkout: Path, block: str) -> str:
        """Copy the archives of the images to the node and run the block beside them."""
        (built,) = (checkout / "dist").iterdir()
        folder = f"/var/tmp/kvplace-{built.name}"
        self.run(checkout, f"{self.node} mkdir -p {folder}")
        for archive in sorted(built.glob("*.oci.tar")):
            copy = shlex.quote(f"cat > {folder}/{archive.name}")
            self.run(checkout, f"{self.node} sh -ec {copy}", archive)
        return self.run(checkout, f"{self.node} sh -ec {shlex.quote(f'cd {folder}; {block}')}")


def fit_this_machine(checkout: Path) -> None:
    """Give the VM of the page's template one vCPU and little memory; its idle guest cannot shut down."""
    template = checkout / "vm-templates" / "web-server.yaml"
    vm = yaml.safe_load(template.read_text())
    spec = vm["spec"]["template"]["spec"]
    spec["domain"]["cpu"]["cores"] = 1
    spec["domain"]["memory"]["guest"] = "64Mi"
    spec["terminationGracePeriodSeconds"] = 0
    template.write_text(yaml.safe_dump(vm))
