"""Fuzz the codec and a live node: python -m tests.fuzz [--seconds N] [--seed N] [--directory DIR]. `make fuzz SECONDS=600` runs
this.

Two searches run side by side: atheris, if it is installed, follows the codec's branches in a process of its own, and Hypothesis
generates inputs of the codec, attacks on a node, sequences of MQTT clients over each transport, and sequences of calls of both
APIs over gRPC. Nodes take turns: one that everybody may do everything with, and one with rules, passwords and tokens, whose
callers have different rights. The exit status is 1 if anything fails: an exception, also in the node's log, an answer that the
protocol does not name, a message or an answer that a caller must not get, an input that takes too long, a well-behaved client
that is not served, growing memory, or leaked resources.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.install import install_hint
from tests.fuzz.calls import APIS
from tests.fuzz.search import search_calls, search_codec, search_listener, search_sequences
from tests.fuzz.target import ROOT, Target
from tests.fuzz.wires import TRANSPORTS

TOLD_EVERY_S = 30
SLICE_S = 54.0
CODEC_SLICE_S = 6.0


def guided(seconds: int, directory: Path) -> subprocess.Popen[bytes] | None:
    """Start the coverage-guided search; return None if atheris is not installed."""
    if importlib.util.find_spec("atheris") is None:
        print(f"atheris is not installed ({install_hint('fuzz')}): the codec is fuzzed by Hypothesis alone")
        return None
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "guided.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.fuzz.guided", str(seconds), str(directory)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if "sequences" not in name)


def _summary(name: str, target: Target, state: dict[str, Any]) -> None:
    print(
        f"{name}: {target.inputs:,} attacks and sequences, {target.connections:,} connections of attacks, "
        f"{state['stored']:,} messages stored; slowest {target.slowest_s * 1000:.0f} ms; memory "
        f"{state['anonymous_kib'] / 1024:.1f} MiB, {target.grown_kib(state['anonymous_kib']) / 1024:+.1f} since a quarter of "
        "the run; nothing left behind"
    )
    print("steps of MQTT:", _listed(target.player.counts))
    print("calls:", _listed(target.calls.counts))
    print("closed by the node:", ", ".join(f"{reason} {count:,}" for reason, count in sorted(state["closed"].items())))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="how long; both searches take all of it (default 600)")
    parser.add_argument("--directory", type=Path, default=ROOT / ".fuzz", help="corpus, log and failing inputs of atheris")
    parser.add_argument("--seed", type=int, default=None, help="repeats the sequences of a run that printed it")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(2**32)
    print(f"seed {options.seed}", flush=True)
    sequences: Counter[str] = Counter()
    began_s = told_s = time.monotonic()
    until_s = began_s + options.seconds
    codec_inputs = 0
    watched = guided(options.seconds, options.directory)

    def told(target: Target) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TOLD_EVERY_S:
            told_s = time.monotonic()
            print(
                f"{told_s - began_s:5.0f} s: {target.inputs:,} attacks with {target.connections:,} connections, slowest "
                f"{target.slowest_s * 1000:.0f} ms, node {target.samples[-1][1] / 1024:.1f} MiB; {codec_inputs:,} codec inputs",
                flush=True,
            )

    try:
        with Target() as anonymous, Target(is_secured=True) as secured:
            targets = {"everybody may do everything": anonymous, "rules and passwords": secured}
            for turn, target in enumerate(itertools.cycle(targets.values())):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                share_s = min(SLICE_S, left_s) / (len(TRANSPORTS) + len(APIS) + 1)
                for transport in TRANSPORTS:
                    sequences[transport] += search_sequences(target, share_s, transport=transport, seed=options.seed + turn)
                for api in APIS:
                    sequences[api] += search_calls(target, share_s, api=api, seed=options.seed + turn)
                search_listener(target, share_s, told=told)
                codec_inputs += search_codec(min(CODEC_SLICE_S, max(until_s - time.monotonic(), 0.1)))
            for name, target in targets.items():
                _summary(name, target, target.close())
        print("sequences:", ", ".join(f"{name} {count:,}" for name, count in sequences.items()), f"(seed {options.seed})")
        print(f"codec: {codec_inputs:,} inputs of Hypothesis")
        if watched is not None:
            status = watched.wait(60)
            lines = (options.directory / "guided.log").read_text("utf-8", "replace").splitlines()
            print("codec, guided:", "; ".join(line for line in lines if line.startswith(("Done", "stat::"))) or lines[-5:])
            if status:
                print(f"atheris found something: see {options.directory}/guided.log and failed-*", file=sys.stderr)
                return 1
    finally:
        if watched is not None and watched.poll() is None:
            watched.kill()
            watched.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
