"""The password file: a line `NAME:HASH` for each user, with an Argon2 hash. `penstock user` changes it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Final

from argon2 import PasswordHasher, extract_parameters
from argon2.exceptions import InvalidHashError, VerificationError, VerifyMismatchError

from penstock.access.errors import AccessInvalid
from penstock.store.files import SYSTEM_FILES, replace_file

NAME_CHARS_MAX: Final = 255
PASSWORD_BYTES_MAX: Final = 1024
"""A longer password is refused before it is hashed."""

KEY_BYTES_MAX: Final = blake2b.MAX_KEY_SIZE

_HASH: Final = "$argon2"
_PERMISSIONS: Final = 0o600
_LANES: Final = 1
"""Argon2 takes a thread for each lane. With the four lanes of argon2-cffi's default, two logins at once would compete with the
event loop as eight threads (`make test-attack ONLY=login-flood`). What a guess costs in memory and time stays the same."""


class PasswordFile:
    """The users of a password file, as they were when it was read.

    Parameters:
        path: of the file.

    Raises:
        AccessInvalid: the file can't be read, or a line is not valid. The message names the line, and never a hash.
    """

    def __init__(self, path: Path) -> None:
        self._begin(path, _read(path))

    @classmethod
    def empty(cls, path: Path) -> PasswordFile:
        """Return a file without users, which the first one creates."""
        users = cls.__new__(cls)
        users._begin(path, [])
        return users

    def _begin(self, path: Path, lines: list[str]) -> None:
        self._path = path
        self._hashes: dict[str, str] = {}
        self._hasher = PasswordHasher(parallelism=_LANES)
        self._lines = lines
        for number, line in enumerate(self._lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, colon, stated = line.strip().partition(":")
            if not colon or not name or not stated.startswith(_HASH):
                raise AccessInvalid(f"the password file {path}, line {number}: write NAME:HASH with an Argon2 hash")
            if name in self._hashes:
                raise AccessInvalid(f"the password file {path}, line {number}: the user {name!r} was there before")
            self._hashes[name] = stated
        self._stand_ins = [stated for stated in self._hashes.values() if _is_readable(stated)]
        """The hashes of which one stands in for that of an unknown user."""

    @property
    def hashes(self) -> Mapping[str, str]:
        """The hash of each user's password, by name."""
        return self._hashes

    def __contains__(self, user: object) -> bool:
        return user in self._hashes

    def verify(self, user: str, password: bytes) -> bool:
        """Return whether a password is that of a user. It takes some 0.1 s, so call it on a thread; Argon2 lets others run.

        An unknown user takes as long as a known one with a wrong password, so that the time tells nothing: see `_stand_in`.
        """
        known = self._hashes.get(user)
        if len(password) > PASSWORD_BYTES_MAX:
            return False
        try:
            return self._hasher.verify(known or self._stand_in(user), password) and known is not None
        except VerifyMismatchError:
            return False
        except (VerificationError, InvalidHashError) as error:
            if known is None:
                return False
            raise AccessInvalid(f"the password file {self._path} has a damaged hash for the user {user!r}: {error}") from error

    def _stand_in(self, user: str) -> str:
        """Return the hash that stands in for that of an unknown user.

        It is that of a known user, since hashes in one file may differ in their cost. The name decides which one, so the cost
        of a name is the same each time, and unknown names have each cost as often as known ones. Nobody outside can tell which
        one it is, because the choice depends on a hash of the file.
        """
        if not self._stand_ins:
            return _hash_of_nobody(self._hasher.time_cost, self._hasher.memory_cost, self._hasher.parallelism)
        digest = blake2b(user.encode(errors="surrogateescape"), key=self._stand_ins[0].encode()[-KEY_BYTES_MAX:]).digest()
        return self._stand_ins[int.from_bytes(digest[:8], "big") % len(self._stand_ins)]

    # --- changes ----------------------------------------------------------------------------------------------------

    def add(self, user: str, password: str) -> None:
        """Add a user, and write the file.

        Raises:
            AccessInvalid: the user exists, or name or password can't be used.
            OSError: the file can't be written.
        """
        if user in self._hashes:
            raise AccessInvalid(f"the user {user!r} exists; `penstock user password` changes the password")
        check_user_name(user)
        self._lines.append(f"{user}:{self._hash(password)}")
        self._write()

    def change(self, user: str, password: str) -> None:
        """Change the password of a user, and write the file. Raises as `add`."""
        self.check_known(user)
        fresh = f"{user}:{self._hash(password)}"
        self._lines = [fresh if line.startswith(f"{user}:") else line for line in self._lines]
        self._write()

    def delete(self, user: str) -> None:
        """Delete a user, and write the file. Raises as `add`."""
        self.check_known(user)
        self._lines = [line for line in self._lines if not line.startswith(f"{user}:")]
        self._write()

    def check_known(self, user: str) -> None:
        """Raise AccessInvalid if there is no such user."""
        if user not in self._hashes:
            raise AccessInvalid(f"the password file {self._path} has no user {user!r}")

    def _hash(self, password: str) -> str:
        if not password:
            raise AccessInvalid("the password is empty")
        if len(password.encode()) > PASSWORD_BYTES_MAX:
            raise AccessInvalid(f"the password is longer than {PASSWORD_BYTES_MAX} bytes")
        return self._hasher.hash(password)

    def _write(self) -> None:
        data = "".join(f"{line}\n" for line in self._lines).encode()
        replace_file(SYSTEM_FILES, self._path, data, permissions=_PERMISSIONS)


def check_user_name(user: str) -> None:
    """Check that a user name can be in a password file. Raises AccessInvalid."""
    if (
        not user
        or len(user) > NAME_CHARS_MAX
        or not user.isprintable()
        or user != user.strip()
        or ":" in user
        or user[0] == "#"
    ):
        raise AccessInvalid(
            f"the user name {user[:40]!r} can't be used: give 1 to {NAME_CHARS_MAX} printable characters without ':', with no "
            "space at the ends and no '#' at the beginning"
        )


def _read(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except FileNotFoundError as error:
        raise AccessInvalid(f"there is no password file {path}; make it with `penstock user add NAME --file {path}`") from error
    except OSError as error:
        raise AccessInvalid(f"the password file {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise AccessInvalid(f"the password file {path} is not UTF-8: {error}") from error


@cache
def _hash_of_nobody(time_cost: int, memory_kib: int, lanes: int) -> str:
    return PasswordHasher(time_cost, memory_kib, lanes).hash(token_bytes(32))


def _is_readable(stated: str) -> bool:
    try:
        extract_parameters(stated)
    except InvalidHashError:
        return False
    return True
