"""`penstock top`."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TextIO

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.adminclient import AdminClient
from penstock.cli.endpoint import Endpoint
from penstock.cli.login import UserPassword
from penstock.cli.nodeview import Figures, Scrape, view_of
from penstock.cli.output import laid_out, print_row, shown_bytes, shown_rate, shown_seconds
from penstock.store.printable import printable

WIDE = 130
"""Columns of a terminal that has room for all blocks side by side, and for all figures of a group."""

PIPE_COLUMNS = 160
"""Columns where the output is no terminal."""

LINES_WIDE, LINES_NARROW = 15, 22
"""Lines of a terminal that are not for groups."""

NAMES = ("group", "filter")

GROUP_FIGURES = {
    "visible": "visible",
    "in flight": "in_flight",
    "delayed": "delayed",
    "parked": "parked",
    "dead": "dead",
    "waiting": "waiting",
    "oldest": "oldest_s",
    "acked/s": "acked_per_s",
    "p99": "ack_p99_s",
}
"""What is shown of a group, by the head of its column."""

NARROW_FIGURES = ("visible", "in flight", "dead", "oldest", "acked/s")
"""What a narrow terminal has room for beside the names."""

GROUPS_MIN = 5
"""Groups that are shown on any terminal."""


def top(
    node: Endpoint, login: UserPassword | None, *, interval_s: float, count: int, groups: int, sort: str, as_json: bool
) -> None:
    """Show what a node does, again and again until `q` or Ctrl-C. A node that is away is asked again.

    Args:
        node: its admin listener.
        login: see `AdminClient`.
        interval_s: seconds between two views.
        count: number of views; 0 never ends.
        groups: number of groups to show; 0 for what the terminal has room for, or all in JSON.
        sort: see `view_of`.
        as_json: print each view as one JSON object a line.

    Raises:
        ConnectionError: the node does not answer at the beginning.
        PermissionError: it does not show its metrics to whoever asks.
    """
    client = AdminClient(node, login)
    before, _ = _scrape(client, node)
    screen = _Screen(as_json=as_json, groups=groups)
    with suppress(KeyboardInterrupt), screen, _Keys(is_read=screen.is_live) as keys:
        shown = 0
        while not count or shown < count:
            if keys.has_quit(interval_s):
                return
            try:
                now, is_ready = _scrape(client, node)
            except ConnectionError as error:
                screen.fail(str(error))
                continue
            screen.show(view_of(Figures(before, now), is_ready=is_ready, sort=sort), str(node.address))
            before = now
            shown += 1


def _scrape(client: AdminClient, node: Endpoint) -> tuple[Scrape, bool]:
    at_s = time.monotonic()
    status, body = client.get("/metrics")
    ready, _ = client.get("/readyz")
    try:
        scrape = Scrape.parse(body.decode(), at_s)
    except ValueError as error:
        raise ConnectionError(f"What {node.address} shows at /metrics can't be read: {error}.") from error
    if status != HTTPStatus.OK or "penstock_log_end_bytes" not in scrape.samples:
        raise ConnectionError(f"The HTTP server on {node.address} is no Penstock node: give --admin the node's admin.listen.")
    return scrape, ready == HTTPStatus.OK


class _Screen:
    """Shows views: in place on a terminal, else one after another.

    Parameters:
        as_json: print them as JSON.
        groups: number of groups to show; 0 for those that have room.
    """

    def __init__(self, *, as_json: bool, groups: int, out: TextIO | None = None) -> None:
        self._console = Console(file=out or sys.stdout, highlight=False)
        if not self._console.is_terminal:
            self._console.width = PIPE_COLUMNS
        self._as_json = as_json
        self._groups = groups
        self.is_live = self._console.is_terminal and not as_json
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if self.is_live else None
        self._last: Group | None = None
        self._has_failed = False

    def show(self, view: dict[str, Any], address: str) -> None:
        """Show a view."""
        self._has_failed = False
        if self._as_json:
            print_row(view | {"groups": view["groups"][: self._groups or None]}, as_json=True)
            return
        width = self._console.width
        lines = (LINES_WIDE if width >= WIDE else LINES_NARROW) + len(view["attention"])
        room = self._groups or max(self._console.height - lines, GROUPS_MIN)
        self._last = rendered(view, address, room, width if self.is_live else None)
        if self._live is not None:
            self._live.update(self._last, refresh=True)
        else:
            self._console.print(self._last)

    def fail(self, why: str) -> None:
        """Show why there is no view, and the last one below. Without a terminal, say it once."""
        text = printable(f"{why} Trying again.")
        if self._live is None:
            if not self._has_failed:
                print(f"penstock top: {text}", file=sys.stderr)
            self._has_failed = True
            return
        told = Text(text, style="bold red")
        self._live.update(Group(told, *([self._last] if self._last is not None else [])), refresh=True)

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            if self._last is not None:
                self._console.print(self._last)  # the screen before the command comes back, without what was seen


class _Keys:
    """The keys that somebody presses while views are shown. The end of the context restores the terminal.

    Parameters:
        is_read: whether to read keys, where standard input is a terminal.
    """

    def __init__(self, *, is_read: bool) -> None:
        has_terminal = is_read and sys.stdin is not None and sys.stdin.isatty()
        self._terminal = sys.stdin.fileno() if has_terminal and _is_in_foreground(sys.stdin.fileno()) else None
        self._mode: list[Any] = []

    def has_quit(self, within_s: float) -> bool:
        """Wait, and return whether somebody has pressed `q` meanwhile."""
        if self._terminal is None:
            time.sleep(within_s)
            return False
        ends_s = time.monotonic() + within_s
        while (left_s := ends_s - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left_s)[0]:
                pressed = os.read(self._terminal, 1024)
                if not pressed or b"q" in pressed:
                    return True  # the terminal is closed, or somebody wants the end
        return False

    def __enter__(self) -> _Keys:
        if self._terminal is not None:
            self._mode = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._mode)


def _is_in_foreground(terminal: int) -> bool:
    """Return whether the process may change the mode of a terminal. In the background, the system would stop the process."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True  # it is not the terminal that controls the process


def rendered(view: dict[str, Any], address: str, groups: int, width: int | None) -> Group:
    """Return a view for a terminal of a width, with at most so many groups. None means that lines may have any length."""
    state = Text("ready", style="green") if view["ready"] else Text("not ready", style="bold red")
    since = f"  up {shown_seconds(view['up_s'])}  {view['time'][11:19]} UTC"
    head = Text.assemble(("Penstock ", "bold"), f"{view['version']} on {address}  ", state, since)
    attention = [Text(printable(f"! {line}"), style="bold yellow") for line in view["attention"]]
    traffic, latency, clients, store, process = (view[name] for name in ("traffic", "latency", "clients", "store", "process"))
    blocks = Columns(
        [
            _block(
                "per second",
                ("published", shown_rate(traffic["published_per_s"])),
                ("sent", shown_rate(traffic["sent_per_s"])),
                ("delivered", shown_rate(traffic["delivered_per_s"])),
                ("popped", shown_rate(traffic["popped_per_s"])),
                ("acknowledged", shown_rate(traffic["acked_per_s"])),
                ("in", shown_bytes(traffic["in_bytes_per_s"])),
                ("out", shown_bytes(traffic["out_bytes_per_s"])),
            ),
            _block(
                "latency",
                ("sync p50", shown_seconds(latency["sync_p50_s"])),
                ("sync p99", shown_seconds(latency["sync_p99_s"])),
                ("commit p99", shown_seconds(latency["commit_p99_s"])),
                ("delivery p99", shown_seconds(latency["delivery_p99_s"])),
                ("loop lag p99", shown_seconds(latency["loop_p99_s"])),
                ("timers p99", shown_seconds(latency["timer_p99_s"])),
            ),
            _block(
                "clients",
                ("connected", f"{clients['connected']:,}"),
                ("accepted/s", shown_rate(clients["accepted_per_s"])),
                ("closed/s", shown_rate(clients["closed_per_s"])),
                ("subscriptions", f"{clients['subscriptions']:,}"),
                ("absent sessions", f"{clients['sessions_away']:,}"),
                ("slow", f"{clients['slow']:,}"),
            ),
            _block(
                "store",
                ("log", shown_bytes(store["log_bytes"])),
                ("free disk", shown_bytes(store["disk_free_bytes"])),
                ("not on disk", shown_bytes(store["undurable_bytes"])),
                ("retained", f"{store['retained']:,}"),
                ("delayed", f"{store['timers_pending']:,}"),
                ("due in 1 min", f"{store['timers_due_minute']:,}"),
            ),
            _block(
                "process",
                ("processor", f"{process['cpu']:.0%}"),
                ("memory", shown_bytes(process["memory_bytes"])),
                ("descriptors", f"{process['open_fds']:,}"),
                ("groups", f"{view['totals']['groups']:,}"),
                ("visible", f"{view['totals']['visible']:,}"),
                ("dead letters", f"{view['totals']['dead']:,}"),
            ),
        ],
        padding=(0, 3),
    )
    figures = GROUP_FIGURES if width is None or width >= WIDE else NARROW_FIGURES
    return Group(head, *attention, Text(), blocks, Text(), *_group_lines(view["groups"], groups, figures, width))


def _block(title: str, *lines: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column(title)
    table.add_column("", justify="right", min_width=9)
    for name, value in lines:
        table.add_row(name, value)
    return table


def _group_lines(found: list[dict[str, Any]], room: int, figures: Iterable[str], width: int | None) -> list[Text]:
    if not found:
        return [Text("There are no groups.")]
    table = [
        [*(printable(group[name]) for name in NAMES), *(_figure(name, group[GROUP_FIGURES[name]]) for name in figures)]
        for group in found[:room]
    ]
    lines = [Text(line, no_wrap=True, overflow="ignore") for line in laid_out(table, (*NAMES, *figures), width)]
    if len(found) > room:
        lines.append(Text(f"and {len(found) - room:,} more groups: --groups shows more"))
    return lines


def _figure(name: str, value: float | None) -> str:
    if name in ("oldest", "p99"):
        return shown_seconds(value)
    return shown_rate(value or 0.0) if name == "acked/s" else f"{value:,}"
