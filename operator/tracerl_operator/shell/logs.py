"""Logs on stderr, one JSON object a line, kopf's and the client's too."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_EXTRAS = ("job", "namespace", "reason", "kind", "seconds")
# What these say at INFO is for their own developers; the client's DEBUG shows whole answers, Secrets too.
_LEAST = {
    **dict.fromkeys(("kopf", "aiohttp", "asyncio"), logging.WARNING),
    "kubernetes": logging.ERROR,  # warns of a configuration that it then refuses
    "kopf._core.reactor.running": logging.ERROR,  # warns that a thread gets no signals
}


def configure(level: str, form: str) -> None:
    """Send everything that is logged to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.captureWarnings(True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in _LEAST.items():
        logging.getLogger(name).setLevel(least)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key in _EXTRAS if (value := getattr(record, key, None)) is not None}
        where = getattr(record, "k8s_ref", None)  # kopf's word for the object
        if isinstance(where, dict):
            line |= {
                "object": f"{where.get('kind')}/{where.get('name')}",
                "namespace": where.get("namespace"),
            }
        if record.exc_info and record.exc_info[1] is not None:
            # How kopf came to an error is of no use; what it was is, and the watches begin anew.
            foreign = record.name.startswith("kopf")
            line["error"] = repr(record.exc_info[1]) if foreign else self.formatException(record.exc_info)
        return json.dumps(line, default=str)
