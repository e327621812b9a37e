"""The wheel holds `penstock/` and `pyspark_penstock.py`, and works beside a project with packages named like our folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.system.processes import ROOT, STOP_S

pytest.importorskip("hatchling", reason="the build backend is not installed (it is among the extra `dev`)")

FOLDERS = ("gateway", "pop", "spark", "store", "timer")
RUN_S = 200

SERVICE = """
import asyncio
import sys

import gateway, pop, spark, store, timer
from penstock import Client

assert {each.OWNER for each in (gateway, pop, spark, store, timer)} == {"shop"}


async def main(address: str) -> None:
    async with Client(address) as client:
        async for message in client.consume("plant/#", group="billing"):
            await message.ack()
            print(message.topic, message.body.decode(), message.attempt)
            break


asyncio.run(main(sys.argv[1]))
"""


@dataclass(frozen=True)
class Build:
    """The distributions of this checkout."""

    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


def run(*command: str | Path, directory: Path, **environment: str) -> str:
    """Run a command to its successful end, without this checkout on its path; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**inherited, **environment},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def build_wheel(source: Path, directory: Path) -> Path:
    """Build a wheel with pip, by the backend that is installed, so that no network is needed."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    run(*pip, "--wheel-dir", directory, source, directory=directory)
    (wheel,) = directory.glob("penstock-*.whl")
    return wheel


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    of_checkout, of_sdist = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sdist")
    wheel = build_wheel(ROOT, of_checkout)
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", of_sdist, directory=ROOT)
    (sdist,) = of_sdist.glob("penstock-*.tar.gz")
    return Build(wheel, sdist, build_wheel(sdist, of_sdist))


@pytest.fixture(scope="module")
def environment(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of a new environment with the wheel, and with the dependencies of the running one.

    A path in a .pth file is added behind the environment's own packages, and the .pth files in that path are not read. So an
    editable install of this checkout does not count.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", build.wheel, directory=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return programs


@pytest.fixture(scope="module")
def small(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of a new environment that has the wheel, and what it needs without an extra."""
    folder = tmp_path_factory.mktemp("small")
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", build.wheel, directory=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(build.wheel):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())
    return programs


def required(wheel: Path, extra: str = "") -> set[str]:
    """Return the names of all distributions that a wheel needs, with what those need, as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist", [])]
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            continue
        found.add(requirement.name)
        waiting += [Requirement(line) for line in distribution(requirement.name).requires or ()]
    return found


def metadata_of(wheel: Path) -> Message:
    (name,) = (name for name in names_in(wheel) if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(zipfile.ZipFile(wheel).read(name))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Return the folder of a project whose packages are named like folders of Penstock."""
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "shop"\n')
    (tmp_path / "service.py").write_text(SERVICE)
    return tmp_path


@contextmanager
def serving(python: Path, directory: Path) -> Iterator[dict[str, str]]:
    """Run `penstock serve` in a folder; yield the addresses of its listeners."""
    listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    log = directory / "node.log"
    with log.open("wb") as errors:
        node = subprocess.Popen(
            [python, "-m", "penstock", "serve", *listeners],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    try:
        assert node.stdout is not None
        line = node.stdout.readline().decode()
        assert line.startswith("ready "), f"{line!r}\n{log.read_text()}"
        yield dict(word.split("=", 1) for word in line.split()[1:])
        node.terminate()
        assert node.wait(STOP_S) == 0
    finally:
        if node.poll() is None:
            node.kill()
        node.wait(STOP_S)
        assert node.stdout is not None
        node.stdout.close()


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_penstock_and_the_module_that_spark_finds_at_its_top(build: Build) -> None:
    names = names_in(build.wheel)
    tops = {name.partition("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"penstock", "pyspark_penstock.py", info}
    assert {f"penstock/{folder}/__init__.py" for folder in FOLDERS} <= names
    assert "penstock/py.typed" in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_sdist_holds_penstock_and_what_describes_it(build: Build) -> None:
    with tarfile.open(build.sdist) as archive:
        members = archive.getmembers()
    tops = {member.name.split("/")[1] for member in members}
    assert tops == {"penstock", "pyspark_penstock.py", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert not [member.name for member in members if member.issym() or member.islnk()], "the links are followed"


def test_the_wheel_of_the_sdist_holds_the_same_files(build: Build) -> None:
    assert names_in(build.wheel_of_sdist) == names_in(build.wheel)


def test_the_installed_package_is_not_the_checkout(environment: Path, shop: Path) -> None:
    shown = run(
        environment / "python",
        "-c",
        "import penstock, penstock.store as s; print(penstock.__file__, s.__file__)",
        directory=shop,
    )
    for path in shown.split():
        assert Path(path).is_relative_to(environment.parent)


def test_the_clients_need_three_distributions(build: Build) -> None:
    direct = [Requirement(line) for line in metadata_of(build.wheel).get_all("Requires-Dist", [])]
    assert sorted(each.name for each in direct if each.marker is None) == ["grpcio", "orjson", "protobuf"]
    assert required(build.wheel) == {"grpcio", "orjson", "protobuf", "typing-extensions"}


def test_an_environment_without_the_node_has_clients_worker_and_testing(small: Path, shop: Path) -> None:
    names = (
        "import penstock, penstock.testing, penstock.worker.application\nfor name in penstock.__all__: getattr(penstock, name)"
    )
    run(small / "python", "-c", names, directory=shop)
    assert "penstock send" in run(small / "penstock", "send", "--help", directory=shop)
    for command in (("serve",), ("pub", "a", "b"), ("inspect", "log")):
        ended = subprocess.run(
            [small / "penstock", *command], cwd=shop, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert ended.stderr.startswith(f"penstock {command[0]} needs the node's packages: "), ended.stderr
        assert "[node]" in ended.stderr


@pytest.mark.nightly
def test_both_installs_from_the_package_index_are_as_small_as_they_should_be(build: Build, tmp_path: Path) -> None:
    """It prints packages, bytes and seconds: run it with `-s`. It needs the package index."""
    for extra, packages_max, megabytes_max in (("", 5, 45), ("[node]", 60, 260)):
        folder = tmp_path / (extra.strip("[]") or "small")
        venv.create(folder, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        began_s = time.monotonic()
        run(*pip, "install", "--quiet", "--no-cache-dir", f"{build.wheel}{extra}", directory=tmp_path)
        took_s = time.monotonic() - began_s
        installed = json.loads(run(*pip, "list", "--format", "json", directory=tmp_path))
        megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        loading_s = min(timed(folder / "bin" / "python", "from penstock import Client", tmp_path) for _ in range(5))
        print(f"penstock{extra}: {len(installed)} packages, {megabytes:.0f} MB, {took_s:.0f} s, import {loading_s:.2f} s")
        assert len(installed) <= packages_max
        assert megabytes <= megabytes_max


def timed(python: Path, code: str, directory: Path) -> float:
    """Return how many seconds a program takes."""
    began_s = time.monotonic()
    run(python, "-c", code, directory=directory)
    return time.monotonic() - began_s


@pytest.mark.nightly
def test_the_quickstart_works_beside_packages_of_the_same_names(environment: Path, shop: Path) -> None:
    with serving(environment / "python", shop) as addresses:
        topic = "plant/1/press/temperature"
        run(environment / "penstock", "pub", "--mqtt", addresses["mqtt"], "--qos", "1", topic, "71.5", directory=shop)
        shown = run(environment / "python", "service.py", addresses["pop"], directory=shop)
        assert shown.split() == [topic, "71.5", "1"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java 17 or later, and there is no java on PATH")
def test_spark_reconciles_beside_packages_of_the_same_names(environment: Path, shop: Path) -> None:
    with serving(environment / "python", shop) as addresses:
        run(environment / "penstock", "pub", "--mqtt", addresses["mqtt"], "--qos", "1", "plant/1", "71.5", directory=shop)
        run(environment / "python", "service.py", addresses["pop"], directory=shop)
    # `python -m` puts the project's folder first on the path, also on that of Spark's workers.
    shown = run(environment / "python", "-m", "penstock", "reconcile", "--json", directory=shop)
    summary = json.loads(shown)
    assert (summary["complete"], summary["ok"], summary["engine"]) == (True, True, "spark")
    assert summary["groups"][0]["message_outcomes"]["acked"] == 1
