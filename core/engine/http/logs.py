"""Log lines as JSON, one object each; what is private (prompts, answers, keys) is never logged."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger and event, the fields that come with the record, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as_json(level: int = logging.INFO) -> None:
    """Have the whole process log so, on standard error, warnings of Python and what transformers says included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    with suppress(ImportError):
        from transformers.utils import logging as of_transformers

        of_transformers.disable_default_handler()
        of_transformers.enable_propagation()
