"""The Java that Spark uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
