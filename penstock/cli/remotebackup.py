"""`penstock backup NAME --admin`: a backup that the node makes on its own machine, and that the command watches."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.node.errors import ControlRefused

if TYPE_CHECKING:
    from penstock.cli.apiclient import ApiClient
    from penstock.cli.progress import ProgressBar

LOOK_S_MIN = 0.05
LOOK_S_MAX = 1.0
"""Seconds between two looks at the node. Each is twice as long as the one before: most backups of what is new are short."""

SILENCE_S_MAX = 60.0
"""Seconds without an answer after which the command gives up. A backup takes hours, and a network has gaps."""


def check_name(name: str) -> None:
    """Raise ValueError for a path in place of a name."""
    if "/" in name:
        raise ValueError(
            f"{name!r} is a path. A node that is named by its admin listener (--admin, PENSTOCK_ADMIN or a context) stores the "
            "backup on its own machine, below its admin.backup_dir: give the NAME of a directory there, such as plant. For a "
            "node on this machine, give --data-dir."
        )


def begin(api: ApiClient, name: str, *, may_link: bool, mib_per_s: int | None) -> dict[str, Any]:
    """Let a node begin a backup, and return what the node shows of it.

    Args:
        api: of the node.
        name: of the backup.
        may_link: as in `back_up`.
        mib_per_s: bound of the rate in MiB per second; 0 for none, None for the node's own.

    Raises:
        ValueError: the name is a path.
        ControlRefused, ConnectionError, PermissionError: as `ApiClient.call`.
    """
    check_name(name)
    bound = {} if mib_per_s is None else {"mib_per_s": mib_per_s}
    begun: dict[str, Any] = api.call("POST", "/backup", body={"name": name, "link": may_link, **bound})
    return begun


def watch(api: ApiClient, begun: dict[str, Any], bar: ProgressBar) -> dict[str, Any]:
    """Show the progress of a backup until it is complete, and return what it has done. Ctrl-C cancels it.

    Args:
        api: of the node.
        begun: as `begin` returns it.
        bar: shows the progress.

    Raises:
        KeyboardInterrupt: the backup was cancelled by Ctrl-C, and has ended; or Ctrl-C was pressed again.
        ControlRefused: the backup has failed or was cancelled by somebody else, or nobody knows how it has ended.
        ConnectionError: the node does not answer.
        PermissionError: the caller may no longer look, or not cancel.
    """
    is_interrupted = False
    progress = _Progress(bar)
    try:
        ended = _ended(api, begun, progress)
    except KeyboardInterrupt:
        is_interrupted = True
        sys.stderr.write("Cancelling the backup. Press Ctrl-C again to leave without waiting for its end.\n")
        _cancel(api, begun)
        ended = _ended(api, begun, progress)
    if ended["state"] == "complete":
        done: dict[str, Any] = ended["last_complete"]
        return done
    if is_interrupted and ended["state"] == "cancelled":
        sys.stderr.write("The backup is cancelled. The one before, if there is any, is as it was.\n")
        raise KeyboardInterrupt
    verb = "was cancelled" if ended["state"] == "cancelled" else "has failed"
    raise ControlRefused(f"the backup {ended['name']} {verb}: {ended['why']}")


def _cancel(api: ApiClient, begun: dict[str, Any]) -> None:
    try:
        api.call("DELETE", "/backup", {"id": begun["id"]})
    except ControlRefused:  # it has ended meanwhile, and the next look says how
        return


class _Progress:
    """Moves a bar to what a node shows, which has totals where a bar takes steps."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._step: tuple[str, int] | None = None
        self._done_bytes = 0

    def show(self, shown: dict[str, Any]) -> None:
        step = (shown["step"], shown["expected_bytes"])
        if step != self._step:
            self._step, self._done_bytes = step, 0
            self._bar.expect(shown["expected_bytes"], shown["step"])
        self._bar.advance(shown["done_bytes"] - self._done_bytes)
        self._done_bytes = shown["done_bytes"]


def _ended(api: ApiClient, begun: dict[str, Any], progress: _Progress) -> dict[str, Any]:
    """Return what a node shows of a backup that has ended."""
    look_s = LOOK_S_MIN
    while True:
        shown = _look(api)
        if shown["id"] != begun["id"]:
            raise ControlRefused(
                f"the node does not know any more how the backup {begun['name']} has ended, because it was started anew or has "
                "begun another one; look at its log, or begin the backup again"
            )
        progress.show(shown)
        if shown["state"] not in ("running", "cancelling"):
            return shown
        time.sleep(look_s)
        look_s = min(2 * look_s, LOOK_S_MAX)


def _look(api: ApiClient) -> dict[str, Any]:
    """Return what a node shows. A node that does not answer for a while may go on all the same."""
    silent_since_s = time.monotonic()
    while True:
        try:
            shown: dict[str, Any] = api.get("/backup")
        except ConnectionError as error:
            if time.monotonic() - silent_since_s > SILENCE_S_MAX:
                raise ConnectionError(
                    f"{error} Whether the backup goes on is unknown: look at GET /api/v1/backup, or at the log of the node."
                ) from error
            time.sleep(LOOK_S_MAX)
        else:
            return shown
