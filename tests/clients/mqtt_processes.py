"""MQTT clients in other languages, as processes that follow commands as lines of words.

The drivers are in `mqttjava`, `mqttgo`, `mqttrust`, `mqttjs` and `mqttc`, and `gmqtt_driver.py` is one; `tests/clients/install`
builds them. Each process has one connection. It answers each line with `ok`, followed by the result, or with `error` and the
reason:

| line | result |
|---|---|
| `connect PORT CLIENT_ID CLEAN WILL_TOPIC` | 1 if the session was present. Flags are 0 or 1, and `-` stands for no will |
| `subscribe FILTER QOS` | the code of the SUBACK |
| `publish TOPIC QOS RETAIN BODY` | nothing; the message is acknowledged |
| `blob TOPIC SIZE` | nothing; a message of SIZE zero bytes at QoS 1 is acknowledged |
| `next` | `TOPIC QOS RETAIN BODY` of the next message; a body over 1,000 bytes is `#SIZE` |
| `waiting` | how many messages `next` would return without waiting |
| `stream TOPIC COUNT` | nothing; the messages 0 to COUNT - 1 go out one by one in the background, across lost connections |
| `acked` | how many messages of the stream are acknowledged |
| `end` | nothing; the client has disconnected |
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final, NamedTuple

import pytest

FOLDER: Final = Path(__file__).parent

JAVA: Final = FOLDER / "mqttjava"

GMQTT: Final = Path(sysconfig.get_path("purelib")) / "gmqtt"

DRIVERS: Final[dict[str, Path]] = {
    "go-3": FOLDER / "mqttgo" / "driver",
    "go-5": FOLDER / "mqttgo" / "driver",
    "rust-3": FOLDER / "mqttrust" / "driver",
    "rust-5": FOLDER / "mqttrust" / "driver",
    "hivemq-3": JAVA / "build" / "Driver.class",
    "hivemq-5": JAVA / "build" / "Driver.class",
    "paho-3": JAVA / "build" / "Driver.class",
    "paho-5": JAVA / "build" / "Driver.class",
    "js-3": FOLDER / "mqttjs" / "node_modules" / "mqtt",
    "js-5": FOLDER / "mqttjs" / "node_modules" / "mqtt",
    "gmqtt-3": GMQTT,
    "gmqtt-5": GMQTT,
    "mosquitto-3": FOLDER / "mqttc" / "driver",
    "mosquitto-5": FOLDER / "mqttc" / "driver",
}
"""A file of each client that is installed: paho.mqtt.golang, paho.golang, rumqttc, HiveMQ's and Paho's for Java, MQTT.js,
gmqtt, and Mosquitto's library.

The number is the version of MQTT: 3.1.1 or 5.0."""


class Arrived(NamedTuple):
    """A message as the client gives it to the application."""

    topic: str
    qos: int
    is_retained: bool
    body: str


class MqttProcess:
    """A process with one client. A test that uses a client that is not installed skips.

    Parameters:
        kind: a key of `DRIVERS`.
        home: the standard error of the process goes to a file there.
    """

    def __init__(self, kind: str, home: Path) -> None:
        if not DRIVERS[kind].exists():
            pytest.skip(f"the MQTT client {kind} is not installed: run tests/clients/install")
        command = _command(kind, DRIVERS[kind])
        with (home / f"{kind}.err").open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=home, text=True
            )

    def do(self, *words: object) -> str:
        """Send a command; return its result. Fails if the client reports an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        status, _, result = self._process.stdout.readline().rstrip("\n").partition(" ")
        assert status == "ok", (words, status, result)
        return result

    def connect(self, port: int, client_id: str, *, clean: bool = True, will: str = "-") -> bool:
        """Connect to a port of this machine; return whether the session was present. `will` is its topic."""
        return self.do("connect", port, client_id, int(clean), will) == "1"

    def subscribe(self, topic_filter: str, qos: int) -> int:
        """Subscribe; return the code of the SUBACK."""
        return int(self.do("subscribe", topic_filter, qos))

    def publish(self, topic: str, body: str, qos: int = 1, *, retain: bool = False) -> None:
        """Publish, and return when the message is acknowledged."""
        self.do("publish", topic, qos, int(retain), body)

    def next(self) -> Arrived:
        """Return the next message."""
        topic, qos, retained, body = self.do("next").split(" ", 3)
        return Arrived(topic, int(qos), retained == "1", body)

    def close(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _command(kind: str, made: Path) -> list[str]:
    """Return what starts the driver of a client."""
    if made.suffix == ".class":
        path = f"{made.parent}{os.pathsep}{JAVA / 'lib'}/*"
        return ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", path, "Driver", kind]
    if kind.startswith("js-"):
        return ["node", str(FOLDER / "mqttjs" / "driver.js"), kind]
    if made == GMQTT:
        return [sys.executable, str(FOLDER / "gmqtt_driver.py"), kind]
    return [str(made), kind]
