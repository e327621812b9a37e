"""The load of `bench.soak`: a little of everything that a node does, at a steady rate, for as long as it runs.

`python -m bench.soakload --mqtt HOST:PORT --pop HOST:PORT` runs it as a process of its own until SIGTERM. Each kind of work is
a task that repeats one round. When a round fails, the task counts the failure, waits a second and goes on. At the end the
process prints the rounds and failures of each task as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random

import orjson
from aiomqtt import Client as MqttClient
from aiomqtt import MqttError, ProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from bench.load import Load, LoadFailed, start_load
from penstock import Client, OutgoingMessage, PopError, group_settings
from penstock.pop.client.message import Message

RETRY_S = 1.0
ROUND_S = 10
"""Seconds of one round of the load generator."""

PLAIN_PER_S = 3_000
"""Messages a second of the load generator, at QoS 0 and 1 in turn."""

SESSIONS = 40
"""Client ids of which one after the other connects. Their sessions last for `SESSION_S`."""
SESSION_S = 20
AWAY_S = 0.5

RETAINED = 300
"""Topics with a retained message. Each message is replaced again and again, and one in ten is cleared."""

TRANSACTIONS = 3
"""Transactions a second. The node remembers the outcome of the last 100,000, so a higher rate takes longer to level off."""

TIMERS_PER_S = 20
DELAY_S_MAX = 120
SENT_PER_S = 400
ATTEMPTS_MAX = 2
DEAD_SHARE = 0.02
FAILED_SHARE = 0.03

Work = Callable[[], Awaitable[None]]


class SoakLoad:
    """The load on one node.

    Parameters:
        mqtt, pop: addresses of the node's listeners.
        seed: of everything that is drawn.
    """

    def __init__(self, mqtt: str, pop: str, seed: int) -> None:
        self._host, _, port = mqtt.rpartition(":")
        self._port = int(port)
        self._pop = pop
        self._random = Random(seed)
        self._numbers = count()
        self.rounds: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def _mqtt(self, client_id: str = "", *, session_s: int = 0) -> MqttClient:
        """Return a client of MQTT 5.0; its session lasts for `session_s` after its connection."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = session_s
        return MqttClient(
            self._host,
            self._port,
            identifier=client_id or None,
            protocol=ProtocolVersion.V5,
            clean_start=not session_s,
            properties=properties,
        )

    # --- MQTT -----------------------------------------------------------------------------------------------------------

    async def plain(self) -> None:
        """Publish at QoS 0 and 1 in turn to subscribers, as fast as the load says."""
        qos = next(self._numbers) % 2
        load = Load(pubs=4, subs=2, msgs=PLAIN_PER_S * ROUND_S, qos=qos, subqos=qos, rate=PLAIN_PER_S, topics=64, size=200)
        with start_load(self._host, self._port, load) as running:
            while running.is_running:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.1)
            running.result()

    async def exactly_once(self) -> None:
        """Publish at QoS 2 to a subscriber."""
        async with self._mqtt() as reader, self._mqtt() as writer:
            await reader.subscribe("exact/#", qos=2)
            for number in range(50):
                await writer.publish(f"exact/{number % 5}", b"x" * 100, qos=2)
                await anext(aiter(reader.messages))

    async def sessions(self) -> None:
        """Let a client return to its session, get some messages and leave, or end a session for good."""
        number = self._random.randrange(SESSIONS)
        async with self._mqtt(f"soak-{number}", session_s=SESSION_S) as client:
            await client.subscribe([("sensor/+/state", self._random.randrange(3)), (f"sensor/{number}/#", 1)])
            if self._random.random() < 0.1:
                await client.unsubscribe(f"sensor/{number}/#")
            for _ in range(10):
                await client.publish(f"sensor/{self._random.randrange(SESSIONS)}/state", b"s" * 80, qos=1)
            await asyncio.sleep(AWAY_S)
        async with self._mqtt(f"once-{next(self._numbers)}", session_s=SESSION_S) as client:
            await client.subscribe(f"sensor/{number}/once/{next(self._numbers)}", qos=1)

    async def retained(self) -> None:
        """Replace retained messages, clear some, and read them with a new subscription."""
        async with self._mqtt() as client:
            for _ in range(30):
                topic = f"state/{self._random.randrange(RETAINED)}/value"
                await client.publish(topic, b"" if self._random.random() < 0.1 else b"v" * 60, qos=1, retain=True)
            await client.subscribe("state/+/value", qos=1)
            for _ in range(20):
                await anext(aiter(client.messages))
            await client.subscribe(f"$share/soak/shared/{next(self._numbers) % 3}/#", qos=1)
            await client.publish(f"shared/{self._random.randrange(3)}/work", b"w" * 50, qos=1)
        await asyncio.sleep(AWAY_S)

    async def for_ever(self) -> None:
        """Keep one retained message and one far delayed message from the beginning of the load to its end."""
        async with self._mqtt() as client, Client(self._pop) as pop:
            await client.publish("plant/for/ever", b"retained once", qos=1, retain=True)
            await pop.send("plant/far/away", b"due in a year", delay=365 * 24 * 3_600)
            await asyncio.Event().wait()

    # --- POP ------------------------------------------------------------------------------------------------------------

    async def producer(self) -> None:
        """Send batches with tags, message groups and properties, at a steady rate."""
        async with Client(self._pop) as client:
            while True:
                numbers = [self._random.randrange(200) for _ in range(SENT_PER_S // 10)]
                await client.send_batch(
                    OutgoingMessage(
                        topic=f"plant/{number % 80}/{('temperature', 'pressure')[number % 2]}",
                        body=b"p" * 150,
                        tag=("reading", "alarm")[number % 10 == 0],
                        message_group=f"machine-{number % 80}",
                        properties={"unit": "C"},
                    )
                    for number in numbers
                )
                self.rounds["producer"] += 1
                await asyncio.sleep(0.1)

    async def delayed(self) -> None:
        """Send delayed messages, and recall some."""
        async with Client(self._pop) as client:
            while True:
                for _ in range(TIMERS_PER_S):
                    delay_s = self._random.uniform(0.1, DELAY_S_MAX)
                    receipt = await client.send(f"plant/{self._random.randrange(20)}/due", b"d" * 80, delay=delay_s)
                    if self._random.random() < 0.1:
                        await client.recall(receipt.recall_handle)
                self.rounds["delayed"] += 1
                await asyncio.sleep(1)

    def consumer(self, group: str, topic_filter: str, **settings: object) -> Work:
        """Return the work of one consumer of a group. It fails some messages and rejects others."""

        async def consume() -> None:
            async with Client(self._pop) as client:
                await client.groups.create(group, topic_filter, settings=group_settings(**settings))  # type: ignore[arg-type]
                while True:
                    messages = await client.pop(topic_filter, group=group, messages_max=100, invisible=5.0, wait=2.0)
                    done: list[Message] = []
                    for message in messages:
                        drawn = self._random.random()
                        if drawn < DEAD_SHARE:
                            await client.dead_letter([message.handle], group=group)
                        elif drawn < DEAD_SHARE + FAILED_SHARE:
                            await message.nack(delay=0.2)
                        else:
                            done.append(message)
                    await client.ack([message.handle for message in done], group=group)
                    self.rounds[group] += 1

        return consume

    async def redriver(self) -> None:
        """Redrive a few dead letters. The others stay until retention drops them."""
        async with Client(self._pop) as client:
            await asyncio.sleep(5)
            letters = await client.dead_letters.of_group("workers", limit=20)
            if letters:
                await client.dead_letters.redrive("workers", [letter.message_id for letter in letters[:5]])

    async def transactions(self) -> None:
        """Commit most transactions, and roll back the others."""
        async with Client(self._pop) as client:
            for number in range(TRANSACTIONS):
                transaction = await client.transactions.begin(f"plant/{number}/paid", b"t" * 90, producer="soak")
                await (transaction.rollback() if self._random.random() < 0.2 else transaction.commit())
            await asyncio.sleep(1)

    # --- running --------------------------------------------------------------------------------------------------------

    async def run(self, ended: asyncio.Event) -> None:
        """Run everything until `ended` is set."""
        work: dict[str, Work] = {
            "plain": self.plain,
            "exactly_once": self.exactly_once,
            "sessions": self.sessions,
            "retained": self.retained,
            "for_ever": self.for_ever,
            "producer": self.producer,
            "delayed": self.delayed,
            "workers": self.consumer("workers", "plant/#", attempts_max=ATTEMPTS_MAX),
            "ordered": self.consumer("ordered", "plant/+/temperature", fifo=True, attempts_max=ATTEMPTS_MAX),
            "alarms": self.consumer("alarms", "plant/+/pressure", tags="alarm"),
            "redriver": self.redriver,
            "transactions": self.transactions,
        }
        tasks = [asyncio.create_task(self._repeat(name, each)) for name, each in work.items()]
        await ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, name: str, work: Work) -> None:
        while True:
            try:
                await work()
                self.rounds[name] += 1
            except (PopError, MqttError, LoadFailed, OSError, TimeoutError) as error:
                self.failures[name] += 1
                print(f"{name}: {error!r}", file=sys.stderr)
                await asyncio.sleep(RETRY_S)


async def _main(options: argparse.Namespace) -> int:
    load, ended = SoakLoad(options.mqtt, options.pop, options.seed), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await load.run(ended)
    sys.stdout.write(orjson.dumps({"rounds": load.rounds, "failures": load.failures}).decode() + "\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.soakload", description="Put a steady load of everything on a node.")
    parser.add_argument("--mqtt", required=True, help="Address of the MQTT listener, HOST:PORT.")
    parser.add_argument("--pop", required=True, help="Address of the gRPC listener, HOST:PORT.")
    parser.add_argument("--seed", type=int, default=17, help="Seed of everything that is drawn (%(default)s).")
    sys.exit(asyncio.run(_main(parser.parse_args())))
