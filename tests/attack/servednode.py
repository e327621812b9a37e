"""The node under attack: `penstock serve` as an operator configures it. Limits are at their defaults."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.access.passwords import PasswordFile
from tests.attack.ground import (
    BILLING_TOKEN,
    HONEST,
    HONEST_PASSWORD,
    HONEST_TOKEN,
    JWT_SECRET,
    MALLORY,
    MALLORY_PASSWORD,
    Ground,
)
from tests.gateway.certificates import Authority

ROOT = Path(__file__).parents[2]
READY_S_MAX = 120
STOP_S_MAX = 60

ACCESS = f"""
[[rule]]
allow = ["publish", "subscribe"]
users = ["{HONEST}"]
topics = ["honest/#"]

[[rule]]
allow = ["publish", "subscribe", "consume"]
users = ["{MALLORY}"]
topics = ["#"]
groups = ["mallory-*"]

[[principal]]
name = "honest"
token_sha256 = "{hashlib.sha256(HONEST_TOKEN.encode()).hexdigest()}"
read = ["honest/#"]
write = ["honest/#"]
consume = ["honest"]

[[principal]]
name = "billing"
token_sha256 = "{hashlib.sha256(BILLING_TOKEN.encode()).hexdigest()}"
read = ["orders/#"]
write = ["orders/#"]
consume = ["billing", "billing-*"]
admin = ["billing-*"]
"""

CONFIG = """
[mqtt]
listen = "127.0.0.1:0"
{mqtt}

[[mqtt.listeners]]
name = "tls"
kind = "tls"
listen = "127.0.0.1:0"
certificate_file = "{directory}/tls/server.pem"
key_file = "{directory}/tls/server.key"

[[mqtt.listeners]]
name = "ws"
kind = "ws"
listen = "127.0.0.1:0"
origins = ["https://dashboard.example.org"]

[[mqtt.listeners]]
name = "wss"
kind = "wss"
listen = "127.0.0.1:0"
certificate_file = "{directory}/tls/server.pem"
key_file = "{directory}/tls/server.key"
origins = ["https://dashboard.example.org"]

[[mqtt.listeners]]
name = "proxied"
kind = "tcp"
listen = "127.0.0.1:0"
proxy_from = ["127.0.0.1/32"]

[pop]
listen = "127.0.0.1:0"
{pop}
certificate_file = "{directory}/tls/server.pem"
key_file = "{directory}/tls/server.key"

[access]
file = "{directory}/access.toml"
password_file = "{directory}/passwords"
audit_file = "{directory}/audit.jsonl"

[access.jwt]
algorithms = ["HS256"]
keys = "{directory}/jwt-secret"

[admin]
listen = "127.0.0.1:0"
{more}
"""


class ServedNode:
    """A node as a process, pinned to some processors.

    Parameters:
        directory: gets the data, the configuration, the certificates and the log.
        cpus: the processors that the process may use.
        options: lines of TOML by section: "mqtt", "pop", or "more" for further sections.
        mutation: a deliberate defect, by its name in `tests.attack.mutations`; an empty string for none.
    """

    def __init__(self, directory: Path, cpus: Sequence[int], options: dict[str, str], mutation: str = "") -> None:
        self.directory = directory
        self.log = directory / "log"
        self._cpus = cpus
        self._options = options
        self._mutation = mutation
        self._process: asyncio.subprocess.Process | None = None
        self.ground = Ground({}, str(directory / "tls" / "ca.pem"))

    async def start(self) -> Ground:
        """Start the process; return the addresses of its listeners once it is ready."""
        Authority(self.directory / "tls")
        users = PasswordFile.empty(self.directory / "passwords")
        users.add(HONEST, HONEST_PASSWORD)
        users.add(MALLORY, MALLORY_PASSWORD)
        (self.directory / "jwt-secret").write_text(JWT_SECRET)
        access = self.directory / "access.toml"
        access.write_text(ACCESS)
        access.chmod(0o600)
        sections = dict.fromkeys(("mqtt", "pop", "more"), "")
        assert self._options.keys() <= sections.keys(), f"{sorted(self._options)} has other sections than {', '.join(sections)}"
        sections |= self._options
        config = self.directory / "penstock.toml"
        config.write_text(CONFIG.format(directory=self.directory, **sections))
        with self.log.open("ab") as log:
            program = ("tests.attack.serve", self._mutation) if self._mutation else ("penstock",)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *program),
                *("serve", "--config", str(config), "--data-dir", str(self.directory / "data")),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                preexec_fn=lambda: os.sched_setaffinity(0, self._cpus),
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(READY_S_MAX):
            line = (await self._process.stdout.readline()).decode()
        assert line.startswith("ready "), f"the node did not start: {line!r}\n{self.log.read_text()[-2_000:]}"
        addresses = dict(word.split("=", 1) for word in line.split()[1:])
        del addresses["data"]
        ports = {name.removeprefix("mqtt."): int(address.rpartition(":")[2]) for name, address in addresses.items()}
        self.ground = Ground(ports, self.ground.ca)
        return self.ground

    @property
    def memory_mib(self) -> float:
        """The resident memory of the process, without pages of files."""
        assert self._process is not None
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0.0
        return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))) / 1024

    @property
    def written_bytes(self) -> int:
        """The bytes that the process has written to the disk so far."""
        assert self._process is not None
        try:
            lines = Path(f"/proc/{self._process.pid}/io").read_text().splitlines()
        except OSError:
            return 0
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def tracebacks(self) -> list[str]:
        """The unhandled exceptions in the log: the event that has each, or where none has it, some of what follows."""
        text = self.log.read_text(errors="replace")
        return [_event_at(text, at) or text[at : at + 1_500] for at in _places(text, "Traceback (most recent call last)")]

    async def stop(self) -> int:
        """End the node with SIGTERM; return its exit status."""
        assert self._process is not None
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S_MAX):
                    return await self._process.wait()
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()

    def kill(self) -> None:
        if self.is_running:
            assert self._process is not None
            self._process.kill()


def _places(text: str, part: str) -> list[int]:
    found, at = [], text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + 1)
    return found


def _event_at(text: str, at: int) -> str:
    """Return the rest of the line at a place, if the line is an event in JSON."""
    rest, _, _ = text[at:].partition("\n")
    return rest.replace("\\n", "\n") if rest.endswith("}") else ""
