"""The echo of an own write to a ledger is known already; what others wrote is read."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_document
from kvplace.core.request import Policy
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.session import open_session
from kvplace.kube.watches import LEDGERS, InitApply, InitDone
from tests.kube.api_stub import answer, api_stub

CPUS = parse_cpu_list("2-3")
CLAIM = Claim(PodUid("a"), "default", "pod-a", "", Policy.EXCLUSIVE, CPUS, CPUS, {}, {}, "")


async def test_the_echo_of_an_own_write_is_the_record_that_was_written(tmp_path: Path) -> None:
    spec = {"owners": {"2": "a", "3": "a"}, "claims": {"a": claim_document(CLAIM)}}

    def stored(name: str, version: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": version}, "spec": spec}

    async with api_stub() as stub:
        cluster = ApiCluster(await open_session(stub.kubeconfig(tmp_path)))
        stub.script = [
            answer(stored("ours", "5")),
            answer(
                {"metadata": {"resourceVersion": "9"}, "items": [stored("ours", "5"), stored("theirs", "5")]}
            ),
        ]
        before = LedgerRecord(NodeName("ours"), Ledger(), "4", "uid-ours")
        written = await cluster.write_ledger(before, LedgerChange(claims=(CLAIM,)))

        seen = {}
        async with aclosing(cast(Any, cluster.watch(LEDGERS))) as events:
            async for event in events:
                if isinstance(event, InitApply):
                    seen[event.record.node] = event.record
                if isinstance(event, InitDone):
                    break
        await cluster.close()
    assert seen["ours"] is written
    assert seen["theirs"].ledger == written.ledger
