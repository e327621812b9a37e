"""`make nightly`: everything that searches, kills, floods, takes time or drives clients of other projects.

Each suite takes its share of the minutes. A table at the end says what passed, how long it took and how to repeat it; the
output of each suite is in a file. `--smoke` runs each suite once, small, and with the same seed each time, for `.ci/run`. The
exit status is 1 if a suite failed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.failures import tells_of_loss

ROOT = Path(__file__).parents[1]
MINUTES = 60.0
SMOKE_SEED = 1
OVERTIME = 3.0
"""A suite that takes so many times its share, and `GRACE_S` on top, is ended and has failed."""
GRACE_S = 600.0
ATTACK_S_MIN = 2.0
"""Seconds of an attack in a window. In less, an attacker may not reach the bound that is to stop it."""

SOAK_MINUTES_MIN = 10.0
"""Minutes of the soak. Before that, its rows and the block cache still fill, which looks like growth."""

TAIL_LINES = 60
"""Lines that are printed of the output of a suite that failed."""

PYTHON = sys.executable
"""What runs the suites, each in a process of its own."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a suite is to do."""

    seconds: float
    seed: int
    is_smoke: bool

    def times(self, per_minute: float, smoke: int) -> int:
        """Return how often to do what fits `per_minute` times into a minute, at least once; `smoke` times in a smoke."""
        return smoke if self.is_smoke else max(int(self.seconds / 60 * per_minute), 1)


@dataclass(frozen=True, slots=True)
class Suite:
    """A part of the nightly.

    Parameters:
        name: what `--only` calls it.
        share: its part of the time, relative to the others.
        commands: returns what to run, one after the other. A command may begin with settings of the environment, `NAME=value`.
    """

    name: str
    share: float
    commands: Callable[[Size], list[list[str]]]


@dataclass(slots=True)
class Result:
    """What came of a suite."""

    suite: Suite
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    """Commands that failed."""
    is_flaky: bool = False
    """It failed, and passed when it ran once more."""


def _pytest(*arguments: str, workers: int = 2) -> list[str]:
    return [PYTHON, "-m", "pytest", f"--numprocesses={workers}", "--timeout=3600", *arguments]


def _searches(size: Size) -> list[list[str]]:
    """Tests of Hypothesis, with other examples each night."""
    files = ["tests/store/test_topics.py", "tests/pop/test_core_machine.py", "tests/store/test_store_machine.py"]
    depth = f"PENSTOCK_TEST_DEPTH={size.times(1.5, 1)}"
    seeded = ["--hypothesis-profile=search", f"--hypothesis-seed={size.seed}"]
    return [[depth, *_pytest("-m", "hypothesis", *seeded, *(files if size.is_smoke else []))]]


def _tests(size: Size) -> list[list[str]]:
    """Tests with the marker `nightly`: kills at random moments, real load, real time, other people's databases."""
    rounds = f"PENSTOCK_KILL_ROUNDS={size.times(3, 1)}"
    if size.is_smoke:
        cluster = "tests/system/test_cluster.py::test_nothing_acknowledged_is_lost_when_leaders_are_killed"
        demo = "tests/system/test_demo.py::test_the_demo_accounts_for_every_reading"
        schema = "tests/node/test_api_schema.py"
        return [
            [rounds, *_pytest("-m", "nightly", "tests/system/test_kill.py", "tests/store/test_kill.py", schema, cluster, demo)]
        ]
    skip = ("tests/system/test_rocketmq_clients.py", "tests/system/test_mqtt_clients.py", "tests/test_bench.py", "tests/attack")
    fleet = [f"PENSTOCK_FLEET_DEVICES={size.times(20, 60)}", f"PENSTOCK_FLEET_KILLS={size.times(1, 3)}"]
    return [[rounds, *fleet, *_pytest("-m", "nightly", *(f"--ignore={path}" for path in skip))]]


def _clients(size: Size) -> list[list[str]]:
    """Clients of other projects and languages."""
    mqtt, rocketmq = "tests/system/test_mqtt_clients.py", "tests/system/test_rocketmq_clients.py"
    if size.is_smoke:
        return [
            ["tests/clients/install", "node", "mqtt-go"],
            ["PENSTOCK_MQTT_CLIENTS=go-5", *_pytest("-m", "nightly", mqtt)],
            ["PENSTOCK_ROCKETMQ_CLIENTS=node", *_pytest("-m", "nightly", rocketmq, "-k", "receives or acknowledged or fifo")],
        ]
    return [["make", "test-clients"]]


def _chaos(size: Size) -> list[list[str]]:
    """Real faults in nodes under load."""
    faults = "kill-node,kill-sync" if size.is_smoke else "all"
    rounds = size.times(4, 1)
    chaos = [PYTHON, "-m", "tests.chaos", f"--seed={size.seed}", f"--rounds={rounds}", f"--faults={faults}"]
    return [[*chaos, "--spark-every=0"] if size.is_smoke else [*chaos, "--keep-going"]]


def _attacks(size: Size) -> list[list[str]]:
    """Attackers beside honest clients. How fast the node is meanwhile is in the log, and is judged by `make test-attack`."""
    if size.is_smoke:
        return [_pytest("-m", "nightly", "tests/attack")]
    seconds = min(max(round(size.seconds / 60 / 6, 1), ATTACK_S_MIN), 2.9)
    return [[PYTHON, "-m", "tests.attack", f"--seconds={seconds:g}", "--windows=2", "--tries=2"]]


def _fuzz(size: Size) -> list[list[str]]:
    """Arbitrary bytes, and sequences that break rules."""
    return [[PYTHON, "-m", "tests.fuzz", f"--seconds={20 if size.is_smoke else round(size.seconds)}", f"--seed={size.seed}"]]


def _simulations(size: Size) -> list[list[str]]:
    """Nodes and replicas on simulated machines."""
    first = size.seed % 1_000_000 * 1_000
    nodes, replicas = size.times(1_000, 200), size.times(4_000, 2_000)
    return [
        [PYTHON, "-m", "tests.simulation", f"--seeds={first}-{first + nodes - 1}"],
        [PYTHON, "-m", "tests.cluster", f"--seeds={first}-{first + replicas - 1}"],
    ]


def _mutations(size: Size) -> list[list[str]]:
    """Deliberate defects, which the simulations must catch. They run whole, whatever time they take."""
    if size.is_smoke:
        return [[PYTHON, "-m", "tests.simulation", "--mutation=replay-in-reverse", "--seeds-max=100"]]
    return [[PYTHON, "-m", "tests.simulation", "--mutations"], [PYTHON, "-m", "tests.cluster", "--mutations"]]


def _soak(size: Size) -> list[list[str]]:
    """Everything under a small retention, where nothing may grow."""
    if size.is_smoke:
        return [_pytest("-m", "nightly", "tests/test_bench.py", "-k", "soak")]
    minutes = max(size.seconds / 60, SOAK_MINUTES_MIN)
    return [[PYTHON, "-m", "bench", "soak", f"--minutes={minutes:.0f}", "--out=.nightly"]]


def _benchmarks(size: Size) -> list[list[str]]:
    """Each row of the benchmarks once, to see that it works."""
    return [_pytest("-m", "nightly", "tests/test_bench.py", *(["-k", "mqtt or access"] if size.is_smoke else []))]


SUITES = (
    Suite("searches", 10, _searches),
    Suite("tests", 14, _tests),
    Suite("clients", 10, _clients),
    Suite("chaos", 8, _chaos),
    Suite("attacks", 8, _attacks),
    Suite("fuzz", 5, _fuzz),
    Suite("simulations", 6, _simulations),
    Suite("mutations", 8, _mutations),
    Suite("soak", 4, _soak),
    Suite("benchmarks", 4, _benchmarks),
)


def run_command(command: list[str], seconds_max: float, log: Path) -> bool:
    """Run a command with its output in a file; return whether it succeeded. It is ended after `seconds_max`."""
    split = next(at for at, word in enumerate(command) if "=" not in word)
    settings = dict(word.split("=", 1) for word in command[:split])
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command[split:], cwd=ROOT, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(seconds_max) == 0
        except subprocess.TimeoutExpired:
            output.write(f"ended after {seconds_max:.0f} s\n".encode())
            return False
        finally:
            # Its children, too: those of a suite that was ended, and those that one has left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_suite(suite: Suite, size: Size, logs: Path) -> Result:
    """Run the commands of a suite, also after one that failed."""
    result, log = Result(suite), logs / f"{suite.name}.log"
    began_s = time.monotonic()
    for command in suite.commands(size):
        if not run_command(command, OVERTIME * size.seconds + GRACE_S, log):
            result.failed.append(shlex.join(command))
    result.seconds = time.monotonic() - began_s
    return result


def again(result: Result, logs: Path) -> None:
    """Run the tests of a smoke that failed once more, alone, unless they told of lost messages; see `tests.failures`.

    A search that fails has found something, so it counts at once.
    """
    log = logs / f"{result.suite.name}.log"
    if tells_of_loss(log.read_text("utf-8", "replace")) or not all(" pytest " in command for command in result.failed):
        return
    seconds_max = OVERTIME * 60 + GRACE_S
    if all(run_command(shlex.split(command), seconds_max, log.with_suffix(".again.log")) for command in result.failed):
        print(f"flaky: {result.suite.name}\n{_tail(log)}", flush=True)
        result.is_flaky, result.failed = True, []


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:])


def table(results: list[Result]) -> str:
    """Return the table of all suites."""
    lines = ["| suite | result | seconds | run it again |", "|---|---|---|---|"]
    for result in results:
        said = "**failed**" if result.failed else "flaky" if result.is_flaky else "passed"
        commands = "; ".join(f"`{command}`" for command in result.failed) or "-"
        lines.append(f"| {result.suite.name} | {said} | {result.seconds:.0f} | {commands.replace(PYTHON, 'python')} |")
    return "\n".join(lines)


def main() -> int:
    """Run the suites that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"how long, about ({MINUTES:.0f})")
    parser.add_argument("--seed", type=int, help="repeats a run that printed it (another one each time)")
    parser.add_argument("--only", default="all", help=f"names, separated by commas, of {', '.join(s.name for s in SUITES)}")
    parser.add_argument("--smoke", action="store_true", help="run each suite once, small, with one seed")
    parser.add_argument("--logs", type=Path, default=ROOT / ".nightly", help="folder for the output of each suite (.nightly)")
    options = parser.parse_args()
    names = [suite.name for suite in SUITES] if options.only == "all" else options.only.split(",")
    for name in names:
        if name not in [suite.name for suite in SUITES]:
            parser.error(f"there is no suite {name!r}; the suites are {', '.join(suite.name for suite in SUITES)}")
    suites = [suite for suite in SUITES if suite.name in names]
    seed = options.seed if options.seed is not None else SMOKE_SEED if options.smoke else random.randrange(1_000_000)
    print(f"seed {seed}: make nightly ONLY={','.join(names)} SEED={seed} MINUTES={options.minutes:g}", flush=True)
    options.logs.mkdir(exist_ok=True)
    for log in options.logs.glob("*.log"):
        log.unlink()
    whole = sum(suite.share for suite in suites)
    results = []
    for suite in suites:
        seconds = 30 if options.smoke else options.minutes * 60 * suite.share / whole
        result = run_suite(suite, Size(seconds, seed, options.smoke), options.logs)
        results.append(result)
        print(f"{suite.name}: {'FAILED' if result.failed else 'passed'} after {result.seconds:.0f} s", flush=True)
    for result in results if options.smoke else []:
        if result.failed:
            again(result, options.logs)
    for result in results:
        if result.failed:
            log = options.logs / f"{result.suite.name}.log"
            print(f"\n--- {result.suite.name}, the end of {log}\n{_tail(log)}")
    print(f"\n{table(results)}\n\nseed {seed}")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
