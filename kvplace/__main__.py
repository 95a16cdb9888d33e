"""Where the command `kvplace` begins: `python -m kvplace`, and the scripts of that name.

The command's modules are imported when it runs, so that Ctrl-C while they load ends it as it does later.
"""

import sys

_INTERRUPTED = 130
"""The code of `core.errors`, which may not be loaded yet."""


def main() -> None:
    """Run the command line that the process was started with."""
    try:
        from kvplace.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
