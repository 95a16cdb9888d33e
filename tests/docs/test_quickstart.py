"""The quick start: what varies between machines is not compared, and what it repeats is repeated exactly."""

from __future__ import annotations

import pytest

from harness.install_page.page import Block
from harness.install_page.quickstart import CONSOLE, commands_and_output, masked
from tests.docs.blocks import blocks

REPEATED = [one for one in blocks("docs/quickstart.md") if one.language != CONSOLE]


def test_files_and_scripts_are_those_of_the_installation_page() -> None:
    assert len(REPEATED) == 2
    assert {one.text for one in REPEATED} <= {one.text for one in blocks("docs/install.md")}


def test_a_transcript_has_commands_and_what_they_print() -> None:
    text = "$ kubectl get nodes\nNAME\n...\n\n$ date\n"
    assert commands_and_output(Block("", 1, "", CONSOLE, text)) == ("kubectl get nodes\ndate\n", ["NAME"])


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("kvplace/hook:0.1.0  sha256:97a0e  17.4 MB", "kvplace/hook:0.0.9 sha256:af03b  9.0 MB"),
        ("worker-1   128    0   True    11s", "worker-1 2 1 True 1m3s"),
        ('{"socket0":["1","65","2","66"]}', '{"socket0":["1"]}'),
        ("web   Pinned   1-2,65-66   0   7s", "web   Pinned   1   0   12s"),
        ("pod/virt-launcher-web-server-867w6 met", "pod/virt-launcher-web-server-abcde met"),
    ],
)
def test_what_machines_decide_is_not_compared(shown: str, printed: str) -> None:
    assert masked(shown) == masked(printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("web   Pinned   1-2   7s", "web   NotPinned   1-2   7s"),
        ("worker-1   128   True   11s", "worker-1   128   False   11s"),
        ("pod/virt-launcher-web-server-867w6 met", "pod/virt-launcher-database-867w6 met"),
    ],
)
def test_every_other_difference_counts(shown: str, printed: str) -> None:
    assert masked(shown) != masked(printed)
