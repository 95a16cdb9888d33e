"""`kvplace web` on a real API server: rights, the browser, ports and the end."""

from __future__ import annotations

import json
import signal
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.server_process import reserve_port
from harness.waiting import PATIENCE_S, wait_until
from tests.cli.live_cluster.small_cluster import MANIFESTS, OURS, Call, SmallCluster
from tests.manifests.policies import granted
from tests.web.map_process import map_process

NO_BROWSER = "--no-browser"
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> Any:
    with _WITHOUT_PROXY.open(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def viewers_kubeconfig(cluster: SmallCluster) -> Path:
    """Give a user the role kvplace-viewer and nothing else."""
    cluster.plane.kubectl("apply", "--server-side", "-f", str(MANIFESTS / "rbac" / "people.yaml"))
    cluster.plane.create_service_account(cluster.namespace, "viewer")
    cluster.plane.kubectl(
        *("create", "clusterrolebinding", cluster.namespace, "--clusterrole=kvplace-viewer"),
        f"--serviceaccount={cluster.namespace}:viewer",
    )
    token = cluster.plane.service_account_token(cluster.namespace, "viewer")
    granted(lambda: cluster.plane.request("GET", f"{OURS}/nodeledgers", token=token))
    return cluster.plane.service_account_kubeconfig(cluster.namespace, "viewer")


def test_a_viewer_reads_the_map_and_ctrl_c_ends_it(cluster: SmallCluster, viewers_kubeconfig: Path) -> None:
    with map_process(viewers_kubeconfig, NO_BROWSER) as process:
        assert process.printed.startswith(f"kvplace: the map of {cluster.plane.url} is at http://127.0.0.1:")
        names = {node["name"] for node in read(f"{process.url}api/cluster")["nodes"]}
        assert {cluster.first, cluster.second, cluster.bare} <= names
        vm = read(f"{process.url}api/vms/{cluster.namespace}/db")
        assert [pod["node"] for pod in vm["pods"]] == [cluster.first]
        assert process.end() == (130, "\n")


def test_sigterm_ends_it_as_ctrl_c_does(viewers_kubeconfig: Path) -> None:
    with map_process(viewers_kubeconfig, NO_BROWSER) as process:
        assert process.end(signal.SIGTERM) == (130, "\n")


def test_pages_have_the_name_of_the_context_or_the_one_that_is_given(viewers_kubeconfig: Path) -> None:
    with map_process(viewers_kubeconfig, NO_BROWSER) as process:
        named = read(f"{process.url}api/cluster")["name"]
        assert f'"current-context": "{named}"' in viewers_kubeconfig.read_text()
    with map_process(viewers_kubeconfig, NO_BROWSER, "--cluster-name=rack-7") as process:
        assert read(f"{process.url}api/cluster")["name"] == "rack-7"


def test_a_user_without_the_rights_gets_the_sentence_that_names_the_role(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    called = on_cluster("web", NO_BROWSER, "--as", "tom")
    assert (called.code, called.out) == (2, "")
    assert "you may not list nodeledgers" in called.err
    assert "kvplace-viewer" in called.err


def test_a_port_that_is_taken_is_named(on_cluster: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        called = on_cluster("web", NO_BROWSER, "--port", port)
    assert called.code == 2
    assert port in called.err
    assert "Traceback" not in called.err


def test_the_port_can_be_chosen_and_the_token_left_out(viewers_kubeconfig: Path) -> None:
    reservation, port = reserve_port()
    with (
        reservation,
        map_process(viewers_kubeconfig, NO_BROWSER, "--port", str(port), "--no-token") as process,
    ):
        assert process.url == f"http://127.0.0.1:{port}/"
        read(f"http://127.0.0.1:{port}/api/cluster")


def test_the_browser_is_led_to_the_url_by_a_file_that_only_its_user_can_read(
    viewers_kubeconfig: Path, tmp_path: Path
) -> None:
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$*" > {seen}.new && mv {seen}.new {seen}\n')
    browser.chmod(0o755)
    with map_process(viewers_kubeconfig, BROWSER=f"{browser} %s", TMPDIR=str(tmp_path)) as process:
        _wait_for(seen)
        secret = process.url.rstrip("/").rpartition("/")[2]
        opened = seen.read_text()
        assert secret not in opened
        file = Path(opened.removeprefix("file://"))
        assert f'url={process.url}"' in file.read_text()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert process.end() == (130, "\n")
    assert not file.exists()


def test_where_there_is_no_screen_the_url_is_left_to_the_user(viewers_kubeconfig: Path) -> None:
    with map_process(viewers_kubeconfig) as process:
        assert process.read_line() == "kvplace: no browser was found; open the URL yourself\n"
        read(f"{process.url}api/cluster")
        assert process.end() == (130, "\n")


def test_another_run_does_not_answer_to_the_old_url(viewers_kubeconfig: Path) -> None:
    reservation, port = reserve_port()
    options = (NO_BROWSER, "--port", str(port))
    with reservation:
        with map_process(viewers_kubeconfig, *options) as process:
            old = process.url
            process.end()
        with (
            map_process(viewers_kubeconfig, *options),
            pytest.raises(urllib.error.HTTPError, match="403"),
        ):
            read(f"{old}api/cluster")


def _wait_for(file: Path) -> None:
    wait_until(file.exists, lambda: f"{file} is not there")
