"""`python -m bench [NAME] [OPTION...]`: run one benchmark with its options, or all of them as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

BENCHES = {
    "mqtt": "MQTT in and out, beside mosquitto and nats-server",
    "pop": "POP over gRPC, beside Redis streams and beanstalkd",
    "store": "the store by itself: append, read, many queues, starts",
    "compare": "this tree beside another tree of the project; only where it is named",
    "curve": "cost of a record while the log grows to 20 GiB; only where it is named",
}
"""Name and subject of each benchmark; `bench.<name>.main(arguments)` runs it and returns its exit status."""

NAMED_ONLY = ("compare", "curve")
"""What `python -m bench` alone leaves out: the one needs another tree, the other tens of gigabytes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names and return the exit status: that of the first benchmark that failed, or 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in BENCHES:
        print("usage: python -m bench [NAME] [OPTION...]   (NAME --help lists the options)", file=sys.stderr)
        for name, subject in BENCHES.items():
            print(f"  {name:10} {subject}", file=sys.stderr)
        return 0 if given[0] in ("-h", "--help") else 2
    if given:
        return _run(given[0], given[1:])
    return next((status for status in [_run(name, []) for name in BENCHES if name not in NAMED_ONLY] if status), 0)


def _run(name: str, arguments: Sequence[str]) -> int:
    # Imported by name and late: one benchmark needs a C compiler, another gRPC, and neither the other's.
    status: int = import_module(f"bench.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
