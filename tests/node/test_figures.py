"""What `penstock top` makes of two scrapes."""

from __future__ import annotations

import io
import time
from typing import cast

import pytest
from rich.console import Console

from penstock.cli.adminclient import AdminClient
from penstock.cli.endpoint import Endpoint
from penstock.cli.nodeanswers import ask
from penstock.cli.nodeview import Figures, Scrape, view_of
from penstock.cli.output import shown_bytes, shown_rate, shown_seconds
from penstock.cli.topscreen import Room, rendered
from penstock.store.options import HostPort

OTHERS = ("waiting", "in_flight", "dead", "delayed", "parked")


def scrape(at_s: float, *lines: str, start: float = 1.0) -> Scrape:
    return Scrape.parse("\n".join([f"process_start_time_seconds {start}", *lines, ""]), at_s)


def histogram(*counts: int) -> list[str]:
    return [f'h_bucket{{le="{bound}"}} {count}' for bound, count in zip(("0.1", "0.2", "+Inf"), counts, strict=True)]


def test_a_rate_is_the_growth_per_second() -> None:
    figures = Figures(scrape(10, 'a{l="1"} 5', 'a{l="2"} 5'), scrape(12, 'a{l="1"} 7', 'a{l="2"} 9'))
    assert (figures.rate("a"), figures.rate("a", l="2"), figures.rate("b")) == (3, 2, 0)


def test_a_restart_has_no_rates() -> None:
    figures = Figures(scrape(10, "a 500"), scrape(12, "a 7", *histogram(1, 1, 1), start=2.0))
    assert (figures.rate("a"), figures.quantile("h", 0.5), figures.now.sum("a")) == (0, None, 7)


@pytest.mark.parametrize(
    ("now", "part", "expected"),
    [
        ((10, 10, 10), 0.99, None),
        ((20, 20, 20), 0.5, 0.05),
        ((10, 20, 20), 0.5, 0.15),
        ((10, 10, 20), 0.99, 0.2),
        ((15, 20, 20), 0.5, 0.1),
    ],
)
def test_a_quantile_is_of_what_came_in_between(now: tuple[int, int, int], part: float, expected: float | None) -> None:
    figures = Figures(scrape(10, *histogram(10, 10, 10)), scrape(12, *histogram(*now)))
    found = figures.quantile("h", part)
    assert found == (None if expected is None else pytest.approx(expected))


def test_what_somebody_should_look_at_comes_first() -> None:
    before = scrape(10, "penstock_pop_dead_lettered_total 1")
    now = scrape(
        12,
        "penstock_pop_dead_lettered_total 5",
        "penstock_store_read_only 1",
        'penstock_quota_held{resource="queues"} 9',
        'penstock_quota_maximum{resource="queues"} 10',
        'penstock_quota_held{resource="groups"} 1',
        'penstock_quota_maximum{resource="groups"} 10',
        'penstock_pop_group_visible{group="g",filter="a"} 3',
        'penstock_pop_group_oldest_seconds{group="g",filter="a"} 300',
        *(f'penstock_pop_group_{name}{{group="g",filter="a"}} 0' for name in OTHERS),
    )
    view = view_of(Figures(before, now), is_ready=False, sort="visible")
    assert view["attention"] == [
        "The disk is nearly full: new messages are refused. Free or add space.",
        "The node is not ready: it accepts no clients.",
        "90% of the queues are in use: see `penstock inspect quotas`.",
        "Nobody consumes the messages of g.",
        "2.0 messages per second become dead letters: see `penstock dlq list GROUP`.",
    ]


def test_dates_that_are_near_or_long_ago_want_attention() -> None:
    certificate, day_s, now_s = "penstock_certificate_expires_timestamp_seconds", 86_400, time.time()
    backup = "penstock_backup_last_success_timestamp_seconds"
    ends = {"late": 13.5, "past": -1, "good": 15}
    soon = scrape(
        1,
        *(f'{certificate}{{listener="{name}"}} {now_s + days * day_s}' for name, days in ends.items()),
        f"{backup} {now_s - 3.5 * day_s}",
    )
    drain = {"state": "draining", "clients": 1200, "checkpoints": 3}
    assert view_of(Figures(soon, soon), is_ready=False, sort="visible", drain=drain)["attention"] == [
        "The node drains, and accepts no clients. What is left: 1,200 clients of MQTT and 3 batches that consumers have.",
        "The certificate of the listener late expires in 13 d: replace its files.",
        "The certificate of the listener past has expired: replace its files.",
        "The last backup is 3.5 d old: look at the job that runs `penstock backup`.",
    ]
    never = scrape(1, f"{backup} 0")
    assert view_of(Figures(never, never), is_ready=True, sort="visible")["attention"] == []


BUSY = {"user": "", "address": "10.0.0.1"} | dict.fromkeys(
    ("messages_in_per_s", "messages_out_per_s", "bytes_in_per_s", "bytes_out_per_s"), 1234.5
)


@pytest.mark.parametrize(
    ("width", "height", "names"), [(80, 24, 36), (80, 24, 400), (80, 40, 36), (130, 24, 36), (200, 50, 36)]
)
def test_a_view_with_groups_and_clients_has_room_on_any_terminal(width: int, height: int, names: int) -> None:
    groups = [
        f'penstock_pop_group_{name}{{group="g{n}",filter="a"}} 3'
        for n in range(30)
        for name in (*OTHERS, "visible", "oldest_seconds")
    ]
    now = scrape(1, "penstock_store_read_only 1", *groups)
    busiest = [BUSY | {"client_id": f"{n:0{names}}"} for n in range(20)]
    view = view_of(Figures(now, now), is_ready=True, sort="visible", busiest=busiest)
    console = Console(width=width, height=height, file=io.StringIO())
    lines = console.render_lines(rendered(view, "node:8080", Room.of(view, width, height, 0), width), pad=False)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert len(lines) <= height
    assert "0" * 35 in text
    assert "g0 " in text


class OtherNode:
    """An admin listener that says of clients what an older node, or one that does not know the caller, does."""

    def __init__(self, answer: tuple[int, bytes] | None) -> None:
        self._answer = answer

    def get(self, path: str) -> tuple[int, bytes]:
        if path in ("/metrics", "/readyz"):
            return 200, b"penstock_log_end_bytes 1\n"
        if self._answer is None:
            raise PermissionError("no right to list clients")
        return self._answer


@pytest.mark.parametrize("answer", [None, (400, b'{"error": "unknown field"}'), (200, b'{"items": [], "rates_over_ms": null}')])
def test_clients_are_unknown_where_the_node_does_not_say(answer: tuple[int, bytes] | None) -> None:
    answers = ask(cast(AdminClient, OtherNode(answer)), Endpoint(HostPort("node", 8080)), "messages_in")
    assert (answers.is_ready, answers.busiest) == (True, None)


def test_quantities_have_the_unit_that_fits() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1536, 5 * 2**30, 3 * 2**50)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 PiB",
    ]
    assert [shown_seconds(s) for s in (None, 0, 0.0004, 0.012, 3.21, 90, 7200, 900_000)] == [
        "-",
        "0",
        "0.4 ms",
        "12 ms",
        "3.2 s",
        "1.5 min",
        "2.0 h",
        "10 d",
    ]
    assert [shown_rate(n) for n in (0, 0.25, 9.96, 12_345.6)] == ["0", "0.2", "10.0", "12,346"]
