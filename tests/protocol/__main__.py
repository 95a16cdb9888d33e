"""Tells stories by seed: `python -m tests.protocol SEED...` or `--count N [--first SEED] [--jobs N]`.

Prints the seeds of those that break a promise on stderr, with the command that replays them, and what
happened as one line of JSON. `--steps` shows each step that had an effect.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pool

from tests.protocol.mutations import MUTATIONS
from tests.protocol.promises import BrokenPromise
from tests.protocol.simulation import Story

_CHUNK = 50


@dataclass
class Told:
    """What came of some stories."""

    happened: Counter[str] = field(default_factory=Counter)
    schedules: set[int] = field(default_factory=set)
    broken: dict[int, str] = field(default_factory=dict)
    """Why, by seed."""


def told(
    seeds: Iterable[int], *, makes_room: bool = False, steps: bool = False, until_broken: bool = False
) -> Told:
    """Tell stories one after the other, all or until the first that breaks a promise."""
    logging.disable(logging.CRITICAL)
    answer = Told()
    for seed in seeds:
        story = Story(seed, makes_room=makes_room, tell=print if steps else None)
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


def _in_parallel(seeds: list[int], jobs: int, *, makes_room: bool) -> Iterator[Told]:
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(partial(told, makes_room=makes_room), chunks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="stories to tell")
    parser.add_argument("--count", type=int, default=0, help="how many further stories")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of these")
    parser.add_argument("--make-room", action="store_true", help="VMs move for others")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes tell them")
    parser.add_argument(
        "--mutation", choices=sorted(MUTATIONS), help="break kvplace, and stop when it is noticed"
    )
    parser.add_argument("--steps", action="store_true", help="print each step that had an effect")
    chosen = parser.parse_args()
    if chosen.mutation:
        MUTATIONS[chosen.mutation]()
    seeds = [*chosen.seeds, *range(chosen.first, chosen.first + chosen.count)]
    parts = (
        _in_parallel(seeds, chosen.jobs, makes_room=chosen.make_room)
        if chosen.jobs > 1
        else [
            told(
                seeds,
                makes_room=chosen.make_room,
                steps=chosen.steps,
                until_broken=bool(chosen.mutation),
            )
        ]
    )
    together = Told()
    for part in parts:
        together.happened += part.happened
        together.schedules |= part.schedules
        together.broken |= part.broken
        for seed, why in part.broken.items():
            print(f"story {seed}: {why}", file=sys.stderr)
    if together.broken:
        broken = sorted(together.broken)
        flags = "--make-room --steps" if chosen.make_room else "--steps"
        print(f"broken: {broken}; replay with: python -m tests.protocol {flags} {broken[0]}", file=sys.stderr)
    together.happened["schedules"] = len(together.schedules)
    print(json.dumps(together.happened, sort_keys=True))
    return 1 if together.broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a story
        command = [sys.executable, "-m", "tests.protocol", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
