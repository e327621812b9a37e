"""The layout is the architecture: imports point one way, between packages and between their folders."""

from __future__ import annotations

import ast
import re

import pytest

from tests.layout import ROOT, circles, class_names, imported_modules, module_graph, package_graph, room_graph, sources

ALLOWED: dict[str, set[str]] = {
    "store": set(),
    "timer": {"store"},
    "access": {"store"},
    "tracing": {"store"},
    "cluster": {"store"},
    "pop": {"store", "timer", "access", "tracing", "install", "settings"},
    "gateway": {"store", "timer", "access", "tracing", "pop"},
    # The formats of records, of the sync mark and of snapshots, and the rules of topic filters, so that a Spark worker needs no
    # broker.
    "spark": {
        "store.record",
        "store.bodies",
        "store.log.recordscan",
        "store.log.segment",
        "store.files",
        "store.durations",
        "store.errors",
        "store.log.syncmark",
        "store.index.rowformats",
        "store.snapshots.snapshotreader",
        "store.topics",
        "install",
    },
}
"""What each package may import of `penstock`, besides itself. The rest of `penstock` may import anything but tests."""

FOLDERS: dict[str, set[str]] = {"spark.sink": {"pop.client", "pop.errors", "pop.proto"}}
"""What a folder of a package may import besides. The sink is a client of a node."""


def violations(source: str, module: str) -> list[str]:
    """Return what a module imports against the order."""
    known = {name for name, _ in sources()}
    package = module.split(".")[1]
    found = []
    for name in imported_modules(source, module, known=known):
        top, _, rest = name.partition(".")
        if top in ("tests", "bench", *ALLOWED):  # only below `penstock` do they have one name
            found.append(name)
        elif top == "penstock" and package in ALLOWED:
            folder = ".".join(module.split(".")[1:3])
            allowed = {package, *ALLOWED[package], *FOLDERS.get(folder, ())}
            if not any(rest == each or rest.startswith(f"{each}.") for each in allowed):
                found.append(name)
    return found


def test_imports_point_one_way() -> None:
    found = []
    for name, path in sources():
        module = f"{name}.__init__" if path.name == "__init__.py" else name
        found += [f"{name} imports {each}" for each in violations(path.read_text("utf-8"), module)]
    assert found == []


def test_the_module_that_every_spark_session_imports_imports_only_pyspark() -> None:
    """An error in it would break all Python sources of the session."""
    tree = ast.parse((ROOT / "pyspark_penstock.py").read_text("utf-8"))
    names = [each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)]
    assert not [each for each in tree.body if isinstance(each, ast.Import)]
    assert {name.partition(".")[0] for name in names} == {"__future__", "pyspark"}


LAYERS = {
    "store": ("index", "space", "log", "queues", "snapshots", "retention", "recovery", "housekeeping", "store"),
    "gateway": ("protocol", "transport", "auth", "sessions", "delivery", "connection", "gateway"),
    "pop": ("proto", "core", "access", "grpc", "rocketmq", "server"),
}
"""The folders of a package from the lowest to the module that composes all of them. At run time each may import only lower
ones. For types only it may import any of its package, so that a signature names the class that is meant."""


@pytest.mark.parametrize("package", LAYERS)
def test_a_folder_imports_only_lower_folders_of_its_package(package: str) -> None:
    layers = [f"{package}/{name}" for name in LAYERS[package]]
    rooms = room_graph()
    assert set(layers) <= set(rooms)
    upwards = [
        f"{room} imports {other}"
        for height, room in enumerate(layers)
        for other in sorted(rooms[room])
        if other in layers[height:]
    ]
    assert upwards == []


def test_the_gateway_does_not_import_its_composition() -> None:
    importing = sorted(name for name, imported in module_graph().items() if "penstock.gateway.gateway" in imported)
    assert [name for name in importing if not name.startswith("penstock.node.")] == []


def test_the_clients_import_nothing_of_the_node() -> None:
    assert room_graph()["pop/client"] == {"install", "pop/errors", "pop/proto", "settings"}


def test_the_worker_imports_the_clients_and_nothing_of_the_node() -> None:
    found = {name for room, names in room_graph().items() if room.startswith("worker") for name in names}
    assert {name for name in found if not name.startswith("worker")} == {"install", "pop/client", "pop/errors"}


def test_the_integrations_import_the_clients_and_the_worker_and_nothing_of_the_node() -> None:
    found = {name for room, names in room_graph().items() if room.startswith("contrib") for name in names}
    assert {name for name in found if not name.startswith(("contrib", "worker"))} == {"pop/client", "pop/errors", "pop/proto"}


def test_there_are_no_circles() -> None:
    assert circles(room_graph()) == []
    assert circles(module_graph()) == []
    assert circles(package_graph()) == []


def test_a_class_name_names_one_class() -> None:
    assert {name: paths for name, paths in class_names().items() if len(paths) > 1} == {}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f", "g"]]


def test_imports_for_types_only_are_told_apart() -> None:
    source = "import a\nif TYPE_CHECKING:\n    from b import C\ndef later():\n    import d"
    assert set(imported_modules(source, "x")) == {"a", "b", "d"}
    assert set(imported_modules(source, "x", with_types=False)) == {"a", "d"}


def test_the_graph_has_the_arrows_of_the_code() -> None:
    graph = module_graph()
    assert "penstock.store.record" in graph["penstock.store.log.commitlog"]
    assert "penstock.store.topics" in graph["penstock.store.queues.queues"]  # by `from penstock.store import topics`
    assert graph["penstock.node.errors"] == set()
    assert graph["penstock.install"] == graph["penstock.settings"] == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.store.x", "import penstock.timer"),
        ("penstock.store.x", "from penstock.pop.options import PopOptions"),
        ("penstock.store.x", "def later():\n    import penstock.gateway.protocol.decode"),
        ("penstock.store.x", "if TYPE_CHECKING:\n    from penstock.node import config"),
        ("penstock.store.x", "import_module('penstock.pop.core')"),
        ("penstock.store.x", "importlib.import_module('penstock.pop.core')"),
        ("penstock.store.x", "from ..timer import options"),
        ("penstock.store.x", "from store import record"),
        ("penstock.timer.x", "from penstock.pop import options"),
        ("penstock.pop.core.x", "import penstock.store, penstock.gateway"),
        ("penstock.gateway.x", "import penstock.cli"),
        ("penstock.gateway.x", "import tests.conftest"),
        ("penstock.spark.x", "import penstock.store"),
        ("penstock.spark.x", "from penstock.store import options"),
        ("penstock.spark.x", "from penstock.store import *"),
        ("penstock.spark.x", "from penstock.store.options import MIB"),
        ("penstock.spark.x", "from penstock.store.recorder import x"),
        ("penstock.spark.x", "from penstock.pop.client import syncclient"),
        ("penstock.spark.sink.x", "from penstock.pop.core import names"),
        ("penstock.cli.x", "import tests"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "penstock.store.x",
            "import numpy\nfrom penstock.store import record\nfrom .errors import StoreError\nfrom . import record",
        ),
        ("penstock.pop.core.x", "import penstock.timer.wheel\nfrom penstock.store.record import Kind"),
        (
            "penstock.spark.x",
            "from penstock.store import record, errors\nfrom penstock.store.record import Kind\nimport pyspark",
        ),
        ("penstock.spark.sink.x", "from penstock.pop.client.channel import sync_channel\nfrom penstock.store import record"),
        ("penstock.cli.x", "import penstock.store, penstock.timer, penstock.pop, penstock.gateway, penstock.spark"),
    ],
)
def test_an_import_with_the_order_is_left_alone(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_no_test_imports_from_another_test() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in re.findall(r"^\s*(?:from|import) (\S+)", path.read_text("utf-8"), re.MULTILINE):
            if name.startswith(("tests.", ".")) and name.rpartition(".")[2].startswith(("test_", "conftest")):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    assert found == [], "shared helpers live in modules of their own, see tests/README.md"
