"""The requirements of a Spark session, and the zip for executors."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from penstock.spark import java, session
from penstock.spark import java as javaoutput
from penstock.spark.errors import JavaMissing


def a_java(home: Path, script: str) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)


def test_without_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match=r"Reconciliation needs Java.* apt install openjdk-17"):
        java.java_version()


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=f"{tmp_path}/bin/java can't be run"):
        java.java_version()


@pytest.mark.parametrize(
    ("first_line", "version"), [('openjdk version "17.0.15" 2025-04-15', 17), ('java version "21" 2023-09-19 LTS', 21)]
)
def test_a_recent_java_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_line: str, version: int) -> None:
    a_java(tmp_path, f"echo '{first_line}' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.java_version() == version


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'openjdk version \"1.8.0_292\"' >&2", "is version 8"),
        ("echo 'openjdk version \"11.0.2\"' >&2", "is version 11"),
        ("echo hello", "is version unknown"),
        ("exit 1", "can't be run"),
    ],
)
def test_another_java_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, complaint: str) -> None:
    a_java(tmp_path, script)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=complaint):
        java.java_version()


def test_warnings_that_java_has_about_itself_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    says = (
        "WARNING: Using incubator modules: jdk.incubator.vector\nWARNING: sun.misc.Unsafe::x has been called by y\n"
        "WARNING: the disk is full\nError: no memory\nWARNING: A restricted method in java.lang.System is called\n[Stage 0:>"
    )
    before = {*threading.enumerate()}
    with javaoutput.without_warnings():
        process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stderr.write({says!r})"])
    process.wait()
    for thread in {*threading.enumerate()} - before:  # that of a session which other tests use goes on
        thread.join()
    assert capfd.readouterr().err == "WARNING: the disk is full\nError: no memory\n[Stage 0:>"


def test_the_zip_for_executors_holds_what_a_worker_imports(tmp_path: Path) -> None:
    names = zipfile.ZipFile(session._zip_packages(tmp_path)).namelist()
    assert {
        "penstock/__init__.py",
        "penstock/spark/parquet/rows.py",
        "penstock/spark/records.py",
        "penstock/spark/segments.py",
        "penstock/spark/source/stream.py",
        "penstock/store/record.py",
        "penstock/store/bodies.py",
        "penstock/store/log/recordscan.py",
        "penstock/store/errors.py",
        "pyspark_penstock.py",
    } <= set(names)
