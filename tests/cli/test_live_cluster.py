"""An obstacle between a user and a cluster is reported in one sentence with its fix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from aiohttp import web
from click.testing import CliRunner

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags
from kvplace.core.errors import (
    Absent,
    ExitCode,
    Forbidden,
    KvplaceError,
    Misconfigured,
    Unavailable,
    exit_code_of,
)
from kvplace.core.label_terms import read_label_terms
from kvplace.kube import list_watch
from kvplace.kube.api_rollouts import ApiRollouts
from kvplace.kube.reported_vms import VMS
from kvplace.kube.watches import LEDGERS, NODES, PODS
from kvplace.nodes.cluster_reading import read_cluster
from tests.cli.calls import call_process
from tests.kube.api_stub import ApiStub, answer, api_stub, status

EMPTY_LIST = answer({"metadata": {"resourceVersion": "1"}, "items": []})


@pytest.fixture
async def stub() -> AsyncIterator[ApiStub]:
    async with api_stub() as server:
        yield server


@pytest.fixture
def flags(stub: ApiStub, tmp_path: Path) -> ClusterFlags:
    return ClusterFlags(kubeconfig=stub.kubeconfig(tmp_path, token="t").kubeconfig)


async def test_vms_are_asked_for_in_the_chosen_namespace_with_the_chosen_labels(
    stub: ApiStub, flags: ClusterFlags
) -> None:
    stub.script = [EMPTY_LIST]
    wanted = replace(flags, namespace="team-a", selector=read_label_terms("app=web"))
    async with wanted.open() as cluster:
        assert await cluster.api.read_all(PODS, cluster.vms) == ()
    (asked,) = stub.asked
    assert asked.path == "/api/v1/namespaces/team-a/pods"
    assert asked.query["labelSelector"] == "kvplace.io/placed=true,app in (web)"


async def test_the_namespace_is_that_of_the_context_unless_all_are_wanted(flags: ClusterFlags) -> None:
    async with flags.open() as cluster:
        assert cluster.namespace == "default"
    async with replace(flags, all_namespaces=True).open() as cluster:
        assert cluster.namespace == ""


async def test_another_user_is_impersonated_with_its_groups(stub: ApiStub, flags: ClusterFlags) -> None:
    stub.script = [EMPTY_LIST]
    async with replace(flags, as_user="eve", as_groups=("a", "b")).open() as cluster:
        await cluster.api.read_all(PODS)
    (asked,) = stub.asked
    assert asked.headers.getall("Impersonate-User") == ["eve"]
    assert asked.headers.getall("Impersonate-Group") == ["a", "b"]


async def test_ages_are_those_of_the_cluster_whatever_our_own_clock_states(
    stub: ApiStub, flags: ClusterFlags
) -> None:
    metadata = {"name": "db", "namespace": "default", "uid": "u", "creationTimestamp": "2026-06-01T11:00:00Z"}

    async def at_noon(request: web.Request) -> web.StreamResponse:
        pods = [{"metadata": metadata, "spec": {"nodeName": "worker"}, "status": {"phase": "Running"}}]
        body = {"metadata": {"resourceVersion": "1"}, "items": pods if request.path.endswith("/pods") else []}
        return web.json_response(body, headers={"Date": "Mon, 01 Jun 2026 12:00:00 GMT"})

    stub.script = [at_noon] * 3
    called = await asyncio.to_thread(call_process, "get", "vms", "--kubeconfig", str(flags.kubeconfig))
    assert called.out.split()[-8:] == ["db", "Running", "-", "worker", "-", "-", "-", "60m"], called.err


async def test_a_cluster_without_kubevirt_is_called_so(stub: ApiStub, flags: ClusterFlags) -> None:
    stub.script = [status(404, "404 page not found")]
    with pytest.raises(Absent, match="serves no virtualmachines: install KubeVirt, or choose another"):
        async with flags.open() as cluster:
            await ApiRollouts(cluster.session).read_all(VMS)


async def test_a_missing_resource_is_not_an_answer_about_room(stub: ApiStub, flags: ClusterFlags) -> None:
    stub.script = [status(404, "the server could not find the requested resource")]
    with pytest.raises(Absent, match="list pods: the server could not find"):
        async with flags.open() as cluster:
            await cluster.api.read_all(PODS)


async def test_flags_that_contradict_each_other_are_refused_before_anything_is_opened(
    flags: ClusterFlags,
) -> None:
    for wrong in (replace(flags, namespace="a", all_namespaces=True), replace(flags, as_groups=("a",))):
        with pytest.raises(Misconfigured, match=r"-n and -A|--as-group needs --as"):
            async with wrong.open():
                pass


async def test_expired_credentials(stub: ApiStub, flags: ClusterFlags) -> None:
    stub.script = [status(401, "Unauthorized"), status(401, "Unauthorized")]
    with pytest.raises(Forbidden, match=rf"{stub.url} does not accept the credentials.*log in again"):
        async with flags.open() as cluster:
            await cluster.api.read_all(NODES)


async def test_a_missing_right_is_named_with_the_role_that_gives_it(
    stub: ApiStub, flags: ClusterFlags
) -> None:
    stub.script = [status(403, 'User "eve" cannot list resource "nodeledgers"')]
    said = r'may not list nodeledgers \(User "eve".*ClusterRole kvplace-viewer grants this right'
    with pytest.raises(Forbidden, match=said):
        async with flags.open() as cluster:
            await cluster.api.read_all(LEDGERS)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (status(404, "not found"), "has no kvplace: its objects are not installed"),
        (answer({"versions": [{"version": "v2"}]}), "serves kvplace.io in v2, and kvplace .* reads v1alpha1"),
        (
            answer({"versions": [{"version": "v1alpha1"}]}),
            "does not serve nodeledgers: apply the installation again",
        ),
    ],
)
async def test_a_cluster_without_kvplace_or_with_another_version_of_it(
    stub: ApiStub, flags: ClusterFlags, group: object, said: str
) -> None:
    stub.script = [status(404, "the server could not find the requested resource"), group]  # type: ignore[list-item]
    with pytest.raises(Absent, match=said) as error:
        async with flags.open() as cluster:
            await cluster.api.read_all(LEDGERS)
    assert exit_code_of(error.value) == ExitCode.FAILED


async def test_a_server_that_is_down_is_named(tmp_path: Path) -> None:
    nowhere = ApiStub()
    nowhere.url = "http://127.0.0.1:1"
    flags = ClusterFlags(kubeconfig=nowhere.kubeconfig(tmp_path).kubeconfig)
    with pytest.raises(Unavailable, match=r"127.0.0.1:1 does not answer.*check the network and --context"):
        async with flags.open() as cluster:
            await read_cluster(cluster.api)


async def test_an_error_from_inside_is_not_reworded(flags: ClusterFlags) -> None:
    with pytest.raises(KvplaceError, match=r"^mine$"):
        async with flags.open():
            raise Misconfigured("mine")


@click.command()
@cluster_flags()
def shown(flags: ClusterFlags) -> None:
    click.echo(repr(flags))


def test_the_flags_are_kubectls() -> None:
    given = "-n a -l app=web --context c --kubeconfig f --request-timeout 2m --as u --as-group g"
    answered = CliRunner().invoke(shown, given.split())
    assert answered.output.strip() == repr(
        ClusterFlags("f", "c", 120.0, "u", ("g",), "a", False, read_label_terms("app=web"))
    )
    assert CliRunner().invoke(shown, []).output.strip() == repr(ClusterFlags())
    assert not ClusterFlags().are_given
    assert ClusterFlags(all_namespaces=True).are_given


@pytest.mark.parametrize("text", ["soon", "-1s", "1d", "nan", "inf", "0s"])
def test_a_timeout_that_is_none_is_named(text: str) -> None:
    answered = CliRunner().invoke(shown, ["--request-timeout", text])
    assert answered.exit_code == 2
    assert "is not a duration such as" in answered.output


async def test_watches_of_an_open_cluster_report_once_that_it_is_down(
    flags: ClusterFlags, capsys: pytest.CaptureFixture[str]
) -> None:
    async with flags.open():
        for resource in ("nodes", "pods"):
            list_watch._report(resource, Unavailable("no connection"), 0.1)
    assert capsys.readouterr().err.count("cannot be watched at the moment") == 1


async def test_a_webhook_that_does_not_answer_is_named_with_where_to_check(
    stub: ApiStub, flags: ClusterFlags
) -> None:
    said = 'failed calling webhook "vm.kvplace.io": failed to call webhook: context deadline exceeded'
    stub.script = [status(500, f"Internal error occurred: {said}")] * 20
    with pytest.raises(Unavailable) as refused:
        async with flags.open() as cluster:
            await cluster.api.read_all(PODS)
    assert str(refused.value) == (
        "`kvplace serve` does not answer the API server (webhook vm.kvplace.io): context deadline exceeded; "
        "`kubectl -n kvplace-system get pods` shows whether it runs"
    )
