"""What the filter of a subscription names: topics and, if the subscription is shared, a POP group."""

from __future__ import annotations

from penstock.gateway.protocol.topics import SHARE, split_share
from penstock.pop.core.group import check_group_name
from penstock.pop.errors import GroupInvalid
from penstock.store.errors import TopicInvalid


def topics_of(topic_filter: str) -> str:
    """Return the filter that selects the topics of a subscription: what follows `$share/{name}/`, if it is shared."""
    return topic_filter.split("/", 2)[-1] if topic_filter.startswith(SHARE) else topic_filter


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
