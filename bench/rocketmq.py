"""Apache RocketMQ as a peer of the benchmarks: its own server, and the worker of its official client for Java.

The server runs on its own, because it takes minutes to install and start: `tests/clients/rocketmq-server start DIR` does that,
and prints the environment that names it. It answers a send when the message is in the page cache, and syncs later.
`tests/clients/install java` installs the client.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from bench.peers import BrokerFailed, NotInstalled

ROCKETMQ = "RocketMQ"

PEER = "PENSTOCK_ROCKETMQ_PEER"
"""Environment variable with `HOST:PORT` of the server's gRPC port."""

ADMIN = "PENSTOCK_ROCKETMQ_PEER_ADMIN"
"""Environment variable with the command that runs `mqadmin`."""

CLIENT = Path(__file__).parents[1] / "tests/clients/rocketmqjava/lib/5.2.0"
WORKER = Path(__file__).with_name("RocketmqWorker.java")

HANDLERS = 32
WORK_S_MAX = 400


def check_rocketmq() -> None:
    """Raise NotInstalled unless the server is named and the client is there."""
    if not (os.environ.get(PEER) and os.environ.get(ADMIN)):
        raise NotInstalled(f"{PEER} and {ADMIN} name no server (tests/clients/rocketmq-server start DIR starts one).")
    if shutil.which("java") is None or not CLIENT.is_dir():
        raise NotInstalled("Its client for Java is not installed (tests/clients/install java).")


def rocketmq_work(name: str, count: int, *, in_order: bool) -> float:
    """Send messages to a topic of its own and consume them with a worker; return the rate in messages a second.

    Args:
        name: names the topic and the group.
        count: number of messages. A tenth as many warm up the worker before.
        in_order: whether all messages are of one message group, which the worker handles in order.

    Raises:
        BrokerFailed: the server or the worker failed.
    """
    kind, ordered = ("FIFO", "true") if in_order else ("NORMAL", "false")
    _run(*_admin("updateTopic"), "-t", name, "-r", "8", "-w", "8", "-a", f"+message.type={kind}")
    _run(*_admin("updateSubGroup"), "-g", name, "-o", ordered)
    order = "all" if in_order else "-"
    command = ["java", "-cp", f"{CLIENT}/*", str(WORKER), os.environ[PEER], name, name, str(count), str(count // 10), order]
    messages, seconds = _run(*command, str(HANDLERS)).split()[-2:]
    return int(messages) / float(seconds)


def _admin(word: str) -> list[str]:
    return [*shlex.split(os.environ[ADMIN]), word, "-n", "127.0.0.1:9876", "-c", "DefaultCluster"]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WORK_S_MAX, check=False)
    if done.returncode:
        raise BrokerFailed(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
