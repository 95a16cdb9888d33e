"""Login programs of kubeconfigs (`exec`): each issues a token, a client certificate or both.

A program runs as under kubectl. It has stderr, so that a person sees its prompts also where stdout is a
pipe. It has stdin where that is a terminal and `interactiveMode` is not `Never`. The official client is not
used: it shows stderr only where stdout is a terminal, and importing it takes half a second.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ISSUED = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
"""Fields of a program's answer by their key in a kubeconfig."""
_CONFIGURATION = "client.authentication.k8s.io/exec"
"""The extension of a cluster that holds settings for login programs."""


async def issued_credentials(plugin: Any, cluster: Mapping[str, Any]) -> dict[str, str]:
    """Run a user's `exec` and return the keys of a kubeconfig that it issues.

    `cluster` is the cluster that it logs in to. Raises OSError where the program cannot be started,
    TypeError or ValueError for a wrong entry or answer. A cancelled call ends the program.
    """
    if not isinstance(plugin, Mapping):
        raise TypeError("its exec must be a mapping with command and apiVersion")
    texts = [plugin.get("command"), plugin.get("apiVersion"), *_list(plugin, "args")]
    variables = [(_value(entry, "name"), _value(entry, "value")) for entry in _list(plugin, "env")]
    if not all(isinstance(text, str) and text for text in texts[:2]):
        raise ValueError("its exec needs command and apiVersion")
    if not all(isinstance(text, str) for text in (*texts, *(text for pair in variables for text in pair))):
        raise ValueError("args and env of its exec must be strings, in quotes")
    command, version, *arguments = texts
    interactive = _may_ask(plugin.get("interactiveMode") or "IfAvailable")
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = _shown(cluster)
    credential = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    environment = {**os.environ, **dict(variables), "KUBERNETES_EXEC_INFO": json.dumps(credential)}
    stdin = None if interactive else asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            command, *arguments, stdin=stdin, stdout=asyncio.subprocess.PIPE, env=environment
        )
    except FileNotFoundError as error:
        hint = plugin.get("installHint")
        raise FileNotFoundError(
            error.errno, f"{error.strerror}. {hint}" if hint else error.strerror
        ) from None
    try:
        answer, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        raise ValueError(f"it ended with exit code {process.returncode}, and reports on stderr")
    return _issued(answer, version)


def _list(plugin: Mapping[str, Any], key: str) -> list[Any]:
    values = plugin.get(key) or []
    if not isinstance(values, list):
        raise TypeError(f"the {key} of its exec must be a list")
    return values


def _value(entry: Any, key: str) -> Any:
    return entry.get(key) if isinstance(entry, Mapping) else None


def _may_ask(mode: object) -> bool:
    """Return whether the program may read from stdin, by kubectl's rule."""
    if mode not in ("Never", "IfAvailable", "Always"):
        raise ValueError(f"its interactiveMode is {mode!r}; it must be Never, IfAvailable or Always")
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if mode == "Always" and not terminal:
        raise ValueError("its interactiveMode is Always, and stdin is not a terminal")
    return terminal and mode != "Never"


def _shown(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the cluster to a program with `provideClusterInfo`, the CA in place."""
    apart = ("certificate-authority", "extensions")
    shown = {key: value for key, value in cluster.items() if key not in apart}
    if "certificate-authority-data" not in shown and (path := cluster.get("certificate-authority")):
        shown["certificate-authority-data"] = base64.b64encode(Path(path).read_bytes()).decode()
    for extension in cluster.get("extensions") or ():
        if _value(extension, "name") == _CONFIGURATION:
            shown["config"] = _value(extension, "extension")
    return shown


def _issued(answer: bytes, version: str) -> dict[str, str]:
    try:
        credential = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"its answer is not valid JSON ({error})") from None
    if not isinstance(credential, Mapping) or credential.get("apiVersion") != version:
        raise ValueError(f"its answer has not the apiVersion {version!r} of its exec")
    status = credential.get("status")
    given = {key: _value(status, key) for key in ("token", *_ISSUED.values()) if _value(status, key)}
    if not all(isinstance(value, str) for value in given.values()):
        raise ValueError("token, certificate and key of its answer must be strings")
    if not given.keys() & {"token", "clientCertificateData"}:
        raise ValueError("it answers with neither a token nor a certificate")
    if ("clientCertificateData" in given) != ("clientKeyData" in given):
        raise ValueError("it answers with a certificate without its key, or a key without its certificate")
    pems = {
        key: base64.b64encode(given[name].encode()).decode() for key, name in _ISSUED.items() if name in given
    }
    return {**({"token": given["token"]} if "token" in given else {}), **pems}
