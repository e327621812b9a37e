"""The prefixes that give a topic or a filter another meaning: `$share/{name}/{filter}` and `$delayed/{seconds}/{topic}`.

`$share/` is a shared subscription (MQTT 5.0, 4.8.2). A message that is published to `$delayed/60/a/b` goes to `a/b` 60 seconds
later. That form is EMQX's, so that devices which use it can move over; see `delays`. What bridges of mosquitto publish about
themselves below `$SYS/` is accepted and dropped, as EMQX does it.
"""

from __future__ import annotations

from typing import Final

from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX
from penstock.store.topics import check_filter

SHARE: Final = "$share/"
"""The beginning of the filter of a shared subscription."""

DELAYED: Final = b"$delayed/"
"""The beginning of the topic of a delayed message."""

_BRIDGE: Final = b"$SYS/broker/connection/"
_STATE: Final = b"/state"


def is_bridge_state(topic: bytes) -> bool:
    """Return whether a topic is that of a bridge's state, `$SYS/broker/connection/{name}/state`.

    A bridge of mosquitto publishes there that it is connected, and leaves a will there. The node accepts both, whatever the
    client's rights are, and drops them: a refusal would close a connection of MQTT 3.1.1, and the bridge would come back for
    ever.
    """
    return topic.startswith(_BRIDGE) and topic.endswith(_STATE) and len(topic) > len(_BRIDGE) + len(_STATE)


def split_share(topic_filter: str) -> tuple[str, str]:
    """Return the share name and the filter of `$share/{name}/{filter}`.

    Args:
        topic_filter: begins with `SHARE`.

    Raises:
        TopicInvalid: the share name or the filter breaks MQTT 5.0, 4.8.2, or the filter selects topics of the node's own.
    """
    name, slash, shared = topic_filter.removeprefix(SHARE).partition("/")
    if not name or "+" in name or "#" in name:  # [MQTT-4.8.2-1], [MQTT-4.8.2-2]
        raise TopicInvalid(f"The share name {name[:64]!r} is empty or has a wildcard. Use $share/NAME/FILTER [MQTT-4.8.2-2].")
    if not slash or not shared:
        raise TopicInvalid(f"No filter follows the share name {name[:64]!r}. Use $share/NAME/FILTER [MQTT-4.8.2-2].")
    if shared.startswith("$"):
        raise TopicInvalid(
            f"The filter {shared[:64]!r} can't be shared, because topics that begin with '$' are the node's own."
        )
    return name, check_filter(shared)


def check_asked(topic_filter: str) -> None:
    """Raise TopicInvalid if a filter of a SUBSCRIBE or UNSUBSCRIBE breaks MQTT 5.0, 4.7 or 4.8.2.

    How deep and how long a filter may be are limits of the store, which checks them where it makes the queue.
    """
    if topic_filter.startswith(SHARE):
        split_share(topic_filter)
    else:
        check_filter(topic_filter, levels_max=TOPIC_BYTES_MAX + 1)  # [MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1]


def without_prefix(topic: bytes) -> bytes:
    """Return what follows `$share/{name}/` or `$delayed/{seconds}/` at the beginning of a topic or filter.

    This never fails: if the second part is missing, the last part that exists is returned.
    """
    return topic.split(b"/", 2)[-1]
