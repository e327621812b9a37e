"""The backups of the node over the admin API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation
from penstock.node.backups import BackupRun, Backups, BackupState
from penstock.node.errors import ControlRefused

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
"""Names of backups: one component of a path, which is not hidden, and leads nowhere else."""

MIB_PER_S: Final = 100
"""MiB per second that a backup reads unless its caller says otherwise: a disk that the node needs, too, has more."""

MIB_PER_S_MAX: Final = 100_000


class BackupRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A backup to begin."""

    name: Annotated[
        str,
        msgspec.Meta(
            description="Directory below admin.backup_dir: 1 to 64 letters, digits, `-`, `_` and `.`, not beginning with a "
            "dot. If it has a backup of the node, only what is new is copied."
        ),
    ]
    link: Annotated[
        bool, msgspec.Meta(description="Link files that never change, where the backup is on the file system of the node.")
    ] = False
    mib_per_s: Annotated[int, msgspec.Meta(ge=0, le=MIB_PER_S_MAX, description="MiB to read per second; 0 for no bound.")] = (
        MIB_PER_S
    )


class BackupQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which backup to cancel."""

    id: Annotated[str, msgspec.Meta(max_length=64, description="Of the backup; empty for the one that is running.")] = ""


class BackupCompleted(msgspec.Struct, kw_only=True):
    """What a backup has done."""

    name: str
    directory: str
    completed_ms: int
    round: Annotated[int, msgspec.Meta(description="Number of the backup in its directory, from 1.")]
    start: Annotated[int, msgspec.Meta(description="Position of the oldest record.")]
    durable: Annotated[int, msgspec.Meta(description="Position after the last record.")]
    files: int
    bytes: int
    copied_files: Annotated[int, msgspec.Meta(description="Files that were new. The backup had the others.")]
    copied_bytes: int
    deleted_files: Annotated[int, msgspec.Meta(description="Files of earlier backups that were deleted.")]
    seconds: float


class BackupShown(msgspec.Struct, kw_only=True):
    """The backup that the admin API has begun last, and the last one that is complete."""

    state: Annotated[
        str,
        msgspec.Meta(
            description="idle (none has begun since the node was started), running, cancelling, complete, failed or cancelled."
        ),
    ]
    id: str
    name: str
    directory: str
    begun_ms: int
    ended_ms: Annotated[int, msgspec.Meta(description="0 while it is running.")]
    step: Annotated[str, msgspec.Meta(description="What is done at the moment, or was done last.")]
    done_bytes: Annotated[int, msgspec.Meta(description="Of the step.")]
    expected_bytes: Annotated[int, msgspec.Meta(description="Of the step, which is copying all files; 0 if not known yet.")]
    why: Annotated[str, msgspec.Meta(description="Why it has failed or was cancelled.")]
    held: Annotated[bool, msgspec.Meta(description="Whether any backup is running, also one of `penstock backup DIR`.")]
    last_complete: Annotated[
        BackupCompleted | None, msgspec.Meta(description="Of those that the admin API has begun since the node was started.")
    ]
    last_backup_ms: Annotated[int, msgspec.Meta(description="When the last backup of any kind was complete; 0 if unknown.")]


class BackupOperations:
    """Serves the backups.

    Parameters:
        backups: of the node.
    """

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "showBackup",
            "GET",
            "/backup",
            ApiRole.VIEWER,
            "Say how far the backup is, and when the last one was complete.",
            self.show,
            BackupShown,
        )
        yield Operation(
            "beginBackup",
            "POST",
            "/backup",
            ApiRole.ADMIN,
            "Begin a backup on the node's machine, below admin.backup_dir, and answer at once.",
            self.begin,
            BackupShown,
            body=BackupRequest,
        )
        yield Operation(
            "cancelBackup",
            "DELETE",
            "/backup",
            ApiRole.ADMIN,
            "Cancel the backup that is running, and answer at once. The earlier one in its directory stays as it was.",
            self.cancel,
            BackupShown,
            query=BackupQuery,
        )

    async def show(self, _call: ApiCall) -> BackupShown:
        """Say how far the backup is."""
        return self._shown()

    async def begin(self, call: ApiCall) -> BackupShown:
        """Begin a backup."""
        asked: BackupRequest = call.body
        call.noted |= {"name": asked.name[:80], "link": asked.link, "mib_per_s": asked.mib_per_s}
        if NAME.fullmatch(asked.name) is None:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the name {asked.name[:80]!r} can't be used: give 1 to 64 letters (A-Z, a-z), digits, '-', '_' and '.', not "
                "beginning with a dot",
            )
        try:
            run = self._backups.begin(asked.name, may_link=asked.link, mib_per_s=asked.mib_per_s)
        except ControlRefused as error:
            raise ApiError(HTTPStatus.CONFLICT, str(error)) from None
        call.noted["id"] = run.grant.id
        return self._shown()

    async def cancel(self, call: ApiCall) -> BackupShown:
        """Cancel the backup that is running."""
        asked: BackupQuery = call.query
        run = self._backups.run
        if run is None or run.is_over:
            hint = "; the one of `penstock backup` ends with its command" if self._backups.is_held else ""
            raise ApiError(HTTPStatus.CONFLICT, f"no backup of the admin API is running{hint}")
        if asked.id not in ("", run.grant.id):
            raise ApiError(HTTPStatus.CONFLICT, f"the backup {asked.id!r} has ended, and {run.grant.id!r} is running")
        call.noted |= {"name": run.name, "id": run.grant.id}
        self._backups.cancel(run, "an operator has cancelled it")
        return self._shown()

    def _shown(self) -> BackupShown:
        backups = self._backups
        run, last = backups.run, backups.last_complete
        shown = BackupShown(
            state=BackupState.IDLE,
            id="",
            name="",
            directory="",
            begun_ms=0,
            ended_ms=0,
            step="",
            done_bytes=0,
            expected_bytes=0,
            why="",
            held=backups.is_held,
            last_complete=_completed(last) if last is not None else None,
            last_backup_ms=backups.last_backup_ms,
        )
        if run is not None:
            shown.state, shown.id, shown.name, shown.directory = run.state, run.grant.id, run.name, str(run.directory)
            shown.begun_ms, shown.ended_ms, shown.why = run.begun_ms, run.ended_ms, run.why
            shown.step, shown.done_bytes, shown.expected_bytes = run.step
        return shown


def _completed(run: BackupRun) -> BackupCompleted:
    assert run.summary is not None
    return BackupCompleted(name=run.name, directory=str(run.directory), completed_ms=run.ended_ms, **run.summary._asdict())
