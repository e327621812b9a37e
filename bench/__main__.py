"""`python -m bench [BENCHMARK] [OPTION...]`: run one benchmark with its options, or all of them with their defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

BENCHES = {
    "mqtt": "Measure MQTT, beside mosquitto and nats-server.",
    "pop": "Measure POP over gRPC, beside Redis streams, NATS JetStream, beanstalkd and RocketMQ.",
    "store": "Measure the store alone: append, read, many queues, starts.",
    "timer": "Measure delayed messages, beside a sorted set of Redis and the schedules of nats-server.",
    "access": "Measure what access control costs, for a decision and for a message.",
    "admin": "Measure the admin API with 100,000 clients, and what it does to publishers. It runs only by name.",
    "backup": "Measure backups, and what they do to publishers. It runs only by name.",
    "compare": "Compare this tree with another tree of the project. It runs only by name.",
    "quick": "Compare the hot paths of this tree with those of a commit, in three minutes. It runs only by name.",
    "curve": "Plot the cost of a record while the log grows to 20 GiB. It runs only by name.",
    "storm": "Plot a storm of logins with passwords. It runs only by name.",
    "spark": "Measure the tables and their reconciliation, beside a plain join. It runs only by name.",
    "tables": "Write the measured tables of README.md anew. It runs only by name.",
    "soak": "Run everything under a small retention, and show that nothing grows. It runs only by name.",
}
"""Summary of each benchmark, by name. `bench.<name>.main(arguments)` runs it and returns its exit status."""

NAMED_ONLY = ("admin", "backup", "compare", "curve", "quick", "soak", "spark", "storm", "tables")
"""Benchmarks that `python -m bench` alone does not run: they need another tree, tens of gigabytes of disk, or minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line names, or all. Return the status of the first one that failed, or 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in BENCHES:
        is_help = given[0] in ("-h", "--help")
        out = sys.stdout if is_help else sys.stderr
        if not is_help:
            print(f"There is no benchmark {given[0]}.\n", file=out)
        print("usage: python -m bench [BENCHMARK] [OPTION...]\n", file=out)
        for name, summary in BENCHES.items():
            print(f"  {name:10} {summary}", file=out)
        print(
            "\nWithout a name, mqtt, pop, store, timer and access run. `python -m bench BENCHMARK --help` lists the options.",
            file=out,
        )
        return 0 if is_help else 2
    if given:
        return _run(given[0], given[1:])
    return next((status for status in [_run(name, []) for name in BENCHES if name not in NAMED_ONLY] if status), 0)


def _run(name: str, arguments: Sequence[str]) -> int:
    # Each benchmark is imported only when it runs: one needs a C compiler and another gRPC, and neither needs both.
    status: int = import_module(f"bench.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
