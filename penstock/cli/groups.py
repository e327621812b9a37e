"""`penstock group` and `penstock dlq`: what an operator does with groups and dead letters, by hand."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from google.protobuf.json_format import MessageToDict

from penstock import SyncClient, group_settings
from penstock.cli.rows import show_all
from penstock.cli.tools import security
from penstock.pop.backoff import Backoff, Exponential
from penstock.pop.proto import pop_pb2 as pb


def backoff_of(text: str) -> Backoff:
    """Return the back-off that is written as `none`, as `1000,5000`, or as `exponential:MIN_MS:MAX_MS[:FACTOR]`."""
    if text == "none":
        return ()
    try:
        if text.startswith("exponential:"):
            minimum, maximum, *factor = text.removeprefix("exponential:").split(":")
            return Exponential(int(minimum), int(maximum), *map(float, factor))
        return tuple(int(step) for step in text.split(","))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no back-off: write none, 1000,5000 or exponential:1000:60000:2"
        ) from None


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


def run(options: argparse.Namespace) -> int:
    """Do what `penstock group ACTION` or `penstock dlq ACTION` says; return the exit status."""
    with SyncClient(str(options.pop), security=security()) as client:
        action: str = options.action
        if action == "list":
            _show_groups(client.groups.describe(options.group, options.filter), options.json)
        elif action == "create":
            made = client.groups.create(options.group, options.filter, start=options.start, settings=_settings(options))
            _show_groups([made], options.json)
        elif action == "update":
            updated = client.groups.update(options.group, _settings(options), topic_filter=options.filter)
            _show_groups(updated, options.json)
        elif action in ("pause", "resume"):
            settings = group_settings(paused=action == "pause")
            _show_groups(client.groups.update(options.group, settings, topic_filter=options.filter), options.json)
        elif action == "reset":
            reset = client.groups.reset(
                options.group,
                topic_filter=options.filter,
                end=options.to,
                time_ms=options.time_ms,
                message_id=options.message_id,
            )
            _show_groups(reset, options.json)
        elif action == "delete":
            client.groups.delete(options.group, topic_filter=options.filter)
        elif action == "letters":
            _show_letters(client.dead_letters.of_group(options.group, after=options.after, limit=options.limit), options.json)
        else:
            ids = None if options.all else options.message_id
            sys.stdout.write(f"{client.dead_letters.redrive(options.group, ids)} sent back\n")
    return 0


def _show_groups(groups: list[pb.GroupDescription], as_json: bool) -> None:
    names = ("visible", "retries", "in_flight", "delayed", "parked", "dead", "waiting")
    show_all(
        [MessageToDict(group, preserving_proto_field_name=True, always_print_fields_with_no_presence=True) for group in groups],
        [[group.group, group.filter, _state(group.settings), *(str(getattr(group, n)) for n in names)] for group in groups],
        ("group", "filter", "", *names),
        as_json=as_json,
        out=sys.stdout,
    )


def _state(settings: pb.GroupSettings) -> str:
    return " ".join(name for name in ("paused", "shared") if getattr(settings, name))


def _show_letters(letters: list[pb.DeadLetter], as_json: bool) -> None:
    show_all(
        [MessageToDict(letter, preserving_proto_field_name=True) for letter in letters],
        [
            [
                letter.message_id,
                letter.topic,
                letter.filter,
                str(letter.attempts),
                pb.Reason.Name(letter.reason).lower(),
                datetime.fromtimestamp(letter.failed_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            ]
            for letter in letters
        ],
        ("message", "topic", "filter", "attempts", "reason", "failed"),
        as_json=as_json,
        out=sys.stdout,
    )
