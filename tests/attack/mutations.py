"""Deliberate defects of the node, each with an attack that must fail because of it. They prove that the rows see."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

from penstock.access.passwords import PasswordFile
from penstock.gateway.connection.keep_alive import KeepAliveWheel
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.sessions import lifecycle
from penstock.gateway.transport.lingering import Lingering
from penstock.pop.core import handle
from penstock.pop.core.handle import Handles
from penstock.pop.core.polls import Unsynced
from penstock.pop.grpc.access import POP_RULES, _consume
from penstock.pop.grpc.responsebytes import StreamBytes
from penstock.store.space.ledger import Ledger
from penstock.timer.listing import TimerListing
from tests.chaos.mutations import acknowledge_without_append

Patch = pytest.MonkeyPatch

HASH_US = 400_000
"""How long a hash keeps the interpreter: as on a small machine. With 150 ms the row sees it only if nothing else runs."""


def close_at_once(patch: Patch) -> None:
    """The node closes a socket whose client still sends, so that the kernel resets it."""

    def add(_: Lingering, end: socket.socket) -> None:
        end.close()

    patch.setattr(Lingering, "add", add)


def give_sessions_to_anybody(patch: Patch) -> None:
    """A session belongs to nobody."""
    patch.setattr(lifecycle, "_is_others", lambda owner, user: False)


def let_anybody_read(patch: Patch) -> None:
    """A pop needs the right to consume the group, and no right to read the topics."""
    patch.setitem(POP_RULES.needs, "Pop", _consume)


def charge_nobody(patch: Patch) -> None:
    """Whoever comes first gets everything."""
    patch.setattr(Ledger, "_allowed", lambda *_: (2**62, ""))


def answer_pings_for_ever(patch: Patch) -> None:
    """Answers that a client does not read do not count."""
    patch.setattr(Outbox, "note_answer", lambda *_: None)


def hash_on_the_loop(patch: Patch) -> None:
    """A password hash keeps the interpreter's lock, as if it ran on the loop."""
    verify = PasswordFile.verify
    sleep: Any = ctypes.PyDLL(None).usleep

    def verify_and_hold(one: PasswordFile, user: str, password: bytes) -> bool:
        sleep(HASH_US)
        return verify(one, user, password)

    patch.setattr(PasswordFile, "verify", verify_and_hold)


def hand_out_without_end(patch: Patch) -> None:
    """A caller may hand out any number of messages before a sync, and what its streams keep does not count."""
    patch.setattr(Unsynced, "fits", lambda *_: True)
    patch.setattr(StreamBytes, "resize", lambda *_: None)


def wait_for_ever(patch: Patch) -> None:
    """A connection may take any time for its CONNECT."""
    patch.setattr(KeepAliveWheel, "check", lambda *_: None)


def list_for_anybody(patch: Patch) -> None:
    """A listing has pending messages of all topics."""
    page = TimerListing.page

    async def page_of_all(listing: TimerListing, query: Any, token: str, count: int, _: Any) -> Any:
        return await page(listing, query, token, count, lambda topic: True)

    patch.setattr(TimerListing, "page", page_of_all)


def believe_handles(patch: Patch) -> None:
    """Every handle is genuine."""
    patch.setattr(handle, "compare_digest", lambda *_: True)
    patch.setattr(Handles, "read_recall", lambda *_: (0, 0))


def accept_any_password(patch: Patch) -> None:
    """Every password is right."""
    patch.setattr(PasswordFile, "verify", lambda *_: True)


class Mutation(NamedTuple):
    """A deliberate defect."""

    apply: Callable[[Patch], None]
    attack: str
    """The name of the attack that must fail."""


MUTATIONS: Final[dict[str, Mutation]] = {
    mutation.apply.__name__.replace("_", "-"): mutation
    for mutation in (
        Mutation(close_at_once, "close-path"),
        Mutation(give_sessions_to_anybody, "take-over"),
        Mutation(let_anybody_read, "forbidden-pops"),
        Mutation(charge_nobody, "retained-flood"),
        Mutation(answer_pings_for_ever, "websocket-pings"),
        Mutation(hash_on_the_loop, "login-flood"),
        Mutation(hand_out_without_end, "responses-unread"),
        Mutation(accept_any_password, "first-logins"),
        Mutation(wait_for_ever, "half-open-tcp"),
        Mutation(list_for_anybody, "timer-listings"),
        Mutation(believe_handles, "forged-handles"),
        Mutation(acknowledge_without_append, "take-over"),
    )
}
"""All defects by name."""


def mutate(name: str) -> None:
    """Give this process a defect, for as long as it lives."""
    MUTATIONS[name].apply(pytest.MonkeyPatch())
