"""The client and worker for JavaScript (clients/javascript), in a process of its own on a real node."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import Client, group_settings
from penstock.access.subject import Subject
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import until
from tests.worker.accessfile import access_file

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "penstockjs" / "driver.mjs"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        shutil.which("node") is None or not (ROOT / "clients" / "javascript" / "node_modules").is_dir(),
        reason="needs Node, and the modules of clients/javascript: tests/clients/install node",
    ),
]


class JavaScriptWorker:
    """A running worker, and what it has told.

    Parameters:
        process: The process.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.told: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.told.append(json.loads(line))

    @property
    def calls(self) -> list[tuple[Any, int]]:
        """What the handler was called with, and the number of the attempt."""
        return [(each["body"].get("do"), each["attempt"]) for each in self.told if "body" in each]

    @property
    def log(self) -> str:
        return "\n".join(each["log"] for each in self.told if "log" in each)

    async def stop(self) -> dict[str, Any]:
        """Send SIGTERM, and return what the process told at its end."""
        self.process.terminate()
        await asyncio.wait_for(self.process.wait(), 20)
        await self._reading
        return self.told[-1]


@asynccontextmanager
async def worker(target: str, **options: object) -> AsyncIterator[JavaScriptWorker]:
    process = await asyncio.create_subprocess_exec("node", DRIVER, target, json.dumps(options), stdout=PIPE)
    started = JavaScriptWorker(process)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await started._reading


async def send(client: Client, do: str, **more: object) -> None:
    await client.send(TOPIC, json.dumps({"do": do, **more}).encode())


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data") as started:
        yield started


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made


def settled(node: Node, count: int) -> Callable[[], bool]:
    """Return whether so many messages are acknowledged, and none is in flight."""
    return lambda: node.core.counters.acked == count and node.group().in_flight == 0


async def test_a_handler_gets_messages_and_returning_acknowledges_them(node: Node, client: Client) -> None:
    async with worker(node.target, concurrency=4) as javascript:
        for number in range(40):
            await send(client, "sleep", ms=5, number=number)
        await until(settled(node, 40))
        assert {each["body"]["number"] for each in javascript.told} == set(range(40))
        assert max(each["running"] for each in javascript.told) <= 4
        assert (await javascript.stop())["stopped"]["handled"] == 40
        assert javascript.process.returncode == 0
    await until(lambda: node.core.waiting == 0)


@pytest.mark.parametrize(("count", "refused"), [(48, 0), (80, 16)])
async def test_messages_that_are_sent_at_once_fit_into_calls_and_those_that_wait_are_bounded(
    node: Node, count: int, refused: int
) -> None:
    process = await asyncio.create_subprocess_exec("node", DRIVER.with_name("flood.mjs"), node.target, str(count), stdout=PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    found = json.loads(output)
    assert found["stored"] == count - refused, found["errors"]
    assert len(found["errors"]) == refused
    assert all(error.startswith("Overloaded: 64 messages with 64 MiB wait") for error in found["errors"])


async def test_failures_come_back_and_what_can_never_succeed_is_a_dead_letter_with_the_reason(
    node: Node, client: Client
) -> None:
    await client.groups.create(GROUP, FILTER, settings=group_settings(backoff=()))
    async with worker(node.target) as javascript:
        await send(client, "throw")
        await send(client, "later")
        await send(client, "reject")
        await client.send(TOPIC, b"{{")
        await until(lambda: ("throw", 2) in javascript.calls)
        await until(lambda: node.group().dead_letter_count == 2)
        assert ("later", 2) not in javascript.calls
        node.advance(61_000)
        await until(lambda: ("later", 2) in javascript.calls)
        await until(settled(node, 2))
    reasons = [letter.detail for letter in await client.dead_letters.of_group(GROUP)]
    assert "no such meter, ever" in reasons
    assert any(reason.startswith("the body of 2 bytes is not valid: ") for reason in reasons)
    assert "the handler failed for a message from" in javascript.log


async def test_a_message_is_extended_while_its_handler_runs_and_one_that_hangs_goes_back(node: Node, client: Client) -> None:
    await client.groups.create(GROUP, FILTER, settings=group_settings(backoff=()))
    async with worker(node.target, invisible=0.4, timeout=3) as javascript:
        await send(client, "sleep", ms=1_500)
        await until(settled(node, 1))
        await send(client, "hang")
        await until(lambda: ("hang", 2) in javascript.calls)
        await until(settled(node, 2))
        assert javascript.calls == [("sleep", 1), ("hang", 1), ("hang", 2)]
        assert "did not end within its timeout" in javascript.log
        counts = (await javascript.stop())["stopped"]
    assert (counts["handled"], counts["timedOut"], counts["late"]) == (2, 1, 1)


async def test_messages_and_replies_are_sent(node: Node, client: Client) -> None:
    async with worker(node.target):
        await send(client, "send", text="21.5")
        (message,) = await client.pop("out/#", group="out", wait=15.0)
        reply = await client.request(TOPIC, b'{"do": "ask", "value": 21}', timeout=15)
    assert (message.body, message.properties, message.tag, message.message_group) == (b"21.5", {"unit": "C"}, "t", "g")
    assert json.loads(reply.body) == {"twice": 42}


async def test_a_reply_that_the_node_refuses_does_not_fail_its_handler(node: Node, client: Client) -> None:
    async with worker(node.target) as javascript:
        await client.send(TOPIC, b'{"do": "ask", "value": 21}', response_topic="$delayed/1/x")
        await until(settled(node, 1))
        counts = (await javascript.stop())["stopped"]
    assert (counts["handled"], counts["failed"], counts["repliesRefused"]) == (1, 0, 1)
    assert 'was refused, and is dropped: "$delayed/1/x": ' in javascript.log


async def test_a_worker_that_stops_returns_uncounted_what_does_not_end_within_the_grace(node: Node, client: Client) -> None:
    async with worker(node.target, concurrency=1, grace=0.2) as javascript:
        await send(client, "sleep", ms=60_000)
        await send(client, "sleep", ms=60_000)
        await until(lambda: len(javascript.calls) == 1)
        counts = (await javascript.stop())["stopped"]
    assert counts["returned"] == 1
    assert node.group().in_flight == 0
    found = await client.pop("plant/#", group=GROUP, messages_max=9)
    assert [message.attempt for message in found] == [1, 1]


async def test_a_worker_goes_on_when_its_node_was_away_and_when_its_group_was_deleted(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    async with worker(node.target) as javascript:
        async with Client(node.target) as client:
            await send(client, "before")
            await until(lambda: ("before", 1) in javascript.calls)
            await until(settled(node, 1))
        await node.stop()
        await until(lambda: f"the node at 127.0.0.1:{port} did not answer" in javascript.log)
        node = Node(tmp_path / "data")
        await node.start(port)
        async with Client(node.target) as client:
            await send(client, "after")
            await until(lambda: ("after", 1) in javascript.calls)
            await until(lambda: node.core.waiting == 1 and node.group().in_flight == 0)
            await client.groups.delete(GROUP)
            await send(client, "deleted")
            await until(lambda: ("deleted", 1) in javascript.calls)
        assert "was deleted" in javascript.log
    await node.stop()


async def test_wrong_tokens_and_filters_are_told(tmp_path: Path) -> None:
    path = access_file(tmp_path / "access.toml", "s3cret")
    async with Node(tmp_path / "data", access=path) as node, worker(node.target, token="wrong") as javascript:
        await until(lambda: "show a token" in javascript.log)
        access_file(path, "wrong")
        node.access.reload(Subject("test"))
        await until(lambda: "gets messages again" in javascript.log)
        assert javascript.log.count("show a token") == 1
    async with Node(tmp_path / "other") as node, worker(node.target, group="a/b") as javascript:
        await asyncio.wait_for(javascript.process.wait(), 20)
        await until(lambda: javascript.told)
        assert javascript.told[-1]["error"] == "RequestInvalid"
        assert "a/b" in javascript.told[-1]["message"]


async def test_the_code_of_the_guide_does_what_it_says(node: Node, client: Client, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "javascript.md").read_text("utf-8")
    module = (ROOT / "clients" / "javascript" / "src" / "index.js").as_uri()
    handling, sending = (
        block.replace('"penstock-client"', f'"{module}"').replace("127.0.0.1:8081", node.target)
        for block in re.findall(r"^```javascript\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    )
    for name, code in (("billing.mjs", handling), ("send.mjs", sending)):
        (tmp_path / name).write_text(code)
    billing = await asyncio.create_subprocess_exec("node", tmp_path / "billing.mjs", stdout=PIPE)
    assert billing.stdout is not None
    await client.send(TOPIC, b'{"meter": 7, "value": 21.5}')
    assert await asyncio.wait_for(billing.stdout.readline(), 20) == b"meter 7: 21.5\n"
    billing.terminate()
    assert await asyncio.wait_for(billing.wait(), 20) == 0
    sender = await asyncio.create_subprocess_exec("node", tmp_path / "send.mjs", stdout=PIPE)
    printed, _ = await asyncio.wait_for(sender.communicate(), 20)
    node.advance(61_000)
    (order,) = await client.pop("orders/+", group="orders", wait=15.0)
    assert order.message_id == printed.decode().strip()
    assert (order.body, order.properties) == (b'{"placed":true}', {"level": "3"})


async def test_options_that_do_not_exist_or_make_no_sense_are_refused() -> None:
    program = """
        import { Client, Worker } from "./src/index.js";
        const worker = new Worker("127.0.0.1:1");
        for (const wrong of [
          () => new Client("127.0.0.1"),
          () => new Client("127.0.0.1:1").send("a/b", "x", { delayMs: 5 }),
          () => new Client("127.0.0.1:1").send("a/b", "x", { delay: -1 }),
          () => new Client("127.0.0.1:1").send("a/b", "x", { expireAfter: "5s" }),
          () => new Client("127.0.0.1:1", { timeout: 0 }),
          () => new Client("127.0.0.1:1").send(7),
          () => worker.consumer("a", { group: "g" }),
          () => worker.consumer("a", {}, () => {}),
          () => worker.consumer("a", { group: "g", timeoutMs: 5 }, () => {}),
          () => worker.consumer("a", { group: "g", timeout: 60_000_000 }, () => {}),
          () => worker.consumer("a", { group: "g", concurrency: 0 }, () => {}),
          () => worker.consumer("a", { group: "g", decode: "xml" }, () => {}),
          () => worker.consumer("a", { group: "g", start: "now" }, () => {}),
        ]) {
          try { wrong(); console.log("taken"); } catch (error) { console.log(error.message); }
        }
    """
    folder = ROOT / "clients" / "javascript"
    process = await asyncio.create_subprocess_exec("node", "--input-type=module", "-e", program, cwd=folder, stdout=PIPE)
    printed, _ = await process.communicate()
    expected = (
        "give HOST:PORT", "no option delayMs", "delay is -1 seconds: use 0 or more",
        'expireAfter is "5s": give a number of seconds', "timeout is 0: use more than 0 seconds", "the topic is 7",
        "no function", "name the group", "no option timeoutMs", "timeout is 60000000 seconds: use at most 2147483",
        "concurrency is 0", 'decode is "xml"', "start is now",
    )  # fmt: skip
    lines = printed.decode().splitlines()
    assert [part in line for part, line in zip(expected, lines, strict=True)] == [True] * len(expected), lines


async def test_the_types_name_what_the_module_exports() -> None:
    types = (ROOT / "clients" / "javascript" / "src" / "index.d.ts").read_text("utf-8")
    program = "import('./src/index.js').then((all) => console.log(JSON.stringify(Object.keys(all))))"
    process = await asyncio.create_subprocess_exec("node", "-e", program, cwd=ROOT / "clients" / "javascript", stdout=PIPE)
    printed, _ = await process.communicate()
    for name in json.loads(printed):
        assert f"export class {name} " in types
