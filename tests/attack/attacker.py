"""The attacker, in a process of its own: python -m tests.attack.attacker NAME. It reads commands from stdin, a line each.

The first line is the ground. `go` begins the attack, `stop` ends it, `end` asks for what the attacker got and ends the process.
Each line is answered by a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.attack.attacks.attack import FAILURES
from tests.attack.catalogue import ATTACKS
from tests.attack.ground import Ground
from tests.attack.link import logged_in

ROOT = Path(__file__).parents[2]

ANSWER_S_MAX = 180


class Attacker:
    """The process of an attack, as the one that measures sees it.

    Parameters:
        name: of the attack.
        cpus: the processors that the process may use.
    """

    def __init__(self, name: str, cpus: Sequence[int]) -> None:
        self._name = name
        self._cpus = cpus
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(self) -> None:
        """Start the process, which takes a while to import everything."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attack.attacker", self._name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=lambda: os.sched_setaffinity(0, self._cpus),
            limit=1 << 24,
        )

    async def prepare(self, ground: Ground) -> None:
        """Let the attack do what it does before the first window."""
        await self.tell(ground.dump())

    async def tell(self, line: str) -> dict[str, Any]:
        """Send a command; return the answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(ANSWER_S_MAX):
            answer = await self._process.stdout.readline()
        if not answer:
            raise AssertionError(f"the attacker has ended with {await self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


async def serve(name: str) -> None:
    """Attack as standard input says."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    attack = ATTACKS[name](Ground.load((await lines.readline()).decode()))
    if attack.is_known:
        await _be_known(attack.ground)
    await attack.prepare()
    _say({})
    running: asyncio.Task[None] | None = None
    troubles: list[str] = []
    while line := (await lines.readline()).decode().strip():
        if line == "go":
            running = asyncio.create_task(attack.run())
            _say({})
        elif line == "stop":
            if running is not None:
                running.cancel()
                (trouble,) = await asyncio.gather(running, return_exceptions=True)
                if isinstance(trouble, Exception) and not isinstance(trouble, FAILURES):
                    troubles.append(f"the attack itself failed: {trouble!r}")
                elif isinstance(trouble, FAILURES):
                    attack.saw[f"ended early: {type(trouble).__name__}"] += 1
                running = None
            await attack.close()
            _say({})
        else:
            await attack.finish()
            _say({"saw": dict(attack.saw), "problems": [*troubles, *attack.problems()]})
            return


async def _be_known(ground: Ground) -> None:
    """Log in once. On a machine that is busy the first hash may take too long."""
    for _ in range(5):
        try:
            (await logged_in(ground, "first")).close()
        except ConnectionRefusedError:
            continue
        return


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))  # uvloop drops what TLS has received when the node closes while reading is paused
