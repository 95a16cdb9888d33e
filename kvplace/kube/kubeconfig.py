"""kubeconfig files as kubectl reads them: their order, how they are merged, and the parts of a context.

Of several files (KUBECONFIG may list them, as PATH does) the first that has an entry wins, and files that do
not exist are skipped. Relative paths are relative to the file that they are in. What is null is not given.
Every error names the file and the fix.

The proxy before an API server is the one that the kubeconfig names, else that of the environment. As for
kubectl HTTPS_PROXY counts, or HTTP_PROXY for a server without TLS, and NO_PROXY lists the names, domains and
networks that are reached without it. SOCKS proxies are not supported.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from kvplace.core.errors import Misconfigured

_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_LISTS = ("clusters", "users", "contexts")
_USUAL = "~/.kube/config"
_PROXY_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class KubeContext:
    """One context with all that it refers to; paths are absolute."""

    files: str
    """Where it was read, as KUBECONFIG spells it."""
    name: str
    namespace: str
    """The namespace of calls that name none; empty where the context names none either."""
    cluster: Mapping[str, Any]
    user: Mapping[str, Any]


def kubeconfig_files(named: str | None) -> str | None:
    """Return the files to read, as KUBECONFIG spells them: those named or the user's own, else None."""
    chosen = named or os.environ.get("KUBECONFIG")
    if chosen:
        return chosen
    usual = _at_home(_USUAL)
    return str(usual) if usual.exists() else None


def read_context(files: str, wanted: str | None) -> KubeContext:
    """Read the wanted context, by default the current one; raises Misconfigured."""
    entries, current = _merged(files)
    contexts = entries["contexts"]
    name = wanted or current
    if not name:
        raise Misconfigured(
            f"kubeconfig {files} has no current-context: choose one with --context{_listed(contexts)}"
        )
    if name not in contexts:
        near = difflib.get_close_matches(name, contexts, n=1)
        fix = f"; did you mean {near[0]!r}?" if near else f": choose another one{_listed(contexts)}"
        raise Misconfigured(f"kubeconfig {files} has no context {name!r}{fix}")
    context = contexts[name]
    parts: dict[str, Mapping[str, Any]] = {}
    for kind in ("cluster", "user"):
        referred = context.get(kind, "")
        known = entries[f"{kind}s"]
        if not isinstance(referred, str):
            raise Misconfigured(
                f"context {name!r} of kubeconfig {files}: {kind} must be the name of a {kind}"
            )
        if kind == "user" and not referred:
            parts[kind] = {}
        elif referred not in known:
            raise Misconfigured(
                f"context {name!r} of kubeconfig {files} names the {kind} {referred!r}, which is not there"
            )
        else:
            parts[kind] = known[referred]
    _check_server(parts["cluster"].get("server"), f"the cluster {context['cluster']!r} of kubeconfig {files}")
    return KubeContext(files, name, str(context.get("namespace") or ""), parts["cluster"], parts["user"])


def context_names(files: str) -> tuple[str, ...]:
    """Return the names of all contexts; raises Misconfigured."""
    return tuple(_merged(files)[0]["contexts"])


def _check_server(server: object, what: str) -> None:
    if not isinstance(server, str) or not server:
        raise Misconfigured(f"{what} has no server, its URL")
    try:
        url = urlsplit(server)
        (url.hostname or "").encode("idna")  # as names are resolved
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise Misconfigured(
            f"{what} has the server {server!r}; it must be a URL such as https://10.0.0.1:6443"
        )


def _at_home(path: str) -> Path:
    """Return the path that `~` begins; as it is where the user has no home, or is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _exists(path: Path) -> bool:
    """Return whether there is a file of this name; there is none where the name is not a valid file name."""
    try:
        return path.exists()
    except OSError:
        return False


def _merged(files: str) -> tuple[dict[str, dict[str, Mapping[str, Any]]], str]:
    from kvplace.documents.reading import read_document, read_source

    paths = [_at_home(part) for part in files.split(os.pathsep) if part]
    existing = [path for path in paths if _exists(path)]
    if not existing:
        raise Misconfigured(
            f"kubeconfig {files} does not exist: give another one with --kubeconfig or KUBECONFIG"
        )
    entries: dict[str, dict[str, Mapping[str, Any]]] = {kind: {} for kind in _LISTS}
    current = ""
    for path in existing:
        what = f"kubeconfig {path}"
        text = read_source(str(path), what)
        document = {} if _is_empty(text) else read_document(text, what)
        for kind in _LISTS:
            for name, content in _entries(document, kind, what):
                entries[kind].setdefault(name, _absolute(content, path.absolute().parent))
        current = current or str(document.get("current-context") or "")
    return entries, current


def _is_empty(text: str) -> bool:
    """Whether a file holds nothing but comments; a file without content is a kubeconfig without entries."""
    return all(line.lstrip()[:1] in ("", "#") for line in text.splitlines())


def _entries(document: Mapping[str, Any], kind: str, what: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The named entries of a list of a kubeconfig."""
    found = document.get(kind) or []
    if not isinstance(found, list):
        raise Misconfigured(f"{what}: {kind} must be a list of names with their settings")
    entries: list[tuple[str, Mapping[str, Any]]] = []
    for entry in found:
        content = entry.get(kind[:-1]) or {} if isinstance(entry, dict) else None
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not isinstance(content, dict)
        ):
            raise Misconfigured(f"{what}: every entry of {kind} must have a name and a {kind[:-1]}")
        entries.append((entry["name"], content))
    return entries


def _absolute(content: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Make the paths of an entry absolute; a program's name without a folder is searched for in PATH."""
    given = {key: value for key, value in content.items() if value is not None}
    paths = {
        key: str(folder / given[key]) for key in _PATHS if isinstance(given.get(key), str) and given[key]
    }
    plugin = given.get("exec")
    if isinstance(plugin, Mapping) and os.sep in (command := str(plugin.get("command", ""))):
        given["exec"] = {**plugin, "command": str(folder / command)}
    return given | paths


def _listed(contexts: Mapping[str, object]) -> str:
    return f", for example {', '.join(list(contexts)[:5])}" if contexts else ""


def proxy_of(cluster: Mapping[str, Any]) -> str | None:
    """Return the URL of the proxy before a cluster of a kubeconfig; raises ValueError for an unusable one."""
    named = cluster.get("proxy-url")
    if not named:
        return _proxy_of_environment(urlsplit(cluster["server"]))
    if not isinstance(named, str) or not _is_usable_proxy(named):
        shown = re.sub(r"//.*@", "//", str(named))  # without a password
        raise ValueError(f"its proxy-url is {shown!r}; it must be a URL such as http://proxy.example:3128")
    return named


def _proxy_of_environment(server: SplitResult) -> str | None:
    """Return the proxy that counts for a server; one that cannot be used is left aside."""
    proxy = getproxies_environment().get(server.scheme)
    if not proxy or _is_excluded(server):
        return None
    url = proxy if "://" in proxy else f"http://{proxy}"
    return url if _is_usable_proxy(url) else None


def _is_excluded(server: SplitResult) -> bool:
    host = server.hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or bool(proxy_bypass(server.netloc))
    if address.is_loopback or proxy_bypass(server.netloc):
        return True
    return any(address in network for network in _excluded_networks())


def _excluded_networks() -> Iterator[IPv4Network | IPv6Network]:
    for entry in getproxies_environment().get("no", "").split(","):  # NO_PROXY
        try:
            yield ip_network(entry.strip(), strict=False)
        except ValueError:
            continue  # a name


def _is_usable_proxy(proxy: str) -> bool:
    try:
        parts = urlsplit(proxy)
        (parts.hostname or "").encode("idna")
        return parts.scheme in _PROXY_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
