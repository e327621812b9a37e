"""The accounts of the ledger: how much of each resource a tenant, a user, a source or a client holds, and their rows.

Rows of the index. The first byte of each key is b"A":

    key b"Aa", account u64                              value: kind u8, parent u64, which counts follow u16 (a bit for each
                                                        `Resource`), these counts u64 each, and the name
    key b"Ar", resource u8, parent u64, rank u16,       no value: a place in the order of the parent's accounts by what they
               account u64                              hold, the largest first; not of those that hold little

Numbers in keys are big-endian, those in values little-endian. The account 0 is that of the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import islice
from struct import Struct
from typing import Final

from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.options import MIB
from penstock.store.space.causer import AccountKind

NODE_ACCOUNT: Final = 0
"""Id of the account of the node, which all others are part of."""

_ACCOUNT: Final = KeySpace.ACCOUNT + b"a"
_RANK: Final = KeySpace.ACCOUNT + b"r"
_ID = Struct(">Q")
_HEAD = Struct("<BQH")
_COUNT = Struct("<Q")
_RANK_KEY = Struct(">2sBQHQ")
_RANK_PREFIX = Struct(">2sBQ")
_RANK_TOP: Final = 0xFFFF

EXACT: Final = 16
"""Counts below this have a rank each. An eighth of the range between two powers of two shares a rank, which seldom changes."""

RANKED_FROM: Final = 2
"""Count from which on an account has a rank. Most hold one session or none, and need no further row."""

CLIENTS_RANKED_FROM: Final = 16
"""The same for clients, of which there are most."""

BYTES_RANKED_FROM: Final = MIB
"""The same for resources that are counted in bytes."""


class Resource(IntEnum):
    """What the node has a limited amount of. The numbers are in the index, so a number must never be reused."""

    QUEUES = 0
    SESSIONS = 1
    SUBSCRIPTIONS = 2
    RETAINED = 3
    RETAINED_BYTES = 4
    GROUPS = 5
    DELAYED = 6
    DELAYED_BYTES = 7
    TRANSACTIONS = 8
    SHARED = 9
    SCHEDULES = 10
    SCHEDULES_BYTES = 11
    TIMER_KEYS = 12

    @property
    def is_bytes(self) -> bool:
        """Whether the resource is counted in bytes."""
        return self in _IN_BYTES


_IN_BYTES: Final = frozenset((Resource.RETAINED_BYTES, Resource.DELAYED_BYTES, Resource.SCHEDULES_BYTES))

Rank = tuple[Resource, int, int]
"""Resource, parent and rank: the place of an account among those of its parent."""


class Account:
    """What one tenant, user, source or client holds.

    Parameters:
        account_id: see `store.space.causer.Step`.
        kind: what it is about.
        parent: id of the account that it is part of.
        name: of the tenant, user, source or client; of a member, the name of the tenant.
    """

    __slots__ = ("counts", "id", "is_saved", "kind", "name", "parent", "ranks")

    def __init__(self, account_id: int, kind: AccountKind, parent: int, name: str) -> None:
        self.id = account_id
        self.kind = kind
        self.parent = parent
        self.name = name
        self.counts = [0] * len(Resource)
        """How much is held, by resource."""
        self.is_saved = False
        """Whether the index has its row."""
        self.ranks: frozenset[Rank] = frozenset()
        """Its ranks in the index."""

    def row(self) -> bytes:
        """Return the value of its row."""
        mask, counts = 0, b""
        for resource, count in enumerate(self.counts):
            if count:
                mask |= 1 << resource
                counts += _COUNT.pack(count)
        return _HEAD.pack(self.kind, self.parent, mask) + counts + self.name.encode()

    @classmethod
    def from_row(cls, account_id: int, row: bytes) -> Account:
        """Return the account that a row describes."""
        kind, parent, mask = _HEAD.unpack_from(row)
        held = [resource for resource in range(mask.bit_length()) if mask >> resource & 1]
        stop = _HEAD.size + len(held) * _COUNT.size
        found = cls(account_id, AccountKind(kind), parent, row[stop:].decode())
        for resource, (count,) in zip(held, _COUNT.iter_unpack(row[_HEAD.size : stop]), strict=True):
            found.counts[resource] = count
        found.is_saved = True
        found.ranks = found.present_ranks()
        return found

    def present_ranks(self) -> frozenset[Rank]:
        """Return the ranks that follow from its counts."""
        if self.id == NODE_ACCOUNT or self.kind is AccountKind.MEMBER:
            return frozenset()
        least = CLIENTS_RANKED_FROM if self.kind is AccountKind.CLIENT else RANKED_FROM
        if max(self.counts) < least:
            return frozenset()
        return frozenset(
            (resource, self.parent, rank_of(self.counts[resource]))
            for resource in Resource
            if self.counts[resource] >= (BYTES_RANKED_FROM if resource.is_bytes else least)
        )


def rank_of(count: int) -> int:
    """Return the rank of a count. A larger count never has a lesser rank."""
    if count < EXACT:
        return count
    power = count.bit_length()
    return (power << 3) - (EXACT.bit_length() << 3) + EXACT + (count >> (power - 4) & 7)


def load_account(index: Index, account_id: int) -> Account | None:
    """Return an account; None if it holds nothing."""
    row = index.get(_ACCOUNT + _ID.pack(account_id))
    return Account.from_row(account_id, row) if row is not None else None


def all_accounts(index: Index) -> Iterator[Account]:
    """Yield all accounts that hold something, that of the node included. This is for tools."""
    for key, row in index.rows(_ACCOUNT):
        yield Account.from_row(_ID.unpack_from(key, len(_ACCOUNT))[0], row)


def largest_of(index: Index, resource: Resource, parent: int, count: int) -> Iterator[int]:
    """Yield the ids of up to `count` accounts of a parent that hold much, about in descending order, as of the last save."""
    for key, _ in islice(index.rows(_RANK_PREFIX.pack(_RANK, resource, parent)), count):
        yield _RANK_KEY.unpack(key)[-1]


def save_account(batch: Batch, account: Account) -> None:
    """Write the rows of an account that have changed since its last save."""
    key = _ACCOUNT + _ID.pack(account.id)
    if any(account.counts):
        batch.put(key, account.row())
        account.is_saved = True
    elif account.is_saved:
        batch.delete(key)
        account.is_saved = False
    ranks = account.present_ranks()
    if ranks != account.ranks:
        for rank in account.ranks - ranks:
            batch.delete(_rank_key(rank, account.id))
        for rank in ranks - account.ranks:
            batch.put(_rank_key(rank, account.id), b"")
        account.ranks = ranks


def _rank_key(rank: Rank, account_id: int) -> bytes:
    resource, parent, number = rank
    return _RANK_KEY.pack(_RANK, resource, parent, _RANK_TOP - number, account_id)
