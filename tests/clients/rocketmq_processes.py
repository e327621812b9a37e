"""The official RocketMQ clients as processes that follow commands as lines of JSON: see rocketmq_driver.py.

`tests/clients/install` installs those that are not part of Python's packages.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from penstock.pop.rocketmq.status import Code

FOLDER = Path(__file__).parent
NODE_FOLDER = FOLDER / "rocketmqjs"

JAVA_FOLDER = FOLDER / "rocketmqjava"
GO_FOLDER = FOLDER / "rocketmqgo"
RUST_FOLDER = FOLDER / "rocketmqrust"

INSTALL = "run tests/clients/install"

Kind: TypeAlias = str
"""A language, for Java with the version of the client: `java-5.2.0`."""


LACKING: dict[str, frozenset[str]] = {
    "rust": frozenset({"change", "recall", "push", "lite", "namespace", "tls", "priority"}),
    "java-5.0": frozenset({"recall", "lite", "priority"}),
    "java-5.1": frozenset({"priority"}),
    "python": frozenset({"namespace", "tls"}),
    "node": frozenset({"namespace", "tls"}),
}
"""What the clients whose kind starts so do not have. `tls` means: uses TLS unless it is told otherwise."""


def has(kind: Kind, feature: str) -> bool:
    """Return whether a client has a feature at all."""
    return not any(feature in lacking for start, lacking in LACKING.items() if kind.startswith(start))


def skip_unless_it_has(kind: Kind, feature: str) -> None:
    """Skip a test of what a client does not have."""
    if not has(kind, feature):
        pytest.skip(f"the official client {kind} has no {feature}")


def skip_unless_there(kind: Kind) -> None:
    """Skip a test whose client is not installed, and say how to install the client."""
    program = {"node": "node", "java": "java"}.get(kind.partition("-")[0])
    if program and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: it runs the official client {kind}")
    made = {"node": NODE_FOLDER / "node_modules", "go": GO_FOLDER / "driver", "rust": RUST_FOLDER / "driver"}.get(kind)
    if kind.startswith("java-"):
        made = (
            JAVA_FOLDER / "build" / "Driver.class" if (JAVA_FOLDER / "lib" / version_of(kind)).is_dir() else JAVA_FOLDER / "lib"
        )
    if made is not None and (not made.exists() or made.name == "lib"):
        pytest.skip(f"the official client {kind} is not installed: {INSTALL}")


def version_of(kind: Kind) -> str:
    """Return the version of a client."""
    return kind.partition("-")[2]


def _program(kind: Kind, home: Path) -> list[str]:
    if kind == "node":
        return ["node", "driver.js"]
    if kind in ("go", "rust"):
        return [str((GO_FOLDER if kind == "go" else RUST_FOLDER) / "driver")]
    if kind.startswith("java-"):
        path = f"{JAVA_FOLDER / 'build'}{os.pathsep}{JAVA_FOLDER / 'lib' / version_of(kind)}/*"
        return ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={home}", "-cp", path, "Driver"]
    return [sys.executable, str(FOLDER / "rocketmq_driver.py")]


class ClientFailed(Exception):
    """Raised when the client raised an error. `code` is the code of the protocol, or 0."""

    def __init__(self, error: str, code: int) -> None:
        self.code = code
        super().__init__(error)


class ClientProcess:
    """A process with the official client of a language.

    Parameters:
        kind: The language.
        target: `HOST:PORT` of the node.
        home: Home directory of the process. The Python client writes there.
        key, secret: Access key and its secret.
        namespace: Namespace of all names, with a client that has namespaces.
        tls: Leave TLS on, with a client that has it on by default.
    """

    def __init__(
        self, kind: Kind, target: str, home: Path, key: str = "", secret: str = "", namespace: str = "", *, tls: bool = False
    ) -> None:
        skip_unless_there(kind)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [*_program(kind, home), target, key, secret, *([namespace] if has(kind, "namespace") else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / f"{kind}.err").open("ab"),
            cwd=NODE_FOLDER if kind == "node" else home,
            env={**environment, "HOME": str(home), "DRIVER_TLS": "1" if tls else "0"},
            text=True,
        )

    def ask(self, do: str, **wish: Any) -> None:
        """Send a command. `answer` waits for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **wish}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the result of the oldest command.

        Raises:
            ClientFailed: the client raised an error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the client's process has ended"
        answer = json.loads(line)
        if "error" in answer:
            code = answer["code"]
            raise ClientFailed(answer["error"], Code[code] if isinstance(code, str) and code else code or 0)
        return answer

    def do(self, do: str, **wish: Any) -> Any:
        """Send a command; return its result."""
        self.ask(do, **wish)
        return self.answer()

    def receive(self, **wish: Any) -> list[dict[str, Any]]:
        """Return the messages that a SimpleConsumer receives in one call."""
        found: list[dict[str, Any]] = self.do("receive", **wish)["messages"]
        return found

    def until(self, do: str, holds: Callable[[Any], bool], within_s: float = 20) -> Any:
        """Return the first result that satisfies a condition."""
        ends_s = time.monotonic() + within_s
        while not holds(answer := self.do(do)):
            assert time.monotonic() < ends_s, answer
            time.sleep(0.02)
        return answer

    def kill(self) -> None:
        """Kill the process, as a crash would end it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the process at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
