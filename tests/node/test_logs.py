"""The node's own log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from penstock.node.config import LogOptions
from penstock.node.logs import configure_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []  # configure_logging closes the handlers that it replaces, and these are pytest's
    yield
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def test_an_event_is_one_json_object_with_its_values() -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format="json"), stream)
    structlog.get_logger("store").info("segment sealed", position=7, body=b"\xff", kinds={1: "message"})
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "segment sealed", "level": "info", "position": 7, "body": r"b'\xff'", "kinds": {"1": "message"}}


def test_events_of_libraries_come_in_the_same_format() -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format="json"), stream)
    logging.getLogger("amqtt.plugins").warning("%d plugins", 2)
    event = json.loads(stream.getvalue())
    assert (event["event"], event["level"], event["logger"]) == ("2 plugins", "warning", "amqtt.plugins")


def test_a_connection_that_ends_while_grpc_writes_to_it_is_no_error() -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format="json"), stream)
    grpc_logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise RuntimeError('Failed "execute_batch"')
    except RuntimeError:
        grpc_logger.exception("ExecuteBatchError raised in core by servicer method [%s]", "/penstock.pop.v1.PopService/Consume")
        assert stream.getvalue() == ""
        grpc_logger.exception("Unexpected [%s] raised by servicer method [%s]", "RuntimeError", "/x")
    assert json.loads(stream.getvalue())["event"] == "Unexpected [RuntimeError] raised by servicer method [/x]"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("value", "has_colors"), [("", True), ("1", False)])
def test_a_terminal_has_colors_unless_nobody_wants_them(value: str, has_colors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    stream = Terminal()
    configure_logging(LogOptions(), stream)
    structlog.get_logger("store").info("segment sealed")
    assert ("\x1b[" in stream.getvalue()) is has_colors


def test_events_below_the_level_are_not_logged() -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(level="warning"), stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("aiohttp").info("quiet")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_error_shows_its_traceback_and_no_local_variables(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format=log_format), stream)  # type: ignore[arg-type]
    password = "hunter" + "2"
    try:
        raise ValueError(f"{len(password)} characters")
    except ValueError:
        structlog.get_logger().exception("login failed")
    assert "ValueError: 7 characters" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_the_last_configuration_applies_to_existing_loggers() -> None:
    first, last = io.StringIO(), io.StringIO()
    log = structlog.get_logger()
    configure_logging(LogOptions(), first)
    configure_logging(LogOptions(format="console"), last)
    log.info("moved", to="last")
    assert first.getvalue() == ""
    assert "moved" in last.getvalue()


def test_auto_is_json_without_a_terminal() -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format="auto"), stream)
    structlog.get_logger().error("full")
    assert json.loads(stream.getvalue())["event"] == "full"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_names_that_clients_choose_neither_forge_lines_nor_steer_a_terminal(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging(LogOptions(format=log_format), stream)  # type: ignore[arg-type]
    name = "c\n2026 forged\x1b[2J\u202e\x9b"
    structlog.get_logger().info("closed", client=name, filters=[name], by={name: name})
    logging.getLogger("amqtt").warning("of %s", name)
    try:
        raise ValueError(name)
    except ValueError:
        structlog.get_logger().exception("failed")
    written = stream.getvalue()
    assert not {"\u202e", "\x9b", "\x1b"} & set(written)
    assert [line for line in written.splitlines() if line.startswith("2026 forged")] == (
        ["2026 forged\\u001b[2J\\u202e\\u009b"] if log_format == "console" else []
    ), "only the lines of a traceback stay lines"
    assert written.count("forged\\" if log_format == "console" else "forged") >= 5
