"""The node's own log on stderr, with one event per line.

Modules get their logger from `structlog.get_logger`, and log the name of an event with its values:
`log.info("segment sealed", position=position, bytes=size)`. No code logs per message.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import orjson
import structlog

from penstock.node.config import LogLevel, LogOptions
from penstock.store.printable import printable

LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_GRPC: Final = "grpc._cython.cygrpc"
"""The logger of gRPC."""

_OF_LINES = frozenset(("exception", "stack"))
"""Values that have several lines."""


def configure_logging(options: LogOptions, stream: TextIO | None = None) -> None:
    """Write the events of this process, and those of libraries that use `logging`, to `stream` in one format.

    `stream` is stderr if it is None. The last call counts.
    """
    stream = stream or sys.stderr
    level = LEVELS[options.level]
    is_console = options.format == "console" or (options.format == "auto" and stream.isatty())
    has_colors = stream.isatty() and not os.environ.get("NO_COLOR")  # as https://no-color.org says
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.typing.Processor]
    if is_console:
        # Plain tracebacks, because the rich ones print local variables, among them message bodies and passwords.
        rendering = [_escape, structlog.dev.ConsoleRenderer(colors=has_colors, exception_formatter=_write_traceback)]
    else:
        rendering = [structlog.processors.format_exc_info, _escape, _render_json]

    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger(_GRPC).addFilter(_is_error)


def log_level() -> LogLevel:
    """Return the least severe level of the events that this process logs."""
    level = logging.getLogger().getEffectiveLevel()
    names: list[LogLevel] = [name for name, number in LEVELS.items() if number >= level]
    return names[0] if names else "error"


def set_log_level(name: LogLevel) -> None:
    """Log the events of a level and of those above it from now on, until the next call of this or of `configure_logging`."""
    level = LEVELS[name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    logging.getLogger().setLevel(level)


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether an event of gRPC is worth a line. A connection that ends while it is written to is everyday life.

    gRPC writes a traceback for each call of such a connection, so any caller could fill the log.
    """
    return not (isinstance(record.msg, str) and record.msg.startswith("ExecuteBatchError"))


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what people can't see in the values of an event, because clients choose many of them."""
    for name, value in event.items():
        event[name] = printable(value, keep="\n") if name in _OF_LINES and isinstance(value, str) else _escaped(value)
    return event


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return value


def _write_traceback(stream: TextIO, failed: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, failed)
    stream.write(printable(text.getvalue(), keep="\n"))


def _render_json(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """Render an event as JSON. Values without a type in JSON become their `repr`, because logging must not raise."""
    options = orjson.OPT_NON_STR_KEYS
    return orjson.dumps(event, default=repr, option=options).decode()
