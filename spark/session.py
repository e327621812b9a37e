"""A Spark session for Penstock's jobs: with this interpreter, little logging, and our packages importable on every worker."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.java import java_version, without_warnings

DRIVER_MEMORY = "2g"
"""Heap of the driver. On a local master all tasks share this heap, and with Spark's default of 1 GiB the shuffle of a few
million deliveries spills to disk."""

BRIEF_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A brief job is over before the second compiler of the JVM has paid for itself, and it and a parallel collector take
processors from the tasks."""

LOCAL_PARTITIONS = 16
"""Partitions of a shuffle on a local master. Spark joins small ones, and large ones need little memory at a time."""

HASH_BYTES = "64m"
"""Up to this size of a partition, a join builds a hash table of it rather than sort both sides."""

PACKAGES = ("pop", "spark", "store")
"""Packages of `penstock` that a worker imports to read the log, and to publish rows."""

SOURCE_MODULE = "pyspark_penstock.py"

_PENSTOCK = Path(__file__).parents[1]


def open_session(master: str = "local[*]", app_name: str = "penstock", *, is_brief: bool = False) -> SparkSession:
    """Start a session, or return the running one. It has the source `penstock`, and passes filters to it.

    On a local master, workers use this interpreter and this source tree, and all ports are on 127.0.0.1. On any other
    master, the session sends a zip of our packages to the executors. To read the log itself these need fastcrc, numpy, orjson
    and pyarrow, and they must see the log and the report's directory under the same paths. To publish rows, they need grpcio,
    grpcio-health-checking and protobuf.

    Args:
        master: a Spark master URL.
        app_name: name of the job in Spark.
        is_brief: whether the session is for one job of a minute or two. On a local master the JVM then spends less on compiling
            what it runs, which does not pay before.

    Raises:
        JavaMissing: there is no Java 17 or later.
        ReadOptionInvalid: Spark can't use the master.
    """
    if master.startswith("sc://"):
        return _opened(SparkSession.builder.remote(master), master)
    java_version()
    local = re.fullmatch(r"local(\[.*\])?", master) is not None
    if local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    with _importable(), without_warnings():
        builder = SparkSession.builder.master(master).appName(app_name)
        for name, value in _settings(local, is_brief=is_brief).items():
            builder = builder.config(name, value)
        session = _opened(builder, master)
    if local:
        session.conf.set("spark.sql.shuffle.partitions", max(LOCAL_PARTITIONS, session.sparkContext.defaultParallelism))
    if not local:
        session.sparkContext.addPyFile(str(_zip_packages(Path(tempfile.mkdtemp(prefix="penstock-spark-")))))
    return session


def _opened(builder: SparkSession.Builder, master: str) -> SparkSession:
    try:
        return builder.getOrCreate()
    except Exception as error:  # of Py4J, of PySpark or of gRPC
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ReadOptionInvalid(f"Spark can't use the master {master!r}: {reason[-1].strip()}") from error


def _settings(local: bool, *, is_brief: bool) -> dict[str, str]:
    settings = {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}",
        "spark.ui.enabled": "false",
        # A bar for stages that take longer than half a second. It is for people, so not in a file or a pipe.
        "spark.ui.showConsoleProgress": str(not is_brief and sys.stderr.isatty()).lower(),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if local:
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        if is_brief:
            settings["spark.driver.extraJavaOptions"] += f" {BRIEF_JAVA_OPTIONS}"
        settings["spark.sql.adaptive.maxShuffledHashJoinLocalMapThreshold"] = HASH_BYTES
    return settings


@contextmanager
def _importable() -> Iterator[None]:
    """Put our packages on PYTHONPATH. The JVM inherits it and passes it on to its workers."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_PENSTOCK.parent), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _zip_packages(directory: Path) -> Path:
    target = directory / "penstock_spark.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in ("__init__.py", "install.py"):
            archive.write(_PENSTOCK / module, f"penstock/{module}")
        archive.write(_PENSTOCK.parent / SOURCE_MODULE, SOURCE_MODULE)
        for package in PACKAGES:
            for source in sorted((_PENSTOCK / package).rglob("*.py")):
                archive.write(source, f"penstock/{package}/{source.relative_to(_PENSTOCK / package)}")
    return target
