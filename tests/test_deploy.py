"""The dashboard and the alerts in deploy/ ask for metrics and labels that a live node has, and its units fit the node."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.main import main
from penstock.node.node import EXIT_INDEX_DAMAGED, EXIT_REPLICA_FAILED, EXIT_RESTART, EXIT_STORE_FAILED
from tests.gateway.wire import Broker
from tests.reference import families
from tests.waiting import PROCESS_S

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "penstock-alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "penstock.json"

OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that Prometheus adds, or that histograms have."""

_METRIC = re.compile(r"\b((?:penstock|process)_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield the expressions of alerts and panels, each with the texts that show labels."""
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values()).replace("$value", "")
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


@pytest.fixture
async def labels(tmp_path: Path) -> dict[str, set[str]]:
    """Return the labels of each metric that a live node shows."""
    broker = await Broker(tmp_path, {}).start()
    try:
        client = await broker.connect("a")
        await client.subscribe(("a", 1))
        broker.node.pop.groups.get_or_create("g", "a")
        await client.publish("a", b"x", 1)
        await client.message()
        found: dict[str, set[str]] = {"up": set()}
        for family in text_string_to_metric_families(generate_latest(broker.node.registry).decode()):
            found.setdefault(family.name + "_total" if family.type == "counter" else family.name, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        for metric in [*broker.node.registry.collect(), *await families()]:  # also those with labels that have no samples yet
            name = metric.name + "_total" if metric.type == "counter" else metric.name
            found.setdefault(name, set()).update(getattr(metric, "_labelnames", ()))
    finally:
        await broker.stop()
    return found


async def test_each_metric_and_label_of_a_query_is_one_of_a_node(labels: dict[str, set[str]]) -> None:
    wrong = []
    for expression, shown in queries():
        used = _METRIC.findall(expression)
        assert used, f"no metric in {expression}"
        wrong += [name for name, _ in used if name not in labels]
        known = OF_PROMETHEUS.union(*(labels.get(name, set()) for name, _ in used))
        asked = {label for _, matchers in used for label in _LABEL.findall(re.sub(r'"[^"]*"', '""', matchers))}
        asked |= {label.strip() for by in _BY.findall(expression) for label in by.split(",")}
        wrong += [f"{label} in {expression}" for label in (asked | set(_SHOWN.findall(shown))) - known]
    assert wrong == []


def test_each_alert_says_what_it_means_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        for command in re.findall(r"`penstock ([a-z]+(?: [a-z]+)?)", rule["annotations"]["description"]):
            words = command.split()
            known = words if words[0] in ("group", "dlq", "inspect", "schedule") else words[:1]
            with pytest.raises(SystemExit) as ended:
                main([*known, "--help"])
            assert ended.value.code == 0, command
    capsys.readouterr()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        taken = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells |= taken


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_files() -> None:
    for arguments in (("check", "rules", str(RULES)), ("check", "config", str(RULES.with_name("prometheus.yml")))):
        ended = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=PROCESS_S, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    text = DASHBOARD.read_text("utf-8").replace("$__rate_interval", "1m")
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    found = [{"record": "query", "expr": target["expr"]} for panel in panels for target in panel["targets"]]
    numbered = [rule | {"labels": {"number": str(number)}} for number, rule in enumerate(found)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": numbered}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_no_fault_with_the_metrics(tmp_path: Path) -> None:
    broker = await Broker(tmp_path, {}).start()
    try:
        shown = generate_latest(broker.node.registry)
    finally:
        await broker.stop()
    ended = await asyncio.to_thread(
        subprocess.run, ["promtool", "check", "metrics"], input=shown, capture_output=True, timeout=PROCESS_S, check=False
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, b"", b"")


NODE = 'job="penstock",instance="a"'
GROUP = f'{NODE},group="g",filter="a/#"'


def buckets(name: str, slow: str, fast: str) -> dict[str, str]:
    """Return the series of a histogram: those above a tenth of a second, and those below."""
    return {
        f'{name}_bucket{{{NODE},le="0.1"}}': fast,
        f'{name}_bucket{{{NODE},le="1.0"}}': slow,
        f'{name}_bucket{{{NODE},le="+Inf"}}': slow,
    }


def group(visible: int, waiting: int) -> dict[str, str]:
    """Return the series of a group."""
    figures = {"visible": visible, "waiting": waiting, "in_flight": 0}
    return {f"penstock_pop_group_{name}{{{GROUP}}}": f"{value}x60" for name, value in figures.items()}


def backed_up(last: str, started: str) -> dict[str, str]:
    """Return the series of a node: when its last backup was, and when it was started. The rules see times from 0 on."""
    return {
        f"penstock_backup_last_success_timestamp_seconds{{{NODE}}}": last,
        f"process_start_time_seconds{{{NODE}}}": started,
    }


def role(instance: str, leading: str) -> dict[str, str]:
    """Return the series that says whether a replica leads."""
    return {f'penstock_replication_role{{job="penstock",instance="{instance}",cluster="prod",role="leading"}}': leading}


def committed(position: str) -> dict[str, str]:
    """Return the series of a leader whose log grows."""
    return {
        **role("a", "1x60"),
        f"penstock_log_end_bytes{{{NODE}}}": "1000+1000x60",
        f"penstock_replication_committed_position{{{NODE}}}": position,
    }


ALERTS: list[tuple[str, dict[str, str], dict[str, bool]]] = [
    ("PenstockDown", {f"up{{{NODE}}}": "1x3 0x20"}, {"3m": False, "5m": False, "8m": True}),
    ("PenstockDown", {'up{job="other",instance="a"}': "0x20"}, {"8m": False}),
    ("PenstockRestartsOften", {f"process_start_time_seconds{{{NODE}}}": "1 2 3 4x60"}, {"1m": False, "5m": True, "50m": False}),
    ("PenstockReadOnly", {f"penstock_store_read_only{{{NODE}}}": "0x2 1x5 0x5"}, {"1m": False, "4m": True, "10m": False}),
    (
        "PenstockDiskFills",
        {f"penstock_disk_free_bytes{{{NODE}}}": "10e9-100e6x100", f"penstock_disk_reserve_bytes{{{NODE}}}": "1e9x100"},
        {"20m": False, "70m": True},
    ),
    (
        "PenstockDiskFills",
        {f"penstock_disk_free_bytes{{{NODE}}}": "3e9x100", f"penstock_disk_reserve_bytes{{{NODE}}}": "1e9x100"},
        {"70m": False},
    ),
    ("PenstockSyncSlow", buckets("penstock_log_sync_seconds", "0+10x60", "0+0x60"), {"5m": False, "20m": True}),
    ("PenstockSyncSlow", buckets("penstock_log_sync_seconds", "0+1000x60", "0+999x60"), {"20m": False}),
    ("PenstockLoopLate", buckets("penstock_loop_lag_seconds", "0+10x60", "0+0x60"), {"5m": False, "20m": True}),
    ("PenstockIndexBehind", {f"penstock_index_stopped{{{NODE}}}": "0x5 1x10"}, {"5m": False, "9m": True}),
    ("PenstockGroupAbandoned", group(visible=5, waiting=0), {"10m": False, "20m": True}),
    ("PenstockGroupAbandoned", group(visible=5, waiting=1), {"20m": False}),
    ("PenstockGroupAbandoned", group(visible=0, waiting=0), {"20m": False}),
    (
        "PenstockDeadLetters",
        {f"penstock_pop_dead_lettered_total{{{NODE}}}": "0x5 3x60"},
        {"4m": False, "8m": True, "40m": False},
    ),
    (
        "PenstockQuotaNearlyFull",
        {
            f'penstock_quota_held{{{NODE},resource="queues"}}': "9x60",
            f'penstock_quota_maximum{{{NODE},resource="queues"}}': "10x60",
            f'penstock_quota_held{{{NODE},resource="groups"}}': "9x60",
            f'penstock_quota_maximum{{{NODE},resource="groups"}}': "0x60",
        },
        {"10m": False, "20m": True},
    ),
    (
        "PenstockCertificateExpires",
        {f'penstock_certificate_expires_timestamp_seconds{{{NODE},listener="pop"}}': "1209900x30"},
        {"12m": False, "20m": True},
    ),
    (
        "PenstockCertificateExpired",
        {f'penstock_certificate_expires_timestamp_seconds{{{NODE},listener="pop"}}': "86700x30"},
        {"4m": False, "6m": True},
    ),
    ("PenstockBackupOld", backed_up("-172500x30", "-1e6x30"), {"12m": False, "20m": True}),
    ("PenstockBackupOld", backed_up("0x30", "-1e6x30"), {"20m": False}),
    ("PenstockBackupMissing", backed_up("0x30", "-86100x30"), {"12m": False, "20m": True}),
    ("PenstockBackupMissing", backed_up("-172500x30", "-1e6x30"), {"20m": False}),
    ("PenstockNoLeader", {**role("a", "1x5 0x20"), **role("b", "0x20")}, {"4m": False, "10m": True}),
    ("PenstockNoLeader", {**role("a", "1x5 0x20"), **role("b", "0x5 1x20")}, {"4m": False, "10m": False}),
    ("PenstockNotCommitting", committed("1000x60"), {"1m": False, "10m": True}),
    ("PenstockNotCommitting", committed("900+1000x60"), {"10m": False}),
    (
        "PenstockReplicaLeft",
        {f"penstock_replication_in_sync{{{NODE}}}": "3x5 2x120", **role("a", "1x130")},
        {"4m": False, "25m": True},
    ),
    (
        "PenstockCoordinatorGone",
        {f"penstock_replication_coordinator_reachable{{{NODE}}}": "1x5 0x10"},
        {"4m": False, "10m": True},
    ),
]
"""Name of an alert, the values of its metrics minute by minute, and when it fires."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    for name, series, times in ALERTS:
        expression = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        firing = [{"labels": "{}", "value": 1}]
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [
                    {"expr": expression, "eval_time": at, "exp_samples": firing if fires else []} for at, fires in times.items()
                ],
            }
        )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    ended = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


# --- systemd ----------------------------------------------------------------------------------------------------------

UNITS = DEPLOY / "systemd"
HAS_SYSTEMD = shutil.which("systemd-analyze") is not None
EXPOSURE_MAX = 1.5
"""The exposure of the service by `systemd-analyze security`, from 0 to 10, as docs/guides/deployment.md states it."""


@pytest.mark.skipif(not HAS_SYSTEMD, reason="systemd-analyze is not installed (apt-get install systemd)")
def test_systemd_accepts_the_units_and_finds_little_exposed(tmp_path: Path) -> None:
    service = (UNITS / "penstock.service").read_text("utf-8").replace("/opt/penstock/bin/penstock", "/bin/true")
    (tmp_path / "penstock.service").write_text(service)
    shutil.copy(UNITS / "penstock.socket", tmp_path)
    security = ["security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", "./penstock.service"]
    for arguments in (["verify", "./penstock.service", "./penstock.socket"], security):
        ended = subprocess.run(
            ["systemd-analyze", "--no-pager", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout


def test_the_service_is_not_started_again_when_a_person_should_look_first() -> None:
    service = (UNITS / "penstock.service").read_text("utf-8")
    (left,) = re.findall(r"^RestartPreventExitStatus=(.*)$", service, re.MULTILINE)
    statuses = {int(status) for status in left.split()}
    assert {EXIT_STORE_FAILED, EXIT_REPLICA_FAILED} < statuses
    assert not {EXIT_INDEX_DAMAGED, EXIT_RESTART} & statuses
