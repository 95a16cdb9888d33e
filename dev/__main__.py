"""The targets of ./make: the commands for a machine where nothing has been prepared."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev import mutants as mutation_testing
from dev import requirements, system_packages
from dev.environment import Environment
from dev.requirements import Section
from dev.step import StepFailed, become, beside, in_ci, run, say, show
from harness.kvplace_cluster import options as cluster_options
from harness.real_node import options as node_options

PROJECT = Path(__file__).resolve().parent.parent
VENV = Environment(PROJECT)
RUNTIME = (Section.RUNTIME, Section.BUILD)
QUICK = (*RUNTIME, Section.AGENT, Section.TESTS, Section.BENCH, Section.RELEASE)
NEEDS_NOTHING = (
    "not control_plane and not node_programs and not libvirt_session and not real_node and not emulated"
    " and not debian_packages"
)
"""The tests that need only the environment: no server, no system package, no other machine."""
IMAGES = (*RUNTIME, Section.AGENT, Section.RELEASE)
ALL_TESTS = ["--numprocesses=2"]
"""Two processes share them (tests/shared_work.py); each more starts servers of its own."""
PREPARED = {
    "the programs that tests run against": "harness.build",
    "the kernels of emulated machines": "harness.emulated_machine.kernels",
}
"""Files that are built and fetched beside the tests, with their modules."""
CHECKS = (*QUICK, Section.LINT)


def demo(arguments: list[str]) -> int:
    """Shows what kvplace does on captured machines: no root, no cluster."""
    VENV.ensure(RUNTIME)
    become([VENV.bin / "kvplace", "demo", *arguments], cwd=PROJECT)


def quick(arguments: list[str]) -> int:
    """Runs the tests that need only Python, with fewer examples; `./make quick tests/core` runs a part."""
    VENV.ensure(QUICK)
    few = any(".py" in argument for argument in arguments)
    workers = [] if few else [f"--numprocesses={min(os.cpu_count() or 1, 8)}"]
    command: list[str | Path] = [VENV.python, "-m", "pytest", "-m", NEEDS_NOTHING, *workers, *arguments]
    return show(command, cwd=PROJECT, environment=_test_environment(HYPOTHESIS_PROFILE="quick"))


def test(arguments: list[str]) -> int:
    """Runs every check and test after setting up all they need; arguments, if any, go to pytest."""
    VENV.ensure(CHECKS)
    with ThreadPoolExecutor(1) as pool:
        checks = pool.submit(_failed_checks)
        _prepare_tests(arguments)
    failed = list(checks.result())
    for reason in checks.result().values():
        print(reason, file=sys.stderr)
    if failed and not in_ci():
        say(f"FAILED: {', '.join(failed)} (see above); the tests were not run")
        return 1
    python = str(VENV.python)
    # A test waits for the programs that it needs, and builds them where nothing else does.
    prepared = {} if arguments else {name: [python, "-m", module] for name, module in PREPARED.items()}
    environment = _test_environment(KVPLACE_BUILD="1")
    with beside(prepared, cwd=PROJECT, environment=environment) as failures:
        pytest = [python, "-m", "pytest", *(arguments or ALL_TESTS)]
        tests = show(pytest, cwd=PROJECT, environment=environment)
        failed += failures()
    if failed:
        say(f"FAILED: {', '.join(failed)} (see above)")
    return tests or (1 if failed else 0)


def lint(arguments: list[str]) -> int:
    """Checks style, types, layers and prose; `./make lint --fix` fixes some of the findings."""
    VENV.ensure(CHECKS)
    if "--fix" in arguments:
        show([VENV.bin / "ruff", "check", "--fix"], cwd=PROJECT)
        show([VENV.bin / "ruff", "format"], cwd=PROJECT)
    failed = _failed_checks()
    for reason in failed.values():
        print(reason, file=sys.stderr)
    return 1 if failed else 0


def bench(arguments: list[str]) -> int:
    """Runs the named benchmarks, or all, and writes their results to benchmarks/results/."""
    _prepare_tests()
    _build_servers("control-plane")
    return show([VENV.python, "-m", "benchmarks", *arguments], cwd=PROJECT, environment=_environment())


def mutants(arguments: list[str]) -> int:
    """Changes the code in small ways and lists the changes that no test notices (takes long)."""
    VENV.ensure((*CHECKS, Section.MUTATION))
    return mutation_testing.run(PROJECT, VENV.bin, arguments, _environment())


def cluster(arguments: list[str]) -> int:
    """Starts a real API server, scheduler, KubeVirt and kvplace on this machine, to try by hand."""
    cluster_options.parser().parse_args(arguments)  # a slip is reported before minutes of work
    VENV.ensure(CHECKS)
    _build_servers("control-plane")
    command = [str(VENV.python), "-m", "harness.kvplace_cluster", *arguments]
    return show(command, cwd=PROJECT, environment=_environment())


def node(arguments: list[str]) -> int:
    """Starts real nodes with KubeVirt, QEMU and kvplace on this machine, to try by hand; needs root."""
    node_options.parser().parse_args(arguments)
    _prepare_tests()
    _build_servers("control-plane", "node")
    command = [str(VENV.python), "-m", "harness.real_node", *arguments]
    return show(command, cwd=PROJECT, environment=_environment())


def images(arguments: list[str]) -> int:
    """Builds kvplace's container images as OCI archives in dist/, without a container engine."""
    return release(["--images-only", *arguments])


def release(arguments: list[str]) -> int:
    """Makes wheel, images, manifests, chart and kubectl plugin in dist/, with digests; see `--help`."""
    system_packages.ensure(system_packages.IMAGES)
    # Only the parts of the images: no other package of this machine may get into them.
    VENV.ensure(IMAGES)
    return show([VENV.python, "-m", "release", *arguments], cwd=PROJECT, environment=_environment())


def constraints(arguments: list[str]) -> int:
    """Resolves pyproject.toml into constraints.txt; `--upgrade` takes the newest versions that fit."""
    VENV.ensure((*RUNTIME, Section.DEV))
    requirements.write(PROJECT, VENV.bin / "uv", upgrade="--upgrade" in arguments)
    say("wrote constraints.txt")
    return 0


def clean(_arguments: list[str]) -> int:
    """Removes everything that these targets made inside the project."""
    for name in (
        ".venv",
        "mutants",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".import_linter_cache",
        ".hypothesis",
    ):
        shutil.rmtree(PROJECT / name, ignore_errors=True)
    for folder in [path for path in PROJECT.rglob("__pycache__") if path.is_dir()]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


TARGETS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "quick": quick,
    "test": test,
    "lint": lint,
    "bench": bench,
    "mutants": mutants,
    "cluster": cluster,
    "node": node,
    "images": images,
    "release": release,
    "constraints": constraints,
    "clean": clean,
}


def main(words: list[str]) -> int:
    """Runs the target that the first word names."""
    name, arguments = (words[0], words[1:]) if words else ("help", [])
    if name in {"help", "-h", "--help"}:
        for target, function in TARGETS.items():
            print(f"./make {target:<12} {(function.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if name not in TARGETS:
        print(f"kvplace: no target {name!r}; there are: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    try:
        return TARGETS[name](arguments)
    except StepFailed as failed:
        print(f"kvplace: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _prepare_tests(arguments: Sequence[str] = ()) -> None:
    packages = system_packages.needed_by(arguments)
    compiles = system_packages.COMPILER.keys() <= packages.keys()
    system_packages.ensure(packages | (system_packages.python_headers() if compiles else {}))
    VENV.ensure((*CHECKS, Section.LIBVIRT) if compiles and system_packages.can_compile() else CHECKS)


def _build_servers(*groups: str) -> None:
    # Its own words are worth seeing: a cold build takes minutes.
    say(f"building the programs that tests run against: {', '.join(groups)} (minutes when cold, then kept)")
    command = [str(VENV.python), "-m", "harness.build", *groups]
    code = show(command, cwd=PROJECT, environment=_environment())
    if code != 0:
        raise StepFailed("the servers that the tests run against could not be built; see above")


def _failed_checks() -> dict[str, StepFailed]:
    steps: dict[str, list[str | Path]] = {
        "ruff check": [VENV.bin / "ruff", "check", "--quiet"],
        "ruff format": [VENV.bin / "ruff", "format", "--check", "--quiet"],
        "mypy": [VENV.bin / "mypy", "--no-error-summary"],
        "lint-imports": [VENV.bin / "lint-imports", "--no-logo"],
        "prose": [VENV.python, "-m", "dev.prose"],
    }
    failed = {}
    for name, command in steps.items():
        try:
            run(name, command, cwd=PROJECT)
        except StepFailed as reason:
            failed[name] = reason
    return failed


def _environment() -> dict[str, str]:
    return {"PATH": f"{VENV.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def _test_environment(**settings: str) -> dict[str, str]:
    # Tests start thousands of Python programs: without bytecode on disk each would compile kvplace anew.
    return {**_environment(), "PYTHONDONTWRITEBYTECODE": "", **settings}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
