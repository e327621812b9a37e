"""The demo's consumers: processes that pop readings of one group. One is steady, one is slow, one dies.

`python -m penstock.demo.worker --pop 127.0.0.1:8081 --group billing --filter 'plant/#' --habit steady` prints
JSON lines with the number of deliveries that it popped, acknowledged, and acknowledged too late.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic

import orjson
import uvloop

from penstock import Client, Message
from penstock.pop.errors import HandleExpired

HABITS = ("steady", "slow", "dies")

BATCH = 64
INVISIBLE_S = 3.0
"""Invisible time of all three. It is short, so that the demo soon shows revived messages."""

NAP_S = INVISIBLE_S + 0.3
"""Seconds for which the slow consumer keeps a batch, so that its acknowledgements are too late."""

NAPS_AFTER = 200
"""Deliveries that the slow consumer handles at full speed first. By then batches are large."""

NAPS_MAX = 2
"""Number of batches that the slow consumer acknowledges too late."""

DIES_AFTER = 1_500
"""Deliveries that the dying consumer acknowledges before it kills itself while it holds a batch."""

PROGRESS_S = 0.2


@dataclass(slots=True)
class Work:
    """Counts of a consumer's deliveries."""

    popped: int = 0
    acked: int = 0
    late: int = 0
    naps: int = 0


class DemoConsumer:
    """One consumer of a group.

    Parameters:
        client: a client of the node.
        habit: one of `HABITS`.
    """

    def __init__(self, client: Client, group: str, topic_filter: str, habit: str) -> None:
        self._client = client
        self._group = group
        self._filter = topic_filter
        self._habit = habit
        self._printed_s = 0.0
        self._stopping = False
        self.work = Work()

    def stop(self) -> None:
        """Stop after the current pop."""
        self._stopping = True

    async def run(self) -> None:
        """Pop and acknowledge until `stop`, or until the habit kills the process."""
        while not self._stopping:
            messages = await self._client.pop(
                self._filter, group=self._group, messages_max=BATCH, invisible=INVISIBLE_S, wait=1.0
            )
            self.work.popped += len(messages)
            if self._habit == "dies" and self.work.acked >= DIES_AFTER and messages:
                self.report(always=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if self._habit == "slow" and messages and self.work.popped > NAPS_AFTER and self.work.naps < NAPS_MAX:
                self.work.naps += 1
                await asyncio.sleep(NAP_S)
            await self._acknowledge(messages)
            self.report()

    async def _acknowledge(self, messages: Sequence[Message]) -> None:
        outcomes = await asyncio.gather(*(message.ack() for message in messages), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, HandleExpired):
                self.work.late += 1
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                self.work.acked += 1

    def report(self, *, always: bool = False) -> None:
        """Print the counts, at most once every `PROGRESS_S` unless `always` is set."""
        if always or monotonic() >= self._printed_s + PROGRESS_S:
            self._printed_s = monotonic()
            sys.stdout.write(orjson.dumps(asdict(self.work)).decode() + "\n")
            sys.stdout.flush()


async def _work(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    async with Client(options.pop) as client:
        worker = DemoConsumer(client, options.group, options.filter, options.habit)
        loop.add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()
        worker.report(always=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a consumer until SIGTERM, and return the exit status."""
    parser = argparse.ArgumentParser(prog="penstock.demo.worker", description="A consumer of the demo.")
    parser.add_argument("--pop", required=True, metavar="HOST:PORT")
    parser.add_argument("--group", required=True)
    parser.add_argument("--filter", required=True)
    parser.add_argument("--habit", choices=HABITS, default="steady")
    uvloop.run(_work(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
