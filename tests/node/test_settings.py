"""Where the command line, the clients and the worker find a node: what they are given, variables, contexts, defaults."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from penstock import Client, SyncClient, Worker
from penstock.cli.main import main
from penstock.pop.client.security import PLAIN, Security, node_of
from penstock.settings import DEFAULTS, NAMES, PREFIX, SettingInvalid, find_settings, read_contexts

FLAT, PLANT = {"target": "flat:1", "token": "of the context"}, {"target": "plant:1"}


@pytest.fixture(autouse=True)
def _contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "context"):
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def write_contexts(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "penstock" / "contexts.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("given", "variables", "context", "found"),
    [
        ({}, {"TARGET": ""}, "", {"target": DEFAULTS["target"]}),
        ({}, {}, "flat", FLAT),
        ({}, {"TARGET": "there:1"}, "flat", {"target": "there:1"}),
        ({}, {"TOKEN": "of the variable"}, "flat", {"target": "flat:1", "token": "of the variable"}),
        ({}, {"TOKEN_FILE": "file"}, "flat", {"target": "flat:1", "token_file": "file"}),
        ({}, {"CONTEXT": "plant"}, "flat", PLANT),
        ({"target": "here:1"}, {"TARGET": "there:1"}, "flat", {"target": "here:1"}),
        ({"token_file": "file"}, {"TOKEN": "of the variable"}, "", {"target": DEFAULTS["target"], "token_file": "file"}),
    ],
)
def test_what_is_given_comes_before_variables_and_these_before_the_context(
    given: dict[str, str | None],
    variables: dict[str, str],
    context: str,
    found: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_contexts(tmp_path, json.dumps({"current": context, "contexts": {"flat": FLAT, "plant": PLANT}}))
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    assert find_settings("target", given) == found


async def test_clients_and_workers_take_what_they_are_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = tmp_path / "ca.pem"
    roots.write_text("roots")
    write_contexts(tmp_path, json.dumps({"current": "flat", "contexts": {"flat": FLAT | {"ca_file": str(roots)}}}))
    assert node_of(None, None) == ("flat:1", Security(token="of the context", tls=True, root_certificates=b"roots"))
    assert node_of("here:1", None) == ("here:1", PLAIN), "the token of the context is for its node"
    assert node_of(None, PLAIN) == ("flat:1", PLAIN)
    assert Worker().target == "flat:1"
    monkeypatch.setenv("PENSTOCK_TARGET", "no address")
    for made in (Client, SyncClient):
        with pytest.raises(ValueError, match="no address"):
            made()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no token"),
        (b" \n", "has no token"),
        (b"one\ntwo\n", "has several lines"),
        (b"a\0b", r"has the character '\\x00' at place 2"),
        (b"a\xff", r"has the character '\\udcff' at place 2"),
        ("\N{PILE OF POO}".encode(), "has the character '.*' at place 1"),
    ],
)
def test_a_token_that_grpc_can_not_send_is_refused(
    content: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    for command in (["send", "a", "body"], ["group", "list"]):
        assert main([*command, "--token-file", str(file)]) == 2
        assert re.search(f": token_file is {file}, which {problem}: write one line of", capsys.readouterr().err)
    if not content.strip() or b"\0" in content:
        return  # no variable has these
    monkeypatch.setenv("PENSTOCK_TOKEN", os.fsdecode(content))
    with pytest.raises(SettingInvalid, match=rf"^token \(from PENSTOCK_TOKEN\) {problem}"):
        node_of(None, None)
    with pytest.raises(ValueError, match=f"^token {problem}"):
        Security(token=os.fsdecode(content).strip())


def test_a_value_that_can_not_be_used_is_named_with_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_contexts(tmp_path, json.dumps({"current": "flat", "contexts": {"flat": FLAT | {"tls": "perhaps"}}}))
    assert main(["group", "list"]) == 2
    assert "tls (from the context 'flat') is 'perhaps': set it to yes or no." in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_TARGET", "nonsense")
    assert main(["group", "list"]) == 2
    assert "target (from PENSTOCK_TARGET) is 'nonsense': it must be HOST:PORT" in capsys.readouterr().err
    with pytest.raises(SettingInvalid, match=r"^target \(from PENSTOCK_TARGET\) is 'nonsense': give HOST:PORT"):
        SyncClient()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "are no JSON"),
        ("[]", "it must have `current` and `contexts`"),
        ('{"current": "x", "contexts": {}}', "`current` is 'x', which must be one of"),
        ('{"current": "", "contexts": {"a": {"port": "1"}}}', "the context 'a' has the setting 'port'"),
    ],
)
def test_a_file_of_contexts_that_can_not_be_used_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = write_contexts(tmp_path, text)
    with pytest.raises(SettingInvalid, match=message) as raised:
        read_contexts()
    assert str(file) in str(raised.value)


def test_the_command_writes_contexts_that_nobody_else_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["context", "add", "flat", "--target", "flat:1", "--tls", "--ca-file", "ca.pem"]) == 0
    assert main(["context", "add", "plant", "--mqtt", "plant:2"]) == 0
    file = tmp_path / "penstock" / "contexts.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == [file.name]
    assert main(["context", "add", "plant", "--mqtt", "plant:2", "--admin", "plant:3"]) == 0
    assert main(["context", "add", "plant", "--mqtt", "plant:2"]) == 0
    assert capsys.readouterr().out == "added flat\nadded plant\nreplaced plant\nreplaced plant, which no longer has admin\n"
    assert main(["context", "use", "plant"]) == 0
    capsys.readouterr()
    assert main(["context", "list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["flat", "no", "flat:1", "default", "default", "default"],
        ["plant", "yes", "default", "plant:2", "default", "default"],
    ]
    assert main(["context", "show", "flat", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"target": "flat:1", "tls": "yes", "ca_file": str(Path("ca.pem").absolute())}
    assert main(["context", "remove", "plant"]) == main(["context", "show", "flat"]) == 0
    assert main(["context", "use", "plant"]) == 2
    assert "There is no context 'plant'" in capsys.readouterr().err
    assert main(["group", "list", "--context", "gone"]) == 2
    assert "There is no context 'gone'" in capsys.readouterr().err
    assert main(["context", "add", "empty"]) == 1
    for name in ("", " ", "a\nb"):
        assert main(["context", "add", name, "--target", "plant:1"]) == 1
        assert f"The name {name!r} can't be used: give one of printable characters." in capsys.readouterr().err
