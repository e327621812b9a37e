"""The image of a node, as far as its Containerfile can be followed without a container.

The steps of the build run with their paths below a temporary directory. Then the commands of the image run as its user, who can
write nothing but the data directory.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containerfile import ROOT, last_of, stages, variables
from tests.system.processes import STOP_S
from tests.waiting import PROCESS_S

BUILD_S = 280
PLACES = ("/src", "/wheels", "/opt/penstock", "/var/lib/penstock")
"""Directories of the image that the steps use."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become the image's user"),
]


def placed(text: str, root: Path) -> str:
    """Return a text with the directories of the image below `root`."""
    for place in PLACES:
        text = text.replace(place, f"{root}{place}")
    return text


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """Return a directory with the files of the image, which only root may write."""
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        root = Path(name)
        root.chmod(0o755)
        for instruction in stages()[0]:
            if instruction.name == "COPY":
                *sources, target = instruction.text.split()
                copy(sources, root / "src" / target)
            elif instruction.name == "RUN":
                run_step(placed(re.sub("^python ", f"{sys.executable} ", instruction.text), root), root)
        yield root


def run_step(command: str, directory: Path) -> None:
    """Run a step of the build to its successful end, without this checkout on its path."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    ended = subprocess.run(
        ["bash", "-ec", command], cwd=directory, env=inherited, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"


def copy(sources: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, target)


def as_user(*command: str) -> list[str]:
    """Return a command that runs as the user of the image.

    Its one capability lets it read below a private directory, where the interpreter of this machine may be. It may write
    nowhere because of that.
    """
    user, group = last_of("USER").text.split(":")
    capabilities = [f"--{kind}=-all,+dac_read_search" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", *capabilities, *command]


def test_a_container_serves_as_its_user_and_writes_only_its_data(image: Path) -> None:
    data = Path(placed(variables()["PENSTOCK_DATA_DIR"], image))
    data.mkdir(parents=True)
    user, group = (int(part) for part in last_of("USER").text.split(":"))
    os.chown(data, user, group)
    data.chmod(0o700)
    addresses = {name: "127.0.0.1:0" for name in variables() if name.endswith("__LISTEN")}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        **variables(),
        **addresses,
        "PENSTOCK_DATA_DIR": str(data),
    }
    entry = [*last_of("ENTRYPOINT").command(), *last_of("CMD").command()]
    before = {path: path.stat().st_mtime_ns for path in (image / "opt").rglob("*")}
    node = subprocess.Popen(
        as_user(*(placed(word, image) for word in entry)), stdout=subprocess.PIPE, cwd=image, env=environment, text=True
    )
    try:
        assert node.stdout is not None
        line = node.stdout.readline()
        assert line.startswith("ready "), line
        admin = dict(word.split("=", 1) for word in line.split()[1:])["admin"]
        check = as_user(*(placed(word, image) for word in last_of("HEALTHCHECK").command()))
        for address, status in ((admin, 0), ("127.0.0.1:1", 1)):
            probed = {**environment, "PENSTOCK_ADMIN__LISTEN": address}
            ended = subprocess.run(check, cwd=image, env=probed, capture_output=True, timeout=PROCESS_S, check=False)
            assert ended.returncode == status, ended.stderr
        node.send_signal(getattr(signal, last_of("STOPSIGNAL").text))
        assert node.wait(STOP_S) == 0
    finally:
        if node.poll() is None:
            node.kill()
            node.wait(STOP_S)
        assert node.stdout is not None
        node.stdout.close()
    assert {path: path.stat().st_mtime_ns for path in (image / "opt").rglob("*")} == before
    assert {path.stat().st_uid for path in data.rglob("*")} == {user}


def test_a_container_without_authentication_says_so(image: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, *(int(part) for part in last_of("USER").text.split(":")))
        environment = {"PATH": os.environ["PATH"], **variables(), "PENSTOCK_DATA_DIR": name}
        entry = [placed(word, image) for word in (*last_of("ENTRYPOINT").command(), *last_of("CMD").command())]
        ended = subprocess.run(
            as_user(*entry), cwd=image, env=environment, capture_output=True, text=True, timeout=PROCESS_S, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.count("would serve everybody who reaches it") == 3, shlex.join(entry)
