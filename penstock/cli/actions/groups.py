"""`penstock group`."""

from __future__ import annotations

import argparse
import sys

from penstock import group_settings
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_rows
from penstock.cli.actions.popclient import sync_client_of
from penstock.cli.actions.protorow import row_of
from penstock.cli.actions.quantities import shown_seconds
from penstock.pop.proto import pop_pb2 as pb


def run(node: Endpoint, options: argparse.Namespace) -> int:
    """Run an action of `penstock group` and return its exit status."""
    with sync_client_of(node) as client:
        action: str = options.action
        if action == "list":
            _print_groups(client.groups.describe(options.group, options.filter), options.json)
        elif action == "create":
            created = client.groups.create(options.group, options.filter, start=options.start, settings=_settings(options))
            _print_groups([created], options.json)
        elif action == "update":
            updated = client.groups.update(options.group, _settings(options), topic_filter=options.filter)
            _print_groups(updated, options.json)
        elif action in ("pause", "resume"):
            settings = group_settings(paused=action == "pause")
            _print_groups(client.groups.update(options.group, settings, topic_filter=options.filter), options.json)
        elif action == "reset":
            reset = client.groups.reset(
                options.group,
                topic_filter=options.filter,
                end=options.to,
                time_ms=options.time_ms,
                message_id=options.message_id,
            )
            _print_groups(reset, options.json)
        else:
            client.groups.delete(options.group, topic_filter=options.filter)
    return 0


def _settings(options: argparse.Namespace) -> pb.GroupSettings:
    return group_settings(
        attempts_max=options.attempts_max,
        backoff=options.backoff,
        invisible_ms=options.invisible_ms,
        in_flight_max=options.in_flight_max,
        fifo=options.fifo,
        tags=options.tags,
        sql=options.sql,
    )


def _print_groups(groups: list[pb.GroupDescription], as_json: bool) -> None:
    names = ("visible", "retries", "in_flight", "delayed", "parked", "dead", "waiting")
    print_rows(
        [row_of(group, is_full=True) for group in groups],
        [
            [group.group, group.filter, _state(group.settings), *(str(getattr(group, n)) for n in names), _oldest(group)]
            for group in groups
        ],
        ("group", "filter", "state", *names, "oldest"),
        as_json=as_json,
        out=sys.stdout,
    )


def _oldest(group: pb.GroupDescription) -> str:
    """Return the age of the oldest message that was not handed out."""
    return shown_seconds(group.oldest_ms / 1000) if group.HasField("oldest_ms") else ""


def _state(settings: pb.GroupSettings) -> str:
    return " ".join(name for name in ("paused", "shared") if getattr(settings, name))
