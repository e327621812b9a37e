"""`penstock.__all__` is the public API: complete, documented, and the same for asyncio and for threads."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message as ProtobufMessage

import penstock
from penstock import (
    Client,
    DeadLetterCalls,
    GroupCalls,
    Message,
    SyncClient,
    SyncDeadLetterCalls,
    SyncGroupCalls,
    SyncMessage,
    SyncTransaction,
    SyncTransactionCalls,
    Transaction,
    TransactionCalls,
)
from penstock.pop import errors
from tests.waiting import PROCESS_S

PAIRS = [
    (Client, SyncClient),
    (DeadLetterCalls, SyncDeadLetterCalls),
    (GroupCalls, SyncGroupCalls),
    (Message, SyncMessage),
    (Transaction, SyncTransaction),
    (TransactionCalls, SyncTransactionCalls),
]

NODE_ONLY = {"GroupInvalid", "ExpressionInvalid"}
"""Errors that reach a client as RequestInvalid."""


def is_ours(member: object) -> bool:
    """Return whether a name of the API is a class that is documented here, and not in pop.proto."""
    return inspect.isclass(member) and not issubclass(member, ProtobufMessage)


def methods(kind: type) -> Iterator[tuple[str, object]]:
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


def test_type_checkers_and_the_running_program_see_the_same_names() -> None:
    tree = ast.parse(Path(penstock.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    typed = {alias.name: each.module for each in block.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert sorted(typed) == sorted(penstock.__all__)
    assert {name: getattr(penstock, name) for name in typed} == {
        name: getattr(sys.modules[str(module)], name) for name, module in typed.items()
    }
    assert set(penstock.__all__) <= set(dir(penstock))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Clientele'"):
        penstock.Clientele  # type: ignore[attr-defined]  # noqa: B018


def test_each_error_of_a_client_is_public() -> None:
    kinds = {name for name, member in vars(errors).items() if inspect.isclass(member) and issubclass(member, errors.PopError)}
    assert kinds - NODE_ONLY <= set(penstock.__all__)


@pytest.mark.parametrize("name", [name for name in penstock.__all__ if is_ours(getattr(penstock, name))])
def test_each_public_class_and_method_is_documented(name: str) -> None:
    kind = getattr(penstock, name)
    assert kind.__doc__
    assert [each for each, member in methods(kind) if not member.__doc__] == []


@pytest.mark.parametrize(("asynchronous", "synchronous"), PAIRS)
def test_both_clients_take_the_same_arguments(asynchronous: type, synchronous: type) -> None:
    expected = dict(methods(asynchronous))
    only_asynchronous = {"aclose", "stream", "answer_checks"}
    assert expected.keys() - only_asynchronous == {name for name, _ in methods(synchronous)} - {"close"}
    for name, member in methods(synchronous):
        if name == "close" or isinstance(member, property):
            continue
        parameters = dict(inspect.signature(expected[name]).parameters)  # type: ignore[arg-type]
        found = dict(inspect.signature(member).parameters)  # type: ignore[arg-type]
        if name == "consume":  # This client pops nothing ahead, so the group's invisible time serves.
            for only in ("prefetch", "first_max", "in_order_max", "invisible", "fast_max", "ack_hold"):
                del parameters[only]
            del found["invisible"]
        assert list(found.values()) == list(parameters.values()), name


@pytest.mark.nightly
def test_a_type_checker_knows_the_types_of_the_api(tmp_path: Path) -> None:
    program = tmp_path / "service.py"
    program.write_text("import penstock\nreveal_type(penstock.SyncClient('x').send)\nreveal_type(penstock.Overloaded)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert "penstock.pop.client.outgoing.SendReceipt" in ended.stdout, ended.stdout
    assert "def (*args: object) -> penstock.pop.errors.Overloaded" in ended.stdout.replace("builtins.", "")
