"""Plot a login storm: how many of a fleet that logs in at once are in, against time. It runs only by name.

    python -m bench storm --devices 300
    python -m bench storm --devices 10000

Each device has a user name of its own, so each first login costs a hash. A device that is told that the server is busy comes
again after a random time, at most `RETRY_S`. When all are in, the connections end, and all log in again: the node remembers
their credentials, and hashes nothing. Meanwhile an honest device, which is connected, publishes at QoS 1 at a steady rate.

`login-storm.csv` has a line for each sample: what happened up to then, how long the node estimates that a login which begins
now will take (the metric `penstock_mqtt_login_wait_seconds`), and how long those took that began since the sample before.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Final, TextIO

import uvloop
from argon2 import PasswordHasher
from rich.console import Console

from bench import plots
from bench.peers import BrokerProcess, penstock

RETRY_S: Final = 10.0
"""Longest time after which a device that was refused comes again, in seconds."""

SAMPLES: Final = 120
"""Samples of the first storm, about. They are at least `SAMPLE_S_MIN` seconds apart."""
SAMPLE_S_MIN: Final = 0.25

HONEST_PERIOD_S: Final = 0.05
HONEST_BEFORE_S: Final = 5.0
"""Seconds for which the honest device publishes before the storm."""

PASSWORD: Final = "a password"
HONEST: Final = "honest"
ACCEPTED, BUSY = 0, 3
"""Return codes of a CONNACK of MQTT 3.1.1."""


@dataclass(slots=True)
class Login:
    """A login that was accepted, in seconds from the beginning of its storm."""

    began_s: float
    in_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at a moment of a storm."""

    at_s: float
    devices_in: int
    busy: int
    """How often devices have been told that the server is busy. Each of these came again."""
    estimate_s: float
    """Wait that the node expects for a login that begins now."""
    logins_per_s: float
    """Logins a second that the node has measured."""


@dataclass(slots=True)
class Storm:
    """One storm."""

    title: str
    logins: list[Login] = field(default_factory=list)
    busy: int = 0
    samples: list[Sample] = field(default_factory=list)
    acks_ms: list[float] = field(default_factory=list)
    """Milliseconds until each PUBACK of the honest device."""

    @property
    def end_s(self) -> float:
        """When the last device was in."""
        return max(login.in_s for login in self.logins)

    def waited_s(self, first_s: float, end_s: float) -> float | None:
        """Return the median of the time that those logins took that began between two moments; None if there were none."""
        found = [login.in_s - login.began_s for login in self.logins if first_s <= login.began_s < end_s]
        return median(found) if found else None


def connect_of(user: str) -> bytes:
    """Return the CONNECT of a device: clean session, with user name and password."""
    fields = b"".join(len(text).to_bytes(2) + text for text in (user.encode(), user.encode(), PASSWORD.encode()))
    body = b"\0\4MQTT\4\xc2\0\0" + fields
    assert len(body) < 128, "the length has one byte"
    return b"\x10" + bytes((len(body),)) + body


async def storm(node: BrokerProcess, title: str, devices: int, sample_s: float, chance: random.Random) -> Storm:
    """Let all devices log in at once, and end the connections when all are in."""
    found, began_s = Storm(title), time.monotonic()
    open_ones: list[asyncio.StreamWriter] = []

    async def device(number: int) -> None:
        while True:
            first_s = time.monotonic() - began_s
            try:
                reader, writer = await asyncio.open_connection(node.host, node.port)
                writer.write(connect_of(f"device-{number}"))
                answer = await reader.readexactly(4)
            except (ConnectionError, asyncio.IncompleteReadError):
                answer = bytes((0, 0, 0, BUSY))
            if answer[3] == ACCEPTED:
                found.logins.append(Login(first_s, time.monotonic() - began_s))
                open_ones.append(writer)
                return
            if answer[3] != BUSY:
                raise RuntimeError(f"The node refused device {number} with return code {answer[3]}.")
            found.busy += 1
            await asyncio.sleep(chance.uniform(0, RETRY_S))

    async def take_sample() -> None:
        metrics = await metrics_of(node)
        estimate_s, logins_per_s = metrics["penstock_mqtt_login_wait_seconds"], metrics["penstock_mqtt_logins_per_second"]
        found.samples.append(Sample(time.monotonic() - began_s, len(found.logins), found.busy, estimate_s, logins_per_s))

    async def sample() -> None:
        while True:
            await asyncio.sleep(sample_s)
            await take_sample()

    await take_sample()
    sampling = asyncio.create_task(sample())
    await asyncio.gather(*map(device, range(devices)))
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    found.samples.append(Sample(found.end_s, devices, found.busy, 0, found.samples[-1].logins_per_s))
    for writer in open_ones:
        writer.transport.abort()
    return found


async def metrics_of(node: BrokerProcess) -> dict[str, float]:
    """Return the metrics without labels that a node shows."""
    host, _, port = node.addresses["admin"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    pairs = (line.split() for line in lines if line.startswith("penstock_") and "{" not in line)
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}


async def publish_steadily(host: str, port: int, acks: TextIO) -> None:
    """Publish at QoS 1 at a steady rate, and write the milliseconds from when each message was due to its PUBACK."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(connect_of(HONEST))
    if (await reader.readexactly(4))[3] != ACCEPTED:
        raise RuntimeError("The node refused the honest device.")
    due_s = time.monotonic()
    while True:
        due_s += HONEST_PERIOD_S
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        writer.write(b"\x32\x0c\0\6honest\0\1ab")
        await reader.readexactly(4)
        acks.write(f"{(time.monotonic() - due_s) * 1000}\n")
        acks.flush()


def be_honest(host: str, port: int, acks: Path) -> None:
    """Be the honest device, in a process of its own, so that it does not wait for the other devices of the bench."""
    with acks.open("a") as file:
        asyncio.run(publish_steadily(host, port, file))


class HonestDevice:
    """The honest device, which publishes while the context is open.

    Parameters:
        node: gets the messages.
        directory: gets a file of its own.
    """

    def __init__(self, node: BrokerProcess, directory: Path) -> None:
        self._acks = directory / "acks"
        self._read = 0
        arguments = (node.host, node.port, self._acks)
        self._process = get_context("spawn").Process(target=be_honest, args=arguments, daemon=True)

    def __enter__(self) -> HonestDevice:
        self._acks.touch()
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def take_ms(self) -> list[float]:
        """Return the milliseconds of the PUBACKs since the call before.

        Raises:
            RuntimeError: the device has ended.
        """
        if not self._process.is_alive():
            raise RuntimeError("The honest device has ended, see above.")
        lines = self._acks.read_text().splitlines()[self._read :]
        self._read += len(lines)
        return [float(line) for line in lines]


async def storms_of(node: BrokerProcess, devices: int, hash_s: float, honest: HonestDevice) -> tuple[list[float], list[Storm]]:
    """Return how long the PUBACKs of the honest device took before the storms, and the storms."""
    chance, found = random.Random(1), []
    await asyncio.sleep(HONEST_BEFORE_S)
    before_ms = honest.take_ms()
    for title in ("first login", "login again"):
        sample_s = max(devices * hash_s / SAMPLES, SAMPLE_S_MIN)
        found.append(await storm(node, title, devices, sample_s, chance))
        found[-1].acks_ms = honest.take_ms()
    return before_ms, found


# --- what is written --------------------------------------------------------------------------------------------------


def p99_of(values_ms: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(values_ms, n=100)[-1] if len(values_ms) > 1 else max(values_ms, default=0.0)


def rows_of(storms: Iterable[Storm]) -> Iterable[tuple[object, ...]]:
    """Yield the lines of the CSV file."""
    yield ("storm", "seconds", "devices_in", "busy", "logins_per_s", "estimate_s", "took_s")
    for each in storms:
        for sample, until in zip(each.samples, [*each.samples[1:], None], strict=True):
            took_s = each.waited_s(sample.at_s, until.at_s) if until is not None else None
            yield (
                each.title,
                f"{sample.at_s:.2f}",
                sample.devices_in,
                sample.busy,
                f"{sample.logins_per_s:.2f}",
                f"{sample.estimate_s:.2f}",
                f"{took_s:.2f}" if took_s is not None else "",
            )


def svg_of(before_ms: Sequence[float], storms: Sequence[Storm]) -> str:
    """Return the plot: above, devices that are in and refusals; below, the wait that the node expects and the real one."""
    first = storms[0]
    took = [
        (sample.at_s, waited_s)
        for sample, until in zip(first.samples, first.samples[1:], strict=False)
        if (waited_s := first.waited_s(sample.at_s, until.at_s)) is not None
    ]
    above = {f"in: {each.title}": [(s.at_s, float(s.devices_in)) for s in each.samples] for each in storms}
    above["refused as busy, to come again"] = [(s.at_s, float(s.busy)) for s in first.samples]
    below = {
        "wait that the metrics expect": [(s.at_s, s.estimate_s) for s in first.samples],
        "wait of logins that began then": took,
    }
    during_ms = p99_of(first.acks_ms)
    return plots.svg_of(
        (
            plots.Panel(f"{len(first.logins)} devices log in at once", "", above),
            plots.Panel("First login: seconds that it takes", " s", below),
        ),
        " s",
        note=f"PUBACK of a connected device, p99: {p99_of(before_ms):.1f} ms before, {during_ms:.1f} ms during the first storm",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the plot and the figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench storm", description="Plot a storm of logins with passwords.")
    parser.add_argument("--devices", type=int, default=1000, help="Devices that log in at once (%(default)s).")
    parser.add_argument("--memory-kib", type=int, default=65_536, help="KiB of memory of a hash (%(default)s).")
    parser.add_argument("--time-cost", type=int, default=3, help="Passes of a hash (%(default)s).")
    parser.add_argument(
        "--lanes", type=int, default=1, help="Threads of a hash (%(default)s, as `penstock user` makes them; amqtt's have 4)."
    )
    parser.add_argument("--dir", type=Path, help="Directory for data (a temporary one).")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images"), help="Directory for login-storm.svg and .csv (%(default)s)."
    )
    options = parser.parse_args(arguments)
    if options.devices < 1:
        parser.error("--devices must be at least 1.")
    console = Console(stderr=True, highlight=False)
    console.print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before the run")
    hasher = PasswordHasher(options.time_cost, options.memory_kib, options.lanes)
    stored = hasher.hash(PASSWORD)  # The same for all: the node can't tell, because names differ.
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    hasher.verify(stored, PASSWORD)
    hash_s = time.perf_counter() - began_s
    console.print(f"a hash takes {hash_s:.4f} s, {time.process_time() - began_cpu_s:.4f} s of processor")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.dir) as name:
        directory = Path(name)
        users = (HONEST, *(f"device-{number}" for number in range(options.devices)))
        (directory / "passwords").write_text("".join(f"{user}:{stored}\n" for user in users))
        config = directory / "penstock.toml"
        config.write_text(f'[access]\npassword_file = "{directory / "passwords"}"\n')
        with penstock(directory / "data", "--config", str(config)) as node, HonestDevice(node, directory) as honest:
            before_ms, storms = uvloop.run(storms_of(node, options.devices, hash_s, honest))
    for each in storms:
        console.print(
            f"{each.title}: all in after {each.end_s:.1f} s, busy {each.busy} times; PUBACK of a connected device p99 "
            f"{p99_of(each.acks_ms):.1f} ms, before the storms {p99_of(before_ms):.1f} ms"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "login-storm.svg").write_text(svg_of(before_ms, storms))
    with (options.out / "login-storm.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows_of(storms))
    return 0
