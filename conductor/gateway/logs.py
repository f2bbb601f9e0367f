"""Log lines for people or for machines, each with the id of the request that it belongs to.

`text` is one readable line, `json` one object a line. Nothing that a client sends is logged but its request id, its path and
its tenant's name: no prompts, no keys, no headers.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Literal, TextIO, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` of a record is merged into it."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, object] = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request.get()
        if request_id is not None:
            line["request_id"] = request_id
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        words = [f"{name}={value}" for name, value in getattr(record, FIELDS, {}).items()]
        request_id = current_request.get()
        if request_id is not None:
            words.append(f"request_id={request_id}")
        return " ".join([line, *words])


def configure_logging(kind: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Send warnings of everybody, and our own lines from `level` on, to one handler in place of any other."""
    logging.basicConfig(level=logging.WARNING, handlers=[handler_for(kind, stream)], force=True)
    logging.getLogger("conductor").setLevel(level.upper())


def handler_for(kind: LogFormat, stream: TextIO | None = None) -> logging.Handler:
    """A handler that writes to `stream` (standard error by default) in that form."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    return handler
