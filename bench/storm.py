"""Plot a login storm: how many of a fleet that logs in at once are in, against time. It runs only by name.

    python -m bench storm --devices 1000
    python -m bench storm --devices 10000 --memory-kib 4096 --time-cost 1

Each device has a user name of its own, so each first login costs a hash. A device that is told that the server is busy comes
again after a random time, at most `RETRY_S`. When all are in, the connections end, and all log in again: the node remembers
their credentials, and hashes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from argon2 import PasswordHasher
from rich.console import Console

from bench.peers import penstock

RETRY_S: Final = 10.0
"""Longest time after which a device that was refused comes again, in seconds."""

PASSWORD: Final = "a password"
ACCEPTED, BUSY = 0, 3
"""Return codes of a CONNACK of MQTT 3.1.1."""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 320, 64, 44, 44, 16
COLOURS: Final = ("#1f6feb", "#bf5700")


class Storm(NamedTuple):
    """One storm."""

    in_s: list[float]
    """When each device was in, in seconds from the beginning, in order."""
    busy: int
    """How often a device was told that the server is busy."""


def connect_of(user: str) -> bytes:
    """Return the CONNECT of a device: clean session, with user name and password."""
    fields = b"".join(len(text).to_bytes(2) + text for text in (user.encode(), user.encode(), PASSWORD.encode()))
    body = b"\0\4MQTT\4\xc2\0\0" + fields
    assert len(body) < 128, "the length has one byte"
    return b"\x10" + bytes((len(body),)) + body


async def storm(host: str, port: int, devices: int, chance: random.Random) -> Storm:
    """Let all devices log in at once, and end the connections when all are in."""
    began_s, in_s, busy = time.monotonic(), [], 0
    open_ones: list[asyncio.StreamWriter] = []

    async def device(number: int) -> None:
        nonlocal busy
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(connect_of(f"device-{number}"))
                answer = await reader.readexactly(4)
            except (ConnectionError, asyncio.IncompleteReadError):
                answer = bytes((0, 0, 0, BUSY))
            if answer[3] == ACCEPTED:
                in_s.append(time.monotonic() - began_s)
                open_ones.append(writer)
                return
            if answer[3] != BUSY:
                raise RuntimeError(f"The node refused device {number} with return code {answer[3]}.")
            busy += 1
            await asyncio.sleep(chance.uniform(0, RETRY_S))

    await asyncio.gather(*map(device, range(devices)))
    for writer in open_ones:
        writer.transport.abort()
    return Storm(in_s, busy)


def svg_of(storms: Sequence[tuple[str, Storm]]) -> str:
    """Return the plot: seconds on the x axis, devices that are in on the y axis, and a line for each storm."""
    across, up = max(each.in_s[-1] for _, each in storms), max(len(each.in_s) for _, each in storms)

    def x(seconds: float) -> float:
        return LEFT + seconds / across * (WIDTH - LEFT - RIGHT)

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - count / up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Devices that are in, of {up} that log in at once</text>',
    ]
    for step in range(6):
        count, seconds = up * step / 5, across * step / 5
        parts.append(f'<path d="M{LEFT} {y(count):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(count) + 4:.1f}" text-anchor="end">{count:.0f}</text>')
        parts.append(f'<text x="{x(seconds):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{seconds:.1f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">s</text>')
    for number, (name, each) in enumerate(storms):
        step = max(len(each.in_s) // 500, 1)
        curve = [*enumerate(each.in_s, 1)]
        points = [*curve[::step], curve[-1]]
        line = " ".join(f"{x(seconds):.1f},{y(count):.1f}" for count, seconds in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + number * 200}" y="36" fill="{COLOURS[number]}">{name}</text>')
    return "\n".join((*parts, "</svg>", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the plot and the figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench storm", description="Plot a storm of logins with passwords.")
    parser.add_argument("--devices", type=int, default=1000, help="Devices that log in at once (%(default)s).")
    parser.add_argument("--memory-kib", type=int, default=65_536, help="KiB of memory of a hash (%(default)s).")
    parser.add_argument("--time-cost", type=int, default=3, help="Passes of a hash (%(default)s).")
    parser.add_argument("--lanes", type=int, default=4, help="Threads of a hash (%(default)s).")
    parser.add_argument("--dir", type=Path, help="Directory for data (a temporary one).")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="Directory for login-storm.svg and .csv (%(default)s).")
    options = parser.parse_args(arguments)
    if options.devices < 1:
        parser.error("--devices must be at least 1.")
    console = Console(stderr=True)
    console.print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before the run")
    hasher = PasswordHasher(options.time_cost, options.memory_kib, options.lanes)
    stored = hasher.hash(PASSWORD)  # The same for all: the node can't tell, because names differ.
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    hasher.verify(stored, PASSWORD)
    console.print(f"a hash takes {time.perf_counter() - began_s:.4f} s, {time.process_time() - began_cpu_s:.4f} s of processor")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.dir) as name:
        directory = Path(name)
        (directory / "passwords").write_text("".join(f"device-{number}:{stored}\n" for number in range(options.devices)))
        config = directory / "penstock.toml"
        config.write_text(f'[access]\npassword_file = "{directory / "passwords"}"\n')
        with penstock(directory / "data", "--config", str(config)) as node:
            chance = random.Random(1)
            storms = [
                (title, uvloop.run(storm(node.host, node.port, options.devices, chance)))
                for title in ("first login", "login again")
            ]
    for title, each in storms:
        console.print(f"{title}: all in after {each.in_s[-1]:.1f} s, busy {each.busy} times", highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "login-storm.svg").write_text(svg_of(storms))
    with (options.out / "login-storm.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("storm", "devices_in", "seconds"))
        for title, each in storms:
            rows.writerows((title, count, f"{seconds:.3f}") for count, seconds in enumerate(each.in_s, 1))
    return 0
