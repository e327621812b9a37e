"""Who calls the nodes in the fuzzers, and what each may do: as rules for a node, and again in plain Python.

The node decides by its rules, and the fuzzers judge its answers by `Caller`. Neither knows of the other, so a mistake in one of
them shows.
"""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from argon2 import PasswordHasher

from penstock.access.options import TokenOptions

KEY = "a key of the fuzzers, which is long enough for HS256"
TOKENS_S = 24 * 3600


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a filter matches a topic."""
    return contains(topic_filter, topic)


def contains(outer: str, inner: str) -> bool:
    """Return whether a filter matches all topics that another one matches. A topic is a filter, too."""
    if inner.startswith("$") and outer[:1] in ("#", "+"):
        return False
    ours, theirs = outer.split("/"), inner.split("/")
    for at, level in enumerate(ours):
        if level == "#":
            return True
        if at == len(theirs) or theirs[at] == "#" or (level not in ("+", theirs[at])):
            return False
    return len(ours) == len(theirs)


def overlap(one: str, other: str) -> bool:
    """Return whether some topic matches both filters. Neither begins with a wildcard while the other begins with `$`."""
    ours, theirs = one.split("/"), other.split("/")
    for at in range(max(len(ours), len(theirs))):
        mine, yours = (levels[at] if at < len(levels) else None for levels in (ours, theirs))
        if mine == "#" or yours == "#":
            return True
        if mine is None or yours is None or (mine != yours and "+" not in (mine, yours)):
            return False
    return True


class Caller(NamedTuple):
    """Somebody who calls.

    Parameters:
        name: the user name over MQTT.
        password: over MQTT.
        token: over gRPC.
        is_known: the node must let it in.
        reads: filters that it may subscribe to, receive and pop.
        hides: filters that it may not, whatever `reads` says.
        mutes: filters of which it receives nothing over MQTT.
        writes: filters of topics to which it may publish and send.
        consumes, admins: patterns of groups.
        may_all: everybody may do everything: the node asks nobody who it is.
    """

    name: str = ""
    password: str = ""
    token: str = ""
    is_known: bool = True
    reads: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    mutes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()
    may_all: bool = False

    def may_read(self, topic_filter: str) -> bool:
        """Return whether it may subscribe to a filter, or pop by it."""
        return self.may_all or (
            any(contains(each, topic_filter) for each in self.reads)
            and not any(overlap(each, topic_filter) for each in self.hides)
        )

    def may_subscribe(self, topic_filter: str) -> bool:
        """Return whether it may subscribe to a filter, which may be `$share/GROUP/FILTER`."""
        if topic_filter.startswith("$share/"):
            _, group, topic_filter = topic_filter.split("/", 2)
            return self.may_consume(group) and self.may_read(topic_filter)
        return self.may_read(topic_filter)

    def may_receive(self, topic: str) -> bool:
        """Return whether it may get a message of a topic over MQTT."""
        return self.may_read(topic) and not any(contains(each, topic) for each in self.mutes)

    def may_write(self, topic: str) -> bool:
        """Return whether it may publish or send to a topic."""
        return self.may_all or any(contains(each, topic) for each in self.writes)

    def may_consume(self, group: str) -> bool:
        return self.may_all or any(fnmatchcase(group, each) for each in self.consumes)

    def may_admin(self, group: str) -> bool:
        """Return whether it may administer a group; without a name, all groups."""
        return self.may_all or any(fnmatchcase(group, each) if group else each == "*" for each in self.admins)


EVERYBODY = Caller(may_all=True)
"""Whoever calls a node without access control."""


def _token(name: str, **claims: Any) -> str:
    return jwt.encode({"sub": name, "exp": int(time.time()) + TOKENS_S} | claims, KEY, "HS256")


OWNER_TOKEN = _token("owner", roles=["owners"])
OUTDATED = _token("owner", roles=["owners"], exp=int(time.time()) - 3600)
UNSIGNED = jwt.encode({"sub": "keeper", "exp": int(time.time()) + TOKENS_S}, "", "none")

KEEPER = Caller("keeper", "kept", "kept", reads=("#", "$dlq/#"), writes=("#", "$delayed/#"), consumes=("*",), admins=("*",))
"""May do everything. The fuzzers themselves use it, to see what comes of what others do."""

KNOWN = (
    Caller("reader", "r", "r", reads=("seq/#", "call/#"), hides=("seq/secret/#", "call/secret/#"), consumes=("call*", "seq")),
    Caller("writer", "w", "w", writes=("seq/#", "call/#"), admins=("call-2",)),
    Caller(
        "owner",
        OWNER_TOKEN,
        OWNER_TOKEN,
        reads=("seq/own/#", "seq/a", "call/own/#"),
        writes=("seq/own/#", "call/own/#"),
        consumes=("call", "seq"),
        admins=("call",),
    ),
    Caller(
        "partial",
        "p",
        "p",
        reads=("seq/#", "call/a"),
        mutes=("seq/secret/#",),
        writes=("seq/a", "call/a"),
        consumes=("hidden",),
    ),
    Caller("nobody", "n", "n"),
)
STRANGERS = (
    Caller(is_known=False),
    Caller("reader", "wrong", "wrong", is_known=False),
    Caller("owner", OUTDATED, OUTDATED, is_known=False),
    Caller("keeper", UNSIGNED, UNSIGNED, is_known=False),
)
"""Whom the node must not let in."""

CALLERS = (*KNOWN, *KNOWN, *KNOWN, *KNOWN, KEEPER, KEEPER, KEEPER, *STRANGERS)
"""Those of a node with access control, the known ones more often."""

RULES = f"""
[[rule]]
deny = ["receive"]
users = ["partial"]
topics = ["seq/secret/#"]

[[rule]]
deny = ["read"]
users = ["reader"]
topics = ["seq/secret/#", "call/secret/#"]

[[rule]]
allow = ["subscribe", "pop"]
users = ["reader", "part*"]
topics = ["seq/#"]

[[rule]]
allow = ["read"]
users = ["reader"]
topics = ["call/#"]

[[rule]]
allow = ["consume"]
users = ["reader"]
groups = ["call*", "seq"]

[[rule]]
allow = ["write"]
users = ["writer"]
topics = ["seq/#", "call/#"]

[[role]]
name = "owners"
read = ["seq/own/#", "seq/a", "call/own/#"]
write = ["seq/own/#", "call/own/#"]
consume = ["call", "seq"]
admin = ["call"]

[[principal]]
name = "keeper"
token_sha256 = "{sha256(b"kept").hexdigest()}"
read = ["#", "$dlq/#"]
write = ["#", "$delayed/#"]
consume = ["*"]
admin = ["*"]

[[principal]]
name = "reader"
token_sha256 = "{sha256(b"r").hexdigest()}"

[[principal]]
name = "writer"
token_sha256 = "{sha256(b"w").hexdigest()}"
admin = ["call-2"]

[[principal]]
name = "partial"
token_sha256 = "{sha256(b"p").hexdigest()}"
read = ["call/a"]
write = ["seq/a", "call/a"]
consume = ["hidden"]

[[principal]]
name = "nobody"
token_sha256 = "{sha256(b"n").hexdigest()}"
"""


def control(directory: Path) -> dict[str, Any]:
    """Write the files of a node's access control; return its options. Hashes are cheap, so that many can log in."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    users = [caller for caller in (KEEPER, *KNOWN) if caller.password != OWNER_TOKEN]
    files = {
        "access.toml": RULES,
        "passwords": "".join(f"{caller.name}:{hasher.hash(caller.password)}\n" for caller in users),
        "key": KEY,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = directory / name
        path.write_text(text)
        path.chmod(0o600)
    return {
        "access_file": str(directory / "access.toml"),
        "control": {
            "password_file": str(directory / "passwords"),
            "jwt": TokenOptions(algorithms=("HS256",), keys=str(directory / "key")),
        },
    }
