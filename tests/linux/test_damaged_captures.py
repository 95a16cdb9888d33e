"""A recorded machine with damaged files is read as far as it can be, or refused by the name of a file."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadTopology
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree
from tests.captured import captured_folder
from tests.core.invalid_input import answer_or_sentence
from tests.linux.written_tree import WrittenTree

NAMES = (
    *("lscpu/vmware_fpe.tar.gz", "lscpu/s390-nested-virt.tar.gz", "lscpu/vbox-win.tar.gz"),
    *("hwloc/16em64t-4s2c2t-offlines.tar.bz2", "hwloc/fakeheteromemtiers.tar.bz2"),
)
JUNK = st.sampled_from(
    [
        "",
        "\n",
        "\0\0",
        "-1\n",
        "4294967295\n",
        "0-\n",
        "9-3\n",
        "0-70000\n",
        "0,0,0\n",
        "\ufffd\ufffd",
        "f" * 99,
    ]
)


@cache
def recorded(name: str) -> dict[str, str]:
    """All files that we read of a captured machine."""
    tree = open_tree(captured_folder("topologies") / name)
    files: dict[str, str] = {}
    folders = ["sys/devices/system/cpu", "sys/devices/system/node"]
    while folders:
        folder = folders.pop()
        for entry in tree.entries(folder):
            text = tree.read(f"{folder}/{entry}")
            if text is None:
                folders.append(f"{folder}/{entry}")
            else:
                files[f"{folder}/{entry}"] = text
    return files


@given(st.data())
def test_damaged_files_are_read_around_or_named(data: st.DataObject) -> None:
    tree = WrittenTree(dict(recorded(data.draw(st.sampled_from(NAMES)))))
    paths = sorted(path for path in tree.files if "/cache/" not in path or path.endswith(("map", "list")))
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=5, unique=True)):
        text = tree.files[path]
        change = data.draw(st.sampled_from(["drop", "cut", "junk", "swap"]))
        if change == "drop":
            del tree.files[path]
        elif change == "cut":
            tree.files[path] = text[: data.draw(st.integers(0, len(text)))]
        elif change == "swap":
            tree.files[path] = tree.files.get(data.draw(st.sampled_from(paths)), text)
        else:
            tree.files[path] = data.draw(JUNK)
    found, said = answer_or_sentence(discover, tree, BadTopology)
    assert found is not None or said.startswith("written machine: ")
