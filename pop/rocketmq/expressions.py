"""The expressions that the consumers of each group ask for."""

from __future__ import annotations

from typing import TypeAlias

import structlog

from penstock.pop.core.expression import ExpressionType
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.status import Code, Refused

logger = structlog.get_logger("pop.rocketmq")

Wanted: TypeAlias = tuple[str, ExpressionType]


class Expressions:
    """Knows what each client that is there last got from a group, so that no client takes messages away from another one.

    A group has one expression and one cursor. If two consumers with different expressions changed it in turn, the group would
    skip the messages of both.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[str, Wanted]] = {}
        """Expressions by id of the group and id of the client."""
        self._groups: dict[str, set[int]] = {}
        """Ids of groups by id of the client."""

    def note(self, client: ConnectedClient, group: ConsumerGroup, wanted: Wanted) -> None:
        """Note that a client polls a group by an expression, which is the group's."""
        self._held.setdefault(group.id, {})[client.id] = wanted
        self._groups.setdefault(client.id, set()).add(group.id)

    def check_may_change(self, client: ConnectedClient, group: ConsumerGroup, wanted: Wanted) -> None:
        """Check that no other client that is there asks for another expression than `wanted`.

        Raises:
            Refused: ILLEGAL_FILTER_EXPRESSION.
        """
        held = self._held.get(group.id, {})
        held.pop(client.id, None)  # The client itself has changed its mind.
        other = next((client_id for client_id, expression in held.items() if expression != wanted), None)
        if other is None:
            return
        detail = (
            f"the consumers of the group {group.name[:80]!r} ask for different messages of {group.filter[:80]!r}: this one for "
            f"{wanted[0][:80]!r}, {other[:80]!r} for {held[other][0][:80]!r}; give all consumers of a group the same "
            f"subscription, or each subscription a group of its own"
        )
        logger.warning("rocketmq.subscriptions_differ", group=group.name, filter=group.filter, client=client.id, why=detail)
        raise Refused(Code.ILLEGAL_FILTER_EXPRESSION, detail)

    def client_gone(self, client: ConnectedClient) -> None:
        """Forget what a client asked for."""
        for group_id in self._groups.pop(client.id, ()):
            held = self._held.get(group_id, {})
            held.pop(client.id, None)
            if not held:
                self._held.pop(group_id, None)
