"""The POP group that the filter of a shared subscription names."""

from __future__ import annotations

from penstock.gateway.protocol.topics import split_share
from penstock.pop.core.names import check_group_name
from penstock.pop.errors import GroupInvalid
from penstock.store.errors import TopicInvalid


def group_of_share(topic_filter: str) -> tuple[str, str]:
    """Return the name of the POP group and the filter in `$share/{name}/{filter}`.

    Raises:
        TopicInvalid: the filter breaks MQTT 5.0, 4.8.2, or no POP group can have this name.
    """
    name, shared = split_share(topic_filter)
    try:
        check_group_name(name)
    except GroupInvalid as error:
        raise TopicInvalid(f"A shared subscription is a POP group, and no group can have its name: {error}") from error
    return name, shared
