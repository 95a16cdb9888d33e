"""Runs stories by seed: `python -m tests.protocol SEED...` or `--count N [--first SEED] [--jobs N]`.

Prints the seeds of runs that break a promise on stderr, with the command that replays them, and what
happened as one line of JSON. `--steps` shows each step that had an effect. A long run states every minute how
far it is; with `--record` it can be ended at any time, and the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path

from tests.protocol.device_promises import BrokenPromise
from tests.protocol.mutations import MUTATIONS
from tests.protocol.results_file import Part, Record, Told, commit
from tests.protocol.run_kind import Kind
from tests.protocol.simulation import Story

_CHUNK = 50
_PROGRESS_S = 60.0
_MEANINGS = {
    Kind.ROOM: "VMs move for others",
    Kind.NODES: "VMs migrate for others",
    Kind.DEVICES: "VMs have devices of the host",
    Kind.PREEMPTION: "VMs are evicted for others",
    Kind.DRA: "dra-driver-cpu sets the cpusets",
}


def told(
    seeds: Iterable[int], *, kind: Kind = Kind.PLAIN, steps: bool = False, until_broken: bool = False
) -> Told:
    """Run stories one after the other, all or until the first that breaks a promise."""
    logging.disable(logging.CRITICAL)
    answer = Told()
    for seed in seeds:
        story = Story(seed, kind, tell=print if steps else None)
        try:
            story.run()
        except BrokenPromise as broken:
            answer.broken[seed] = str(broken)
        except Exception:
            answer.broken[seed] = traceback.format_exc()
        answer.happened += story.diary.happened
        answer.happened["stories"] += 1
        answer.schedules.add(story.diary.schedule)
        if until_broken and answer.broken:
            break
    return answer


def _told_part(part: Part) -> tuple[Part, Told]:
    return part, told(part.seeds, kind=part.kind)


def _in_parallel(parts: list[Part], jobs: int) -> Iterator[tuple[Part, Told]]:
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(_told_part, parts)


def _tell_many(first: int, count: int, jobs: int, record: Record | None, kind: Kind) -> Told:
    """Run consecutive stories in several processes, except recorded ones."""
    starts = range(first, first + count, _CHUNK)
    parts = [Part(start, min(_CHUNK, first + count - start), kind) for start in starts]
    known = record.told if record is not None else {}
    together = Told()
    for part in parts:
        together.add(known.get(part, Told()))
    began = said = time.monotonic()
    before = together.happened["stories"]
    for part, one in _in_parallel([part for part in parts if part not in known], jobs):
        together.add(one)
        if record is not None:
            record.add(part, one)
        for seed, why in one.broken.items():
            print(f"story {seed}: {why}", file=sys.stderr, flush=True)
        now, stories = time.monotonic(), together.happened["stories"]
        if now - said > _PROGRESS_S:
            said = now
            rate = (stories - before) / (now - began)
            print(
                f"{stories:,} of {count:,} stories, {len(together.broken)} broken;"
                f" {rate:.0f} a second, {(count - stories) / rate / 60:.0f} minutes left",
                file=sys.stderr,
                flush=True,
            )
    return together


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="stories to tell")
    parser.add_argument("--count", type=int, default=0, help="how many further stories")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of these")
    kinds = parser.add_mutually_exclusive_group()
    for kind, meaning in _MEANINGS.items():
        kinds.add_argument(f"--{kind.value}", dest="kind", action="store_const", const=kind, help=meaning)
    parser.set_defaults(kind=Kind.PLAIN)
    parser.add_argument("--jobs", type=int, default=1, help="how many processes tell the further stories")
    parser.add_argument("--record", type=Path, metavar="FILE", help="note here what came of each part")
    parser.add_argument(
        "--mutation", choices=sorted(MUTATIONS), help="break kvplace, and stop when it is noticed"
    )
    parser.add_argument("--steps", action="store_true", help="print each step that had an effect")
    chosen = parser.parse_args()
    further = range(chosen.first, chosen.first + chosen.count)
    in_parts = chosen.jobs > 1 or chosen.record is not None
    if in_parts and (chosen.mutation or chosen.steps):
        parser.error("--mutation and --steps tell one story after the other, without --jobs and --record")
    if chosen.mutation:
        MUTATIONS[chosen.mutation]()
    try:
        record = Record(chosen.record, commit()) if chosen.record is not None else None
    except ValueError as error:
        parser.error(str(error))
    together = told(
        chosen.seeds if in_parts else [*chosen.seeds, *further],
        kind=chosen.kind,
        steps=chosen.steps,
        until_broken=bool(chosen.mutation),
    )
    for seed, why in together.broken.items():
        print(f"story {seed}: {why}", file=sys.stderr)
    if in_parts:
        together.add(_tell_many(chosen.first, chosen.count, chosen.jobs, record, chosen.kind))
    if together.broken:
        broken = sorted(together.broken)
        flags = "--steps" if chosen.kind is Kind.PLAIN else f"--{chosen.kind.value} --steps"
        print(f"broken: {broken}; replay with: python -m tests.protocol {flags} {broken[0]}", file=sys.stderr)
    together.happened["schedules"] = len(together.schedules)
    print(json.dumps(together.happened, sort_keys=True))
    return 1 if together.broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a story
        command = [sys.executable, "-m", "tests.protocol", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
