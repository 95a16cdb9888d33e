"""The proxy before an API server: the one that the kubeconfig names, else that of the environment.

As for kubectl HTTPS_PROXY counts, or HTTP_PROXY for a server without TLS, and NO_PROXY lists the names,
domains and networks that are reached without it. SOCKS proxies are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

_SCHEMES = ("http", "https")


def proxy_of(cluster: Mapping[str, Any]) -> str | None:
    """Return the URL of the proxy before a cluster of a kubeconfig; raises ValueError for an unusable one."""
    named = cluster.get("proxy-url")
    if not named:
        return _of_environment(urlsplit(cluster["server"]))
    if not isinstance(named, str) or not _is_usable(named):
        shown = re.sub(r"//.*@", "//", str(named))  # without a password
        raise ValueError(f"its proxy-url is {shown!r}; it must be a URL such as http://proxy.example:3128")
    return named


def _of_environment(server: SplitResult) -> str | None:
    """Return the proxy that counts for a server; one that cannot be used is left aside."""
    proxy = getproxies_environment().get(server.scheme)
    if not proxy or _is_excluded(server):
        return None
    url = proxy if "://" in proxy else f"http://{proxy}"
    return url if _is_usable(url) else None


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


def _is_usable(proxy: str) -> bool:
    try:
        parts = urlsplit(proxy)
        (parts.hostname or "").encode("idna")
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
