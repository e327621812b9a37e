"""A socket that a supervisor keeps open for the gRPC listener while the node restarts, as systemd does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import SyncClient
from tests.system.processes import NodeProcess
from tests.waiting import PROCESS_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, listener: socket.socket) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data", listener=listener).start()
    yield made
    made.close()


@pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.nightly), "kill"])
def test_who_connects_while_no_node_runs_waits_for_the_next_one(node: NodeProcess, listener: socket.socket, end: str) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert node.addresses["pop"] == address
    with SyncClient(address) as client:
        client.groups.create("g", "plant/1")
        client.send("plant/1", b"before")
    getattr(node, end)()

    def send() -> None:
        with SyncClient(address, timeout=PROCESS_S) as client:
            client.send("plant/1", b"meanwhile")

    sender = threading.Thread(target=send)
    sender.start()
    wait_for_a_connection(listener)
    node.start()
    sender.join(PROCESS_S)
    with SyncClient(address) as client:
        assert [message.body for message in client.pop("plant/1", group="g")] == [b"before", b"meanwhile"]


@pytest.mark.nightly
def test_a_socket_of_another_name_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    node = NodeProcess(tmp_path / "data", listener=listener, listener_name="mqtt")
    with pytest.raises(AssertionError, match="LISTEN_FDNAMES is 'mqtt', but must be pop"):
        node.start()
    node.close()


def test_a_socket_beyond_loopback_needs_authentication_as_the_option_does(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        node = NodeProcess(tmp_path / "data", listener=listener)
        with pytest.raises(AssertionError, match=r"would serve everybody who reaches it: pop.listen is 0\.0\.0\.0"):
            node.start()
        node.close()


def wait_for_a_connection(listener: socket.socket) -> None:
    """Return when a connection waits to be accepted, by the kernel's count of a listener's queue."""
    port = f"{listener.getsockname()[1]:04X}"
    ends_s = time.monotonic() + PROCESS_S
    while True:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            if local.endswith(f":{port}") and state == "0A" and int(queues.partition(":")[2], 16):
                return
        assert time.monotonic() < ends_s
        time.sleep(0.01)
