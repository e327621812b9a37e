"""Storage, options and the level of the log over the admin API."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.access.subject import Subject
from penstock.gateway.options import ListenerOptions
from penstock.node.api.nodeoptions import MASKED, options_shown
from penstock.node.api.operation import ApiCall
from penstock.node.api.storage import StorageOperations
from penstock.node.config import load_config
from penstock.store.options import MIB
from penstock.store.retention.retention import Blocker
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, broker, loggers

__all__ = ["api", "broker", "loggers"]


async def test_the_storage_says_what_it_takes_and_what_keeps_it(broker: Broker, api: Api) -> None:
    store, viewer = broker.node.store, api("viewer")
    route = store.router.route(b"a")
    for _ in range(5):
        store.append_message(route, b"x" * MIB)
    await store.durable()
    shown = await viewer.get("/storage")
    assert (shown["log"]["end"], shown["log"]["durable"], shown["log"]["segments"]) == (store.log.end, store.log.end, 2)
    assert (shown["disk"]["level"], shown["tables"]) == ("open", None)
    assert shown["index"]["block_cache_max_bytes"] > 0
    assert (shown["retention"]["blocked_by"], shown["retention"]["waits_for"]) == (None, "")
    store.retention.blocked_by = Blocker.BACKUP  # until the next turn of housekeeping, which no await here lets run
    retention = (await StorageOperations(store, None).show(ApiCall(Subject(), {}, None, None))).retention
    assert (retention.blocked_by, "backup" in retention.waits_for) == ("backup", True)
    segments = await viewer.pages("/storage/segments", limit=1)
    assert [(each["start"], each["end"], each["open"]) for each in segments] == [
        (*segment, number == 1) for number, segment in enumerate(store.log.segments())
    ]
    assert segments[0]["first_stored_ms"] > 0


async def test_options_come_in_pages_by_name(broker: Broker, api: Api) -> None:
    options = await api("viewer").pages("/options", limit=50)
    names = [option["name"] for option in options]
    assert names == sorted(names)
    assert {"data_dir", "store.retention", "mqtt.access.plugins", "log.level"} <= {*names}
    retention = await api("viewer").get("/options/store.retention")
    assert retention == next(option for option in options if option["name"] == "store.retention")
    assert (retention["variable"], retention["origin"]) == ("PENSTOCK_STORE__RETENTION", "default")


def test_an_option_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[store]\nretention = "7d"\nsegment-bytes = 1048576\n[log]\nlevel = "error"\n')
    config = load_config(path, {"log.level": "debug", "data_dir": None}, {"PENSTOCK_STORE__SEGMENT_BYTES": "2097152"})
    options = {option.name: option for option in options_shown(config)}
    assert {name: (options[name].value, options[name].origin) for name in ("store.retention", "store.segment_bytes")} == {
        "store.retention": ("7d", "file"),
        "store.segment_bytes": (2_097_152, "variable"),
    }
    assert (options["log.level"].value, options["log.level"].origin, options["log.level"].default) == (
        "debug",
        "argument",
        "info",
    )
    assert options["data_dir"].origin == "default"


def test_secrets_are_masked() -> None:
    config = load_config()
    listener = ListenerOptions(name="tls", certificate_file="c.pem", key_file="k.pem")
    access = replace(config.mqtt.access, plugins={"a.Plugin": {"password": "hunter2"}})
    config = replace(
        config,
        mqtt=replace(config.mqtt, listeners=(listener,), access=access),
        access=replace(config.access, password_file="users"),
        tracing=replace(config.tracing, endpoint="http://me:hunter2@collector/v1/traces"),
    )
    options = {option.name: option for option in options_shown(config)}
    assert options["mqtt.access.plugins"].value == {"a.Plugin": MASKED}
    assert options["access.password_file"].value == options["tracing.endpoint"].value == MASKED
    (table,) = options["mqtt.listeners"].value
    assert (table["certificate_file"], table["key_file"]) == ("c.pem", MASKED)
    assert all(options[name].masked for name in ("mqtt.access.plugins", "access.password_file", "mqtt.listeners"))
    assert not options["data_dir"].masked


@pytest.mark.usefixtures("loggers")
async def test_the_level_of_the_log_is_changed_for_the_process(broker: Broker, api: Api) -> None:
    admin = api("admin")
    assert await admin.ok("PUT", "/log-level", {"level": "error"}) == {"level": "error", "configured": "info"}
    assert not logging.getLogger("penstock").isEnabledFor(logging.WARNING)
    assert not structlog.get_logger("node").is_enabled_for(logging.WARNING)
    assert (await admin.ok("PUT", "/log-level", {"level": "debug"}))["level"] == "debug"
    assert structlog.get_logger("node").is_enabled_for(logging.DEBUG)
    assert (await api("operator").refused("PUT", "/log-level", {"level": "info"}))[0] == 403
    assert (await api("viewer").get("/log-level"))["level"] == "debug"
    assert [(line["before"], line["level"]) for line in audited(broker) if line["event"] == "changed"][-1] == ("error", "debug")


WRONG: tuple[tuple[tuple[Any, ...], int, str], ...] = (
    (("GET", "/storage/segments?after=x"), 400, "'x'"),
    (("GET", "/storage/segments?limit=0"), 400, "limit"),
    (("GET", "/options/store.nothing"), 404, "store.nothing"),
    (("PUT", "/log-level", {"level": "loud"}), 400, "loud"),
)


async def test_what_is_wrong_is_said_in_a_sentence(api: Api) -> None:
    for call, status, why in WRONG:
        answered, sentence = await api("admin").refused(*call)
        assert (answered, why in sentence) == (status, True), (call, answered, sentence)
