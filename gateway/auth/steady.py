"""Plugins of amqtt with passwords, made to take as long for an unknown user as for a known one.

They answer at once about a user whom they don't know, and hash the password of one whom they know. The time of the answer would
tell anybody which user names exist. So the password of an unknown user is compared with a hash, too, that it does not match.
"""

from __future__ import annotations

import hmac
from secrets import token_bytes
from typing import Any, Final, Protocol

from amqtt.plugins.authentication import FileAuthPlugin

_DATABASE: Final = "amqtt.contrib.auth_db.plugin.UserAuthDBPlugin"
"""Importing it takes long, so its name is compared."""


class Authenticating(Protocol):
    """A plugin that authenticates clients."""

    async def authenticate(self, *, session: Any) -> bool | None:
        """Return whether a client is who it says; None if the plugin can't tell."""
        ...


def steady(plugin: Any) -> Authenticating:
    """Return what to ask in place of a plugin: the plugin itself, unless its answers would take a telling time."""
    if type(plugin) is FileAuthPlugin:
        return SteadyFile(plugin)
    if path_of(type(plugin)) == _DATABASE:
        return SteadyDatabase(plugin)
    found: Authenticating = plugin
    return found


def path_of(plugin: type) -> str:
    """Return the path of a class, as a configuration names it."""
    return f"{plugin.__module__}.{plugin.__qualname__}"


class SteadyFile:
    """amqtt's password file.

    Parameters:
        plugin: reads the file.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._key = token_bytes(32)
        self._hashes = [each for each in plugin._users.values() if plugin.is_hash_supported(each)]

    async def authenticate(self, *, session: Any) -> bool | None:
        answer: bool | None = await self._plugin.authenticate(session=session)
        if session.username and not self._plugin._users.get(session.username) and self._hashes:
            self._plugin.pwd_hasher.verify(session.password or "", self._hash_for(session.username))
        return answer

    def _hash_for(self, name: str) -> str:
        """Return one of the hashes, always the same for a name: hashes of one file may cost different times."""
        number = int.from_bytes(hmac.digest(self._key, name.encode(errors="surrogatepass"), "sha256")[:8])
        found: str = self._hashes[number % len(self._hashes)]
        return found


class SteadyDatabase:
    """amqtt's users in a database. Known and unknown users cost the same: two queries and a hash.

    Parameters:
        plugin: asks the database.
    """

    def __init__(self, plugin: Any) -> None:
        from amqtt.contrib.auth_db.models import PasswordHasher  # The plugin has imported it already.

        self._plugin = plugin
        self._hasher = PasswordHasher()
        self._hash = self._hasher.hash(token_bytes(32).hex())

    async def authenticate(self, *, session: Any) -> bool | None:
        plugin = self._plugin
        if not session.username or not session.password:
            found: bool | None = await plugin.authenticate(session=session)
            return found
        is_known = await plugin._user_manager.get_user_auth(session.username) is not None
        answer: bool | None = await plugin.authenticate(session=session)
        if not is_known:
            self._hasher.verify(session.password, self._hash)
        return answer
