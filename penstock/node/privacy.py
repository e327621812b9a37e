"""Who may enter the data directory, and read the files with secrets: their user, and a group if the operator lets it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from penstock.node.config import Config

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


def warn_of_open_files(config: Config) -> None:
    """Log which files of secrets others may read, and which files that decide who may come in others may change.

    The node does not change them, because other programs may need them as they are. A file that is not there is left out: who
    reads it says so.
    """
    for path, is_secret in _access_files(config):
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
        except OSError:
            continue
        if mode & stat.S_IWOTH:
            logger.warning("file.open_to_others", path=path, mode=f"{mode:04o}", why="others may change it; chmod o-rwx")
        elif is_secret and mode & stat.S_IROTH:
            logger.warning("file.open_to_others", path=path, mode=f"{mode:04o}", why="others may read it; chmod o-rwx")


def files_of(config: Config) -> list[Path]:
    """Return the files that the options name: certificates, keys, users, rules, the audit."""
    audit = config.access.audit_file
    return [Path(path) for path in (*(path for path, _ in _access_files(config)), audit) if path]


def secret_files(config: Config) -> frozenset[str]:
    """Return the paths of the files of secrets that the options name."""
    return frozenset(path for path, is_secret in _access_files(config) if is_secret)


def _access_files(config: Config) -> Iterator[tuple[str, bool]]:
    """Yield the paths of the files that decide who may come in, each with whether it has secrets."""
    access, mqtt, pop, admin = config.access, config.mqtt, config.pop, config.admin
    tokens = access.jwt
    secrets = [access.file, access.password_file, pop.key_file, admin.key_file, *(each.key_file for each in mqtt.listeners)]
    others = [pop.certificate_file, pop.client_ca_file, admin.certificate_file]
    others += [admin.client_ca_file, admin.client_crl_file]
    others += [path for each in mqtt.listeners for path in (each.certificate_file, each.client_ca_file, each.client_crl_file)]
    (secrets if tokens.is_symmetric else others).append(tokens.file)
    for paths, is_secret in ((secrets, True), (others, False)):
        yield from ((path, is_secret) for path in dict.fromkeys(paths) if path)
