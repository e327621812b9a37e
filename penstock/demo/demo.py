"""`penstock demo`: devices, a node and consumers on one machine, with real connections and failures, and a reconciliation.

The node, the fleet of devices and each of three consumers are processes of their own; each device and the dashboard have an
MQTT connection. One consumer is killed while it holds messages and one is too slow, so the node has to revive messages. Then
Apache Spark, or DuckDB where there is no Java, pairs every delivery with its outcome.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import orjson
import uvloop
from amqtt.client import MQTTClient
from amqtt.errors import AMQTTError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.demo.worker import HABITS
from penstock.store.options import HostPort

GROUP = "billing"
FILTER = "plant/+/+/temperature"
DASHBOARD_FILTER = "plant/#"

READY_S_MAX = 30.0
FINISH_S_MAX = 180.0
"""Seconds that the consumers may take after the last reading. A message may be revived several times."""

STOP_S_MAX = 20.0
POLL_S = 0.2


class DemoFailed(Exception):
    """Raised when a step of the demo fails. The message names the step, and the log to read."""


class _Demo:
    """One run of the demo.

    Parameters:
        directory: directory for the node's data, its log, and the report.
        console: shows the progress.
    """

    def __init__(self, directory: Path, console: Console, *, devices: int, readings: int, seed: int) -> None:
        self.data_dir = directory / "data"
        self.report_dir = directory / "report"
        self.node_log = directory / "node.log"
        self.console = console
        self.devices = devices
        self.readings = readings
        self.seed = seed
        self.received = 0
        self.fleet: dict[str, Any] = {}
        self.workers: dict[str, dict[str, int]] = {habit: {} for habit in HABITS}
        self.deaths = 0
        self._processes: list[Process] = []
        self._node_output = self.node_log.open("wb")
        self._progress = Progress(
            TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )

    async def run(self) -> dict[str, int]:
        """Run the demo up to the orderly end of the node, and return the node's POP counters.

        Raises:
            DemoFailed
        """
        try:
            addresses = await self._start_node()
            dashboard = asyncio.create_task(self._watch(addresses["mqtt"]))
            workers = [asyncio.create_task(self._worker(addresses["pop"], habit)) for habit in HABITS]
            with self._progress:
                counters = await self._publish_and_drain(addresses)
            await self._stop_workers(workers)
            await self._stop_node()
            dashboard.cancel()
            await asyncio.gather(dashboard, return_exceptions=True)
            return counters
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
            self._node_output.close()

    # --- processes --------------------------------------------------------------------------------------------------

    async def _spawn(self, module: str, *arguments: str) -> Process:
        command = (sys.executable, "-m", module, *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=self._node_output)
        self._processes.append(process)
        return process

    async def _start_node(self) -> dict[str, HostPort]:
        free = "127.0.0.1:0"
        self._node = await self._spawn(
            "penstock", "serve", "--data-dir", str(self.data_dir), "--mqtt", free, "--pop", free, "--admin", free
        )
        assert self._node.stdout is not None
        try:
            line = (await asyncio.wait_for(self._node.stdout.readline(), READY_S_MAX)).decode()
        except TimeoutError:
            line = ""
        if not line.startswith("ready "):
            raise DemoFailed(f"The node did not start. Its log is {self.node_log}.")
        words = dict(word.split("=", 1) for word in line.split()[1:])
        self.console.print(
            f"\nA node is running. MQTT is on {words['mqtt']}, gRPC on {words['pop']}, metrics on http://{words['admin']}/metrics.\n"
            f"{self.devices} devices publish {self.readings:,} temperature readings over MQTT. A dashboard subscribes to all "
            f"of them, and three consumers of the group {GROUP!r} pop and acknowledge them over gRPC. One consumer is killed, "
            "and one is too slow: the node delivers their messages again.\n"
        )
        return {name: HostPort.parse(words[name]) for name in ("mqtt", "pop", "admin")}

    async def _stop_node(self) -> None:
        self._node.terminate()
        status = await asyncio.wait_for(self._node.wait(), STOP_S_MAX)
        if status != 0:
            raise DemoFailed(f"The node ended with status {status}. Its log is {self.node_log}.")

    async def _worker(self, pop: HostPort, habit: str) -> None:
        """Run a consumer and keep its latest report. A consumer that dies is not restarted: the others get its messages."""
        process = await self._spawn(
            "penstock.demo.worker", "--pop", str(pop), "--group", GROUP, "--filter", FILTER, "--habit", habit
        )
        assert process.stdout is not None
        async for line in process.stdout:
            self.workers[habit] = orjson.loads(line)
        status = await process.wait()
        if status == -signal.SIGKILL:
            self.deaths += 1
        elif status != 0:
            raise DemoFailed(f"The {habit} consumer ended with status {status}. Read {self.node_log}.")

    async def _stop_workers(self, workers: list[asyncio.Task[None]]) -> None:
        for process in self._processes:
            if process is not self._node and process.returncode is None:
                process.terminate()
        await asyncio.wait_for(asyncio.gather(*workers), STOP_S_MAX)

    # --- the dashboard ----------------------------------------------------------------------------------------------

    async def _watch(self, mqtt: HostPort) -> None:
        """Subscribe as a dashboard does, and count the messages that arrive."""
        client = MQTTClient(client_id="dashboard", config={"auto_reconnect": False, "keep_alive": 60, "plugins": {}})
        await client.connect(f"mqtt://{mqtt}/")
        await client.subscribe([(DASHBOARD_FILTER, 0)])
        try:
            while await client.deliver_message() is not None:
                self.received += 1
        except (AMQTTError, asyncio.CancelledError):
            return

    # --- the run ----------------------------------------------------------------------------------------------------

    async def _publish_and_drain(self, addresses: dict[str, HostPort]) -> dict[str, int]:
        tasks = {
            "published": self._progress.add_task("Readings published, QoS 1", total=self.readings),
            "received": self._progress.add_task("Received by the dashboard", total=self.readings),
            "acked": self._progress.add_task("Acknowledged by 3 consumers", total=self.readings),
        }
        fleet = asyncio.create_task(self._run_fleet(addresses["mqtt"], tasks["published"]))
        deadline = time.monotonic() + FINISH_S_MAX
        while True:
            state = await _state(addresses["admin"])
            counters: dict[str, int] = state["pop"]
            self._progress.update(tasks["received"], completed=self.received)
            self._progress.update(
                tasks["acked"],
                completed=counters["acked"],
                description=f"Acknowledged ({counters['revived']} revived)",
            )
            if fleet.done():
                fleet.result()
                if counters["acked"] >= self.readings and self.received >= self.readings and _is_drained(state):
                    return counters
            else:
                deadline = time.monotonic() + FINISH_S_MAX
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"Of {self.readings:,} readings, {counters['acked']:,} were acknowledged and {self.received:,} reached the "
                    f"dashboard within {FINISH_S_MAX:.0f} s of the last publish. The node's log is {self.node_log}."
                )
            await asyncio.sleep(POLL_S)

    async def _run_fleet(self, mqtt: HostPort, task: TaskID) -> None:
        process = await self._spawn(
            "penstock.demo.fleet",
            *("--host", mqtt.host, "--port", str(mqtt.port), "--seed", str(self.seed)),
            *("--devices", str(self.devices), "--readings", str(self.readings)),
        )
        assert process.stdout is not None
        async for line in process.stdout:
            self.fleet = orjson.loads(line)
            if "published" in self.fleet:
                self._progress.update(task, completed=self.fleet.get("acknowledged", self.fleet["published"]))
        if await process.wait() != 0:
            raise DemoFailed(f"The fleet of devices failed: {self.fleet}")


def _is_drained(state: dict[str, Any]) -> bool:
    return all(group["visible"] == 0 and group["in_flight"] == 0 for group in state["groups"])


async def _state(admin: HostPort) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(admin.host, admin.port)
    writer.write(f"GET /api/v1/state HTTP/1.0\r\nHost: {admin}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    state: dict[str, Any] = orjson.loads(answer.partition(b"\r\n\r\n")[2])
    return state


def run_demo(directory: Path | None, *, devices: int, readings: int, seed: int) -> int:
    """Run the demo and print its report.

    Args:
        directory: directory for the demo's files, which must be empty or missing; None for a new temporary directory.
        devices: number of devices, at least 1. Each has an MQTT connection.
        readings: number of readings that all devices publish together.
        seed: seed of the simulated readings.

    Returns:
        The exit status: 0 only if the group acknowledged every published reading and no delivery is lost.
    """
    console = Console(markup=False, highlight=False)  # paths and errors may hold brackets
    from penstock.spark.errors import ReconcileError
    from penstock.spark.reconciliation.command import LOCAL_MASTER, choose, run

    try:
        engine = choose("auto", LOCAL_MASTER)
    except ReconcileError as error:
        console.print(f"penstock demo: {error}", style="red")
        return 2
    directory = _directory(directory)
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # amqtt raises its errors as well as logging them
    console.print(f"The files of this demo are in {directory}.")
    demo = _Demo(directory, console, devices=devices, readings=readings, seed=seed)
    began = time.monotonic()
    try:
        uvloop.run(demo.run())
    except DemoFailed as error:
        console.print(f"penstock demo: {error}", style="red")
        return 1
    name = "Apache Spark" if engine == "spark" else "There is no Java for Apache Spark, so DuckDB"
    console.print(f"\nThe node has stopped. {name} now reads its log and pairs every delivery with its outcome.\n")
    status = run(demo.data_dir, demo.report_dir, engine=engine)
    return _conclude(console, demo, status, time.monotonic() - began)


def _directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty. Name another directory for the demo's files.")
    return directory.resolve()


def _conclude(console: Console, demo: _Demo, status: int, seconds: float) -> int:
    """Compare the published readings with the report, print a conclusion, and return the exit status."""
    if status > 1:  # there is no report
        return 1
    summary = orjson.loads((demo.report_dir / "summary.json").read_bytes())
    # The fleet sends a reading again if its PUBACK is late. The node then stores it twice.
    stored = demo.readings + int(demo.fleet["resent"])
    groups = [group for group in summary["groups"] if group["group"] == GROUP]
    acked = sum(group["message_outcomes"]["acked"] for group in groups)
    handed_out = sum(group["messages"] for group in groups)
    complete = acked == handed_out and demo.readings <= acked <= stored
    late = demo.workers["slow"].get("late", 0)
    revived = sum(group["outcomes"]["revived"] for group in groups)
    lost = summary["totals"]["outcomes"]["lost"]
    console.print(
        f"\n{demo.devices} devices published {demo.readings:,} readings. The dashboard received {demo.received:,}, and the "
        f"group {GROUP!r} acknowledged {acked:,}.\n"
        f"{demo.deaths} consumer was killed while it held a batch, and the slow one acknowledged {late:,} messages too late. "
        f"The node delivered {revived:,} messages again; {lost:,} were lost."
    )
    console.print(
        f"The report is {demo.report_dir}/report.html, with summary.json and Parquet tables beside it. "
        f"The demo took {seconds:.0f} s."
    )
    if not complete:
        console.print(
            f"NOT COMPLETE: of {demo.readings:,} readings, {handed_out:,} were delivered and {acked:,} acknowledged.",
            style="red",
        )
    elif status == 0:
        console.print("Every reading was acknowledged, and no delivery is lost.", style="green")
    return 0 if complete and status == 0 else 1
