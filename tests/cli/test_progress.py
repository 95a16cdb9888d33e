"""Long commands state how far they are, and Ctrl-C ends them with what they have found so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvplace.core.cpuset import parse_cpu_list
from tests.cli.calls import COMMAND, Called
from tests.cli.terminal import Terminal

LONG = {
    "plan": ("plan", "--cluster", "cluster.json", "--requests", "vms.jsonl", "-o", "json"),
    "simulate": ("simulate", "--scenario", "scenario.json", "-o", "json"),
    "demo": ("demo", "--vms", "20000", "--nodes", "200", "-o", "json"),
}
CLUSTER = {"nodes": [{"name": "worker", "count": 300, "machine": "2x-epyc-9354-nps2"}]}
VMS = [
    {"id": cpu_set, "vcpus": vcpus, "cpuSet": cpu_set, "memory": "8Gi", "count": 3000}
    for vcpus, cpu_set in ((4, "one-l3"), (8, "one-numa"), (2, "any"), (6, "one-socket"))
]
MIX = [{"request": {"vcpus": vcpus, "cpuSet": "one-numa"}} for vcpus in range(1, 9)]
SNC4 = "2x-xeon-8480plus-snc4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with documents that keep the commands busy for minutes."""
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "vms.jsonl").write_text("".join(json.dumps(vms) + "\n" for vms in VMS))
    scenario = CLUSTER | {"mix": MIX, "requests": 1_000_000, "load": 0.9}
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    return tmp_path


def interrupted(arguments: tuple[str, ...], folder: Path, stdin: str = os.devnull) -> tuple[str, Called]:
    """Start a command, interrupt it at its first report of progress, and return that report."""
    with (
        (folder / stdin).open("rb") as lines,
        subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=lines,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        ) as process,
    ):
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    return first, Called(process.returncode, out, err)


@pytest.mark.parametrize("name", LONG)
def test_a_long_command_states_how_far_it_is_and_ctrl_c_gives_the_answer_so_far(
    folder: Path, name: str
) -> None:
    first, called = interrupted(LONG[name], folder)
    assert first.startswith("kvplace: ")
    assert " VMs\n" in first
    assert called.code == 130
    assert "kvplace: interrupted; the answer so far follows" in called.err
    assert "Traceback" not in called.err
    document = json.loads(called.out)
    assert document["interrupted"]
    if name == "plan":
        answered = len(document["placed"]) + len(document["undecided"])
        assert answered + sum(len(group["ids"]) for group in document["refused"]) == 12_000
        assert document["summary"]["wanted"]["vms"] == 12_000
    elif name == "simulate":
        (run,) = document["runs"]
        assert run["complete"] is False
        assert 0 < run["arrived"] < 1_000_000
    else:
        assert 0 < document["placed"] < 20_000


def test_a_partial_plan_is_marked_in_the_table_too(folder: Path) -> None:
    _, called = interrupted(LONG["plan"][:-2], folder)
    assert called.code == 130
    assert "\ninterrupted the search was interrupted; a longer one may place more VMs\n" in called.out


CROWD = (
    "43-47,155-158", "48-50,159-162", "29-30,141", "57-59,169-170", "31-41,51-54,143-153,163-166",
    "99-101,211-212",
    "60-69,102-106,172-181,214-218", "15-17,127-128", "18-20,129-132", "21-24,133-135", "1-5,113-116",
    "25-26,136-138",
    "107,213,219",
)  # fmt: skip
"""VMs beside which the search for two moves takes more than three million steps."""


def test_ctrl_c_ends_a_thorough_search_for_moves_with_the_best_ones_so_far(folder: Path) -> None:
    crowd = [
        {"id": f"vm-{number}", "vcpus": parse_cpu_list(cpus).bit_count(), "cpuSet": "any", "free": cpus}
        for number, cpus in enumerate(CROWD)
    ]
    wide = {"id": "wide", "vcpus": 80, "cpuSet": "any"}
    lines = (*crowd, wide, {"id": "next", "vcpus": 1})
    (folder / "crowd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("place", "--topology", SNC4, "--keep", "--make-room", "--thorough")
    first, called = interrupted((*command, "-o", "json"), folder, "crowd.jsonl")
    assert first.startswith("kvplace: searching for moves: ")
    assert first.endswith(" of 200 million steps\n")
    assert "kvplace: interrupted; the answer so far follows" in called.err
    assert called.code == 130
    *answers, last = (json.loads(line) for line in called.out.splitlines())
    assert len(answers) == len(CROWD)
    assert not any("interrupted" in answer for answer in answers)
    assert (
        last["interrupted"] == "the search for moves was interrupted; a longer search may find better moves"
    )
    assert last["id"] == "wide"
    assert len(last["placement"]["vcpus"]) == 80


def test_on_a_terminal_there_is_a_bar_and_it_is_gone_at_the_end(folder: Path) -> None:
    command = [*COMMAND, "demo", "--vms", "20000", "--nodes", "100"]
    with Terminal(command, {"NO_COLOR": "1"}) as terminal:
        terminal.read_until("/20000")
        terminal.interrupt()
        terminal.read_until("interrupted; the answer so far follows")
        terminal.read_until("VMs not tried")


def test_a_quick_command_states_nothing(folder: Path) -> None:
    (folder / "one.jsonl").write_text('{"vcpus": 2}\n')
    done = subprocess.run(
        [*COMMAND, "plan", "--requests", "one.jsonl"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_who_ignores_ctrl_c_goes_on_to_ignore_it(folder: Path) -> None:
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *COMMAND]
    with subprocess.Popen(
        [*ignoring, *LONG["simulate"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ,
    ) as process:
        assert process.stderr is not None
        assert "simulating" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "simulating" in process.stderr.readline()
        process.kill()
