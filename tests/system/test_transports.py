"""A node as a process with the example configuration, docs/penstock.toml with docs/access.toml."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from websockets.asyncio.client import connect as connect_websocket
from websockets.typing import Origin, Subprotocol

from penstock.gateway.protocol.encode import encode_publish
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.wire import CLEAN
from tests.system.processes import ROOT, NodeProcess, run_penstock

EXAMPLE = ROOT / "docs" / "penstock.toml"
CONNACK, REFUSED, DENIED = b"\x20\2\0\0", b"\x20\2\0\4", b"\x20\2\0\5"
LOGIN = CLEAN | 0xC0
WAIT_S = 20


@pytest.fixture
def files(tmp_path: Path) -> Authority:
    """The files that the example names, in the directory where the node is started."""
    authority = Authority(tmp_path / "tls")
    authority.file.rename(tmp_path / "tls" / "devices-ca.pem")
    authority.file = tmp_path / "tls" / "devices-ca.pem"
    shutil.copy(ROOT / "docs" / "access.toml", tmp_path)
    (tmp_path / "given").write_text("open sesame\n")
    added = run_penstock("user", "add", "kiosk-1", "--from", str(tmp_path / "given"), "--file", str(tmp_path / "passwords"))
    assert added.returncode == 0, added.stderr
    # Only the ports differ, which must be free in a test.
    text = EXAMPLE.read_text()
    for port in (8883, 8884, 8443):
        assert f"0.0.0.0:{port}" in text
        text = text.replace(f"0.0.0.0:{port}", "127.0.0.1:0")
    (tmp_path / "penstock.toml").write_text(text)
    return authority


@pytest.fixture
def example(files: Authority, tmp_path: Path, node: NodeProcess) -> NodeProcess:
    node.start("--config", "penstock.toml", directory=tmp_path)
    return node


def secure(node: NodeProcess, listener: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    end = socket.create_connection(("127.0.0.1", node.port(f"mqtt.{listener}")), timeout=WAIT_S)
    return context.wrap_socket(end, server_hostname="localhost")


def ask(end: socket.socket, data: bytes, expected_bytes: int) -> bytes:
    end.sendall(data)
    got = b""
    while len(got) < expected_bytes and (more := end.recv(4096)):
        got += more
    return got


def commented(text: str, section: str) -> str:
    """Return a section of the example that is in a comment there, and its subsections."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"#     [{section}"))
    return "\n".join(
        line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#  ") or line == "#", lines[begin:])
    )


def with_plugins(text: str) -> str:
    """Return the example with plugins in place of the built-in access control, as its comment says."""
    begin = text.index("[access]\n")
    return text[:begin] + commented(text, "mqtt.access.plugins")


async def ask_as_a_page(url: str, context: ssl.SSLContext, data: bytes) -> bytes | str:
    """Send a message over a WebSocket; return the answer.

    The client of threads would lose a request now and then: its threads read and write one TLS object, which Python 3.11 does
    not protect.
    """
    origin = Origin("https://dashboard.example.org")
    async with connect_websocket(url, ssl=context, subprotocols=[Subprotocol("mqtt")], origin=origin) as page:
        await page.send(data)
        return await asyncio.wait_for(page.recv(), WAIT_S)


@pytest.mark.parametrize("changed", [str, with_plugins])
def test_the_example_of_the_documentation_does_what_it_says(
    files: Authority, tmp_path: Path, node: NodeProcess, changed: Callable[[str], str]
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(changed(config.read_text()))
    node.start("--config", "penstock.toml", directory=tmp_path)
    example = node
    assert sorted(name for name in example.addresses if name.startswith("mqtt")) == [
        "mqtt",
        "mqtt.devices",
        "mqtt.local",
        "mqtt.tls",
        "mqtt.web",
    ]
    sensor = files.context(files.issue_client(common_name="sensor-7"))
    with secure(example, "devices", sensor) as end:
        assert ask(end, connect(CLEAN, b"sensor-7-s"), 4) == CONNACK
        wish = subscribe(1, (b"commands/sensor-7/now", 0), (b"#", 0))
        assert ask(end, wish, 6) == b"\x90\4\0\1\0\x80"
        assert ask(end, encode_publish(b"plant/sensor-7/t", b"7", 1, retain=True, packet_id=1), 4) == b"\x40\2\0\1"
        assert ask(end, encode_publish(b"plant/2/t", b"8", 1, retain=True, packet_id=2), 4) == b"\x40\2\0\2"
    with secure(example, "tls", files.context()) as end:
        assert ask(end, connect(LOGIN, b"kiosk-1-d", b"kiosk-1", b"open sesame"), 4) == CONNACK
        assert ask(end, subscribe(1, (b"plant/#", 0)), 24) == b"\x90\3\0\1\0" + encode_publish(
            b"plant/sensor-7/t", b"7", retain=True
        )
    for data, answer in ((connect(LOGIN, b"kiosk-1-d", b"kiosk-1", b"wrong"), REFUSED), (connect(CLEAN, b"kiosk-1-d"), DENIED)):
        with secure(example, "tls", files.context()) as end:
            assert ask(end, data, 4) == answer
    url = f"wss://localhost:{example.port('mqtt.web')}/mqtt"
    assert asyncio.run(ask_as_a_page(url, files.context(), connect(LOGIN, b"kiosk-1-w", b"kiosk-1", b"open sesame"))) == CONNACK
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(tmp_path / "penstock.sock"))
        assert ask(end, connect(LOGIN, b"kiosk-1-l", b"kiosk-1", b"open sesame"), 4) == CONNACK
    assert example.stop() == 0
    assert not (tmp_path / "penstock.sock").exists()


def test_sighup_reads_certificates_again_and_keeps_connections(example: NodeProcess, files: Authority) -> None:
    def served() -> str:
        with secure(example, "tls", files.context()) as end:
            return hashlib.sha256(end.getpeercert(binary_form=True) or b"").hexdigest()

    with secure(example, "tls", files.context()) as kept:
        assert ask(kept, connect(LOGIN, b"kiosk-1-d", b"kiosk-1", b"open sesame"), 4) == CONNACK
        before = served()
        files.issue_server()
        example.signal(signal.SIGHUP)
        while served() == before:
            pass
        assert ask(kept, b"\xc0\0", 2) == b"\xd0\0"


def test_the_tokens_of_the_example_name_users(files: Authority, tmp_path: Path, node: NodeProcess) -> None:
    config = tmp_path / "penstock.toml"
    head, name, rest = config.read_text().partition("[access.jwt]\n")
    assert name
    config.write_text(f'{head}{name}algorithms = ["ES256"]\nkeys = "authority.pem"\n{rest}')
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "authority.pem").write_bytes(public)
    node.start("--config", "penstock.toml", directory=tmp_path)
    token = jwt.encode({"sub": "sensor-8", "exp": int(time.time()) + 600}, key, "ES256").encode()
    with secure(node, "tls", files.context()) as end:
        assert ask(end, connect(LOGIN, b"sensor-8-s", b"", token), 4) == CONNACK
        wish = subscribe(1, (b"commands/sensor-8/now", 0), (b"commands/sensor-7/now", 0))
        assert ask(end, wish, 6) == b"\x90\4\0\1\0\x80"
    with secure(node, "tls", files.context()) as end:
        assert ask(end, connect(LOGIN, b"sensor-8-s", b"", token[:-6] + b"AAAAAA"), 4) == REFUSED
