"""What the documents name exists: links, anchors of headings, files, commands of make and of penstock, options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import penstock
from bench import tables
from penstock.cli.main import main
from penstock.node.document import document_options

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tests").glob("README.md"),
        *(ROOT / "tests").glob("*/README.md"),
    ]
)
HISTORY = "CHANGELOG.md"
"""Names options and files of the past as well."""

_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|toml|proto|md|yml|c))(?:::\w+)?`")
_MAKE = re.compile(r"\bmake ((?:[a-z-]+ ?)+)")
_COMMAND = re.compile(r"^ *(?:\.venv/bin/)?penstock ((?:[a-z][a-z-]* ?)+)", re.MULTILINE)
_OPTION = re.compile(r"`((?:store|mqtt|pop|timer|admin|tracing)\.[a-z]+(?:_[a-z]+|\.[a-z_]+)+)(?: = [^`]*)?`")
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

ELSEWHERE = {"docs/transport.md", "pyproject.toml"}
"""Files that are named where no page of this repository is meant, or without their path."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


@cache
def file_names() -> frozenset[str]:
    """Return the names of all files, for those that a page names without a folder."""
    folders = ("penstock", "gateway", "pop", "store", "timer", "spark", "tests", "bench", "docs", "examples")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())


def anchors_of(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as Python-Markdown's toc makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def links(page: str) -> Iterator[tuple[str, str]]:
    yield from _LINK.findall(_CODE.sub("", text_of(page)))


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: str) -> None:
    wrong = []
    for target, anchor in links(page):
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists():
            wrong.append(target)
        elif anchor and path.suffix == ".md" and anchor not in anchors_of(path.read_text("utf-8")):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = set(_FILE.findall(text_of(page))) - ELSEWHERE
    gone = {name for name in named if not ((ROOT / name).exists() or ("/" not in name and name in file_names()))}
    here = (ROOT / page).parent
    gone = {name for name in gone if not (here / name).exists()}
    gone = {name for name in gone if not (page == "docs/conformance.md" and (ROOT / "tests" / "gateway" / name).exists())}
    assert gone == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_that_a_page_names_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    code = [*re.findall(r"`([^`\n]+)`", text_of(page)), *re.findall(r"^    (make .+)$", text_of(page), re.MULTILINE)]
    named = {name for line in code for match in _MAKE.findall(line.split("#")[0]) for name in match.split()}
    assert named <= targets


@cache
def known_options() -> frozenset[str]:
    """Return all options, each after its section."""
    section, known = "", set()
    for line in document_options().splitlines():
        if found := re.match(r"(?:# )?\[\[?([\w.]+)\]\]?$", line):
            section = found[1]
        elif found := re.match(r"(?:# )?(\w+) = ", line):
            known.add(f"{section}.{found[1]}" if section else found[1])
    return frozenset(known)


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_every_option_that_a_page_names_exists(page: str) -> None:
    known = known_options()
    sections = {name.rsplit(".", 1)[0] for name in known}
    named = set(_OPTION.findall(text_of(page)))
    gone = {name for name in named if name not in known and name not in sections}
    assert {name for name in gone if not name.startswith(("store.index.", "store.snapshot.", "store.record"))} == set()


@cache
def status_of_help(*command: str) -> object:
    """Return the exit status of a command with `--help`, which is 0 if the command exists."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    return ended.value.code


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in {tuple(found.split()) for found in _COMMAND.findall(text_of(page))}:
        known = [*words[:2]] if words[0] in ("group", "dlq", "inspect") else [words[0]]
        assert status_of_help(*known) == 0, known
    capsys.readouterr()


def test_the_reference_of_the_client_has_every_public_name() -> None:
    page = text_of("docs/reference/client.md")
    assert set(penstock.__all__) <= set(re.findall(r"^(?:### |\| `)(\w+)", page, re.MULTILINE))


OTHERS = {
    "penstock_node",
    "penstock_client",
    "penstock_outbox",
    "penstock_worker_messages_total",
    "penstock_worker_call_seconds",
}
"""Fixtures for pytest, a table of a database, and the metrics of workers, which are no metrics of the node."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/reference/metrics.md"])
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"`(penstock_[a-z_]+)`", text_of(page))) - OTHERS
    assert named <= set(re.findall(r"`(penstock_[a-z_]+)[`{]", text_of("docs/reference/metrics.md")))


def test_the_site_lists_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_the_index_lists_every_guide() -> None:
    listed = {target for target, _ in links("docs/index.md")}
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/guides/")} <= listed


def test_commands_to_install_work_from_a_checkout() -> None:
    """Penstock is not on the package index: an install command names the checkout."""
    wrong = [page for page in PAGES if re.search(r"pip install '?penstock", text_of(page))]
    assert wrong == []


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_measured_table_is_what_the_benchmark_wrote(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "<!-- figures: " in text
    assert tables.with_tables(text, tables.FIGURES) == text, "run `python -m bench tables`"


def test_a_table_has_the_median_for_each_broker() -> None:
    measured = {
        "machine": {"date": "2026-01-02", "commit": "abc", "cpus": 2, "filesystem": "ext4", "python": "3.11.7"},
        "lines": [{"figure": "one", "title": "the first", "unit": "x"}, {"figure": "two", "title": "the second", "unit": ""}],
        "figures": {"one": [2.0, 4.0, 3.0], "one@ours": [200.0, 400.0, 300.0], "one@theirs": [100.0], "two": [5.0]},
    }
    assert tables.table_of(measured, ["one"]).splitlines()[:3] == [
        "|  | ours | theirs | median | lowest to highest |",
        "| --- | --: | --: | --: | --: |",
        "| the first | 300 | 100 | 3 x | 2 to 4 |",
    ]
    with pytest.raises(tables.TableFailed, match="There is no figure three"):
        tables.table_of(measured, ["two", "three"])
