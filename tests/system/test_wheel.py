"""The wheel holds `penstock/` and `pyspark_penstock.py`, and works beside a project with packages named like our folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

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
