"""The filter of a shared subscription: `$share/{name}/{filter}`. MQTT 5.0, 4.8.2."""

from __future__ import annotations

from penstock.gateway.protocol.parsers import SHARE
from penstock.pop.core.names import check_group_name
from penstock.pop.errors import GroupInvalid
from penstock.store.errors import TopicInvalid
from penstock.store.topics import check_filter


def split_share(topic_filter: str) -> tuple[str, str]:
    """Return the share name and the filter in `$share/{name}/{filter}`.

    Raises:
        TopicInvalid: the filter breaks MQTT 5.0, 4.8.2, or no POP group can have this name.
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
    try:
        check_group_name(name)
    except GroupInvalid as error:
        raise TopicInvalid(f"A shared subscription is a POP group, and no group can have its name: {error}") from error
    return name, check_filter(shared)
