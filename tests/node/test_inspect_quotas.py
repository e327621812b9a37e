"""`penstock inspect quotas`: an operator finds who fills the node."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import orjson
import pytest

from penstock.cli.inspect_index import inspect_quotas
from penstock.cli.main import main
from penstock.store.options import StoreOptions
from penstock.store.space.causer import Causer
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.store.wiring import SEGMENT_BYTES, close

ANN, BOB = Causer.of("acme/ann", "192.0.2.1", "pump"), Causer.of("", "192.0.2.2")


def fill(data_dir: Path) -> None:
    """Leave a data directory in which three queues have causers."""
    options = StoreOptions(segment_bytes=SEGMENT_BYTES, sync_in="thread")
    store = Store(data_dir, options, ManualClock(), quotas=QuotaOptions(tenant="user"))
    store.recover()
    for topic_filter, causer in (("a/1", ANN), ("a/2", ANN), ("b/1", BOB)):
        store.queues.declare(topic_filter, "service", causer=causer)
    close(store)


def found(data_dir: Path, *, of: str = "", limit: int = 0, as_json: bool = True) -> str:
    out = StringIO()
    inspect_quotas(data_dir, resource="", of=of, limit=limit, as_json=as_json, out=out)
    return out.getvalue()


def test_the_largest_come_first_with_what_they_are_part_of(tmp_path: Path) -> None:
    fill(tmp_path)
    rows = [orjson.loads(line) for line in found(tmp_path).splitlines()]
    assert {row["resource"] for row in rows} == {"queues"}
    assert [(row["held"], row["of"], row["name"], row["part_of"]) for row in rows] == [
        (3, "node", "", []),
        (2, "tenant", "acme", []),
        (2, "user", "acme/ann", ["acme"]),
        (2, "source", "192.0.2.1", ["acme", "acme/ann"]),
        (2, "client", "pump", ["acme", "acme/ann", "192.0.2.1"]),
        (1, "source", "192.0.2.2", []),
    ]
    assert [orjson.loads(line)["name"] for line in found(tmp_path, of="source", limit=1).splitlines()] == ["192.0.2.1"]
    table = found(tmp_path, of="client", as_json=False).splitlines()
    assert [line.split() for line in table][-1] == ["queues", "2", "client", "pump", "acme", "/", "acme/ann", "/", "192.0.2.1"]


def test_an_unknown_resource_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "quotas", "--data-dir", str(tmp_path), "--resource", "cheese"])
    assert "'cheese' is not a resource. The resources are queues, sessions" in capsys.readouterr().err
