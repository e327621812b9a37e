"""The manifest of a backup: the file `backup.json`, which says what the backup has.

A directory is a backup once it has a manifest. The manifest is replaced at the end of each backup, so at any moment it names
files that are complete and durable. Files that it does not name are left over from a backup that was killed.

    {"crc32": "<8 digits>", "backup": {...}}

The checksum is that of the value of `backup`, formatted as this module does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from penstock.backup.errors import BackupInvalid
from penstock.store.files import Files, read_file, replace_file
from penstock.store.record import checksum

FILE = "backup.json"

VERSION = 1
"""Version of the manifest and of the layout of a backup. A restore refuses any other."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a backup."""

    path: str
    """Its path in the data directory."""
    stored: str
    """Its path in the backup. It begins with the round that has stored the file."""
    size: int
    crc32: int
    inode: int
    """Number of the file from which it was copied, and when that file was changed last. A later backup that finds the same
    there need not read the file. 0 if somebody may write to that file."""
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup has."""

    node_version: str
    """Version of Penstock that made the backup."""
    created_ms: int
    """When the backup was complete, in ms since 1970."""
    data_dir: str
    """The data directory from which it was made."""
    identity: str
    """Tells that data directory from others, also after it was moved or restored."""
    round: int
    """Number of the backup in this directory, from 1."""
    start: int
    """Position of the oldest record."""
    durable: int
    """Position after the last record."""
    files: tuple[StoredFile, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def by_path(self) -> dict[str, StoredFile]:
        """Return the files by their paths in the data directory."""
        return {file.path: file for file in self.files}


def is_backup(directory: Path, files: Files) -> bool:
    """Return whether a directory has a manifest. Raises OSError."""
    return files.exists(directory / FILE)


def save_manifest(directory: Path, manifest: Manifest, files: Files) -> None:
    """Write the manifest of a backup in place of the one before, and make it durable. Raises OSError."""
    replace_file(files, directory / FILE, encode_manifest(manifest))


def load_manifest(directory: Path, files: Files) -> Manifest:
    """Return the manifest of a backup.

    Raises:
        BackupInvalid: the directory has no manifest, or one that is damaged or of another version.
        OSError: the file can't be read.
    """
    path = directory / FILE
    try:
        data = read_file(files, path)
    except (FileNotFoundError, NotADirectoryError):
        raise BackupInvalid(
            f"{directory} is no backup, since it has no {FILE}; name a directory of `penstock backup`"
        ) from None
    return decode_manifest(data, path)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file.

    A node that makes a backup itself encodes it beside its event loop, so orjson turns the files into JSON: `asdict` would hold
    the interpreter for far longer.
    """
    return _encode({"version": VERSION, **{each.name: getattr(manifest, each.name) for each in fields(manifest)}})


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Return the manifest whose file `path` has the content `data`. Raises BackupInvalid."""
    try:
        fields = orjson.loads(data)["backup"]
        version = fields["version"]
        is_whole = _encode(fields) == data
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise BackupInvalid(
            f"{path} is damaged: its checksum does not match; use another backup, or name another directory for a new one"
        )
    if version != VERSION:
        raise BackupInvalid(
            f"{path} has version {version}, but this Penstock reads version {VERSION}; use the Penstock that made the backup: "
            f"{fields.get('node_version', 'unknown')}"
        )
    del fields["version"]
    return Manifest(**{**fields, "files": tuple(StoredFile(**file) for file in fields["files"])})


def _encode(fields: dict[str, Any]) -> bytes:
    body = orjson.dumps(fields)
    return b'{"crc32": "%08x", "backup": %b}\n' % (checksum(body), body)
