"""Who may share a POP group over MQTT if an access file names its consumers: devices get no messages of a back end."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from penstock import Client as PopClient
from penstock import Security
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.scripted_plugins import Script
from tests.gateway.share_members import group_of
from tests.gateway.wire import CLEAN, Broker, Client5

TOKEN = "s3cret"
FILE = f"""
[[principal]]
name = "billing"
token_sha256 = "{sha256(TOKEN.encode()).hexdigest()}"
read = ["a/#"]
consume = ["billing"]

[[role]]
name = "edges"
users = ["edge-*"]
consume = ["billing"]

[[rule]]
allow = ["consume"]
groups = ["devices"]

[[rule]]
allow = ["publish", "subscribe"]
topics = ["#"]
"""
BILLING, DEVICES = "$share/billing/a/#", "$share/devices/a/#"
LASTS = {Property.SESSION_EXPIRY_S: 600}


@pytest.fixture
def script() -> Iterator[Script]:
    script = scripted_plugins.new_script()
    yield script
    script.may_answer.set()


@pytest.fixture
def access_file(tmp_path: Path) -> str:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return str(path)


async def login(broker: Broker, username: str, client_id: str = "c", flags: int = CLEAN, **options: Any) -> Client5:
    fields = [username.encode(), b"x"]
    return await broker.connect_5(client_id, *fields, flags=flags | USER | PASSWORD, **options)


def pop_client(broker: Broker) -> PopClient:
    return PopClient(str(broker.node.grpc), security=Security(token=TOKEN))


async def test_a_device_gets_nothing_from_a_back_end_s_group(start_broker: StartBroker, access_file: str) -> None:
    broker = await start_broker(access_file=access_file)
    device, old_device = await broker.connect_5("device"), await broker.connect("old")
    with structlog.testing.capture_logs() as logs:
        assert await device.subscribe((BILLING, 1), (DEVICES, 1)) == [ReasonCode.NOT_AUTHORIZED, 1]
        assert await old_device.subscribe((BILLING, 1), (DEVICES, 1)) == [SUBACK_FAILURE, 1]
    refused = [line for line in logs if line["event"] == "subscription.refused"]
    assert [line["filter"] for line in refused] == [BILLING, BILLING]
    assert "access.file" in refused[0]["why"]
    assert broker.node.gateway.counters.subscriptions_refused == 2
    names = [group.name for group in broker.node.pop.groups]
    assert names == ["devices"], "no group may be created for a user that may not share it"
    async with pop_client(broker) as service:
        await service.pop("a/#", group="billing")
        await device.publish("a/b", b"x", 1)
        (message,) = await service.pop("a/#", group="billing", wait=5.0)
        await message.ack()
    assert [message.body for message in [*await device.messages(), *await old_device.messages()]] == [b"x"]


async def test_users_that_the_file_names_share_the_group_with_the_back_end(
    start_broker: StartBroker, script: Script, access_file: str
) -> None:
    broker = await start_broker(access_file=access_file, access=plugins("Users"))
    edge, other = await login(broker, "edge-1", "edge"), await login(broker, "sensor-1", "sensor")
    assert await edge.subscribe((BILLING, 1)) == [1]
    assert await other.subscribe((BILLING, 1)) == [ReasonCode.NOT_AUTHORIZED]
    await other.publish("a/b", b"x", 1)
    assert (await edge.message()).body == b"x"
    async with pop_client(broker) as service:
        assert await service.pop("a/#", group="billing") == []


async def test_an_unverified_user_name_opens_no_group(start_broker: StartBroker, script: Script, access_file: str) -> None:
    broker = await start_broker(access_file=access_file)  # Without plugins any client may call itself "edge-1".
    assert await (await login(broker, "edge-1")).subscribe((BILLING, 1)) == [ReasonCode.NOT_AUTHORIZED]
    filtering = await start_broker(access_file=access_file, access=plugins("Topics"))
    assert await (await login(filtering, "edge-1")).subscribe((BILLING, 1)) == [ReasonCode.NOT_AUTHORIZED]


async def test_the_user_name_in_a_certificate_opens_a_group(
    start_broker: StartBroker, access_file: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "tls")
    devices = authority.listener("devices", client_certificates="required", username_from="cn")
    broker = await start_broker(access_file=access_file, listeners=(devices,))
    for name, codes in (("edge-7", [1]), ("sensor-7", [ReasonCode.NOT_AUTHORIZED])):
        context = authority.context(authority.issue_client(f"{name}.example.org", common_name=name))
        # The user name in the CONNECT does not count.
        client = await login(broker, "edge-1", name, listener="devices", context=context)
        assert await client.subscribe((BILLING, 1)) == codes


async def test_a_stored_subscription_ends_if_its_user_may_no_longer_share_the_group(
    start_broker: StartBroker, script: Script, access_file: str
) -> None:
    broker = await start_broker(access_file=access_file, access=plugins("Users"))
    first, second = await login(broker, "edge-1", "c", about=LASTS), await login(broker, "edge-2", "d", about=LASTS)
    for client in (first, second):
        assert await client.subscribe((BILLING, 1), (DEVICES, 1)) == [1, 1]
    Path(access_file).write_text(FILE.replace("edge-*", "edge-2"))  # noqa: ASYNC240 - a small file
    await broker.restart()
    first = await login(broker, "edge-1", "c", flags=0, about=LASTS)
    assert not first.session_present, "it has to subscribe again"
    await first.publish("a/b", b"x", 1)
    assert [message.body for message in await first.messages()] == [b"x"], "only the message of the devices' group"
    assert group_of(broker, "billing").visible == 1
    second = await login(broker, "edge-2", "d", flags=0, about=LASTS)
    assert (await second.message()).body == b"x"
    assert group_of(broker, "billing").visible == 0
