"""The node under attack, in a process of its own: python -m tests.fuzz.node DATA_DIR [secured].

With "secured" it has a file of rules, passwords and tokens. Otherwise everybody may do everything.

The process prints its ports as one line of JSON. For each line on stdin it then prints the failures since the previous line,
and for the line "state" also the resources that it holds. It ends when stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop

from penstock.gateway.options import AccessOptions, ListenerOptions
from tests.fuzz.callers import control
from tests.gateway.certificates import Authority
from tests.gateway.proxy_headers import LOOPBACK
from tests.gateway.wire import FREE, Broker

LISTENERS = (
    ListenerOptions(name="ws", kind="ws", listen=FREE),
    ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK),
)
"""Further listeners speak TLS, with the certificate of `CERTIFICATES` beside the data directory."""

CERTIFICATES = "tls"

SESSION_EXPIRY_S_MAX = 1
"""Sessions end soon, so that a session that is left at the end of a run is a leak."""


def state(broker: Broker) -> dict[str, Any]:
    gateway = broker.node.gateway
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "held": broker.held_resources()
        | {
            "handshakes": gateway.listeners.handshakes.open,
            "sources": len(gateway.sources._open),
            "bytes that wait for room": gateway.backlog.kept_bytes,
            "open": sum(listener.admission.open for listener in gateway.listeners),
        },
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "stored": gateway.counters.publishes_in,
        "closed": {reason.name: count for reason, count in gateway.counters.closed_by_reason.items()},
    }


def listeners(data_dir: Path) -> tuple[ListenerOptions, ...]:
    authority = Authority(data_dir.parent / CERTIFICATES)
    files: dict[str, Any] = {"certificate_file": str(authority.certificate), "key_file": str(authority.key)}
    return (*LISTENERS, *(ListenerOptions(name=kind, kind=kind, listen=FREE, **files) for kind in ("tls", "wss")))


async def serve(data_dir: Path, *, is_secured: bool) -> None:
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(f"{context.get('message')}: {context.get('exception')!r}"))
    # The PROXY headers name clients of other machines.
    access = control(data_dir.parent / "access") if is_secured else {"access": AccessOptions(anonymous="always")}
    options = access | {
        "listeners": listeners(data_dir),
        "session_expiry_s_max": SESSION_EXPIRY_S_MAX,
        "connect_timeout_ms": 1000,
        "tls_handshake_ms": 1000,
        "queues_max": 2000,
        "retention_bytes": 256 * 1024 * 1024,
    }
    broker = await Broker(data_dir, options).start()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    ports = {listener.name: listener.address.port for listener in broker.node.gateway.listeners}
    print(json.dumps(ports | {"pop": broker.node.grpc.port}), flush=True)
    while line := await lines.readline():
        print(json.dumps({"failures": failures} | (state(broker) if line == b"state\n" else {})), flush=True)
        failures.clear()
    await broker.stop()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    uvloop.run(serve(Path(sys.argv[1]), is_secured="secured" in sys.argv[2:]))
