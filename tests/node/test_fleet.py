"""The simulated fleet: the readings of a seed, and its connections with good and bad brokers."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.peers import BrokerProcess, NotInstalled, mosquitto
from penstock.demo import fleet
from penstock.demo.fleet import Reading, publish_fleet, simulate
from tests.depth import DEPTH

# --- simulation -----------------------------------------------------------------------------------------------------


def by_device(readings: list[Reading]) -> dict[str, list[Reading]]:
    sent: dict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        sent[reading.device].append(reading)
    return sent


def test_a_seed_gives_the_same_readings_and_another_seed_others() -> None:
    assert simulate(7, 20, 500) == simulate(7, 20, 500)
    assert simulate(7, 20, 500) != simulate(8, 20, 500)


def test_the_readings_of_a_seed_are_the_same_from_one_version_to_the_next() -> None:
    sent = simulate(1)
    assert sent[0].topic == "plant/line-01/device-0001/temperature"
    assert sent[0].body == (
        b'{"device":"device-0001","sequence":1,"reading_id":"device-0001-000001","ts_ms":1767225600116,"celsius":71.82}'
    )
    duplicate = next(reading for reading in sent if reading.duplicate_of)
    assert duplicate.body == (
        b'{"device":"device-0025","sequence":2,"reading_id":"device-0025-000001","ts_ms":1767225600842,"celsius":50.7,'
        b'"duplicate_of":1}'
    )


@settings(max_examples=30 * DEPTH)
@given(seed=st.integers(), devices=st.integers(1, 40), readings=st.integers(0, 1_500))
def test_every_reading_is_consistent_with_what_its_device_sent_before(seed: int, devices: int, readings: int) -> None:
    sent = simulate(seed, devices, readings)
    assert len(sent) == readings
    counts = Counter(reading.device for reading in sent)
    assert len(counts) == min(devices, readings)
    assert not counts or max(counts.values()) - min(counts.values()) <= 1
    for own in by_device(sent).values():
        assert [reading.sequence for reading in own] == list(range(1, len(own) + 1))
        before: dict[str, Reading] = {}
        newest_ms = 0
        for reading in own:
            original = before.setdefault(reading.reading_id, reading)
            assert reading.duplicate_of == (0 if original is reading else original.sequence)
            assert (reading.ts_ms, reading.celsius) == (original.ts_ms, original.celsius)
            assert reading.late == (original is reading and reading.ts_ms < newest_ms)
            newest_ms = max(newest_ms, reading.ts_ms)


def test_a_fleet_has_lines_duplicates_late_readings_drift_and_spikes() -> None:
    sent = simulate(1)
    assert len({reading.line for reading in sent}) == 8
    assert 0.01 < sum(bool(reading.duplicate_of) for reading in sent) / len(sent) < 0.03
    assert 0.005 < sum(reading.late for reading in sent) / len(sent) < 0.02
    spikes = 0
    for own in by_device(sent).values():
        middle = sorted(reading.celsius for reading in own)[len(own) // 2]
        assert 20.0 < middle < 90.0
        spikes += sum(reading.celsius > middle + 11.0 for reading in own)
    assert 20 < spikes < 120


def test_what_marks_a_reading_is_in_its_body() -> None:
    sent = simulate(1)
    late = next(reading for reading in sent if reading.late)
    duplicate = next(reading for reading in sent if reading.duplicate_of)
    assert orjson.loads(late.body)["late"] is True
    assert orjson.loads(duplicate.body)["duplicate_of"] == duplicate.duplicate_of


def test_devices_are_as_they_were_in_a_smaller_fleet() -> None:
    small, large = simulate(3, 10, 1_000), simulate(3, 20, 2_000)
    assert by_device(small).items() <= by_device(large).items()


@pytest.mark.parametrize(("devices", "readings"), [(0, 10), (1, -1)])
def test_a_fleet_that_cannot_be_is_refused(devices: int, readings: int) -> None:
    with pytest.raises(ValueError, match="at least 1 device"):
        simulate(1, devices, readings)


# --- with mosquitto -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    try:
        with mosquitto() as peer:
            yield peer
    except NotInstalled as missing:
        pytest.skip(str(missing))


@pytest.mark.nightly
async def test_every_reading_arrives_and_each_device_keeps_its_order(broker: BrokerProcess) -> None:
    readings = simulate(5, 30, 1_500)
    received: dict[str, list[bytes]] = defaultdict(list)
    subscriber = fleet._client_of("subscriber")
    await subscriber.connect(f"mqtt://{broker.host}:{broker.port}/")
    await subscriber.subscribe([("plant/+/+/temperature", 1)])
    progress: list[int] = []
    report = await publish_fleet(broker.host, broker.port, readings, progress=progress.append, connecting_max=4)
    for _ in readings:
        message = await subscriber.deliver_message(30.0)
        received[message.topic].append(bytes(message.data))
    await subscriber.disconnect()
    assert (report.devices, report.connected, report.published, report.acknowledged, report.failed) == (30, 30, 1_500, 1_500, 0)
    assert report.errors == []
    assert progress == list(range(1, 1_501))
    expected = {own[0].topic: [reading.body for reading in own] for own in by_device(readings).values()}
    assert received == expected


@pytest.mark.nightly
async def test_the_process_prints_progress_and_ends_with_its_report(broker: BrokerProcess) -> None:
    options = {"port": broker.port, "seed": 2, "devices": 10, "readings": 300}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "penstock.demo.fleet", "--host", broker.host),
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    *progress, last = [orjson.loads(line) for line in out.splitlines()]
    assert progress[-1] == {"published": 300}
    assert last["done"] is True
    assert (last["connected"], last["published"], last["acknowledged"], last["failed"]) == (10, 300, 300, 0)


# --- with brokers that misbehave ------------------------------------------------------------------------------------


@asynccontextmanager
async def broker_that(on_publish: Callable[[int, bytes], bytes | None]) -> AsyncIterator[int]:
    """Run a broker that accepts every connection and gives, for the n-th PUBLISH of each, `on_publish(n, packet id)`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        published = 0
        try:
            while head := await reader.read(1):
                length, shift = 0, 0
                while True:
                    byte = (await reader.readexactly(1))[0]
                    length |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                packet = await reader.readexactly(length)
                if head[0] >> 4 == 1:
                    writer.write(b"\x20\x02\x00\x00")
                elif head[0] >> 4 == 3:
                    published += 1
                    topic_bytes = int.from_bytes(packet[:2])
                    answer = on_publish(published, packet[2 + topic_bytes : 4 + topic_bytes])
                    if answer is None:
                        return
                    writer.write(answer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the fleet closed the connection, and the test reads its report
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_lost_connection_fails_the_remaining_readings_of_its_device() -> None:
    readings = simulate(1, 3, 60)
    async with broker_that(lambda n, packet_id: b"\x40\x02" + packet_id if n <= 5 else None) as port:
        report = await publish_fleet("127.0.0.1", port, readings, window=2)
    assert report.connected == 3
    assert report.acknowledged <= 15
    assert report.acknowledged + report.failed == 60
    assert len(report.errors) == 3


async def test_a_fleet_without_a_broker_fails_with_the_reason() -> None:
    async with broker_that(lambda n, packet_id: None) as port:
        pass
    report = await publish_fleet("127.0.0.1", port, simulate(1, 20, 100))
    assert (report.connected, report.acknowledged, report.failed) == (0, 0, 100)
    assert len(report.errors) == fleet.ERRORS_MAX
    assert "device-00" in report.errors[0]


@pytest.mark.nightly
async def test_a_publish_without_its_puback_is_sent_again() -> None:
    # This takes the 5 s after which amqtt stops waiting for a PUBACK.
    async with broker_that(lambda n, packet_id: b"" if n == 3 else b"\x40\x02" + packet_id) as port:
        report = await publish_fleet("127.0.0.1", port, simulate(1, 2, 40))
    assert (report.published, report.acknowledged, report.resent, report.failed) == (40, 40, 2, 0)


async def test_a_fleet_that_is_cancelled_ends() -> None:
    is_publishing = asyncio.Event()

    def never_acknowledge(n: int, packet_id: bytes) -> bytes:
        is_publishing.set()
        return b""

    async with broker_that(never_acknowledge) as port:
        publishing = asyncio.create_task(publish_fleet("127.0.0.1", port, simulate(1, 5, 50)))
        await is_publishing.wait()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
