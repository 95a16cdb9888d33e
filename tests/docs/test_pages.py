"""The pages agree with the code: what there is stands there, and nothing else does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from click import Command

from dev.__main__ import TARGETS
from kvplace import __version__
from kvplace.admission.objects import AdmissionSettings
from kvplace.agent.conditions import PinnedReason, TopologyCondition, TopologyReason
from kvplace.cli.agent_command import command as agent_command
from kvplace.cli.main import COMMANDS
from kvplace.cli.serve_command import certificates as certificates_command
from kvplace.cli.serve_command import command as serve_command
from kvplace.core import well_known_names as keys
from kvplace.core.annotations import CONTRADICTIONS
from kvplace.core.errors import ExitCode
from kvplace.core.placement import Reason
from kvplace.core.request import PinningOptions
from kvplace.doctor.cluster_checks import OLDEST_KUBERNETES, OLDEST_KUBEVIRT
from kvplace.kube.events import EventReason
from tests.docs.reading import PAGES, PROJECT, SOURCES, WORDS, first_cells, in_code_marks, page, section


@pytest.mark.parametrize("key", [*keys.ASKING, *keys.RESULTS])
def test_every_annotation_is_explained(key: str) -> None:
    assert key in in_code_marks(page("annotations.md"))


"""Field of `PinningOptions` by the key that sets it."""


@pytest.mark.parametrize("key", WORDS)
def test_every_value_is_explained_and_the_first_is_the_default(key: str) -> None:
    default = getattr(PinningOptions(), WORDS[key])
    below = section(section(page("annotations.md"), "Values of each annotation"), f"`{key}`")
    assert first_cells(below) == {member.value for member in type(default)}
    first = re.search(r"^\| `([^`]+)`", below, re.MULTILINE)
    assert first is not None
    assert first[1] == default.value


def test_words_that_exclude_each_other_are_listed_and_no_others() -> None:
    key_of = {type(getattr(PinningOptions(), field)): key for key, field in WORDS.items()}
    excluded = {
        tuple(f"{key_of[type(word)]}: {word.value}" for word in (found.word, found.other))
        for found in CONTRADICTIONS
    }
    rows = section(page("annotations.md"), "Values that exclude each other").splitlines()
    listed = {
        (one, other)
        for line in rows
        if line.startswith("| `")
        for one in in_code_marks(line.split("|")[1])
        for other in in_code_marks(line.split("|")[2])
    }
    assert listed == excluded


def test_every_reason_of_a_refusal_is_explained() -> None:
    reasons = {reason.value for reason in Reason}
    assert first_cells(section(page("troubleshoot.md"), "The reasons, one by one")) == reasons
    assert in_code_marks(section(page("reference/objects.md"), "Reasons of a refusal")) == reasons


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([a-z ]+) \|", section(page("reference/cli.md"), "Exit codes"), re.MULTILINE
    )
    assert {int(code): name for code, name in rows} == {
        code.value: code.name.lower().replace("_", " ") for code in ExitCode
    }


def test_every_command_is_listed() -> None:
    named = section(page("reference/cli.md"), "Commands").partition("\n### ")[0]
    listed = first_cells(named)
    assert {f"kvplace {name}" for name in COMMANDS} == listed


@pytest.mark.parametrize(
    "command",
    [agent_command, certificates_command, serve_command],
    ids=["agent", "certificates", "serve"],
)
def test_every_flag_of_a_process_is_listed_with_its_default(command: Command) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in section(page("reference/configuration.md"), f"`kvplace {command.name}`").splitlines()
        if line.startswith("| `--")
    ]
    listed = {flag: default for flags, default in rows for flag in in_code_marks(flags)}
    for option in command.params:
        (flag,) = (name for name in option.opts if name.startswith("--"))
        default = listed.pop(flag)
        if getattr(option, "required", False):
            assert default == "required"
        elif isinstance(option.default, str | int) and not isinstance(option.default, bool):
            assert default == f"`{option.default}`"
    assert listed == {}


def test_the_schedulers_default_name_is_in_the_reference() -> None:
    assert AdmissionSettings("").scheduler_name in page("reference/configuration.md")


def test_every_reason_of_a_condition_of_the_nodetopology_is_listed() -> None:
    below = section(page("agent.md"), "Conditions of the NodeTopology")
    named = {word for word in in_code_marks(below) if re.fullmatch(r"[A-Z]\w+", word)}
    assert named - {"AllowedCPUs"} == {*TopologyCondition, *TopologyReason}


def test_every_reason_of_the_condition_pinned_has_an_action() -> None:
    listed = first_cells(section(page("troubleshoot.md"), "Reasons of the condition Pinned"))
    assert listed == set(PinnedReason) - {PinnedReason.AS_PLACED}


def test_every_event_is_listed() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section(page("reference/objects.md"), "Events").splitlines()
        if line.startswith("| `")
    ]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (f"`{reason.value}`", reason.type, f"`{reason.action}`") for reason in EventReason
    ]


def test_every_event_has_an_action() -> None:
    listed = first_cells(section(page("troubleshoot.md"), "Events of kvplace"))
    assert listed == {reason.value for reason in EventReason}


def test_every_metric_is_listed() -> None:
    named = {name for source in SOURCES for name in re.findall(r'"(kvplace_[a-z_]+)"', source.read_text())}
    assert first_cells(section(page("reference/metrics.md"), "Metrics")) == named


def test_the_folders_that_are_drawn_are_those_that_exist() -> None:
    drawn = section(page("architecture.md"), "Folders")
    folders = {path.parent.name for path in (PROJECT / "kvplace").glob("**/__init__.py")} - {"kvplace"}
    assert {name for name in folders if f"{name}/" not in drawn} == set()
    named = {
        name
        for line in drawn.splitlines()
        if line.startswith("  ")
        for name in re.findall(r"(?:^|\s)([a-z]+)/ ", line)
    }
    assert named <= folders


@pytest.mark.parametrize(("name", "least"), [("architecture.md", 50), ("decisions.md", 15)])
def test_files_and_folders_that_the_contributors_pages_name_exist(name: str, least: int) -> None:
    named = re.findall(r"`([\w/-]+/(?:[\w-]+\.(?:py|yaml))?)`", page(name))
    assert len(named) > least
    places = (PROJECT, PROJECT / "kvplace")
    assert [file for file in named if not any((place / file).exists() for place in places)] == []


def test_the_oldest_releases_are_those_of_which_doctor_warns() -> None:
    needed = section(page("install.md"), "Requirements")
    for program, oldest in {"Kubernetes": OLDEST_KUBERNETES, "KubeVirt": OLDEST_KUBEVIRT}.items():
        assert f"| {program} {'.'.join(map(str, oldest))} or newer" in needed
        assert f"| {program} | {'.'.join(map(str, oldest))} or newer" in FIRST_PAGE


FIRST_PAGE = (PROJECT / "README.md").read_text()
TESTED = {
    "Kubernetes": ("control_plane/kubernetes", "k8s.io/kubernetes"),
    "KubeVirt": ("control_plane/kubevirt", "kubevirt.io/kubevirt"),
    "container runtime": ("node_programs/containerd", "github.com/containerd/containerd/v2"),
    "kubelet": ("node_programs/kubelet", "k8s.io/kubernetes"),
}
"""Where the tests take a program from, by its row in the README."""


@pytest.mark.parametrize("program", TESTED)
def test_the_releases_of_the_first_page_are_those_that_the_tests_build(program: str) -> None:
    folder, module = TESTED[program]
    required = (PROJECT / "harness" / folder / "go.mod").read_text()
    built = re.search(rf"^\s*(?:require )?{re.escape(module)} v(\d+\.\d+)\.", required, re.MULTILINE)
    row = re.search(rf"^\| {program} \|[^|]*\|([^|]*)\|", FIRST_PAGE, re.MULTILINE)
    assert built is not None
    assert row is not None
    assert re.search(rf"\b{re.escape(built[1])}\b", row[1])


def test_folders_of_the_manifests_are_all_explained() -> None:
    folders = {path.name for path in (PROJECT / "manifests").iterdir() if path.is_dir()}
    listed = re.findall(r"\[([a-z-]+)\]\(\1\)", (PROJECT / "manifests" / "README.md").read_text())
    assert sorted(listed) == sorted(folders)


def test_every_admission_policy_is_listed_and_all_but_the_last_fail_closed() -> None:
    listed = first_cells(
        page("reference/objects.md").partition("| admission policy |")[2].partition("\n## ")[0]
    )
    fails = {
        one["metadata"]["name"]: one["spec"]["failurePolicy"]
        for path in (PROJECT / "manifests").rglob("*.yaml")
        for one in yaml.safe_load_all(path.read_text())
        if isinstance(one, dict) and one.get("kind") == "ValidatingAdmissionPolicy"
    }
    assert listed == fails.keys()
    assert [name for name, policy in fails.items() if policy != "Fail"] == ["misspelt-annotations.kvplace.io"]


@pytest.mark.parametrize("process", ["serve", "agent"])
def test_every_setting_of_the_manifests_is_listed_with_its_default(process: str) -> None:
    rows = section(page("reference/configuration.md"), f"`kvplace {process}`").splitlines()
    listed = {}
    for row in rows:
        if row.startswith("| `--") and (
            setting := re.match(r"`([A-Z_]+)(?:=(.+))?`$", row.split("|")[3].strip())
        ):
            default = re.fullmatch(r"`(.+)`", row.split("|")[2].strip())
            listed[setting[1]] = setting[2] or (default[1] if default else "")
    lines = (PROJECT / "manifests" / process / "settings.env").read_text().splitlines()
    assert listed == dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_rights_of_serve_are_listed_as_its_role_grants_them() -> None:
    text = (PROJECT / "manifests" / "rbac" / "serve.yaml").read_text()
    role = next(one for one in yaml.safe_load_all(text) if one["kind"] == "ClusterRole")
    granted = {resource: ", ".join(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    rows = re.findall(
        r"^\| ([a-z/]+) \| ([a-z, ]+) \|", section(page("reference/objects.md"), "Rights"), re.MULTILINE
    )
    listed = {resource: verbs for resource, verbs in rows if resource != "resource"}
    assert listed == granted


def test_tests_that_guard_promises_exist() -> None:
    listed = (PROJECT / "tests" / "README.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(test_\w+))?`", listed)
    assert len(named) > 50
    for file, test in named:
        source = PROJECT / file
        assert source.exists(), file
        if test:
            assert re.search(rf"def {test}\(", source.read_text()), f"{file} has no {test}"


def test_tests_that_guard_against_attacks_exist() -> None:
    listed = (PROJECT / "tests" / "security" / "__init__.py").read_text()
    source, found = "", 0
    for line in map(str.strip, listed.splitlines()):
        if line.startswith("tests/"):
            source, found = (PROJECT / line).read_text(), found + 1
        elif line.startswith("test_"):
            assert f"def {line}(" in source, line
    assert found > 15


FOREIGN = (
    "customresourcedefinitions.",
    "no matches for kind",
    "loading KV pairs",
    "MountVolume.",
    "failed ",
    "cannot set CPU affinity",
    "echo 1 > ",
    "timed out waiting for domain to be defined",
    "sidecar feature gate",
    "VMI ",
    "no candidate node",
    "Preemption is not",
    "Waiting to schedule target pod",
)
"""How the messages begin that others write: kubectl, kubelet, scheduler, API server, libvirt, KubeVirt."""


def texts_in_code() -> list[str]:
    """Collect all texts of the program and the manifests, a gap where a value is filled in."""
    texts = [path.read_text() for path in (PROJECT / "manifests").rglob("*.yaml")]
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_in_troubleshooting_are_those_that_people_are_given() -> None:
    quoted = {
        message
        for line in (page("troubleshoot.md") + page("kubelet.md")).splitlines()
        if line.startswith(("|", "`NUMA")) or "the API server itself" in line
        for message in in_code_marks(line)
        if message.count(" ") >= 2 and not message.startswith((*FOREIGN, "kubectl"))
    }
    assert len(quoted) > 15
    texts = texts_in_code()
    unknown = [
        message
        for message in quoted
        if not any(all(part in text for part in _fixed_parts(message)) for text in texts)
    ]
    assert unknown == []


def _fixed_parts(message: str) -> list[str]:
    """Take out what the program fills in: our own names, and what the page leaves open."""
    return [part.strip() for part in re.split(r"\.\.\.|kvplace\.io/\w+|cpu-map|\w+/kvplace\w*", message)]


def test_links_lead_somewhere() -> None:
    broken = []
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            linked = (path.parent / file).resolve() if file else path
            if not linked.exists() or (anchor and anchor not in _anchors(linked)):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def _anchors(path: Path) -> set[str]:
    """Make the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_targets_that_pages_name_exist() -> None:
    named = {target for path in PAGES for target in re.findall(r"\./make ([a-z]+)", path.read_text())}
    assert {"demo", "test", "images", "node"} <= named <= TARGETS.keys() | {"help"}


def test_images_are_named_with_the_version_of_this_release() -> None:
    for path in PAGES:
        tagged = re.findall(r"kvplace/(?:serve|hook|agent):([0-9.]+)", path.read_text())
        assert set(tagged) <= {__version__}, path.name


def test_pages_are_about_kvplace_alone() -> None:
    for path in PAGES:
        assert not re.search(r"/work/|\.\./shared|issue 3\b|\bagents? who\b", path.read_text()), path.name
