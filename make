#!/bin/sh
# The same targets as the Makefile, for machines without GNU make: needs a POSIX shell and Python only.
set -eu
cd -- "$(dirname -- "$0")"
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" -m dev "$@"
    fi
done
echo "kvplace needs Python 3.11 or newer, and found none on PATH (on Debian 12 or newer: apt-get install python3; or name one with PYTHON=...)" >&2
exit 1
