"""The reference page of the Python API, from the docstrings of its names."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

import penstock

SECTIONS = {
    "Clients": ("Client", "SyncClient", "Security", "Duration"),
    "Sending": ("OutgoingMessage", "SendReceipt", "Producer", "SyncProducer"),
    "Consuming": (
        "Consumer", "Message", "StreamConsumer", "StreamMessage", "ReceivedMessage", "SyncMessage", "PoppedMessages",
    ),
    "Groups": (
        "GroupCalls", "SyncGroupCalls", "group_settings", "GroupSettings", "GroupDescription", "Exponential", "Backoff",
    ),
    "Schedules": ("ScheduleCalls", "SyncScheduleCalls", "ScheduleDescription", "ScheduleSettings", "MissedPolicy"),
    "Pending delayed messages": ("TimerCalls", "SyncTimerCalls", "Timer", "TimersPage", "TimerCounts"),
    "Dead letters": ("DeadLetterCalls", "SyncDeadLetterCalls", "DeadLetter", "DeadLetterReason"),
    "Transactions": (
        "TransactionCalls", "Transaction", "TransactionChecker", "SyncTransactionCalls", "SyncTransaction",
        "PendingTransaction",
    ),
    "Worker": ("Worker", "WorkerCounts", "Reject", "RetryLater", "WorkerError", "HandlerInvalid"),
    "Middlewares": (
        "Middleware", "HandlerCall", "CallNext", "LogCalls", "MeasureCalls", "TraceCalls", "Tracing", "RetryCalls",
        "LimitRate", "Deduplicate",
    ),
}  # fmt: skip
"""The names of `penstock`, by section. The errors are a table of their own."""

INTEGRATIONS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "Outbox": (
        "`penstock.contrib.sqlalchemy` needs the extra `sqlalchemy`. The [guide](../guides/outbox.md) shows it.",
        {"penstock.contrib.sqlalchemy": ("TransactionalOutbox",)},
    ),
    "FastStream and taskiq": (
        "`penstock.contrib.faststream` needs the extra `faststream`, and `penstock.contrib.taskiq` the extra `taskiq`. The "
        "[guide](../guides/frameworks.md) shows them.",
        {
            "penstock.contrib.faststream.broker": ("PenstockBroker",),
            "penstock.contrib.faststream.registrator": ("PenstockRegistrator", "PenstockRouter"),
            "penstock.contrib.faststream.streammessage": ("PenstockMessage", "PenstockBatch"),
            "penstock.contrib.faststream.command": ("PenstockResponse",),
            "penstock.contrib.faststream.inmemory": ("TestPenstockBroker",),
            "penstock.contrib.taskiq": ("PenstockTasks", "PenstockSchedules"),
        },
    ),
    "Tests": (
        "`penstock.testing` exports `NodeInProcess` as `Node`. The [guide](../guides/worker.md) shows it.",
        {"penstock.testing.nodeinprocess": ("NodeInProcess",)},
    ),
}
"""What other packages of Penstock export, by section: a sentence, and the names by module."""

THEIRS = ("As in FastStream's own", "For AsyncAPI.")
"""How the texts of parameters begin that FastStream documents."""

_HEADS = ("Parameters:", "Args:", "Raises:", "Returns:")
_ENTRY = re.compile(r"^([\w.,* ]+): (.*)$")


@dataclass(slots=True)
class Docstring:
    """A docstring in Google's style, taken apart."""

    prose: str
    """What stands before and between the sections."""
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """The entries of each section, such as the parameters: a name and its text."""

    @classmethod
    def of(cls, member: Any) -> Docstring:
        """Take the docstring of a class or function apart."""
        found = cls("")
        prose: list[str] = []
        section: list[tuple[str, str]] | None = None
        for line in (inspect.getdoc(member) or "").splitlines():
            if line in _HEADS:
                section = found.sections.setdefault(line.rstrip(":"), [])
            elif section is None or (line and not line.startswith(" ")):
                section = None
                prose.append(line)
            elif line and (entry := _ENTRY.match(line.removeprefix("    "))) and not line.startswith("     "):
                section.append((entry[1], entry[2]))
            elif line and section:
                section[-1] = (section[-1][0], f"{section[-1][1]} {line.strip()}")
            elif line:
                section.append(("", line.strip()))
        found.prose = "\n".join(prose).strip()
        return found

    @property
    def summary(self) -> str:
        """The first paragraph."""
        return " ".join(self.prose.partition("\n\n")[0].split())

    @property
    def is_brief(self) -> bool:
        """Whether it is one paragraph."""
        return not self.sections and "\n\n" not in self.prose


Table = Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], str]
"""Returns a table of Markdown for its columns and rows."""


def client_page(note: str, table: Table) -> str:
    """Return the page of the Python API.

    Args:
        note: Comment that says how the page was made.
        table: Makes the tables.
    """
    parts = [
        note,
        "# Client API",
        "The public API is what `penstock.__all__` exports. Every other module is private and may change in any release. "
        "Importing it loads the clients and gRPC, and no part of the node. "
        "A duration is a number of seconds, or a `timedelta`. "
        "Names that end in `_ms` are points in time, in milliseconds since 1970 UTC.",
        table(
            ("Section", "Names"),
            (
                (f"[{title}](#{title.lower().replace(' ', '-')})", ", ".join(f"`{name}`" for name in names))
                for title, names in SECTIONS.items()
            ),
        ).replace("\\[", "["),
    ]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _described(name, getattr(penstock, name), table)
    parts += ["## Errors", "All errors of the clients are in `penstock`.", table(("Error", "Base", "Meaning"), _errors())]
    for title, (sentence, modules) in INTEGRATIONS.items():
        parts += [f"## {title}", sentence]
        for module, names in modules.items():
            for name in names:
                parts += _described(name, getattr(import_module(module), name), table)
    return "\n\n".join(part for part in parts if part) + "\n"


def error_names() -> set[str]:
    """Return the errors of `penstock` that no section lists."""
    listed = {name for names in SECTIONS.values() for name in names}
    return {name for name in set(penstock.__all__) - listed if issubclass(getattr(penstock, name), Exception)}


def _errors() -> Iterator[tuple[str, ...]]:
    for name in sorted(error_names()):
        error = getattr(penstock, name)
        yield f"`{name}`", f"`{error.__base__.__name__}`", Docstring.of(error).summary


def _described(name: str, member: Any, table: Table) -> Iterator[str]:
    """Yield the parts about one name."""
    yield f"### {name}"
    if inspect.isfunction(member):
        yield from _function(name, member, table)
    elif not inspect.isclass(member):
        yield from _value(name, member)
    elif issubclass(member, ProtobufMessage):
        yield "A message of the protocol."
        yield table(("Field", "Meaning"), _protocol_fields(member))
    else:
        yield from _class(name, member, table)


def _class(name: str, kind: type, table: Table) -> Iterator[str]:
    docstring = Docstring.of(kind)
    constructor = vars(kind).get("__init__")
    parameters = docstring.sections.get("Parameters", [])
    if constructor is not None and parameters:
        yield f"```python\n{_signature(name, constructor)}\n```"
    bases = [base.__name__ for base in kind.__bases__ if base is getattr(penstock, base.__name__, None)]
    yield docstring.prose
    if bases:
        yield f"It has what `{bases[0]}` has, besides."
    if parameters:
        yield table(("Parameter", "Type", "Meaning"), _parameters(parameters, constructor))
    yield _raises(docstring)
    attributes = [*_attributes(kind)]
    if attributes:
        yield table(("Attribute", "Type", "Meaning"), attributes)
    methods = dict(_methods(kind))
    brief = {method: function for method, function in methods.items() if Docstring.of(function).is_brief}
    rows = ((f"`{' '.join(_signature(each, brief[each]).split())}`", Docstring.of(brief[each]).summary) for each in brief)
    yield table(("Method", "Effect"), rows) if brief else ""
    for method, function in methods.items():
        if method not in brief:
            yield f"#### {name}.{method}"
            yield from _function(method, function, table)


def _function(name: str, function: Any, table: Table) -> Iterator[str]:
    docstring = Docstring.of(function)
    yield f"```python\n{_signature(name, function)}\n```"
    yield docstring.prose
    if "Args" in docstring.sections:
        yield table(("Parameter", "Type", "Meaning"), _parameters(docstring.sections["Args"], function))
    yield _raises(docstring)


def _raises(docstring: Docstring) -> str:
    entries = docstring.sections.get("Raises", [])
    lines = (
        f"- {', '.join(f'`{each}`' for each in names.split(', '))}: {text}" if names else f"- {text}" for names, text in entries
    )
    return "Raises:\n\n" + "\n".join(lines) if entries else ""


def _value(name: str, member: Any) -> Iterator[str]:
    """Yield what an alias of a type stands for, and the docstring after it."""
    if name == "DeadLetterReason":
        reasons = ", ".join(f"`{reason}`" for reason, _ in member.items())
        yield f"Why a message became a dead letter, as a number of the protocol: {reasons}."
        return
    module = import_module(penstock._HOMES[name])
    body = ast.parse(Path(str(module.__file__)).read_text("utf-8")).body
    for statement, after in pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            yield f"```python\n{ast.unparse(statement)}\n```"
            assert isinstance(after, ast.Expr)
            yield str(ast.literal_eval(after.value))


def _signature(name: str, function: Any) -> str:
    """Return a call with the defaults of its parameters, and what it returns."""
    is_context = hasattr(function, "__wrapped__")
    function = inspect.unwrap(function)
    shown: list[str] = []
    has_star = False
    for parameter in list(inspect.signature(function).parameters.values())[name[0].isupper() or _is_method(function) :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            shown.append("*")
        has_star = has_star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        shown.append(f"{star}{parameter.name}{default}")
    result = inspect.signature(function).return_annotation
    returned = f" -> {result}" if result not in ("None", inspect.Signature.empty) and function.__name__ != "__init__" else ""
    call = f"{name}({', '.join(shown)}){returned}"
    if is_context:
        call = f"{'async ' * inspect.isasyncgenfunction(function)}with {name}({', '.join(shown)})"
    elif inspect.iscoroutinefunction(function):
        call = f"await {call}"
    return "\n".join(textwrap.wrap(call, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


def _is_method(function: Any) -> bool:
    return "." in function.__qualname__


def _default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return "..."
    if isinstance(value, penstock.Security):
        return "PLAIN"
    return "EMPTY" if type(value).__name__ in ("EmptyPlaceholder", "_EmptyPlaceholder") else repr(value)


def _parameters(entries: Iterable[tuple[str, str]], function: Any) -> Iterator[tuple[str, ...]]:
    parameters = inspect.signature(inspect.unwrap(function)).parameters if function is not None else {}
    for names, text in entries:
        if text.startswith(THEIRS):
            continue
        for name in names.split(", "):
            annotation = parameters[name].annotation if name in parameters else ""
            yield f"`{name}`", f"`{annotation}`" if annotation else "", text


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        member = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isroutine(member) and inspect.getdoc(member):
            yield name, member


def _attributes(kind: type) -> Iterator[tuple[str, ...]]:
    """Yield the properties of a class, its fields and what its constructor assigns, each with its docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    constructor = [each.body for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    for body in [tree.body, *constructor]:
        for statement, after in pairwise(body):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]  # type: ignore[assignment]
            if target is None or not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
                continue
            name = ast.unparse(target).removeprefix("self.")
            if not name.startswith("_"):
                annotation = f"`{ast.unparse(statement.annotation)}`" if isinstance(statement, ast.AnnAssign) else ""
                yield f"`{name}`", annotation, " ".join(str(after.value.value).split())
    for name, member in vars(kind).items():
        if isinstance(member, property) and not name.startswith("_") and member.fget is not None:
            yield f"`{name}`", f"`{member.fget.__annotations__['return']}`", Docstring.of(member).summary


def _protocol_fields(kind: type[ProtobufMessage]) -> Iterator[tuple[str, ...]]:
    """Yield the fields of a message of the protocol, with their comments in pop.proto."""
    text = (Path(__file__).parents[1] / "pop" / "proto" / "pop.proto").read_text("utf-8")
    found = re.search(rf"^message {kind.DESCRIPTOR.name} {{$(.*?)^}}$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    for declared, comment in re.findall(r"(\w+) = \d+;(?: *// (.*))?", found[1]):
        sentence = comment[:1].upper() + comment[1:].rstrip(",.")
        yield f"`{declared}`", f"{sentence}." if sentence else ""
