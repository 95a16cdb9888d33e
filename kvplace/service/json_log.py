"""Log lines of a long-running process: one JSON object a line on stderr, with the same keys everywhere."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode
_CONTEXT = ("pod", "vm", "node", "uid", "attempt", "review")


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            "component": record.name.removeprefix("kvplace.").partition(".")[0],
        }
        line |= {key: getattr(record, key) for key in _CONTEXT if hasattr(record, key)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def log_as_json(level: str) -> None:
    """Send all logging to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
