"""The Java that Spark uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.spark.errors import JavaMissing

JAVA_VERSION_MIN = 17
"""Spark 4 runs on Java 17 and later (spark.apache.org/docs/4.0.0, Overview)."""

JAVA_TIMEOUT_S = 30
"""Seconds that a JVM may take to print its version."""


def java_version() -> int:
    """Return the major version of the Java that Spark will use: that of JAVA_HOME, or else the first one on PATH.

    Raises:
        JavaMissing: there is no Java, it can't be run, or it is older than `JAVA_VERSION_MIN`.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    remedy = (
        f"Reconciliation needs Java; the node does not. Install a JRE of version {JAVA_VERSION_MIN} or later "
        f"(Debian and Ubuntu: apt install openjdk-17-jre-headless), or set JAVA_HOME."
    )
    if java is None:
        raise JavaMissing(f"There is no `java` on PATH, and JAVA_HOME is not set. {remedy}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaMissing(f"{java} can't be run ({error}). {remedy}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    version = int(found[1]) if found else 0
    if version < JAVA_VERSION_MIN:
        raise JavaMissing(f"{java} is version {version or 'unknown'}. {remedy}")
    return version


READ_BYTES = 65_536

_WARNING = re.compile(
    rb"WARNING: (Using incubator modules: |A (terminally deprecated|restricted) method in |.* has been called by |"
    rb"Use --enable-native-access|.* will be (blocked|removed) in a future release|Please consider reporting this to )"
)
"""Java warns of modules that Spark has chosen, and of what its libraries call. Only Spark can change that, and Java has no
option against it."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave these warnings out of what processes say on stderr that the caller starts within the context.

    A thread hands on what they say, also after the context, until all of them have ended.
    """
    kept = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    threading.Thread(target=_hand_on, args=(read, kept), name="penstock-java-output", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(kept, 2)


def _hand_on(read: int, to: int) -> None:
    """Copy lines from a pipe to a file until no process has the pipe open. Close both."""
    try:
        line = b""
        while data := os.read(read, READ_BYTES):
            line += data
            *whole, line = line.split(b"\n")
            shown = b"".join(each + b"\n" for each in whole if not _WARNING.match(each))
            if not line.startswith(b"W") or len(line) > READ_BYTES:  # a progress bar has no end of a line
                shown, line = shown + line, b""
            _write(to, shown)
        _write(to, line)
    except OSError:
        pass  # nobody reads stderr any more
    finally:
        os.close(read)
        os.close(to)


def _write(to: int, data: bytes) -> None:
    while data:
        data = data[os.write(to, data) :]
