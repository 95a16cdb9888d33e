"""Tells stories by seed: `python -m tests.protocol SEED...` or `--count N [--first SEED]`.

Prints the seeds of those that break a promise on stderr, and what happened as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections import Counter

from tests.protocol.simulation import Story


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="stories to tell")
    parser.add_argument("--count", type=int, default=0, help="how many further stories")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of these")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    happened: Counter[str] = Counter()
    broken = []
    for seed in [*chosen.seeds, *range(chosen.first, chosen.first + chosen.count)]:
        story = Story(seed)
        try:
            story.run()
        except Exception:
            broken.append(seed)
            print(f"story {seed}:", file=sys.stderr)
            traceback.print_exc()
        happened += story.happened
    if broken:
        print(f"broken: {broken}; replay with: python -m tests.protocol {broken[0]}", file=sys.stderr)
    print(json.dumps(happened, sort_keys=True))
    return 1 if broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a story
        command = [sys.executable, "-m", "tests.protocol", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
