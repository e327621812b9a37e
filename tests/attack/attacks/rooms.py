"""Attacks on what takes room for longer: topics, retained and delayed messages, subscriptions."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import ClassVar

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH, PUBLISH_WITH, SUBACK
from penstock.store.options import KIB
from tests.attack.attacks.attack import Attack, side_by_side
from tests.attack.link import Link, logged_in
from tests.gateway.packet_cases_5 import subscribe_5, unsubscribe_5
from tests.gateway.wire import PING

QUOTA = "0x97"

DELIVERED_S_MAX = 30.0
"""Time after the last window in which what was published must be delivered."""


class PublishFlood(Attack):
    """Clients that publish bursts at QoS 1 to ever new topics, and read the reasons."""

    connections = 4
    body = b"x"
    retain = False

    def topic(self) -> str:
        raise NotImplementedError

    async def run(self) -> None:
        await side_by_side(self.connections, self._publish)

    async def _publish(self, number: int) -> None:
        link = await logged_in(self.ground, f"{self.name}-{number}")
        self.links.append(link)
        while True:
            await link.send(
                *(
                    encode_publish(self.topic().encode(), self.body, 1, retain=self.retain, packet_id=at, properties=b"\0")
                    for at in range(1, 101)
                )
            )
            for _ in range(100):
                found = await link.expect(PUBACK)
                if not found:
                    self.saw["closed"] += 1
                    return
                self.saw[f"0x{found[2]:02x}" if len(found) > 2 else "stored"] += 1

    share_max = 1_200
    """More than a user may get of the 2,000 that the node has for all."""

    def problems(self) -> list[str]:
        found = self.once(QUOTA) + self.never("closed")
        return found if self.saw["stored"] <= self.share_max else [*found, f"one user got {self.saw['stored']:,} of 2,000"]


class FirstLevels(PublishFlood):
    """Topics whose first levels are new."""

    name = "first-levels"
    summary = "one user publishes to ever new first-level topics (store.queues_max = 2000)"
    must_get = "quota exceeded (0x97) once it holds its share"
    options: ClassVar[dict[str, str]] = {"more": "[store]\nqueues_max = 2000"}

    def topic(self) -> str:
        return f"level-{self.next_number()}/x"


class RetainedFlood(PublishFlood):
    """Retained messages of ever new topics."""

    name = "retained-flood"
    summary = "one user retains 4 KB under ever new topics (mqtt.retained_max = 2000)"
    must_get = "quota exceeded (0x97) once it holds its share"
    options: ClassVar[dict[str, str]] = {"mqtt": "retained_max = 2000"}
    body = bytes(4 * KIB)
    retain = True

    def topic(self) -> str:
        return f"mallory/retained/{self.next_number()}"


class DelayedFlood(PublishFlood):
    """Delayed messages."""

    name = "delayed-flood"
    summary = "one user delays ever more messages by a day (timer.pending_max = 2000)"
    must_get = "quota exceeded (0x97) once it holds its share"
    options: ClassVar[dict[str, str]] = {"more": "[timer]\npending_max = 2000"}

    def topic(self) -> str:
        return f"$delayed/86400/mallory/{self.next_number()}"


class SubscriptionFlood(Attack):
    """Subscriptions to ever new filters, by ever new clients."""

    name = "subscription-flood"
    summary = "one user subscribes to 1,000 filters in each of ever new clients (mqtt.sessions_max = 800)"
    must_get = "quota exceeded (0x97) once it holds its share"
    options: ClassVar[dict[str, str]] = {"mqtt": "sessions_max = 800"}
    peak_mib = 256

    async def run(self) -> None:
        await side_by_side(4, self._subscribe)

    async def _subscribe(self, _: int) -> None:
        link = await logged_in(self.ground, f"subscriptions-{self.next_number()}")
        self.links.append(link)
        for at in range(10):
            await link.send(subscribe_5(1, *((b"mallory/%d/%d/+" % (self.number, at * 100 + i), 0) for i in range(100))))
            found = await link.expect(SUBACK)
            if not found:
                self.saw["closed"] += 1
                return
            for reason in found[2][3:]:
                self.saw[f"0x{reason:02x}"] += 1

    def problems(self) -> list[str]:
        return self.once(QUOTA) + self.never("closed")


class Overlapping(Attack):
    """Filters that all match one message."""

    name = "overlapping-filters"
    summary = "60 clients with 1,000 overlapping filters each, and 20 messages at a time, that match all of them"
    must_get = "granted (0x00), and one delivery of each message for each client"
    peak_mib = 512

    CLIENTS = 60
    FILTERS = 1_000

    async def prepare(self) -> None:
        levels = [f"l{at}" for at in range(10)]
        self._topic = "/".join(levels)
        # Each filter has a + in place of other levels, so all of them match the topic.
        self._filters = [
            "/".join("+" if number >> at & 1 else level for at, level in enumerate(levels)) for number in range(self.FILTERS)
        ]

        self._readers = []
        for number in range(self.CLIENTS):
            self._readers.append(asyncio.create_task(self._read(await self._subscribe(number))))

    async def run(self) -> None:
        publisher = await logged_in(self.ground, "overlapping-publisher")
        self.links.append(publisher)
        while True:
            await publisher.send(
                *(encode_publish(self._topic.encode(), b"x", 1, packet_id=at, properties=b"\0") for at in range(1, 21))
            )
            for _ in range(20):
                found = await publisher.expect(PUBACK)
                self.saw[f"PUBACK 0x{found[2]:02x}" if len(found) > 2 else "published"] += 1
            await self._delivered()

    async def _delivered(self) -> None:
        while self.saw["delivery"] < self.saw["published"] * self.CLIENTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _subscribe(self, number: int) -> Link:
        link = await logged_in(self.ground, f"overlapping-{number}")
        for at in range(0, self.FILTERS, 250):
            await link.send(subscribe_5(1, *((name.encode(), 0) for name in self._filters[at : at + 250])))
            found = await link.expect(SUBACK)
            for reason in found[2][3:] if found else ():
                self.saw[f"SUBACK 0x{reason:02x}"] += 1
        return link

    async def _read(self, link: Link) -> None:
        while found := await link.next(3600):
            self.saw["delivery" if found[0] in (PUBLISH, PUBLISH_WITH) else "something else"] += 1

    async def finish(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DELIVERED_S_MAX):
                await self._delivered()
        for reader in self._readers:
            reader.cancel()

    def problems(self) -> list[str]:
        found = self.only("SUBACK 0x00", "published", "delivery") + self.once("delivery")
        if self.saw["SUBACK 0x00"] != self.CLIENTS * self.FILTERS:
            found.append(f"{self.saw['SUBACK 0x00']:,} of {self.CLIENTS * self.FILTERS:,} subscriptions were granted")
        if self.saw["delivery"] < self.saw["published"] * self.CLIENTS:
            found.append(
                f"{self.saw['published']:,} messages made {self.saw['delivery']:,} deliveries to {self.CLIENTS} clients"
            )
        return found


class ShareChurn(Attack):
    """Shared subscriptions that are joined and left."""

    name = "share-churn"
    summary = "16 clients join and leave $share groups as fast as they can, while messages come"
    must_get = "granted"

    async def run(self) -> None:
        publishing = asyncio.create_task(self._publish())
        try:
            await side_by_side(16, self._churn)
        finally:
            publishing.cancel()

    async def _publish(self) -> None:
        link = await logged_in(self.ground, "share-publisher")
        self.links.append(link)
        while True:
            await link.send(*(encode_publish(b"mallory/shared", b"x", 0, properties=b"\0") for _ in range(10)))
            await asyncio.sleep(0.01)

    async def _churn(self, number: int) -> None:
        link = await logged_in(self.ground, f"share-{number}")
        self.links.append(link)
        name = b"$share/mallory-%d/mallory/#" % (number % 4)
        while True:
            await link.send(subscribe_5(1, (name, 1)))
            found = await link.expect(SUBACK)
            if not found:
                self.saw["closed"] += 1
                return
            self.saw[f"0x{found[2][-1]:02x}"] += 1
            await link.send(unsubscribe_5(2, name), PING)
            await link.expect(11)

    def problems(self) -> list[str]:
        return self.only("0x01")


class SlowReader(Attack):
    """Subscribers that don't read."""

    name = "slow-readers"
    summary = "20 subscribers never read, while 1 MB a burst is published to them"
    must_get = "nothing more, once 256 KiB are waiting"

    async def run(self) -> None:
        for number in range(20):
            link = await logged_in(self.ground, f"slow-{number}")
            self.links.append(link)
            await link.send(subscribe_5(1, (b"mallory/slow", 0)))
            await link.expect(SUBACK)
            link.writer.transport.pause_reading()  # type: ignore[attr-defined]
        publisher = await logged_in(self.ground, "slow-publisher")
        self.links.append(publisher)
        while True:
            await publisher.send(
                *(encode_publish(b"mallory/slow", bytes(10_000), 1, packet_id=at, properties=b"\0") for at in range(1, 101))
            )
            for _ in range(100):
                await publisher.expect(PUBACK)
            self.saw["published"] += 100

    def problems(self) -> list[str]:
        return self.once("published")
