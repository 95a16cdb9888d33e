"""`kvplace doctor`: the faults of an installation, each with its fix; `kvplace version`: its releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace import __version__
from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_namespace
from kvplace.cli.output import Output, print_answer, say
from kvplace.cli.parameters import Answer, output_option
from kvplace.core.errors import ExitCode
from kvplace.core.quantity import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplace.doctor.examination import Examination
    from kvplace.doctor.reading import Releases


_WIDTH = 20


@click.command("doctor", short_help="Check the installation and name the fixes.")
@click.option(
    "-n",
    "--namespace",
    "trial",
    metavar="NAME",
    shell_complete=complete_namespace,
    default="default",
    show_default=True,
    help="Namespace of the trial pod, which the API server refuses and never stores.",
)
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.REPORT)
def command(*, flags: ClusterFlags, trial: str, output: Output) -> int:
    """Check the installation in a cluster, and print each fault with its fix.

    It checks the API server, the CRDs, `serve`, the scheduler and its configuration, webhooks and their
    answers, certificates, policies, rights, images, releases, KubeVirt, agents, nodes, ledgers and VMs. It
    changes nothing. Missing permissions are listed once.

    Exit code 0 when nothing is wrong, also with warnings; 1 when something is wrong; 4 when something could
    not be checked.
    """
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.doctor.admission_checks import LEFT_ALONE
    from kvplace.doctor.examination import examine
    from kvplace.doctor.installation import Installation, Severity
    from kvplace.doctor.reading import read_installation

    if trial in LEFT_ALONE:
        raise click.UsageError(f"the webhooks do not see pods of {trial}: name another namespace with -n")

    async def body(cluster: LiveCluster) -> Installation:
        return await read_installation(
            cluster.objects,
            cluster.api,
            namespace=trial,
            client_version=__version__,
            now=lambda: cluster.session.server_time,
        )

    found = examine(flags.run(body))
    lines = report_lines(found, wide=output is Output.WIDE)
    print_answer(output, found.document, lines)
    if found.level is Severity.WRONG:
        return ExitCode.FAILED
    unchecked = any(finding.level is Severity.UNCHECKED for one in found.results for finding in one.findings)
    return ExitCode.PARTLY_DONE if unchecked else ExitCode.DONE


def report_lines(found: Examination, *, wide: bool) -> Iterator[str]:
    """Write the faults, then the checks without faults in one line; `wide` writes a line for each of them.

    Missing permissions come after the faults, each once for all checks that need it: a user without rights
    lacks nearly all of them, and they must not hide a fault.
    """
    from kvplace.doctor.installation import Finding, Severity

    unread: dict[str, list[tuple[str, Finding]]] = {}
    for one in found.results:
        if one.level is None and wide:
            yield f"{one.check.name:<{_WIDTH}}ok"
        for finding in one.findings:
            if finding.level is Severity.UNCHECKED and not wide:
                unread.setdefault(finding.fix, []).append((one.check.name, finding))
                continue
            yield f"{one.check.name:<{_WIDTH}}{finding.level.value}: {finding.about}: {finding.problem}"
            yield f"{'':<{_WIDTH}}fix: {finding.fix}"
    for fix, findings in unread.items():
        for problem in dict.fromkeys(finding.problem for _, finding in findings):
            checks = dict.fromkeys(check for check, finding in findings if finding.problem == problem)
            yield f"{Severity.UNCHECKED.value:<{_WIDTH}}{problem}: {', '.join(checks)}"
        yield f"{'':<{_WIDTH}}fix: {fix}"
    well = [one.check.name for one in found.results if one.level is None]
    if well and not wide:
        yield f"{'ok':<{_WIDTH}}{', '.join(well)}"
    yield "all is well" if found.level is None else _summary(found)


def _summary(found: Examination) -> str:
    from collections import Counter

    from kvplace.doctor.installation import Severity

    counts = Counter(finding.level.value for one in found.results for finding in one.findings)
    return ", ".join(
        counted(number, level) if level == Severity.WARNING.value else f"{number} {level}"
        for level, number in counts.items()
    )


_OURS = ("client", "serve", "agent", "hook")


@click.command("version", short_help="Show the releases of this command and of a cluster's kvplace.")
@click.option("--client", "client_only", is_flag=True, help="Only this command, without a cluster.")
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.REPORT)
def version(*, flags: ClusterFlags, client_only: bool, output: Output) -> None:
    """Show the release of this command, of serve, agent and hook in a cluster, of Kubernetes and KubeVirt.

    The release of a program in the cluster is the tag of its image, and `-` for an image with a digest alone.
    """
    found = None if client_only else _of_cluster(flags)
    releases = {"client": __version__, **({} if found is None else found.of)}
    lines = (f"{name:<12}{release or '-'}" for name, release in releases.items())
    print_answer(output, lambda: releases, lines)
    if found is not None:
        _report_missing_rights(found)
    ours = {release for name in _OURS for release in releases.get(name, "").split(", ") if release}
    if len(ours) > 1:
        say(f"there are different releases ({', '.join(sorted(ours))}): use one everywhere")


def _report_missing_rights(found: Releases) -> None:
    """Name each right that is missing once, with the programs that it would show."""
    from kvplace.cli.live_cluster import missing_right

    programs: dict[str, list[str]] = {}
    for name, denied in found.denied.items():
        programs.setdefault(missing_right(denied), []).append(name)
    for sentence, names in programs.items():
        say(f"no release of {' and '.join(names)} is known: {sentence}")
    if not found.denied and not any(name in found.of for name in _OURS):
        say("neither serve nor the agent was found; `kubectl kvplace doctor` checks the installation")


def _of_cluster(flags: ClusterFlags) -> Releases:
    from kvplace.doctor.reading import read_releases

    try:
        return flags.run(lambda cluster: read_releases(cluster.objects))
    except BaseException:
        say(f"this command is of release {__version__}; cluster unreachable:")
        raise
