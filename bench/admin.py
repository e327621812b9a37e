"""`python -m bench admin`: how fast a node with 100,000 clients lists and searches them, and what that does to publishers.

As many clients as `--connected` says are connected, and the rest are entries of the registry (`bench.crowd`), as few
systems let one process have 100,000 descriptors. Publishers send 2,000 messages a second with QoS 1: alone, while somebody asks
for ten pages, searches and single clients a second, as consoles and operators do, and while somebody asks for them without a
pause. The three take turns in each run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import cycle
from threading import Event
from typing import Final

import orjson

from bench.backup import meanwhile
from bench.load import Load, LoadFailed, LoadUnavailable, compile_load, run_load, start_load
from bench.peers import BrokerFailed, BrokerProcess, penstock
from bench.rows import Figures, Goal, Row, RowFailed, Setting, parser_of, run

PUBLISHERS: Final = 20
STEADY_PER_S: Final = 2_000
STEADY_S: Final = 10
PACE_PER_S: Final = 10
STEP: Final = 37
"""By how much the clients that are asked for are apart."""

RATIO_MAX: Final = 1.3
"""How much longer a PUBACK may take in a hundred of them while somebody lists clients."""

ASKED: Final = {
    "page": "/clients?limit=100&after={client}",
    "page_1000": "/clients?limit=1000&after={client}",
    "one": "/clients/{client}",
    "search": "/clients?limit=1000&contains={part}",
    "network": "/clients?limit=1000&address=10.0.1.0/28",
}
"""What is asked for. The client and the part of its id are other ones each time."""

TITLES: Final = {
    "page": "page of 100 clients",
    "page_1000": "page of 1,000 clients",
    "one": "one client in detail",
    "search": "search for a part of an id, all pages",
    "network": "clients of a network, 3 % of all, all pages",
}


def _clients(setting: Setting) -> Generator[Figures]:
    connected = min(setting.options.connected, setting.count(setting.options.connected, 10))
    simulated = setting.count(setting.options.clients, 1_000) - connected - PUBLISHERS
    seconds = setting.count(STEADY_S, 1)
    with ExitStack() as stack:
        node = stack.enter_context(penstock(setting.fresh(), crowd=simulated))
        held = stack.enter_context(start_load(node.host, node.port, Load(pubs=connected, qos=1, hold=1)))
        held.result()
        while True:
            alone = _puback_p99_ms(node, seconds)
            paced, _ = _during(node, simulated, 1 / PACE_PER_S, seconds)
            unpaced, took_ms = _during(node, simulated, 0.0, seconds)
            times = {f"{name}_{part}": value for name, each in took_ms.items() for part, value in _parts_of(each)}
            pubacks = {"alone": alone, "paced": paced, "paced_ratio": paced / alone}
            yield {**pubacks, "unpaced": unpaced, "unpaced_ratio": unpaced / alone, **times}


def _during(node: BrokerProcess, count: int, rest_s: float, seconds: int) -> tuple[float, dict[str, list[float]]]:
    with meanwhile(partial(_ask, node, count, rest_s)) as asking:
        puback = _puback_p99_ms(node, seconds)
    return puback, asking.result()


def _puback_p99_ms(node: BrokerProcess, seconds: int) -> float:
    load = Load(pubs=PUBLISHERS, qos=1, window=100, rate=STEADY_PER_S, msgs=STEADY_PER_S * seconds, skip=STEADY_PER_S // 10)
    return run_load(node.host, node.port, load).ack_us_p99 / 1000


def _ask(node: BrokerProcess, count: int, rest_s: float, ended: Event) -> dict[str, list[float]]:
    """Ask until the end; return the times in ms, by what was asked for. Raises RowFailed if the node refuses."""
    host, _, port = node.addresses["admin"].rpartition(":")
    took_ms: dict[str, list[float]] = {name: [] for name in ASKED}
    with closing(HTTPConnection(host, int(port), timeout=60)) as connection:
        for number, (name, path) in enumerate(cycle(ASKED.items())):
            if ended.wait(rest_s):
                break
            client = f"{number * STEP % count:06}"
            began_s = time.perf_counter()
            _read_pages(connection, path.format(client=f"device-{client}", part=client[1:]))
            took_ms[name].append((time.perf_counter() - began_s) * 1000)
    return took_ms


def _read_pages(connection: HTTPConnection, path: str) -> None:
    """Read an answer, and of a search all pages. Raises RowFailed if the node refuses."""
    after: str | None = ""
    while after is not None:
        connection.request("GET", f"/api/v1{path}" + (f"&after={after}" if after else ""))
        response = connection.getresponse()
        answer = orjson.loads(response.read())
        if response.status != HTTPStatus.OK:
            raise RowFailed(f"{path}: {response.status} {answer['error']}")
        after = answer.get("next") if "after" not in path else None


def _parts_of(times: list[float]) -> Iterator[tuple[str, float]]:
    ordered = sorted(times) or [0.0]
    yield "p50", ordered[len(ordered) // 2]
    yield "p99", ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]


def _goals() -> Iterator[Goal]:
    for name, title in TITLES.items():
        yield Goal(f"{name}_p50", f"{title}: p50", "ms")
        yield Goal(f"{name}_p99", "... p99", "ms")
    yield Goal("alone", f"time until PUBACK at {STEADY_PER_S:,} msg/s, nobody asks: p99", "ms")
    yield Goal("paced", f"... somebody asks {PACE_PER_S} times a second: p99", "ms")
    yield Goal("paced_ratio", "... of the same run, relative", "x", RATIO_MAX, is_most=True)
    yield Goal("unpaced", "... somebody asks without a pause: p99", "ms")
    yield Goal("unpaced_ratio", "... of the same run, relative", "x")


ROWS: dict[str, Row] = {"clients": Row(_clients, tuple(_goals()))}


def _compile(_: Setting) -> None:
    compile_load()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of(
        "admin", "Measure the admin API of a node with many clients, and what it does to publishers.", ROWS, runs=5
    )
    _add_sizes(parser)
    return run(parser, ROWS, arguments, failures=(BrokerFailed, LoadFailed, LoadUnavailable), prepare=_compile)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=100_000, help="clients in all (%(default)s)")
    parser.add_argument("--connected", type=int, default=10_000, help="how many of them are connected (%(default)s)")
