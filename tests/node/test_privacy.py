"""Who may enter what a node writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.node.privacy import keep_private
from tests.gateway.wire import Broker


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_node_keeps_its_data_directory_to_itself(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "new" / "data", {}).start()
    data_dir = broker.config.data_dir
    await (await broker.connect("c")).publish("a", b"x", 1)
    assert mode_of(data_dir) == 0o700
    written = [path for path in data_dir.rglob("*") if path.is_file() and "index" not in path.parts]
    assert {path.name for path in written} >= {"secret"}
    assert {path.name: oct(mode_of(path)) for path in written if mode_of(path) != 0o600} == {}
    assert [path for path in data_dir.iterdir() if path.is_dir() and path.name != "index" and mode_of(path) != 0o700] == []
    await broker.stop()


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o750), (0o777, 0o770), (0o750, 0o750), (0o1777, 0o1777)])
def test_others_lose_their_rights_to_a_directory_that_exists(tmp_path: Path, before: int, after: int) -> None:
    tmp_path.chmod(before)
    keep_private(tmp_path)
    assert mode_of(tmp_path) == after
