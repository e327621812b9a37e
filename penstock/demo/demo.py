"""`penstock demo`: the whole path on one machine, with real connections, real failures and a reconciliation at the end.

A node, a fleet of devices, a dashboard and three consumers run as they would in earnest: each a process or a connection of
its own. One consumer dies with messages in its hands and one is too slow, so that the node has to revive what they held.
Then Spark pairs every delivery with what became of it.
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
from penstock.install import install_hint
from penstock.store.options import HostPort

GROUP = "billing"
FILTER = "plant/+/+/temperature"
DASHBOARD_FILTER = "plant/#"

READY_S_MAX = 30.0
FINISH_S_MAX = 180.0
"""How long the consumers may take after the last reading: revived messages come back several times at worst."""

STOP_S_MAX = 20.0
POLL_S = 0.2


class DemoFailed(Exception):
    """Raised when a step of the demo did not do what it should. The message says which, and where to look."""


class _Demo:
    """One run.

    Parameters:
        directory: where its files go: the node's data and log, and the report.
        console: where progress and the report are shown.
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
        """Run everything up to the orderly end of the node; return the node's own POP counters.

        Raises:
            DemoFailed: something did not come about.
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
            raise DemoFailed(f"the node did not start; its log is {self.node_log}")
        words = dict(word.split("=", 1) for word in line.split()[1:])
        self.console.print(f"node: mqtt {words['mqtt']}, pop {words['pop']}, admin http://{words['admin']}/metrics")
        return {name: HostPort.parse(words[name]) for name in ("mqtt", "pop", "admin")}

    async def _stop_node(self) -> None:
        self._node.terminate()
        status = await asyncio.wait_for(self._node.wait(), STOP_S_MAX)
        if status != 0:
            raise DemoFailed(f"the node ended with status {status}; its log is {self.node_log}")

    async def _worker(self, pop: HostPort, habit: str) -> None:
        """Run a consumer and keep what it reports. One that dies is left dead: the others have its messages soon."""
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
            raise DemoFailed(f"the {habit} consumer ended with status {status}; see {self.node_log}")

    async def _stop_workers(self, workers: list[asyncio.Task[None]]) -> None:
        for process in self._processes:
            if process is not self._node and process.returncode is None:
                process.terminate()
        await asyncio.wait_for(asyncio.gather(*workers), STOP_S_MAX)

    # --- the dashboard ----------------------------------------------------------------------------------------------

    async def _watch(self, mqtt: HostPort) -> None:
        """Subscribe as a dashboard does, and count what comes."""
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
            "published": self._progress.add_task(f"{self.devices} devices publish at QoS 1", total=self.readings),
            "received": self._progress.add_task("dashboard receives", total=self.readings),
            "acked": self._progress.add_task("3 consumers acknowledge", total=self.readings),
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
                description=f"3 consumers acknowledge ({counters['revived']} revived)",
            )
            if fleet.done():
                fleet.result()
                if counters["acked"] >= self.readings and self.received >= self.readings and _is_drained(state):
                    return counters
            else:
                deadline = time.monotonic() + FINISH_S_MAX
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"{counters['acked']} of {self.readings} readings were acknowledged and {self.received} reached the "
                    f"dashboard in {FINISH_S_MAX:.0f} s after the last was published; the node's log is {self.node_log}"
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
            raise DemoFailed(f"the fleet failed: {self.fleet}")


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
    """Run the demo and show its report.

    Args:
        directory: where its files go, empty or missing; None for a new temporary directory.
        devices: MQTT connections, at least 1.
        readings: PUBLISHes in total.
        seed: of the simulation.

    Returns:
        The exit status: 0 only when every reading that was published was acknowledged by the group and nothing is lost.
    """
    console = Console()
    try:
        from penstock.spark.errors import ReconcileError
        from penstock.spark.session import java_version
    except ModuleNotFoundError as error:
        hint = f"penstock demo: {error.name} is not installed: {install_hint('spark')}"
        console.print(hint, style="red", markup=False)
        return 2
    try:
        java_version()
    except ReconcileError as error:
        console.print(f"penstock demo: {error}", style="red")
        return 2
    directory = _directory(directory)
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # what matters of its errors comes as exceptions
    console.print(f"files: {directory}")
    demo = _Demo(directory, console, devices=devices, readings=readings, seed=seed)
    began = time.monotonic()
    try:
        uvloop.run(demo.run())
    except DemoFailed as error:
        console.print(f"penstock demo: {error}", style="red")
        return 1
    console.print(f"\nThe node has stopped. Spark reconciles {demo.data_dir} ...")
    from penstock.spark.reconcile import run

    status = run(demo.data_dir, demo.report_dir)
    return _conclude(console, demo, status, time.monotonic() - began)


def _directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: name another directory for the demo's files")
    return directory.resolve()


def _conclude(console: Console, demo: _Demo, status: int, seconds: float) -> int:
    """Compare what was published with what Spark found; say so, and return the exit status."""
    if status == 2:
        return 1
    summary = orjson.loads((demo.report_dir / "summary.json").read_bytes())
    # A reading whose PUBACK came too late for the fleet was sent again, and is stored twice.
    stored = demo.readings + int(demo.fleet["resent"])
    groups = [group for group in summary["groups"] if group["group"] == GROUP]
    acked = sum(group["messages_acked"] for group in groups)
    handed_out = sum(group["messages"] for group in groups)
    complete = acked == handed_out and demo.readings <= acked <= stored
    late = demo.workers["slow"].get("late", 0)
    revived = sum(group["outcomes"]["revived"] for group in groups)
    lost = summary["totals"]["outcomes"]["lost"]
    console.print(
        f"\n{demo.readings} readings published by {demo.devices} devices, {demo.received} deliveries to the dashboard, "
        f"{acked} readings acknowledged by group {GROUP!r}.\n"
        f"{demo.deaths} consumer died with a batch in its hands; the slow one acknowledged {late} too late. "
        f"{revived} deliveries were revived, {lost} lost."
    )
    console.print(f"report: {demo.report_dir} (summary.json, Parquet tables)  data: {demo.data_dir}  {seconds:.0f} s")
    if not complete:
        console.print(f"NOT COMPLETE: {demo.readings} readings, {handed_out} handed out, {acked} acknowledged", style="red")
    elif status == 0:
        console.print("every reading was acknowledged, and nothing is lost", style="green")
    return 0 if complete and status == 0 else 1
