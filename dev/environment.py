"""Makes the virtual environment .venv and keeps it as constraints.txt states.

Works without root and without network access to anything but the package index that pip is set up
for. A stamp inside the environment names the content of every section that was installed, so a
second call costs a few milliseconds, and a changed pin brings exactly its section up to date.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dev.requirements import Constraints, Section
from dev.step import StepFailed, run, say

_NO_PIP = """\
this Python can make virtual environments but has no pip to fill them, and none could be had from Debian.
As root:  apt-get install python3-venv
Or put a Python that has pip first on PATH (or name it: PYTHON=/path/to/python3 ./make demo)."""

_ITSELF = "kvplace"


class Environment:
    """The project's .venv."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.folder = project / ".venv"
        self.bin = self.folder / "bin"
        self.python = self.bin / "python"
        self.stamp = self.folder / "kvplace-stamp.json"

    def ensure(self, sections: Sequence[Section]) -> None:
        """Makes the environment and installs the missing packages of these sections, and kvplace itself."""
        with self._alone():
            constraints = Constraints.read(self.project / "constraints.txt")
            if self._interpreter() is None:
                self._create()
            wanted = self.wanted(sections, constraints)
            done = self._installed()
            missing = [section for section in sections if done.get(section) != wanted[section]]
            # Packages built from source find their tools in the environment itself: they are pinned, too.
            for is_tool in (True, False):
                if part := [section for section in missing if (section is Section.BUILD) == is_tool]:
                    self._install(part, constraints)
            if done.get(_ITSELF) != wanted[_ITSELF]:
                pip = self._pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
                run("installing kvplace itself", pip, cwd=self.project)
            self.stamp.write_text(json.dumps(done | wanted, indent=1), encoding="utf-8")

    def wanted(self, sections: Iterable[Section], constraints: Constraints) -> dict[str, str]:
        """Gives the content of the stamp when these sections and kvplace itself are installed."""
        pins = {str(section): constraints.fingerprint(section) for section in sections}
        return {**pins, _ITSELF: self._fingerprint_of_kvplace()}

    def _install(self, sections: list[Section], constraints: Constraints) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="kvplace-requirements-") as file:
            file.write(constraints.text(sections))
            file.flush()
            what = f"installing into {self.folder.name}: {', '.join(sections)}"
            # --no-deps: the file holds the whole closure, and a section may lean on one above it.
            safely = ("--quiet", "--require-hashes", "--no-deps", "--no-build-isolation")
            run(what, self._pip("install", *safely, "-r", file.name))

    def _pip(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]

    def _interpreter(self) -> str | None:
        """States which Python the environment runs, or None when it is missing or broken."""
        if not self.python.exists():
            return None
        probe = "import sys, pip; print(sys.version, sys.prefix)"
        answer = subprocess.run(
            [self.python, "-c", probe], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        return answer.stdout.strip() if answer.returncode == 0 else None

    def _installed(self) -> dict[str, str]:
        try:
            stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def _fingerprint_of_kvplace(self) -> str:
        parts = [
            str(self.project),
            (self.project / "pyproject.toml").read_text(encoding="utf-8"),
            (self.project / "kvplace" / "__init__.py").read_text(encoding="utf-8"),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _create(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        say(f"making {self.folder} with Python {sys.version.split()[0]}")
        if self._venv("--clear") and self._interpreter() is not None:
            return
        # Debian splits ensurepip off into python3-venv; the environment can be made without it.
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self._venv("--without-pip"):
            raise StepFailed(f"{sys.executable} cannot make a virtual environment; {_NO_PIP}")
        for way in (self._pip_from_this_python, self._pip_from_debian):
            if way() and self._interpreter() is not None:
                return
        shutil.rmtree(self.folder, ignore_errors=True)
        raise StepFailed(_NO_PIP)

    def _venv(self, how: str) -> bool:
        return _works([sys.executable, "-m", "venv", how, str(self.folder)])

    def _pip_from_this_python(self) -> bool:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--no-input"]
        return _works([*pip, "install", "--quiet", "pip"])

    def _pip_from_debian(self) -> bool:
        """Takes pip's wheel out of Debian's package, without installing it and so without root."""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return False
        say("no pip here: taking it out of Debian's package python3-pip-whl, which stays uninstalled")
        with tempfile.TemporaryDirectory(prefix="kvplace-pip-") as name:
            folder = Path(name)
            (folder / "state" / "lists" / "partial").mkdir(parents=True)
            (folder / "cache" / "archives" / "partial").mkdir(parents=True)
            own = ["-o", f"Dir::State={folder}/state", "-o", f"Dir::Cache={folder}/cache"]
            own += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "APT::Sandbox::User="]
            if not _works(["apt-get", "-qq", *own, "update"], folder):
                return False
            if not _works(["apt-get", "-qq", *own, "download", "python3-pip-whl"], folder):
                return False
            for package in folder.glob("python3-pip-whl_*.deb"):
                if not _works(["dpkg-deb", "-x", str(package), str(folder / "files")]):
                    return False
            wheels = sorted((folder / "files" / "usr" / "share" / "python-wheels").glob("pip-*.whl"))
            if not wheels:
                return False
            pip = str(wheels[-1])
            return _works([str(self.python), f"{pip}/pip", "install", "--quiet", "--no-index", pip])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one process at a time work on the environment."""
        with (self.project / "pyproject.toml").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another ./make that is making the environment")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _works(command: list[str], cwd: Path | None = None) -> bool:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    return finished.returncode == 0
