"""Every quota that docs/guides/quotas.md names, through a real node: whoever reaches its limit is refused, and others go on."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from penstock import Client, Overloaded, Security, TooManyQueues, TooManyTimers, TooManyTransactions
from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK
from penstock.gateway.protocol.properties import write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.pop.errors import PopError
from penstock.store.space.accounts import Resource
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import LASTS
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.wire import CLEAN, Broker, Client5
from tests.layout import ROOT

USERS = ("ann", "bob")
NEAR, FAR, FARTHER, ELSEWHERE = "local", "192.0.2.9", "198.51.100.5", "203.0.113.7"
ANSWERS = (0, int(ReasonCode.QUOTA_EXCEEDED))
LIMIT, BYTES_LIMIT, BODY = 2, 3000, b"x" * 1000
"""Two of each kind fit into its limit, and not a third."""

LISTENER = ListenerOptions(name="far", proxy_from=("127.0.0.0/8",))
ACCESS = 'no_match = "allow"\n' + "".join(
    f'[[principal]]\nname = "{user}"\ntoken_sha256 = "{sha256(user.encode()).hexdigest()}"\n'
    'read = ["#"]\nwrite = ["#"]\nconsume = ["*"]\nadmin = ["*"]\n'
    for user in USERS
)


class Who(NamedTuple):
    """Who makes something: a user, where it comes from, and by which MQTT client."""

    user: str
    source: str
    client: str


class Place:
    """A node with limits, and connections of whoever makes something."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self.broker = broker
        self._stack = stack
        self._clients: dict[Who, Client5] = {}
        self._services: dict[str, Client] = {}

    async def connect(self, who: Who) -> Client5:
        """Connect a client of MQTT 5.0 whose session lasts. The caller receives the CONNACK."""
        flags, login = (CLEAN | USER | PASSWORD, (who.user.encode(), b"secret")) if who.user else (CLEAN, ())
        client = await self.broker.dial_5("far")
        hello = connect_5(flags, who.client.encode(), *login, about=write_properties(LASTS))
        await client.send(f"PROXY TCP4 {who.source} 192.0.2.1 1 2\r\n".encode(), hello)
        return client

    async def client(self, who: Who) -> Client5:
        if who not in self._clients:
            client = self._clients[who] = await self.connect(who)
            assert (await client.connack())[0] == 0
        return self._clients[who]

    async def service(self, who: Who) -> Client:
        if who.user not in self._services:
            client = Client(f"127.0.0.1:{self.broker.node.grpc.port}", security=Security(token=who.user))
            self._services[who.user] = await self._stack.enter_async_context(client)
        return self._services[who.user]


Make: TypeAlias = Callable[[Place, Who, str], Awaitable[bool]]
"""Makes a thing with a name; returns whether the node accepted it."""


def publish(topic: str, *, retain: bool = False) -> Make:
    async def make(place: Place, who: Who, name: str) -> bool:
        client = await place.client(who)
        await client.send(encode_publish((topic + name).encode(), BODY, 1, retain=retain, packet_id=1, properties=b"\0"))
        answer = await client.expect(PUBACK)
        return ANSWERS.index(answer[2] if len(answer) > 2 else 0) == 0

    return make


def subscribe(topic_filter: str) -> Make:
    async def make(place: Place, who: Who, name: str) -> bool:
        client = await place.client(who)
        (answer,) = await client.subscribe((topic_filter.format(name), 0))
        return ANSWERS.index(answer) == 0

    return make


async def log_in(place: Place, who: Who, name: str) -> bool:
    client = await place.connect(who._replace(client=f"{who.client}-{name}"))
    return ANSWERS.index((await client.connack())[0]) == 0


def call(refusal: type[PopError], work: Callable[[Client, str], Awaitable[object]]) -> Make:
    async def make(place: Place, who: Who, name: str) -> bool:
        try:
            await work(await place.service(who), name)
        except refusal as error:
            if "quotas.limits" not in str(error):
                raise
            return False
        return True

    return make


send_later = call(TooManyTimers, lambda client, _: client.send("later", BODY, delay=60.0))
create_schedule = call(Overloaded, lambda client, name: client.schedules.create(name, "often", BODY, every=3_600.0))

MQTT: dict[str, Make] = {
    "queues": publish("first-"),
    "sessions": log_in,
    "subscriptions": subscribe("a/{}"),
    "retained": publish("kept/", retain=True),
    "retained_bytes": publish("kept/", retain=True),
    "groups": subscribe("$share/{}/a"),
    "shared": subscribe("$share/{}/a"),
    "delayed": publish("$delayed/60/a/"),
    "delayed_bytes": publish("$delayed/60/a/"),
}
GRPC: dict[str, Make] = {
    "queues": call(TooManyQueues, lambda client, name: client.send(f"first-{name}", BODY)),
    "groups": call(Overloaded, lambda client, name: client.groups.create(name, "a/#")),
    "delayed": send_later,
    "delayed_bytes": send_later,
    "timer_keys": call(TooManyTimers, lambda client, name: client.send("later", BODY, delay=60.0, timer_key=name)),
    "schedules": create_schedule,
    "schedules_bytes": create_schedule,
    "transactions": call(TooManyTransactions, lambda client, _: client.transactions.begin("a", BODY, producer="p")),
}
FLOODERS = {
    "client": Who("bob", FARTHER, "pump"),
    "user": Who("ann", FARTHER, "of ann"),
    "source": Who("bob", FAR, "from afar"),
}
"""By what has a limit: a client of MQTT that no other limit concerns."""


async def place_of(
    stack: AsyncExitStack, start_broker: StartBroker, tmp_path: Path, quotas: QuotaOptions, *, has_users: bool
) -> Place:
    (tmp_path / "access.toml").write_text(ACCESS)
    access = (
        {"access": plugins("Users"), "access_file": str(tmp_path / "access.toml")}
        if has_users
        else {"access": AccessOptions(anonymous="always")}
    )
    return Place(await start_broker(quotas=quotas, listeners=(LISTENER,), **access), stack)


def limit_of(level: str, name: str, resource: str) -> QuotaLimitOptions:
    limit = BYTES_LIMIT if resource.endswith("_bytes") else LIMIT
    return QuotaLimitOptions(of=level, name=name, **{resource: limit})  # type: ignore[arg-type]


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("resource", MQTT)
async def test_whoever_has_reached_its_limit_is_refused_and_others_are_served(
    start_broker: StartBroker, tmp_path: Path, resource: str
) -> None:
    make = MQTT[resource]
    # A client has one session.
    flooders = {level: who for level, who in FLOODERS.items() if (resource, level) != ("sessions", "client")}
    limits = tuple(limit_of(level, who._asdict()[level], resource) for level, who in flooders.items())
    async with AsyncExitStack() as stack:
        place = await place_of(stack, start_broker, tmp_path, QuotaOptions(limits=limits), has_users=True)
        for level, flooder in flooders.items():
            found = [await make(place, flooder, f"{level}-{number}") for number in range(4)]
            assert found == [True, True, False, False], level
            if level != "client":  # The limit is for all of its clients together.
                again = flooder._replace(client=f"again {level}", source=ELSEWHERE if level == "user" else FAR)
                assert not await make(place, again, f"{level}-again"), level
            other = Who("bob", FARTHER, f"beside {level}")
            assert [await make(place, other, f"beside-{level}-{number}") for number in range(3)] == [True] * 3, level
            assert not await make(place, flooder, f"{level}-last"), level


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("level", ["user", "source"])
@pytest.mark.parametrize("resource", GRPC)
async def test_a_service_that_has_reached_its_limit_is_refused(
    start_broker: StartBroker, tmp_path: Path, resource: str, level: str
) -> None:
    make, has_users = GRPC[resource], level != "source"
    flooder = Who("ann" if has_users else "", NEAR, "")
    limits = (limit_of(level, flooder._asdict()[level], resource),)
    async with AsyncExitStack() as stack:
        place = await place_of(stack, start_broker, tmp_path, QuotaOptions(limits=limits), has_users=has_users)
        found = [await make(place, flooder, f"one-{number}") for number in range(4)]
        assert found == [True, True, False, False]
        if has_users:  # Each caller of a test comes from this machine: see the test below.
            other = flooder._replace(user="bob")
            assert [await make(place, other, f"other-{number}") for number in range(3)] == [True] * 3
            assert not await make(place, flooder, "last")


async def test_a_limit_of_another_source_does_not_concern_a_service(start_broker: StartBroker, tmp_path: Path) -> None:
    limits = {resource: BYTES_LIMIT if resource.endswith("_bytes") else LIMIT for resource in GRPC}
    quotas = QuotaOptions(limits=(QuotaLimitOptions(of="source", name=FAR, **limits),))
    async with AsyncExitStack() as stack:
        place = await place_of(stack, start_broker, tmp_path, quotas, has_users=False)
        for resource, make in GRPC.items():
            found = [await make(place, Who("", NEAR, ""), f"{resource}-{number}") for number in range(4)]
            assert found == [True] * 4, resource


def test_the_table_has_every_quota_that_the_documents_and_the_options_name() -> None:
    page = (ROOT / "docs" / "guides" / "quotas.md").read_text("utf-8")
    table = page.partition("## What is counted")[2].partition("##")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    options = {option.name for option in fields(QuotaLimitOptions)} - {"of", "name"}
    assert {*MQTT, *GRPC} == documented == options == {resource.name.lower() for resource in Resource}
