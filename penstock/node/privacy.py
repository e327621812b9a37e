"""Who may enter the data directory: its user, and a group if the operator lets it."""

from __future__ import annotations

import stat
from pathlib import Path

import structlog

logger = structlog.get_logger("node")

_OTHERS = stat.S_IRWXO


def keep_private(directory: Path) -> None:
    """Take the rights of everybody else away from a directory that an operator or an earlier version has created.

    A directory with the sticky bit, such as /tmp, belongs to many users, and stays as it is.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & _OTHERS or mode & stat.S_ISVTX:
        return
    try:
        directory.chmod(mode & ~_OTHERS)
    except PermissionError as error:
        logger.warning("data_dir.open_to_others", path=str(directory), mode=f"{mode:04o}", error=str(error))
    else:
        logger.info("data_dir.made_private", path=str(directory), before=f"{mode:04o}", now=f"{mode & ~_OTHERS:04o}")
