"""The actions for which the plugins are asked."""

from __future__ import annotations

from typing import Final

# The first three are the names of amqtt's actions. For the fourth amqtt has another call.
PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
RECEIVE: Final = "receive"
CONNECT: Final = "connect"
