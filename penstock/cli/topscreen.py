"""`penstock top`."""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.columns import Columns
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.adminclient import AdminClient
from penstock.cli.endpoint import Endpoint
from penstock.cli.login import UserPassword
from penstock.cli.nodeanswers import ask
from penstock.cli.nodeview import Figures, view_of
from penstock.cli.output import laid_out, print_row, shown_bytes, shown_rate, shown_seconds
from penstock.store.printable import printable

WIDE = 130
"""Columns of a terminal that has room for all blocks side by side, and for all figures of a group."""

PIPE_COLUMNS, PIPE_LINES = 160, 40
"""Columns and lines of a view where the output is no terminal."""

FIGURES, FIGURES_SHORT = 7, 3
"""Lines of a block of figures, and what a short terminal has room for."""

LINES_MIN = 16
"""Lines for clients and groups from which a terminal is high enough for all figures."""

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

CLIENT_FIGURES = {
    "in/s": "messages_in_per_s",
    "out/s": "messages_out_per_s",
    "bytes in/s": "bytes_in_per_s",
    "bytes out/s": "bytes_out_per_s",
}
"""What is shown of a client, by the head of its column."""

ATTENTION = "! "
"""What a line begins with that says what somebody should look at."""

GROUPS_MIN = 3
"""Groups that are shown on any terminal."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a terminal has room for."""

    figures: int
    """Lines of each block."""
    clients: int
    groups: int

    @staticmethod
    def of(view: dict[str, Any], width: int, height: int, groups: int) -> Room:
        """Return the room for a view on a terminal. `groups` is the number that was asked for; 0 for none."""
        blocks = 1 if width >= WIDE else 2
        attention = sum(math.ceil((len(line) + len(ATTENTION)) / width) for line in view["attention"])
        lines = height - attention - 3  # the head, and empty lines around the blocks
        figures = FIGURES if lines - blocks * (FIGURES + 1) >= LINES_MIN else FIGURES_SHORT
        lines -= blocks * (figures + 1)
        clients = min(max(lines // 4, 1), len(view["clients"]["busiest"] or ()))
        if view["clients"]["busiest"] is not None:
            lines -= max(clients, 1) + 2  # with the head, and an empty line
        return Room(figures, clients, groups or max(lines - 2, GROUPS_MIN))


def top(
    node: Endpoint,
    login: UserPassword | None,
    *,
    interval_s: float,
    count: int,
    groups: int,
    sort: str,
    order: str,
    as_json: bool,
) -> None:
    """Show what a node does, again and again until `q` or Ctrl-C. A node that is away is asked again.

    Args:
        node: its admin listener.
        login: see `AdminClient`.
        interval_s: seconds between two views.
        count: number of views; 0 never ends.
        groups: number of groups to show; 0 for what the terminal has room for, or all in JSON.
        sort: of the groups; see `view_of`.
        order: of the clients; see `ask`.
        as_json: print each view as one JSON object a line.

    Raises:
        ConnectionError: the node does not answer at the beginning.
        PermissionError: it does not show its metrics to whoever asks.
    """
    client = AdminClient(node, login)
    before = ask(client, node, order).scrape
    screen = _Screen(as_json=as_json, groups=groups)
    with suppress(KeyboardInterrupt), screen, _Keys(is_read=screen.is_live) as keys:
        shown = 0
        while not count or shown < count:
            if keys.has_quit(interval_s):
                return
            try:
                now = ask(client, node, order)
            except ConnectionError as error:
                screen.fail(str(error))
                continue
            figures = Figures(before, now.scrape)
            view = view_of(figures, is_ready=now.is_ready, sort=sort, drain=now.drain, busiest=now.busiest)
            screen.show(view, str(node.address))
            before = now.scrape
            shown += 1


class _Screen:
    """Shows views: in place on a terminal, else one after another.

    Parameters:
        as_json: print them as JSON.
        groups: number of groups to show; 0 for those that have room.
    """

    def __init__(self, *, as_json: bool, groups: int, out: TextIO | None = None) -> None:
        self._console = Console(file=out or sys.stdout, highlight=False)
        if not self._console.is_terminal:
            self._console.size = ConsoleDimensions(PIPE_COLUMNS, PIPE_LINES)
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
        room = Room.of(view, width, self._console.height, self._groups)
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


def rendered(view: dict[str, Any], address: str, room: Room, width: int | None) -> Group:
    """Return a view for a terminal of a width. None means that lines may have any length."""
    state = Text("ready", style="green") if view["ready"] else Text("not ready", style="bold red")
    since = f"  up {shown_seconds(view['up_s'])}  {view['time'][11:19]} UTC"
    head = Text.assemble(("Penstock ", "bold"), f"{view['version']} on {address}  ", state, since)
    attention = [Text(printable(ATTENTION + line), style="bold yellow") for line in view["attention"]]
    traffic, latency, clients, store, process = (view[name] for name in ("traffic", "latency", "clients", "store", "process"))
    blocks = Columns(
        [
            _block(
                room.figures,
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
                room.figures,
                "latency",
                ("sync p50", shown_seconds(latency["sync_p50_s"])),
                ("sync p99", shown_seconds(latency["sync_p99_s"])),
                ("commit p99", shown_seconds(latency["commit_p99_s"])),
                ("delivery p99", shown_seconds(latency["delivery_p99_s"])),
                ("loop lag p99", shown_seconds(latency["loop_p99_s"])),
                ("timers p99", shown_seconds(latency["timer_p99_s"])),
            ),
            _block(
                room.figures,
                "clients",
                ("connected", f"{clients['connected']:,}"),
                ("accepted/s", shown_rate(clients["accepted_per_s"])),
                ("closed/s", shown_rate(clients["closed_per_s"])),
                ("subscriptions", f"{clients['subscriptions']:,}"),
                ("absent sessions", f"{clients['sessions_away']:,}"),
                ("slow", f"{clients['slow']:,}"),
            ),
            _block(
                room.figures,
                "store",
                ("log", shown_bytes(store["log_bytes"])),
                ("free disk", shown_bytes(store["disk_free_bytes"])),
                ("not on disk", shown_bytes(store["undurable_bytes"])),
                ("retained", f"{store['retained']:,}"),
                ("delayed", f"{store['timers_pending']:,}"),
                ("due in 1 min", f"{store['timers_due_minute']:,}"),
            ),
            _block(
                room.figures,
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
    tables = [
        *_client_lines(clients["busiest"], room.clients, width),
        *_group_lines(view["groups"], room.groups, figures, width),
    ]
    return Group(head, *attention, Text(), blocks, Text(), *tables)


def _block(count: int, title: str, *lines: tuple[str, str]) -> Table:
    """Return the first lines of a block."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column(title)
    table.add_column("", justify="right", min_width=9)
    for name, value in lines[:count]:
        table.add_row(name, value)
    return table


def _client_lines(busiest: list[dict[str, Any]] | None, room: int, width: int | None) -> list[Text]:
    """Return the lines of the busiest clients; none if they are not known."""
    if busiest is None:
        return []
    if not busiest:
        return [Text("No client sends or gets anything."), Text()]
    names = ("client", "address") if width is None or width >= WIDE else ("client",)
    fields = {"client": "client_id", "address": "address"}
    table = [
        [
            *(printable(client[fields[name]]) or "-" for name in names),
            *((shown_bytes if "bytes" in name else shown_rate)(client[field]) for name, field in CLIENT_FIGURES.items()),
        ]
        for client in busiest[:room]
    ]
    lines = list(laid_out(table, (*names, *CLIENT_FIGURES), width))
    # Where names are too long for a table, each client takes several lines, and the first one is what matters.
    return [*(Text(line, no_wrap=True, overflow="ignore") for line in lines[: room + 1]), Text()]


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
