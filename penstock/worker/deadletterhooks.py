"""The hooks of a worker for dead letters: a consumer of `$dlq/GROUP` for each of the worker's groups, which calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.pop.client.message import Message
from penstock.pop.client.results import DeadLetterReason
from penstock.worker.consumerplan import ConsumerPlan
from penstock.worker.errors import WorkerError
from penstock.worker.handler import MESSAGE, Handler

DeadLetterHook = Callable[[Message, str], Awaitable[None] | None]
"""Called with a message that became a dead letter, and the reason."""

SUFFIX = ".on-dead-letter"
"""What follows the name of a group in the name of the group that consumes its dead letters for the hooks."""

GROUP_BYTES_MAX = 255
"""Maximum length of a group's name, as the node has it (`pop.core.group`)."""

INVISIBLE_S = 60.0
"""Invisible time of a dead letter, and the timeout of its hooks, in seconds."""


def hook_plans(plans: Sequence[ConsumerPlan], hooks: Sequence[DeadLetterHook]) -> list[ConsumerPlan]:
    """Return the consumers that call the hooks for the dead letters of the groups of other consumers.

    They begin with the dead letters that come after the first start of a worker with hooks.

    Raises:
        WorkerError: The name of a group leaves no room for the suffix.
    """
    groups = dict.fromkeys(plan.group for plan in plans) if hooks else {}
    for group in groups:
        if len((group + SUFFIX).encode(errors="replace")) > GROUP_BYTES_MAX:
            most = GROUP_BYTES_MAX - len(SUFFIX)
            raise WorkerError(f"on_dead_letter needs group names of up to {most} bytes, and {group[:40]!r}... has more")

    async def call_hooks(message: Message) -> None:
        origin = message.origin
        if origin is None:  # It was sent back to its group, or purged, before anybody heard of it.
            return
        reason = origin.detail or _REASONS.get(origin.reason, "it failed")
        for hook in hooks:
            returned = hook(message, reason)
            if returned is not None:
                await returned

    handler = Handler(call_hooks, "a hook of on_dead_letter", is_async=True, takes=(MESSAGE,), codec=None, batch=0)
    return [
        ConsumerPlan(
            topic_filter=f"$dlq/{group}",
            group=group + SUFFIX,
            handler=handler,
            concurrency=1,
            timeout_s=INVISIBLE_S,
            invisible_s=INVISIBLE_S,
            fifo=False,
            start="latest",
            settings=None,
            middleware=(),
        )
        for group in groups
    ]


_REASONS = {
    DeadLetterReason.ATTEMPTS_EXHAUSTED: "its attempts are used up, and the last one was never acknowledged",
    DeadLetterReason.UNREADABLE: "its record can't be read any more",
    DeadLetterReason.FORWARDED: "a consumer made it a dead letter and gave no reason",
}
