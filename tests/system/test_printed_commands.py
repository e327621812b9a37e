"""Every command of penstock that a page prints works as it is printed.

The pages name no address, so a node on free ports gets the commands by the variables that commands read, and relative paths are
those of the directory in which they run. Only absolute paths and words in capitals stand for something else.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import parse
from tests.system.processes import ROOT, NodeProcess, run_penstock

SYNOPSES = ROOT / "docs" / "reference" / "commands.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != SYNOPSES),
]

PLACEHOLDERS = {
    "/var/lib/penstock": "penstock-data",
    "/tmp/demo/data": "penstock-data",
    "/backup/plant": "backup",
    "/tmp/": "",
    "MESSAGE_ID": "0000000000000000",
    " --admin plant-1.example.org:8080": "",
}
"""What stands for something else, and what the tests put there."""

ENDLESS = ("serve", "demo", "drain", "worker", "sub", "top", "reconcile", "cluster", "context", "repair", "restore", "user")
"""Commands that are only parsed here: they run until they are stopped, take long, need a stopped node or a cluster, or change
settings of the user. Tests of their own run them."""

REFUSED = {
    ("access", "test"): "denied",
    ("clients", "kick"): "no connected client",
    ("clients", "show"): "no connected client",
    ("clock", "accept"): "nothing to accept",
    ("dlq", "show"): "dead letter",
    ("inspect", "sessions"): "sensor-7",
    ("rocketmq", "reconnect"): "CLIENT",
    ("rocketmq", "threads"): "CLIENT",
    ("rocketmq", "verify"): "no message",
    ("story",): "no message",
    ("timer", "cancel"): "not a recall handle",
}
"""Commands that may fail here, because what they name is not there. The text is in what they say then."""


def commands_in(page: Path) -> Iterator[str]:
    """Yield the commands in the blocks of code of a page, without a prompt, a comment or what follows in a pipe."""
    is_fenced, begun = False, ""
    for line in page.read_text("utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            continue
        text = line.strip().removeprefix("$ ")
        if begun:
            text, begun = begun + text, ""
        elif not (is_fenced or line.startswith("    ")) or not re.match(r"(?:[A-Z_]+=\S+ )*penstock [a-z][a-z-]*(?: |$)", text):
            continue
        if text.endswith("\\"):
            begun = text[:-1]
            continue
        yield text


def words_of(command: str) -> list[str]:
    """Return the arguments of a command: what a shell passes to `penstock`."""
    for shown, meant in PLACEHOLDERS.items():
        command = command.replace(shown, meant)
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;>")
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;>"):
            break
        words.append(word)
    return words[words.index("penstock") + 1 :]


COMMANDS = [*dict.fromkeys(tuple(words_of(command)) for page in PAGES for command in commands_in(page))]


def test_the_pages_print_commands_of_every_kind() -> None:
    assert {"serve", "pop", "send", "dlq", "group", "inspect", "reconcile", "backup"} <= {each[0] for each in COMMANDS}
    assert words_of("penstock pub a '#' -q  # a comment | more") == ["pub", "a", "#", "-q"]
    assert words_of("PENSTOCK_TOKEN=x penstock inspect log --json | head") == ["inspect", "log", "--json"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_printed_command_has_arguments_that_exist(words: tuple[str, ...]) -> None:
    assert callable(parse(words).run)


def test_the_printed_commands_work_in_the_order_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.md", "*.svg", "images"))
    node = NodeProcess(tmp_path / "penstock-data").start(directory=tmp_path)
    node.stop()  # flushes the index, which `inspect` reads
    node.start(directory=tmp_path)
    for name, listener in (("TARGET", "pop"), ("MQTT", "mqtt"), ("ADMIN", "admin")):
        monkeypatch.setenv(f"PENSTOCK_{name}", node.addresses[listener])
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "penstock-data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    failed = []
    for words in COMMANDS:
        if words[0] in ENDLESS or words[:2] == ("topics", "tail"):
            continue
        if "billing" in words and words[1] != "create":
            run_penstock("group", "create", "billing", "plant/#")  # it is there, unless a command before has deleted it
        ended = run_penstock(*words, directory=tmp_path)
        said = ended.stdout + ended.stderr
        excuses = [text for known, text in REFUSED.items() if words[: len(known)] == known]
        if "Traceback" in said or (ended.returncode and not any(text in said for text in excuses)):
            failed.append(f"{' '.join(words)}: {said}")
    node.close()
    assert failed == []
