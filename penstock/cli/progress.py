"""What a command that takes long does at the moment: a progress bar, or a line for each stage."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """A bar on standard error for each step of a command, if that is a terminal.

    Parameters:
        is_shown: whether to show anything at all.
    """

    def __init__(self, *, is_shown: bool) -> None:
        console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
        )
        self._task: TaskID | None = None

    def expect(self, size: int, what: str) -> None:
        """Begin a step that processes `size` bytes; 0 if nobody knows."""
        self._finish()
        self._task = self._progress.add_task(what, total=size or None)

    def advance(self, size: int) -> None:
        """Note that `size` more bytes are processed."""
        if self._task is not None:
            self._progress.advance(self._task, size)

    def _finish(self) -> None:
        if self._task is not None:
            task = next(task for task in self._progress.tasks if task.id == self._task)
            total = task.total if task.total is not None else task.completed
            self._progress.update(self._task, total=total, completed=total)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._finish()
        self._progress.stop()


class Stages:
    """Lines on standard error, if that is a terminal.

    Parameters:
        is_shown: whether to show anything at all.
    """

    def __init__(self, *, is_shown: bool) -> None:
        console = Console(file=sys.stderr)
        self._progress = Progress(
            SpinnerColumn(finished_text="done"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
        )
        self._task: TaskID | None = None

    def begin(self, what: str) -> None:
        """End the present stage, and begin another."""
        self._finish()
        self._task = self._progress.add_task(what, total=1)

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=1)

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._finish()
        self._progress.stop()
