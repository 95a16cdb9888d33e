"""The rollout of a command line: read from templates and flags or from one document, and shown while it runs.

Progress is bars on a terminal, else a line a second, both on stderr. Ctrl-C stops the run cleanly: every call
gets its answer, and the report shows the progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvplace.cli.live_cluster import on_interrupt
from kvplace.cli.output import console, say
from kvplace.core.errors import BadBody
from kvplace.core.quantity import counted
from kvplace.core.strict_json import shown
from kvplace.core.vm_stages import VmStage
from kvplace.documents.reading import read_manifests, read_source, source_name
from kvplace.rollout.report import Counts, Report
from kvplace.rollout.run import RolloutRun
from kvplace.rollout.templates import Rollout, read_rollout, read_template


def read_given(
    files: Sequence[str],
    namespace: str | None,
    default: str,
    *,
    name: str | None = None,
    count: int | None = None,
    names: str | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Rollout:
    """Read the rollout; `namespace` is the value of -n, `default` applies if flag and document have none.

    The others are the options beside the files. `names` is a file with the name of one VM on each line, and
    `limits` are keys of the document that options replace. Raises BadBody or UsageError.
    """
    found = [(file, where, content) for file in files for where, content in read_manifests(file)]
    if not found:
        raise BadBody(f"{', '.join(map(source_name, files))}: there is no template in it")
    documents = [(file, where, content) for file, where, content in found if "vms" in content]
    if documents:
        if len(found) > 1 or count is not None or names is not None:
            raise click.UsageError(
                f"{documents[0][1]} is a rollout document, which has its own templates, counts and names;"
                " give it alone"
            )
        file, what, content = documents[0]
        folder = Path() if file == "-" else Path(file).parent
        if name is not None:
            content = {**content, "name": name}
    else:
        what, folder = "the rollout", Path()
        content = _of_templates([(where, content) for _, where, content in found], name, count, names)
    content = {**content, **(limits or {})}
    if namespace is not None:
        content["namespace"] = namespace
    of_templates = filter(None, (_metadata(template, "namespace") for _, _, template in found))
    named = content.get("namespace") or next(of_templates, default)
    return read_rollout(content, named, folder=folder, what=what)


def _of_templates(
    templates: Sequence[tuple[str, dict[str, Any]]], name: str | None, count: int | None, names: str | None
) -> dict[str, Any]:
    for where, content in templates:
        read_template(content, where)  # its errors name the file
    own = [_metadata(content, "name") for _, content in templates]
    name = name or (own[0] if len(own) == 1 else None)
    if name is None:
        raise click.UsageError("give the rollout a --name: several templates, or one without metadata.name")
    if len(templates) > 1 and names is not None:
        raise click.UsageError("--names goes with one template; write a rollout document for several")
    vms: list[dict[str, Any]] = []
    for number, (_, content) in enumerate(templates):
        entry: dict[str, Any] = {"template": content}
        if len(templates) > 1:
            entry["name"] = f"{name}-{own[number] or number + 1}"
        if names is not None:
            entry["names"] = _names_in(names)
        elif count is not None:
            entry["count"] = count
        vms.append(entry)
    return {"name": name, "vms": vms}


def _names_in(file: str) -> list[str]:
    """Read a list of names, one on each line, without blank lines and the text after a #."""
    what = source_name(file)
    found: dict[str, int] = {}
    for number, line in enumerate(read_source(file, what).splitlines(), 1):
        name = line.partition("#")[0].strip()
        if name in found:
            raise BadBody(f"{what}: line {number} names {shown(name)} again, as line {found[name]} does")
        if name:
            found[name] = number
    if not found:
        raise BadBody(f"{what} names no VM; write one name on each line")
    return list(found)


def _metadata(content: Mapping[str, Any], key: str) -> str | None:
    """Return a text of an object's metadata; None where it has none."""
    metadata = content.get("metadata")
    text = metadata.get(key) if isinstance(metadata, dict) else None
    return text if isinstance(text, str) and text else None


_LINE_S = 1.0
_BARS_S = 0.1
_STALL_S = 30.0


async def shown_run(run: RolloutRun) -> Report:
    """Carry out a run and show its progress; the first Ctrl-C stops it, the second one ends the program."""

    def stop() -> None:
        say("stopping; created VMs stay")
        run.stop()

    on_terminal = sys.stderr.isatty()
    with on_interrupt(stop), _bars(run) if on_terminal else contextlib.nullcontext(_say_counts) as show:
        follower = asyncio.create_task(_follow(run, show, _BARS_S if on_terminal else _LINE_S))
        try:
            return await run.run()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
            show(run.counts)


def told_what_is_left(clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return a function that reports once a second how many VMs are still to be deleted."""
    next_line = clock() + _LINE_S

    def tell(left: int, of: int) -> None:
        nonlocal next_line
        if clock() >= next_line:
            next_line = clock() + _LINE_S
            say(f"{left} of {counted(of, 'VM')} left" if left else "the VMs are gone; waiting for their pods")

    return tell


async def _follow(run: RolloutRun, show: Callable[[Counts], None], every_s: float) -> None:
    """Show changed counts, and state the reason of the wait once whenever nothing has changed for a while."""
    before: Counts | None = None
    same_for, told = 0.0, False
    while True:
        await asyncio.sleep(every_s)
        counts = run.counts
        if counts != before:
            before, same_for, told = counts, 0.0, False
            show(counts)
            continue
        same_for += every_s
        if same_for >= _STALL_S and not told and run.waits_for:
            told = True
            say(
                f"nothing has changed for {_STALL_S:.0f} s: {run.waits_for}; Ctrl-C leaves them as they "
                "are, and `kvplace rollout resume` continues"
            )


def _say_counts(counts: Counts) -> None:
    say(counts.sentence)


@contextlib.contextmanager
def _bars(run: RolloutRun) -> Iterator[Callable[[Counts], None]]:
    """Draw a bar for each stage while the block runs; it gets the function that draws counts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr, 80)) as progress:
        wanted = run.counts.wanted
        bars = {stage: progress.add_task(stage.value, total=wanted) for stage in VmStage}
        failed = progress.add_task("failed", total=wanted, visible=False)

        def draw(counts: Counts) -> None:
            for stage, bar in bars.items():
                progress.update(bar, completed=counts.reached[stage])
            progress.update(failed, completed=counts.failed, visible=counts.failed > 0)

        yield draw
