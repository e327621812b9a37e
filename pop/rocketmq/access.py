"""The rights that each method of `apache.rocketmq.v2.MessagingService` needs, and the response to a caller without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from penstock.access.actions import CONSUME, POP, SEND
from penstock.pop.access.auditedcall import LineFields
from penstock.pop.access.caller import CALLER
from penstock.pop.access.callguard import Need, ServiceRules, no_needs
from penstock.pop.access.refusals import CallRefused
from penstock.pop.rocketmq.names import filter_of, group_of, lite_filter_of, topic_of_message
from penstock.pop.rocketmq.status import Refused, code_of, detail_of, refusal


def _send(request: Any) -> Iterator[Need]:
    # If a name is no valid topic, the whole call is refused for every caller.
    for topic in {topic_of_message(message) for message in request.messages}:
        yield SEND, topic


def _consume(request: Any) -> Iterator[Need]:
    yield CONSUME, group_of(request.group)


def _sync_lite(request: Any) -> Iterator[Need]:
    yield CONSUME, group_of(request.group)
    parent = filter_of(request.topic)
    for lite_topic in request.lite_topic_set:
        yield POP, lite_filter_of(parent, lite_topic)


def _offset(request: Any) -> LineFields:
    return {"group": unquote(request.group.name), "filter": unquote(request.message_queue.topic.name)}


def _recall(request: Any) -> LineFields:
    return {"topic": unquote(request.topic.name)}


def _telemetry(request: Any) -> Iterator[Need]:
    # A stream ends when its client may no longer send to a topic about whose half messages the node asks the client.
    for topic in publishable(request.settings.publishing.topics):
        yield SEND, topic


def publishable(topics: Iterable[Any]) -> Iterator[str]:
    """Yield those of some topics, given as a `Resource` each, to which the caller may send.

    The node asks publishers of a topic about its half messages, and so shows them these messages. The settings of a client
    name all topics to which it has ever sent. A topic that is refused is left out here, because the refused send tells why.
    """
    rights = CALLER.get()
    for resource in topics:
        with suppress(Refused):
            topic = filter_of(resource)
            if rights is None or rights.may(SEND, topic):
                yield topic


def _refuse(error: Exception) -> CallRefused:
    """Return what ends a call with the response that states the error. The protocol keeps the gRPC status OK."""
    return CallRefused(response=refusal(code_of(error), detail_of(error)))


RULES = ServiceRules(
    "/apache.rocketmq.v2.MessagingService/",
    {
        "QueryRoute": no_needs,
        "Heartbeat": no_needs,
        "SendMessage": _send,
        "QueryAssignment": _consume,
        "ReceiveMessage": _consume,  # It checks the filter by itself, because the topic of lite topics is none.
        "AckMessage": _consume,
        "ForwardMessageToDeadLetterQueue": _consume,
        "PullMessage": _consume,
        "UpdateOffset": _consume,
        "GetOffset": _consume,
        "QueryOffset": no_needs,
        "EndTransaction": no_needs,  # It and RecallMessage check the topic of the message by themselves.
        "Telemetry": _telemetry,
        "NotifyClientTermination": no_needs,
        "ChangeInvisibleDuration": _consume,
        "RecallMessage": no_needs,
        "SyncLiteSubscription": _sync_lite,
    },
    _refuse,
    {"UpdateOffset": _offset, "RecallMessage": _recall},
    errors=(Exception,),  # `code_of` logs an unforeseen one
)
"""The table has all methods of the service. A test compares it with the descriptor of the service."""
