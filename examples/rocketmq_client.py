"""The official RocketMQ 5 client on the topics of MQTT. It needs `pip install rocketmq-python-client`.

A topic of RocketMQ is an MQTT topic or filter, percent-encoded. MQTT clients get the messages of this client, and vice versa.

    python examples/rocketmq_client.py 127.0.0.1:8081
"""

from __future__ import annotations

import sys
import time
from urllib.parse import quote

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

TOPIC = quote("plant/1/pressure", safe="")
FILTER = quote("plant/+/pressure", safe="")


def message(body: bytes, **fields: object) -> Message:
    made = Message()
    made.topic, made.body = TOPIC, body
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def main(address: str) -> None:
    configuration = ClientConfiguration(address, Credentials())
    producer = Producer(configuration, [TOPIC])
    producer.startup()
    consumer = SimpleConsumer(configuration, "example-rocketmq", {FILTER: FilterExpression("alarm || reading")})
    consumer.startup()
    for number in range(8):
        producer.send(message(b"%d" % number, tag="reading" if number % 2 else "debug"))
    soon = int(time.time()) + 2
    producer.send(message(b"delayed", tag="alarm", delivery_timestamp=soon))
    recalled = producer.send(message(b"recalled", tag="alarm", delivery_timestamp=soon))
    producer.recall_message(TOPIC, recalled.recall_handle)
    received: list[str] = []
    while len(received) < 5:
        for found in consumer.receive(32, 15):
            consumer.ack(found)
            received.append(found.body.decode())
    print(f"received {', '.join(received)}")
    consumer.shutdown()
    producer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081")
