"""Failures of a server that amqtt's HTTP plugins ask, told apart from its answers.

To those plugins any status but success is a no (`response_mode` "json" or "text") or None ("status"), so a server that is down
would deny everything for a while. A failure is no answer.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.gateway.auth.steady import path_of

_PLUGIN: Final = "amqtt.contrib.http.AuthHttpPlugin"
"""Importing it takes long, so its name is compared."""

SERVER_ERROR: Final = 500
"""The least status that says that the server has failed (RFC 9110, 15.6)."""


class ServerFailed(Exception):
    """Raised for a plugin whose server could not answer."""


def tell_failures(plugin: Any) -> None:
    """Let a plugin raise ServerFailed when its server fails, if it is one of amqtt's HTTP plugins."""
    if any(path_of(each) == _PLUGIN for each in type(plugin).__mro__):
        # amqtt's plugins call this first for each response, in each mode.
        plugin._is_2xx = _is_success


def _is_success(response: Any) -> bool:
    if response.status >= SERVER_ERROR:
        raise ServerFailed(f"{response.url} has answered with status {response.status}")
    return bool(200 <= response.status < 300)
