"""The project's own order: what a reviewer would otherwise have to search for in every change."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tokenize
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import kvplace
from dev.__main__ import CHECKS, IMAGES, RUNTIME, TARGETS
from dev.requirements import Constraints, Section

PROJECT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())


def files_of_the_project(*suffixes: str) -> list[Path]:
    """Lists what is, or would be, in a commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this copy of the project is no git work tree: {error}")
    paths = [PROJECT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def pins() -> dict[str, Version]:
    """Reads every pinned version, by normalised name; of several the one for this Python."""
    text = (PROJECT / "constraints.txt").read_text()
    found = re.findall(r"^([A-Za-z0-9._-]+==[^\s\\]+(?: ; [^\\]+)?)", text, re.MULTILINE)
    read = [Requirement(entry) for entry in found]
    return {
        normalised(pin.name): Version(str(pin.specifier).removeprefix("=="))
        for pin in read
        if pin.marker is None or pin.marker.evaluate()
    }


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted_distributions() -> list[Requirement]:
    """Lists every dependency that pyproject.toml names: at run time, optional, and of the groups."""
    project = PYPROJECT["project"]
    lists = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PYPROJECT["dependency-groups"].values(),
        PYPROJECT["build-system"]["requires"],
    ]
    return [Requirement(entry) for entries in lists for entry in entries if isinstance(entry, str)]


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("kvplace") == kvplace.__version__


def test_every_dependency_is_pinned_to_a_version_that_its_range_allows() -> None:
    pinned = pins()
    for wanted in wanted_distributions():
        assert normalised(wanted.name) in pinned, f"{wanted.name} is not pinned: run ./make constraints"
        version = pinned[normalised(wanted.name)]
        assert wanted.specifier.contains(version), (
            f"{wanted} excludes its pin {version}: run ./make constraints"
        )


def test_every_pin_carries_hashes_and_stands_in_a_section() -> None:
    sections = Constraints.read(PROJECT / "constraints.txt").sections
    assert list(sections) == list(Section)
    entries = [entry for text in sections.values() for entry in re.split(r"\n(?=\S)", text.strip())]
    pinned = [Requirement(entry.partition(" \\")[0]) for entry in entries]
    assert len({(pin.name, str(pin.marker)) for pin in pinned}) == len(pinned)
    assert pins().keys() <= {normalised(pin.name) for pin in pinned}
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("sections", [RUNTIME, IMAGES, CHECKS], ids=["demo", "images", "test"])
def test_a_target_installs_all_that_its_packages_import(sections: tuple[Section, ...]) -> None:
    text = Constraints.read(PROJECT / "constraints.txt").text(sections)
    found = [Requirement(pin) for pin in re.findall(r"^([\w.-]+==[^\\\n]+)", text, re.MULTILINE)]
    names = {normalised(pin.name) for pin in found if pin.marker is None or pin.marker.evaluate()}
    installed = {normalised(one.name) for one in importlib.metadata.distributions()}
    if absent := names - installed:
        pytest.skip(f"{min(absent)} is not installed; `./make test` installs it")
    wanting = {
        f"{name} needs {needed.name}"
        for name in names
        for needed in map(Requirement, importlib.metadata.requires(name) or ())
        if (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        and normalised(needed.name) not in names
    }
    assert wanting == set()


def test_no_file_names_a_package_index_or_a_folder_of_the_machine_it_was_written_on() -> None:
    hosts = [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("proxy", "golang", "org"),
        ("registry", "npmjs"),
        ("deb", "debian", "org"),
    ]
    pattern = "|".join(
        [
            *(r"\.".join(parts) for parts in hosts),
            r"(?<![\w.$}-])/(?:work/(?:main|shared|wt)|root)\b",
            r"^--?(?:i|index-url|extra-index-url)\b",
        ]
    )
    exempt = {Path(__file__).resolve()}
    found = [
        f"{path.relative_to(PROJECT)}:{number}: {match[0]}"
        for path in files_of_the_project()
        if path not in exempt
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := re.search(pattern, line))
    ]
    assert found == []


def test_the_top_level_has_nothing_but_folders_and_the_files_that_belong_there() -> None:
    files = {path.name for path in files_of_the_project() if path.parent == PROJECT}
    hidden = {".ci", ".dockerignore", ".gitignore"}
    documents = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"}
    assert files - hidden - documents == {"pyproject.toml", "constraints.txt", "Makefile", "make"}


def test_every_module_has_a_docstring_with_its_purpose() -> None:
    silent = []
    for path in files_of_the_project(".py"):
        with path.open() as lines:
            tokens = tokenize.generate_tokens(lines.readline)
            first = next(one for one in tokens if one.type not in (tokenize.COMMENT, tokenize.NL))
        said = ast.literal_eval(first.string) if first.type == tokenize.STRING else ""
        if not said.split("\n\n")[0].rstrip().endswith((".", ":", "?")):
            silent.append(str(path.relative_to(PROJECT)))
    assert silent == []


def test_no_file_is_longer_than_500_lines() -> None:
    long = {
        str(path.relative_to(PROJECT)): lines
        for path in files_of_the_project(".py", ".go")
        if (lines := path.read_text().count("\n")) > 500
    }
    assert long == {}


def product_modules() -> Iterator[ast.Module]:
    """Parse each module of the product."""
    for path in files_of_the_project(".py"):
        if path.is_relative_to(PROJECT / "kvplace"):
            yield ast.parse(path.read_text())


def names_of_types(module: ast.Module) -> Iterator[str]:
    """Return the classes, and the aliases of types, that a module defines; variables of types are none."""
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for statement in module.body:
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Name("TypeVar" | "ParamSpec"))):
                continue
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                if re.fullmatch(r"_?([A-Z][a-z0-9]+)+", name):
                    yield name


def public_functions(module: ast.Module) -> Iterator[str]:
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name[0] != "_":
            yield statement.name


@pytest.mark.parametrize(
    ("names_of", "may_be_shared"),
    [
        pytest.param(names_of_types, set(), id="types"),
        # `command` is the entry of each command of the CLI, `run` that of each process.
        pytest.param(public_functions, {"main", "command", "run"}, id="functions"),
    ],
)
def test_a_name_has_one_meaning(
    names_of: Callable[[ast.Module], Iterator[str]], may_be_shared: set[str]
) -> None:
    names = Counter(
        name for module in product_modules() for name in {one.removeprefix("_") for one in names_of(module)}
    )
    assert {name for name, count in names.items() if count > 1} - may_be_shared == set()


def test_core_needs_nothing_but_the_standard_library() -> None:
    modules = [
        ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        for path in files_of_the_project(".py")
        if path.is_relative_to(PROJECT / "kvplace" / "core") and path.name != "__init__.py"
    ]
    assert modules
    program = (
        "import importlib, sys\n"
        "before = set(sys.modules)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(tops - set(sys.stdlib_module_names) - {'kvplace'}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == []


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    package = PROJECT / "kvplace"
    wanted = {
        str(path.relative_to(PROJECT)) for path in files_of_the_project() if path.is_relative_to(package)
    }
    assert "kvplace/py.typed" in wanted
    assert wanted - packed == set()


def test_make_and_the_script_for_machines_without_it_know_the_same_targets() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    listed = re.search(r"^TARGETS := (.*)$", makefile, re.MULTILINE)
    assert listed is not None
    assert set(listed[1].split()) == {*TARGETS, "help"}


def test_continuous_integration_runs_the_commands_of_a_person() -> None:
    lines = [line for line in (PROJECT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert lines == ['exec "$(dirname -- "$0")/../make" test']


def test_names_of_tests_have_no_noun_clause_with_what() -> None:
    found = [
        f"{path.relative_to(PROJECT)}: {name}"
        for path in files_of_the_project(".py")
        for name in re.findall(r"def (test_(?:\w+_)?what_\w+)", path.read_text())
        if name != "test_names_of_tests_have_no_noun_clause_with_what"
    ]
    assert found == []


def test_no_test_file_is_imported() -> None:
    """Shared parts are in a module beside them, so that each can be moved, split and run alone."""
    found = [
        f"{path.relative_to(PROJECT)} imports {module}"
        for path in files_of_the_project(".py")
        for text in [path.read_text()]
        if re.search(r"^\s*(from|import) .*\btest_|^\s*test_\w+,?$", text, re.MULTILINE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if re.match(r"tests\..*\btest_|test_", module)
    ]
    assert found == []


@pytest.mark.parametrize("target", ["cluster", "node"])
def test_the_options_of_a_target_are_shown_and_checked_before_anything_is_installed(target: str) -> None:
    def called(option: str) -> subprocess.CompletedProcess[str]:
        # -S hides what is installed: only the standard library can be imported.
        command = [sys.executable, "-S", "-m", "dev", target, option]
        return subprocess.run(command, cwd=PROJECT, env={}, capture_output=True, text=True, check=False)

    shown = called("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"usage: ./make {target}" in shown.stdout
    slip = called("--nodse=2")
    assert slip.returncode == 2
    assert "unrecognized arguments: --nodse=2" in slip.stderr
