"""The tables that the benchmarks print, and a quick run of each of their rows."""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import access, admin, backup, compare, curve, floor, mqtt, pop, quick, soak, store, storm, timer
from bench.load import Load, LoadFailed, run_load, start_load
from bench.peers import memory_of, penstock
from bench.profile import shares_of
from bench.rows import Figures, Found, Goal, Row, RowFailed, Setting, beside, measure_all, run, table_of
from bench.rows import parser_of as parser_of_rows
from penstock.gateway.protocol.encode import encode_connack, encode_publish
from penstock.gateway.protocol.reasons import ConnectCode
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
TABLES = {
    "mqtt": mqtt.ROWS,
    "pop": pop.ROWS,
    "store": store.ROWS,
    "timer": timer.ROWS,
    "access": access.ROWS,
    "backup": backup.ROWS,
    "admin": admin.ROWS,
}

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="there is no C compiler")


def _setting(directory: Path, **options: object) -> Setting:
    return Setting(directory, argparse.Namespace(**{"runs": 5, "quick": False, **options}), lambda line: None)


def _shown(found: Found, *goals: Goal) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of("bench", found, {"row": Row(_nothing, goals)}))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _nothing(setting: Setting) -> Generator[Figures]:
    yield {}


# --- goals, and the table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_most", "reached", "met"),
    [
        (False, 99.0, False),
        (False, 100.0, True),
        (False, 101.0, True),
        (True, 99.0, True),
        (True, 100.0, True),
        (True, 101.0, False),
    ],
)
def test_a_goal_is_met_on_its_own_side_only(is_most: bool, reached: float, met: bool) -> None:
    assert Goal("x", "x", "s", 100, is_most).is_met(reached) is met


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
def test_each_figure_of_a_table_has_one_line(rows: dict[str, Row]) -> None:
    figures = [goal.figure for row in rows.values() for goal in row.goals]
    assert len(figures) == len(set(figures))
    assert table_of("x", {figure: [1.0, 3.0, 2.0] for figure in figures}, rows).row_count == len(figures)


def test_the_table_judges_the_median_and_shows_the_extremes() -> None:
    shown = _shown({"x": [90.0, 1_000.0, 101.0]}, Goal("x", "the title", "msg/s", 100))
    assert ">= 100 msg/s" in shown
    assert "101 msg/s" in shown
    assert "90 to 1,000" in shown
    assert "yes" in shown
    assert "NO" in _shown({"x": [90.0, 1_000.0, 99.0]}, Goal("x", "the title", "msg/s", 100))


def test_a_ratio_is_shown_beside_the_value_of_each_broker() -> None:
    figures = beside("x", {"Penstock": 300.0, "other": 900.0, "rival": 100.0}, "rival")
    shown = _shown({name: [value] for name, value in figures.items()}, Goal("x", "the title", "x", 2))
    line = next(line for line in shown.splitlines() if "the title" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "the title",
        "300",
        "900",
        "100",
        ">= 2 x",
        "3 x",
        "",
        "yes",
    ]


def test_without_the_rival_a_ratio_is_neither_met_nor_missed() -> None:
    figures = beside("x", {"Penstock": 300.0}, "rival")
    shown = _shown({name: [value] for name, value in figures.items()}, Goal("x", "the title", "x", 2))
    assert "300" in shown
    assert "yes" not in shown
    assert "NO" not in shown


def test_a_row_has_as_many_runs_as_asked_for_and_is_then_closed(tmp_path: Path) -> None:
    ended = []

    def measure(setting: Setting) -> Generator[Figures]:
        try:
            while True:
                yield {"x": 1.0}
        finally:
            ended.append(True)

    found: Found = {}
    failed = measure_all({"row": Row(measure, ())}, _setting(tmp_path, runs=3), found)
    assert (found, failed, ended) == ({"x": [1.0, 1.0, 1.0]}, [], [True])


def test_a_row_that_fails_keeps_its_results_and_stops_no_other_row(tmp_path: Path) -> None:
    def fails(setting: Setting) -> Generator[Figures]:
        yield {"x": 1.0}
        raise RowFailed("no more")

    def works(setting: Setting) -> Generator[Figures]:
        yield {"y": 2.0}

    found: Found = {}
    failed = measure_all({"first": Row(fails, ()), "second": Row(works, ())}, _setting(tmp_path), found)
    assert found == {"x": [1.0], "y": [2.0]}
    assert failed == ["first: no more"]


@pytest.mark.parametrize(("arguments", "status"), [([], 1), (["--only", "good"], 0)])
def test_the_exit_status_is_1_if_a_row_failed(arguments: list[str], status: int, tmp_path: Path) -> None:
    def fails(setting: Setting) -> Generator[Figures]:
        yield from ()
        raise RowFailed("no")

    rows = {"good": Row(_nothing, ()), "bad": Row(fails, ())}
    out = tmp_path / "figures.json"
    assert run(parser_of_rows("x", "x", rows), rows, ["--json", str(out), *arguments]) == status
    assert orjson.loads(out.read_bytes())["failed"] == ["bad: no"] * status


def test_an_unknown_row_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mqtt.main(["--only", "fanout,fan-in"])
    assert "There is no row fan-in" in capsys.readouterr().err


def test_shares_count_the_own_time_of_functions_on_the_main_thread() -> None:
    stacks = [
        "thread (0x1): MainThread;run (cli.py);write (log.py) 30",
        "thread (0x1): MainThread;run (cli.py);write (log.py);pack (record.py) 60",
        "thread (0x1): MainThread;run (cli.py);parse (codec.py) 10",
        "thread (0x2): sync;run (thread.py);write (log.py) 900",
    ]
    assert shares_of(stacks) == [(60, "pack (record.py)"), (30, "write (log.py)"), (10, "parse (codec.py)")]


# --- the load generator -----------------------------------------------------------------------------------------------


@needs_compiler
def test_a_load_reaches_the_subscribers_that_it_is_for(tmp_path: Path) -> None:
    with penstock(tmp_path) as node:
        to_all = run_load(node.host, node.port, Load(pubs=2, subs=3, msgs=100, qos=1, subqos=1, window=5))
        assert (to_all.acked, to_all.delivered, to_all.expected) == (100, 300, 300)
        one_each = run_load(node.host, node.port, Load(subs=3, stalled=1, own=1, topics=2, msgs=100, others=120))
        assert (one_each.sent, one_each.delivered, one_each.expected) == (100, 100, 100)
        assert to_all.ack_us_p50 > 0
        assert one_each.latency_us_p50 > 0


@needs_compiler
def test_a_rate_is_kept(tmp_path: Path) -> None:
    with penstock(tmp_path) as node:
        result = run_load(node.host, node.port, Load(pubs=3, subs=1, qos=1, rate=1_000, msgs=600))
    assert result.delivered == 600
    assert result.publish_per_s <= 1_001


@needs_compiler
def test_connections_are_held_until_the_end(tmp_path: Path) -> None:
    with penstock(tmp_path) as node, start_load(node.host, node.port, Load(pubs=50, msgs=50, window=1, hold=1)) as running:
        result = running.result()
        assert result.connect_s > 0
        assert result.sent == 0
        assert running.is_running
        assert memory_of(node.pid).resident > memory_of(node.pid).anonymous > 0
    assert not running.is_running


@needs_compiler
def test_a_load_that_fails_says_why() -> None:
    with pytest.raises(LoadFailed, match="Connection refused"):
        run_load("127.0.0.1", 1, Load())


# --- all rows ---------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TABLES)
def test_every_row_runs(name: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", name, "--quick", "--json", str(out), "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = orjson.loads(out.read_bytes())["figures"]
    # Without a rival there is no ratio, but each broker that was measured has its column.
    told = {figure.partition("@")[0] for figure in found}
    assert {goal.figure for row in TABLES[name].values() for goal in row.goals} <= told


# --- two trees --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_tree_is_compared_with_itself_in_each_area(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    rows = ("window", "pop", "append-synced")
    assert compare.main(["--base", str(ROOT), "--only", ",".join(rows), "--quick", "--json", str(figures)]) == 0
    found = orjson.loads(figures.read_bytes())["figures"]
    assert all(
        found[f"{row}_{what}@{tree}"][0] > 0 for row in rows for what in ("us", "per_s") for tree in ("base", "this tree")
    )
    assert {figure.partition("@")[0] for figure in found if "_client_us" in figure} == {"pop_client_us"}, "only POP has clients"


def test_the_comparison_shows_the_ratio_of_medians_and_marks_worse_rows() -> None:
    found = {"window_us@base": [1.0, 2.0, 9.0], "window_us@this tree": [2.1, 1.06, 3.0]}
    found |= {"window_per_s@base": [100.0] * 3, "window_per_s@this tree": [50.0] * 3}
    console = Console(file=io.StringIO(), width=200)
    for worse_max in (3, 6):
        console.print(compare.table_of("x", found, compare.AREAS["mqtt"], worse_max))
    assert isinstance(console.file, io.StringIO)
    first, second = (line for line in console.file.getvalue().splitlines() if "window" in line)
    assert "1.050" in first
    assert "0.500" in first
    assert "NO" in first
    assert "yes" in second


def test_a_processor_time_below_the_resolution_of_the_clock_is_compared_too() -> None:
    found = {"window_us@base": [0.0], "window_us@this tree": [0.0]}
    found |= {"window_per_s@base": [100.0], "window_per_s@this tree": [100.0]}
    assert compare.table_of("x", found, compare.AREAS["mqtt"], 3).row_count == 1
    found["window_us@this tree"] = [1.0]
    console = Console(file=io.StringIO(), width=200)
    console.print(compare.table_of("x", found, compare.AREAS["mqtt"], 3))
    assert isinstance(console.file, io.StringIO)
    assert "NO" in console.file.getvalue()


@needs_compiler
def test_quick_compares_with_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(quick, "KEPT", kept)
    arguments = ["--base", "HEAD", "--only", "delayed,append", "--runs", "1", "--dir", str(tmp_path)]
    monkeypatch.setattr(quick, "WORSE_MAX", 1e6)
    assert quick.main(arguments) == 0
    found = orjson.loads(kept.read_bytes())
    assert found["commit"] == quick.git("rev-parse", "HEAD").decode().strip()
    assert found["figures"].keys() == {"delayed_us", "delayed_per_s", "append_us", "append_per_s"}
    monkeypatch.setattr(quick, "WORSE_MAX", -100.0)
    assert quick.main(arguments) == 1


# --- the curve --------------------------------------------------------------------------------------------------------


def test_growth_compares_the_ends_of_the_curve_behind_its_beginning() -> None:
    points = [curve.Point(gib / 2, 100.0 if gib <= 2 else float(gib), 2.0) for gib in range(1, 43)]
    by_clock, by_processor = curve.growth(points)
    assert by_clock == pytest.approx(37.5 / 7.5, rel=0.01)
    assert by_processor == 1


def test_the_plot_is_svg_with_a_line_for_each_figure() -> None:
    plot = ElementTree.fromstring(curve.svg_of([curve.Point(1, 5.0, 2.0), curve.Point(2, 6.0, 3.0)]))
    lines = [each.attrib["points"].split() for each in plot.iter() if each.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [2, 2]
    assert float(lines[0][0].split(",")[1]) < float(lines[1][0].split(",")[1]), "what costs more stands higher"


# --- the soak ---------------------------------------------------------------------------------------------------------


def test_the_trend_of_a_figure_ignores_a_saw_tooth_and_a_peak() -> None:
    teeth = [(at * 5.0, 100.0 + at % 7) for at in range(100)]
    teeth[50] = (250.0, 10_000.0)
    assert abs(soak.growth_per_hour(teeth)) < 10
    rising = [(at_s, value + at_s / 3600 * 50) for at_s, value in teeth]
    assert soak.growth_per_hour(rising) == pytest.approx(50, rel=0.2)


def test_a_figure_that_grows_is_named_and_one_that_is_full_is_not() -> None:
    samples = [
        {
            "seconds": at * 5.0,
            "rows": 1_000_000.0 + 1_500 * at,
            "descriptors": 50.0 + at % 3,
            "other_bytes": min(at, 30) * 1e6,
        }
        for at in range(100)
    ]
    assert {name: is_bounded for name, _, _, _, is_bounded in soak.judged(samples)} == {
        "rows": False,
        "descriptors": True,
        "other_bytes": True,
    }
    assert not soak.told(samples, {"rounds": {"plain": 9}, "failures": {}}, Console(file=io.StringIO()))
    steady = samples[:1] * 9
    assert soak.told(steady, {"rounds": {"plain": 9}, "failures": {}}, Console(file=io.StringIO()))
    assert not soak.told(steady, {"rounds": {"plain": 9}, "failures": {"plain": 9}}, Console(file=io.StringIO()))


@needs_compiler
def test_a_short_soak_writes_its_samples_and_their_plot(tmp_path: Path) -> None:
    soak.main(["--minutes", "0.1", "--retention-s", "2", "--segment-mib", "1", "--dir", str(tmp_path), "--out", str(tmp_path)])
    names, *samples = (tmp_path / "soak.csv").read_text().splitlines()
    assert len(samples) >= 2
    assert {*soak.BOUNDS} <= {*names.split(","), "rows"}
    plot = ElementTree.fromstring((tmp_path / "soak.svg").read_text())
    assert len([each for each in plot.iter() if each.tag.endswith("polyline")]) == sum(len(each.names) for each in soak.PANELS)


@given(
    st.lists(st.tuples(st.integers(1, 65_535), st.sampled_from([0, 10, 100, 118, 119, 200, 16_000])), max_size=20),
    st.integers(0, 400),
)
def test_the_floor_answers_whole_packets_and_keeps_an_incomplete_one(publishes: list[tuple[int, int]], cut: int) -> None:
    packets = [encode_publish(b"bench/1", bytes(size), 1, packet_id=packet_id) for packet_id, size in publishes]
    stream = connect(CLEAN, b"c") + b"".join(packets)
    answers, used = floor.answers_to(stream)
    assert (answers, used) == (
        encode_connack(False, ConnectCode.ACCEPTED) + b"".join(b"\x40\2%b" % n.to_bytes(2, "big") for n, _ in publishes),
        len(stream),
    )
    first, used = floor.answers_to(stream[:-cut] if cut else stream)
    assert first + floor.answers_to(stream[used:])[0] == answers


@needs_compiler
def test_the_floor_is_measured_beside_penstock_where_it_is_named(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert mqtt.main(["--only", "window,hundred-single", "--beside", "floor", "--quick", "--json", str(figures)]) == 0
    found = orjson.loads(figures.read_bytes())["figures"]
    assert all(found[f"{row}@{name}"][0] > 0 for row in ("window", "hundred-single") for name in ("floor", "Penstock"))


def test_a_storm_of_logins_writes_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "HONEST_BEFORE_S", 0.2)
    cheap = ["--memory-kib", "64", "--time-cost", "1", "--lanes", "1"]
    assert storm.main(["--devices", "20", *cheap, "--out", str(tmp_path)]) == 0
    root = ElementTree.fromstring((tmp_path / "login-storm.svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 5
    rows = list(csv.DictReader((tmp_path / "login-storm.csv").read_text().splitlines()))
    assert {row["storm"] for row in rows} == {"first login", "login again"}
    assert rows[-1]["devices_in"] == "20"
    assert float(rows[0]["estimate_s"]) >= 0
