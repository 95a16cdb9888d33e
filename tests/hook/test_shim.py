"""`hooks/onDefineDomain`, as KubeVirt's sidecar-shim runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.waiting import PATIENCE_S
from kvplace.core.request import OnFailure
from kvplace.domainxml import rewrite
from tests.hook.conftest import PROJECT, HookProcess
from tests.hook.machine import DOMAIN, ON_THIS_MACHINE, VMI
from tests.kubevirt_documents import DOMAINS


def on_define_domain(hook: HookProcess, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run the executable with this Python first in the path, and no kvplace in sight but the checkout's."""
    environ = {key: value for key, value in hook.environ.items() if key != "PYTHONPATH"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    command = [str(PROJECT / "hooks/onDefineDomain"), *words]
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=PATIENCE_S, check=False)


def test_stdout_is_the_pinned_domain_and_stderr_the_log(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    path = DOMAINS / "09-amd64-iothreads-shared.domain.xml"
    vmi = path.with_name("09-amd64-iothreads-shared.vmi.json").read_text()
    done = on_define_domain(hook, "--vmi", vmi, "--domain", path.read_text())
    assert done.returncode == 0
    assert done.stdout == rewrite(path.read_bytes(), ON_THIS_MACHINE)
    assert b'"msg": "pinned all vCPUs within CPUs' in done.stderr


def test_the_version_that_some_shims_pass_is_ignored(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    words = ["--vmi", VMI.decode(), "--domain", DOMAIN.decode()]
    assert on_define_domain(hook, *words, "--version", "v1alpha3").stdout == rewrite(DOMAIN, ON_THIS_MACHINE)


def test_with_wait_the_exit_code_is_nonzero_and_there_is_no_output(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE, uid="forged")
    done = on_define_domain(hook, "--vmi", VMI.decode(), "--domain", DOMAIN.decode())
    assert (done.returncode, done.stdout) == (1, b"")
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(
        "onDefineDomain: annotation kvplace.io/placement: it was made for the pod with UID 'forged'"
    )
    assert b"Traceback" not in done.stderr


def test_with_float_the_domain_is_returned_unchanged(hook: HookProcess) -> None:
    hook.pod.ask_for(OnFailure.FLOAT)
    done = on_define_domain(hook, "--vmi", VMI.decode(), "--domain", DOMAIN.decode())
    assert (done.returncode, done.stdout) == (0, DOMAIN)


def test_non_ascii_text_passes_in_any_locale(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    xml = "<domain><title>Größe ☃</title><vcpu>1</vcpu></domain>"
    for locale in ("C", "C.UTF-8"):
        hook.environ |= {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        assert on_define_domain(hook, "--vmi", "{}", "--domain", xml).stdout == rewrite(
            xml.encode(), ON_THIS_MACHINE
        )


def test_a_call_without_its_arguments_is_a_usage_error(hook: HookProcess) -> None:
    done = on_define_domain(hook, "--vmi", "{}")
    assert done.returncode == 2
    assert b"--domain" in done.stderr


def test_a_checkout_elsewhere_works_too(hook: HookProcess, tmp_path: Path) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    shutil.copytree(PROJECT / "kvplace", tmp_path / "kvplace", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hooks").mkdir()
    shutil.copy(PROJECT / "hooks/onDefineDomain", tmp_path / "hooks/onDefineDomain")
    command = [
        sys.executable,
        str(tmp_path / "hooks/onDefineDomain"),
        "--vmi",
        "{}",
        "--domain",
        DOMAIN.decode(),
    ]
    environ = {key: value for key, value in hook.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == rewrite(DOMAIN, ON_THIS_MACHINE)
    assert os.access(PROJECT / "hooks/onDefineDomain", os.X_OK)


def test_a_python_without_the_xml_library_names_the_package_to_install(hook: HookProcess) -> None:
    hook.pod.bind(ON_THIS_MACHINE)
    command = [sys.executable, "-S", str(PROJECT / "hooks/onDefineDomain")]
    command += ["--vmi", "{}", "--domain", DOMAIN.decode()]
    environ = {key: value for key, value in hook.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    last = done.stderr.decode().splitlines()[-1]
    assert last == (
        "onDefineDomain: the Python of the hook lacks the package lxml; use the image of kvplace's hook, or "
        "install kvplace for this Python"
    )
