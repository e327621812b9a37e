"""The demo's devices: sensors of a plant, simulated from a seed, with real MQTT connections.

`python -m penstock.demo.fleet --port 1883` runs a fleet as a process of its own, so that it shares no event loop with the node.
It prints JSON lines: `{"published": n}` while it runs, and at the end one line with `"done": true` and the counts of
`FleetReport`. The exit status is 0 if every reading was acknowledged, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import orjson
import uvloop
from amqtt.client import MQTTClient
from amqtt.errors import AMQTTError, ClientError, ConnectError, ProtocolHandlerError
from amqtt.mqtt.constants import QOS_1

START_MS = 1_767_225_600_000
"""Time of the first simulated readings, 2026-01-01T00:00:00Z. It is fixed, so that a seed gives the same bytes on any day."""

DEVICES_PER_LINE = 25
INTERVAL_MS = 1_000
"""Time between two readings of a device, before jitter."""

DUPLICATE_SHARE = 0.02
"""Share of readings that a device sends twice, as if it had missed the acknowledgement."""

LATE_SHARE = 0.01
"""Share of readings that a device sends only after up to `LATE_BY_MAX` later readings."""

LATE_BY_MAX = 5
SPIKE_SHARE = 0.003
"""Share of readings that are far too high, as from a loose contact."""

WINDOW = 8
"""Unacknowledged PUBLISH packets per device. With 200 devices that is 1,600 packets: a broker that acknowledges more than 320
packets a second meets the 5 s after which amqtt stops waiting for a PUBACK."""

CONNECTING_MAX = 32
"""Number of devices that connect at the same time. It is below the backlog of any listener."""

CONNECT_S_MAX = 60.0
"""Seconds that a device waits for its CONNACK. amqtt itself limits only the time of the TCP connection."""

ATTEMPTS_MAX = 12
"""Attempts to publish one reading, 5 s apart, before it counts as failed: a minute without a PUBACK."""

ERRORS_MAX = 10
"""Maximum number of errors in a report. One cause usually stops all devices."""

PROGRESS_S = 0.2
"""Seconds between two lines of progress."""

# --- simulation -----------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """One PUBLISH of a device.

    `sequence` counts what the device sent, from 1. `duplicate_of` is 0, or the sequence number under which the device had
    sent the same reading before. `late` says that the device had sent a newer reading before this one.
    """

    device: str
    line: str
    sequence: int
    reading_id: str
    ts_ms: int
    celsius: float
    late: bool = False
    duplicate_of: int = 0

    @property
    def topic(self) -> str:
        return f"plant/{self.line}/{self.device}/temperature"

    @property
    def body(self) -> bytes:
        """Return the JSON that the device sends. It has `late` and `duplicate_of` only if they are set."""
        fields: dict[str, Any] = {
            "device": self.device,
            "sequence": self.sequence,
            "reading_id": self.reading_id,
            "ts_ms": self.ts_ms,
            "celsius": self.celsius,
        }
        if self.late:
            fields["late"] = True
        if self.duplicate_of:
            fields["duplicate_of"] = self.duplicate_of
        return orjson.dumps(fields)


class _Sample(NamedTuple):
    """One measurement of a sensor: its number, from 1 up, its time and the temperature."""

    number: int
    ts_ms: int
    celsius: float


def simulate(seed: int, devices: int = 200, readings: int = 20_000) -> list[Reading]:
    """Return the `readings` PUBLISHes of a plant with `devices` devices, in the order in which they are sent.

    The same arguments give the same list on any machine. Every device sends the same number of readings; the first devices
    send one more each if the number of readings is not divisible by the number of devices.

    Raises:
        ValueError: there is no device, or a negative number of readings.
    """
    if devices < 1 or readings < 0:
        raise ValueError(
            f"A fleet needs at least 1 device and 0 readings, but devices is {devices} and readings is {readings}."
        )
    share, rest = divmod(readings, devices)
    by_device = [_readings_of(seed, index, share + (index < rest)) for index in range(devices)]
    # In rounds, because all devices measure at the same interval.
    return [sent[turn] for turn in range(share + 1) for sent in by_device if turn < len(sent)]


def _readings_of(seed: int, index: int, count: int) -> list[Reading]:
    """Return the `count` readings that one device sends."""
    # Each device has a generator of its own, so that the size of the fleet does not change what a device sends.
    random = Random(f"{seed}/{index}")
    device, line = f"device-{index + 1:04d}", f"line-{index // DEVICES_PER_LINE + 1:02d}"
    readings: list[Reading] = []
    sequence_of: dict[int, int] = {}
    newest_ms = -1
    for sequence, (number, ts_ms, celsius) in enumerate(_send_order(random, _measure(random), count), start=1):
        before = sequence_of.setdefault(number, sequence)
        duplicate_of = before if before != sequence else 0
        late = ts_ms < newest_ms and not duplicate_of
        newest_ms = max(newest_ms, ts_ms)
        reading_id = f"{device}-{number:06d}"
        readings.append(Reading(device, line, sequence, reading_id, ts_ms, celsius, late, duplicate_of))
    return readings


def _measure(random: Random) -> Iterator[_Sample]:
    """Yield measurements for ever: a base temperature of the device, a slow oscillation, drift, noise, and rare spikes."""
    base = random.uniform(35.0, 75.0)
    swing, period_ms, phase = random.uniform(0.5, 3.0), random.uniform(300_000, 1_800_000), random.uniform(0, math.tau)
    noise = random.uniform(0.05, 0.3)
    drift = 0.0
    ts_ms = START_MS + random.randrange(INTERVAL_MS)
    number = 0
    while True:
        number += 1
        drift += random.gauss(0.0, 0.01)
        celsius = base + drift + swing * math.sin(math.tau * (ts_ms - START_MS) / period_ms + phase) + random.gauss(0.0, noise)
        if random.random() < SPIKE_SHARE:
            celsius += random.uniform(15.0, 40.0)
        yield _Sample(number, ts_ms, round(celsius, 2))
        ts_ms += INTERVAL_MS + random.randint(-INTERVAL_MS // 20, INTERVAL_MS // 20)


def _send_order(random: Random, samples: Iterator[_Sample], count: int) -> list[_Sample]:
    """Return `count` samples in the order of sending: some of them twice, some after later samples."""
    sent: list[_Sample] = []
    while len(sent) < count:
        sent.append(next(samples))
        if random.random() < DUPLICATE_SHARE and len(sent) < count:
            sent.append(sent[-1])
    for index in range(count):
        if random.random() < LATE_SHARE:
            sent.insert(min(count - 1, index + random.randint(1, LATE_BY_MAX)), sent.pop(index))
    return sent


# --- publishing -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FleetReport:
    """Counts of a fleet's readings. At the end `acknowledged + failed == readings`."""

    devices: int
    readings: int
    connected: int = 0
    published: int = 0
    """Readings that were sent at least once."""
    resent: int = 0
    """Readings sent again because no PUBACK arrived within 5 s. The broker may have stored both."""
    acknowledged: int = 0
    failed: int = 0
    elapsed_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    """Errors of devices that could not connect or lost their connection, at most `ERRORS_MAX`."""


class _ConnectionLost(Exception):
    """Raised when a device loses its connection. Its remaining readings have failed."""


async def publish_fleet(
    host: str,
    port: int,
    readings: Sequence[Reading],
    *,
    progress: Callable[[int], None] = lambda acknowledged: None,
    window: int = WINDOW,
    connecting_max: int = CONNECTING_MAX,
) -> FleetReport:
    """Publish `readings` at QoS 1, each device over an MQTT 3.1.1 connection of its own and in its order.

    If a device can't connect or loses its connection, its remaining readings fail; the other devices continue. A device sends
    a reading again if it is not acknowledged within 5 s, up to `ATTEMPTS_MAX` times.

    Args:
        host: name or address of the broker.
        port: TCP port of its MQTT listener.
        readings: the readings to send, such as those of `simulate`.
        progress: called after each PUBACK with the number of PUBACKs so far.
        window: maximum number of unacknowledged readings per device, at least 1.
        connecting_max: maximum number of devices that connect at the same time, at least 1.
    """
    by_device: dict[str, list[Reading]] = {}
    for reading in readings:
        by_device.setdefault(reading.device, []).append(reading)
    report = FleetReport(len(by_device), len(readings))
    connecting = asyncio.Semaphore(connecting_max)
    began = monotonic()

    async def run(device: str, own: list[Reading]) -> None:
        client = _client_of(device)
        try:
            async with connecting, asyncio.timeout(CONNECT_S_MAX):
                await client.connect(f"mqtt://{host}:{port}/")
            report.connected += 1
            await _publish_all(client, own, window, report, progress)
            await client.disconnect()
        except (ConnectError, _ConnectionLost) as error:
            if len(report.errors) < ERRORS_MAX:
                report.errors.append(f"{device}: {error}")

    async with asyncio.TaskGroup() as devices:
        for device, own in by_device.items():
            devices.create_task(run(device, own))
    report.failed = report.readings - report.acknowledged
    report.elapsed_s = monotonic() - began
    return report


def _client_of(device: str) -> MQTTClient:
    config = {
        "auto_reconnect": False,
        "connection_timeout": int(CONNECT_S_MAX),
        # amqtt sends a PINGREQ after `keep_alive - ping_delay` seconds without another packet.
        "keep_alive": 60,
        "ping_delay": 10,
        # The default plugin logs each packet, in a task of its own.
        "plugins": {},
    }
    return MQTTClient(client_id=device, config=config)


async def _publish_all(
    client: MQTTClient, readings: list[Reading], window: int, report: FleetReport, progress: Callable[[int], None]
) -> None:
    """Publish the readings of one device, `window` at a time.

    Each of `window` tasks takes the next reading and writes it before it awaits anything, so the readings stay in order.
    """
    following = iter(readings)

    async def publish_following() -> None:
        for reading in following:
            report.published += 1
            if await _publish_until_acknowledged(client, reading, report):
                report.acknowledged += 1
                progress(report.acknowledged)

    tasks = [asyncio.create_task(publish_following()) for _ in range(min(window, len(readings)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _publish_until_acknowledged(client: MQTTClient, reading: Reading, report: FleetReport) -> bool:
    """Publish one reading, up to `ATTEMPTS_MAX` times. Return whether it was acknowledged.

    Raises:
        _ConnectionLost: the device has lost its connection.
    """
    for attempt in range(ATTEMPTS_MAX):
        report.resent += attempt > 0
        try:
            await client.publish(reading.topic, reading.body, qos=QOS_1)
            return True
        except TimeoutError:
            continue  # amqtt waits 5 s for a PUBACK
        except asyncio.CancelledError:
            # amqtt cancels tasks that wait for a PUBACK when the connection ends. Only our own cancellation may propagate.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _ConnectionLost("The broker closed the connection.") from None
        except (AMQTTError, ClientError, ProtocolHandlerError, OSError, AttributeError) as error:
            # AttributeError: amqtt's handler dropped its session and stream while this publish was in progress.
            raise _ConnectionLost(f"The connection is lost ({error!r}).") from error
    return False


# --- the process ----------------------------------------------------------------------------------------------------


def _print_line(fields: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(fields).decode() + "\n")
    sys.stdout.flush()


def _progress_printer() -> Callable[[int], None]:
    """Return a `progress` function that prints at most one line every `PROGRESS_S`."""
    next_s = 0.0

    def progress(acknowledged: int) -> None:
        nonlocal next_s
        if monotonic() >= next_s:
            next_s = monotonic() + PROGRESS_S
            _print_line({"published": acknowledged})

    return progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a fleet from the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="penstock.demo.fleet", description="Publish the readings of simulated devices.")
    parser.add_argument("--host", default="127.0.0.1", help="Address of the broker (%(default)s).")
    parser.add_argument("--port", type=int, default=1883, help="Port of its MQTT listener (%(default)s).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the readings: the same seed gives the same (%(default)s).")
    parser.add_argument("--devices", type=int, default=200, help="Number of devices, with one connection each (%(default)s).")
    parser.add_argument(
        "--readings", type=int, default=20_000, help="Number of readings that all devices publish together (%(default)s)."
    )
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="Maximum number of unacknowledged readings per device (%(default)s)."
    )
    options = parser.parse_args(arguments)
    # amqtt logs a warning for each connection that ends. The report has the errors that matter.
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)
    readings = simulate(options.seed, options.devices, options.readings)
    publishing = publish_fleet(options.host, options.port, readings, progress=_progress_printer(), window=options.window)
    report = uvloop.run(publishing)
    _print_line({"published": report.acknowledged})
    _print_line({"done": True, **asdict(report)})
    return 0 if report.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
