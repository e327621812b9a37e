"""A PostgreSQL server for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    anywhere = shutil.which("initdb")
    return Path(anywhere).parent if anywhere else None


@contextmanager
def postgresql() -> Iterator[str]:
    """Run a server of its own in a temporary directory; yield the directory of its socket. Skip where none is installed."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    # The server does not run as root, and the path of a socket has at most 107 bytes.
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as directory:
        if user:
            shutil.chown(directory, user)
        data = f"{directory}/data"

        def run(program: str, *arguments: str) -> None:
            subprocess.run([programs / program, *arguments], check=True, user=user, cwd=directory, stdout=subprocess.DEVNULL)

        run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync")
        run("pg_ctl", "-D", data, "-w", "-l", f"{directory}/log", "-o", f"-k {directory} -c listen_addresses=", "start")
        try:
            yield directory
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
