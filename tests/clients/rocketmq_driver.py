"""The official Python client of RocketMQ as a process. It reads commands from stdin as lines of JSON, and answers likewise.

Each line is `{"do": NAME, ...}`. Its answer is the result of the method of that name, or `{"error": ..., "code": ...}`. The
driver of the Node client, rocketmqjs/driver.js, understands the same lines.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    LitePushConsumer,
    LiteSimpleConsumer,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType

Answer = dict[str, Any]


def told(message: Any) -> Answer:
    """Return the fields of a message."""
    return {
        "topic": message.topic,
        "body": message.body.decode(),
        "id": message.message_id,
        "tag": message.tag or "",
        "keys": sorted(message.keys),
        "properties": message.properties,
        "group": message.message_group or "",
        "attempt": message.delivery_attempt,
        "born_ms": message.born_timestamp,
        "born_host": message.born_host,
        "lite": message.lite_topic or "",
        "corrupted": message.corrupted,
    }


class Checker(TransactionChecker):  # type: ignore[misc]  # the package ships no types
    """Commits each transaction that the node asks about, except those in `undecided`. Remembers what the node asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.undecided: list[str] = []

    def check(self, message: Any) -> Any:
        body = message.body.decode()
        self.asked.append(body)
        kinds = TransactionResolution
        return kinds.TRANSACTION_RESOLUTION_UNSPECIFIED if body in self.undecided else kinds.COMMIT


class Listener(MessageListener):  # type: ignore[misc]
    """Remembers the messages that it gets.

    Parameters:
        failing: Number of failures of the message with a body.
        slow_s: Time to process a message, in seconds.
    """

    def __init__(self, failing: dict[str, int], slow_s: float) -> None:
        self._failing = failing
        self._slow_s = slow_s
        self._lock = threading.Lock()
        self.begun: list[Answer] = []
        self.done: list[Answer] = []

    def consume(self, message: Any) -> Any:
        found = told(message)
        with self._lock:
            self.begun.append(found)
        time.sleep(self._slow_s)
        with self._lock:
            left = self._failing.get(found["body"], 0)
            self._failing[found["body"]] = left - 1
            if left > 0:
                return ConsumeResult.FAILURE
            self.done.append(found)
        return ConsumeResult.SUCCESS


class Driver:
    """The clients of this process: at most one of each kind.

    Parameters:
        target: `HOST:PORT` of the node.
        key, secret: Access key and its secret.
    """

    def __init__(self, target: str, key: str = "", secret: str = "") -> None:
        self._configuration = ClientConfiguration(target, Credentials(key, secret))
        self._checker = Checker()
        self._transactions: list[Any] = []
        self._received: dict[str, Any] = {}
        self._producer: Any = None
        self._consumer: Any = None
        self._listener = Listener({}, 0)

    def producer(self, topics: list[str], undecided: list[str] | None = None) -> Answer:
        self._checker.undecided = undecided or []
        self._producer = Producer(self._configuration, topics, checker=self._checker)
        self._producer.startup()
        return {}

    def send(self, topic: str, body: str, **more: Any) -> Answer:
        message = self._message(topic, body, **more)
        receipt = self._producer.send(message)
        return {"id": receipt.message_id, "recall": receipt.recall_handle or ""}

    def _message(
        self,
        topic: str,
        body: str,
        tag: str = "",
        keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        group: str = "",
        at_s: int = 0,
        lite: str = "",
        priority: int = 0,
    ) -> Any:
        message = Message()
        message.topic, message.body = topic, body.encode()
        if tag:
            message.tag = tag
        for key in keys:
            message.keys = key
        for name, value in (properties or {}).items():
            message.add_property(name, value)
        if group:
            message.message_group = group
        if at_s:
            message.delivery_timestamp = at_s
        if lite:
            message.lite_topic = lite
        if priority:
            message.priority = priority
        return message

    def recall(self, topic: str, handle: str) -> Answer:
        return {"id": self._producer.recall_message(topic, handle)}

    def begin(self, topic: str, body: str) -> Answer:
        transaction = self._producer.begin_transaction()
        receipt = self._producer.send(self._message(topic, body), transaction)
        self._transactions.append(transaction)
        return {"id": receipt.message_id}

    def end(self, commit: bool) -> Answer:
        transaction = self._transactions.pop()
        if commit:
            transaction.commit()
        else:
            transaction.rollback()
        return {}

    def checked(self) -> Answer:
        return {"bodies": self._checker.asked}

    def simple(self, group: str, topics: dict[str, str], wait_s: int = 5, sql: bool = False) -> Answer:
        kind = FilterType.SQL if sql else FilterType.TAG
        subscriptions = {topic: FilterExpression(expression, kind) for topic, expression in topics.items()}
        self._consumer = SimpleConsumer(self._configuration, group, subscriptions, await_duration=wait_s)
        self._consumer.startup()
        return {}

    def receive(self, count: int = 32, invisible_s: int = 30) -> Answer:
        messages = self._consumer.receive(count, invisible_s)
        self._received |= {message.message_id: message for message in messages}
        return {"messages": [told(message) for message in messages]}

    def ack(self, id: str) -> Answer:
        self._consumer.ack(self._received[id])
        return {}

    def change(self, id: str, invisible_s: int) -> Answer:
        self._consumer.change_invisible_duration(self._received[id], invisible_s)
        return {}

    def push(self, group: str, topics: dict[str, str], failing: dict[str, int] | None = None, slow_s: float = 0) -> Answer:
        self._listener = Listener(failing or {}, slow_s)
        subscriptions = {topic: FilterExpression(expression) for topic, expression in topics.items()}
        self._consumer = PushConsumer(self._configuration, group, self._listener, subscriptions)
        self._consumer.startup()
        return {}

    def pushed(self) -> Answer:
        return {"begun": self._listener.begun, "done": self._listener.done}

    def lite_simple(self, group: str, parent: str, lite: list[str]) -> Answer:
        self._consumer = LiteSimpleConsumer(parent, self._configuration, group, await_duration=5)
        self._consumer.startup()
        return self._subscribe_lite(lite)

    def lite_push(self, group: str, parent: str, lite: list[str]) -> Answer:
        self._listener = Listener({}, 0)
        self._consumer = LitePushConsumer(self._configuration, group, parent, self._listener)
        self._consumer.startup()
        return self._subscribe_lite(lite)

    def _subscribe_lite(self, lite: list[str]) -> Answer:
        for name in lite:
            self._consumer.subscribe_lite(name)
        # Version 5.1.2 sends the characters of a name as separate names. This sends the name as a whole.
        self._consumer.subscribe_lite_all()
        return {}

    def stop(self) -> Answer:
        for client in (self._consumer, self._producer):
            if client is not None:
                client.shutdown()
        self._consumer = self._producer = None
        return {}


def main() -> None:
    driver = Driver(*sys.argv[1:])
    for line in sys.stdin:
        wish: Answer = json.loads(line)
        do: Callable[..., Answer] = getattr(driver, wish.pop("do"))
        try:
            answer = do(**wish)
        except Exception as error:  # The test wants to see whatever the client raises.
            code = getattr(error, "code", 0)
            answer = {"error": f"{type(error).__name__}: {error}", "code": code if isinstance(code, int) else 0}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
