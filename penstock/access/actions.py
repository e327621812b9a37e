"""The actions that rules decide about, and the terms that rules name them by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PUBLISH: Final = "publish"
"""A PUBLISH or a will of MQTT, to a topic."""
SUBSCRIBE: Final = "subscribe"
"""A SUBSCRIBE of MQTT, to a filter."""
RECEIVE: Final = "receive"
"""A delivery over MQTT, of a topic."""
SEND: Final = "send"
"""A message sent over gRPC, to a topic; and its recall."""
POP: Final = "pop"
"""A pop over gRPC, by a filter."""
CONSUME: Final = "consume"
"""The use of a group, over gRPC or as `$share/GROUP/...`."""
ADMIN: Final = "admin"
"""The administration of a group: its creation, settings, deletion, reset and dead letters."""

READ: Final = "read"
WRITE: Final = "write"
ALL: Final = "all"

TOPIC_ACTIONS: Final = (PUBLISH, SUBSCRIBE, RECEIVE, SEND, POP)
"""The actions on topics and filters."""
FILTER_ACTIONS: Final = (SUBSCRIBE, POP)
"""Those of them whose object is a filter: a right must contain it."""
GROUP_ACTIONS: Final = (CONSUME, ADMIN)
"""The actions on groups."""
ACTIONS: Final = (*TOPIC_ACTIONS, *GROUP_ACTIONS)

TERMS: Final[dict[str, tuple[str, ...]]] = {
    PUBLISH: (PUBLISH,),
    SUBSCRIBE: (SUBSCRIBE, RECEIVE),  # a subscription without deliveries would be of no use
    RECEIVE: (RECEIVE,),
    SEND: (SEND,),
    POP: (POP,),
    WRITE: (PUBLISH, SEND),
    READ: (SUBSCRIBE, RECEIVE, POP),
    CONSUME: (CONSUME,),
    ADMIN: (ADMIN,),
    ALL: ACTIONS,
}
"""The actions that a term of a rule stands for."""


def actions_of(terms: Iterable[str]) -> tuple[str, ...]:
    """Return the actions that terms of a rule stand for, each once.

    Raises:
        KeyError: there is no such term.
    """
    named = {action for term in terms for action in TERMS[term]}
    return tuple(action for action in ACTIONS if action in named)
