"""The ledger: who holds how much of what the node has a limited amount of, and who may take more.

Everything that takes room for longer than a request has a causer: a light queue, a session, a subscription, a retained or
delayed message, a group. The record that creates it names the causer, so what the ledger says follows from the log. An account
is part of another: the client's of its source's, that of its user's, that of its tenant's, and all are part of the node's. Each
charge goes to all accounts on this way. A tenant that topics name is charged beside them: if users were part of it, each first
level of topics would give everybody another share.

What a request may take is bounded at each of these accounts in turn. An account may hold a share of what is left above it:
with 100 percent, as much as is still free. So one that takes whatever it can leaves half of the node to all others, two leave a
third, and whoever has little can always get more. `[[quotas.limits]]` sets fixed limits instead.

The accounts are in the index, and only those in use are in memory. What connections hold without a session that is stored is in
memory only, as a second count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from heapq import heappop, heappush, nlargest
from itertools import islice
from typing import Final, NamedTuple

from penstock.store import topics
from penstock.store.errors import LimitExceeded, QuotaExceeded
from penstock.store.index.index import Batch, Index
from penstock.store.recent import RecentIds
from penstock.store.space.accounts import NODE_ACCOUNT, Account, Resource, largest_of, load_account, save_account
from penstock.store.space.causer import NODE, AccountKind, Causer, Step, tenant_step
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions

ACCOUNTS_REMEMBERED: Final = 16_384
"""Accounts that are kept in memory though nothing of them has changed."""

LARGEST_LOOKS: Final = 32
"""Accounts among which the largest of each kind is sought."""

TENANT_SEPARATOR: Final = "/"
"""What ends the name of the tenant in a user name."""

_UNLIMITED: Final = 2**62

WORDS: Final = {
    Resource.QUEUES: "light queues",
    Resource.SESSIONS: "sessions",
    Resource.SUBSCRIPTIONS: "subscriptions",
    Resource.RETAINED: "retained messages",
    Resource.RETAINED_BYTES: "bytes of retained messages",
    Resource.GROUPS: "groups",
    Resource.DELAYED: "delayed messages",
    Resource.DELAYED_BYTES: "bytes of delayed messages",
    Resource.TRANSACTIONS: "pending transactions",
    Resource.SHARED: "shared subscriptions",
    Resource.SCHEDULES: "schedules",
    Resource.SCHEDULES_BYTES: "bytes of schedules",
    Resource.TIMER_KEYS: "pending messages with a key",
}
"""What a resource is called in errors."""


class NodeLimit(NamedTuple):
    """How much of a resource the node has for all."""

    maximum: int
    remedy: str
    """What an operator or a client can do at the limit, as words that follow the limit."""


class QuotaRefusal(NamedTuple):
    """A request that was refused because of a limit."""

    resource: Resource
    kind: AccountKind
    """Of the account that may take no more; NODE if nobody may."""
    causer: Causer
    error: LimitExceeded


class Holder(NamedTuple):
    """An account that holds much."""

    kind: AccountKind
    names: tuple[str, ...]
    """Its name, after those of the accounts that it is part of."""
    held: int


class Ledger:
    """The ledger of a store.

    Parameters:
        index: has the accounts.
        options: see `QuotaOptions`.
    """

    def __init__(self, index: Index, options: QuotaOptions) -> None:
        self._index = index
        self._options = options
        self._node = Account(NODE_ACCOUNT, AccountKind.NODE, NODE_ACCOUNT, "")
        self._changed: dict[int, Account] = {}
        """Accounts that the next save writes. They take precedence over their rows in the index."""
        self._recent: RecentIds[int, Account] = RecentIds(ACCOUNTS_REMEMBERED)
        self._passing: dict[int, list[int]] = {}
        """What connections hold only while they last, by account and resource. A client has one connection, whose options
        bound it, so accounts of clients are in here only for the resources that `[[quotas.limits]]` limits for clients."""
        self._passing_steps: dict[int, tuple[Step, ...]] = {}
        """The way from the node to each of these accounts."""
        self._limited_for_clients = frozenset(
            resource
            for resource in Resource
            for limits in options.limits
            if limits.of == "client" and getattr(limits, resource.name.lower())
        )
        self._limits: dict[Resource, NodeLimit] = {}
        self.refused: dict[tuple[Resource, AccountKind], int] = {}
        """Number of refused requests, by resource and kind of the account that may take no more."""
        self.on_refused: Callable[[QuotaRefusal], None] = lambda _: None
        """Called for each refused request, to log it."""

    # --- limits -----------------------------------------------------------------------------------------------------

    def limit(self, resource: Resource, maximum: int, remedy: str) -> None:
        """Set how much of a resource the node has for all, and what to do at the limit. Without that there is no limit."""
        self._limits[resource] = NodeLimit(maximum, remedy)

    def limit_of(self, resource: Resource) -> NodeLimit | None:
        """Return what `limit` has set for a resource."""
        return self._limits.get(resource)

    def held(self, resource: Resource, causer: Causer = NODE) -> int:
        """Return how much of a resource a causer holds; for the node, how much is in use."""
        return self._held(causer.account, resource)

    def held_by(self, account_id: int, resource: Resource) -> int:
        """Return how much of a resource an account holds."""
        return self._held(account_id, resource)

    def has(self, account_id: int) -> bool:
        """Return whether an account exists. One that a damaged record would have created may not."""
        return self._find(account_id) is not None

    def admit(self, causer: Causer, resource: Resource, amount: int = 1, *, topic: str = "", spare: int = 0) -> Causer:
        """Return a causer as a record names it, if the causer may take more of a resource.

        Args:
            causer: is to be charged when the record is applied.
            resource: that is wanted.
            amount: how much of it.
            topic: the topic or filter that the resource is for; empty if it has none. It may name the tenant.
            spare: how much the caller makes free for it.

        Raises:
            QuotaExceeded: the causer, or what it is part of, holds too much.
            LimitExceeded: the node has no room for anybody.
        """
        causer = self.with_tenant(causer, topic)
        limit = self._limits.get(resource)
        held = self._held(NODE_ACCOUNT, resource)
        room = limit.maximum - held + spare if limit is not None else _UNLIMITED
        if room < amount:
            assert limit is not None, resource
            text = f"{held} {WORDS[resource]} exist, and the limit is {limit.maximum}; {limit.remedy}"
            raise self._refuse(resource, AccountKind.NODE, causer, LimitExceeded(text))
        if causer.topic:
            self._room_of(tenant_step(causer.topic), causer, resource, amount, room)
        for step in causer.chain():
            room = self._room_of(step, causer, resource, amount, room)
        return causer

    def _room_of(self, step: Step, causer: Causer, resource: Resource, amount: int, room: int) -> int:
        """Return how much more an account may take of a resource of which `room` is left above it. Raises QuotaExceeded."""
        held = self._held(step.account, resource)
        allowed, option = self._allowed(step, resource, room)
        room = min(room, allowed - held)
        if room < amount:
            text = (
                f"the {step.kind.name.lower()} {step.name!r} holds {held} {WORDS[resource]} and may hold "
                f"{max(held + room, 0)}, so that others have room: remove some, or see {option}"
            )
            raise self._refuse(resource, step.kind, causer, QuotaExceeded(text))
        return room

    def _allowed(self, step: Step, resource: Resource, room: int) -> tuple[int, str]:
        """Return how much of a resource an account may hold, and the option that says so.

        Args:
            step: the account.
            resource: is wanted.
            room: how much of it may still be taken above the account.
        """
        for limits in self._options.limits:
            fixed = _fixed_limit(limits, step, resource)
            if fixed:
                return fixed, f"quotas.limits of the {step.kind.name.lower()}s {limits.name!r}"
        percent = self._options.share_percent
        if not percent:
            return _UNLIMITED, "quotas.share_percent"
        least = self._options.share_from_bytes if resource.is_bytes else self._options.share_from
        return max(room * percent // 100, least), "quotas.share_percent"

    def _refuse(self, resource: Resource, kind: AccountKind, causer: Causer, error: LimitExceeded) -> LimitExceeded:
        self.refused[resource, kind] = self.refused.get((resource, kind), 0) + 1
        self.on_refused(QuotaRefusal(resource, kind, causer, error))
        return error

    def with_tenant(self, causer: Causer, topic: str = "") -> Causer:
        """Return a causer with the tenant that its user or a topic belongs to."""
        options = self._options
        if options.tenant == "none" or causer == NODE:
            return causer
        if options.tenant == "user":
            tenant, separator, _ = causer.user.partition(TENANT_SEPARATOR)
            return causer._replace(tenant=tenant) if separator else causer
        tenant = topics.first_level(topic)
        return causer.for_topic(tenant) if tenant and not topics.is_wildcard(tenant) else causer

    # --- charges: called when a record is applied -------------------------------------------------------------------

    def enter(self, row: object) -> int:
        """Return the account of the causer that a record names, which is then charged.

        If a client that a user name vouches for comes from another source than before, all that it holds moves there.

        Args:
            row: what `Causer.row` has put into the record; None or empty for the node.
        """
        causer = Causer.from_row(row)
        account_id = self._enter(causer.chain())
        if causer.topic:
            self._enter((tenant_step(causer.topic),))
            member = causer.member()
            if self._find(member.account) is None:
                self._changed[member.account] = Account(member.account, member.kind, account_id, member.name)
            account_id = member.account
        return account_id

    def _enter(self, chain: tuple[Step, ...]) -> int:
        """Return the innermost account of accounts that are part of each other, all of which then exist."""
        if not chain:
            return NODE_ACCOUNT
        known = self._find(chain[-1].account)
        if known is not None and any(known.counts) and known.parent == (chain[-2].account if chain[1:] else NODE_ACCOUNT):
            return known.id  # What it is part of holds as much at least, so it is known, too.
        parent = NODE_ACCOUNT
        for account_id, kind, name in chain:
            account = self._find(account_id)
            if account is None:
                account = self._changed[account_id] = Account(account_id, kind, parent, name)
            elif account.parent != parent:
                self._move(account, parent)
            parent = account_id
        return parent

    def charge(self, account_id: int, resource: Resource, amount: int = 1) -> None:
        """Charge an account, and all that it is part of. A negative amount is released."""
        account = self._get(account_id)
        if account.kind is AccountKind.MEMBER:
            self._add(self._get(tenant_step(account.name).account), resource, amount)
        while True:
            self._add(account, resource, amount)
            if account.id == NODE_ACCOUNT:
                return
            account = self._get(account.parent)

    def _add(self, account: Account, resource: Resource, amount: int) -> None:
        account.counts[resource] += amount
        assert account.counts[resource] >= 0, (account.name, resource)
        self._changed[account.id] = account

    def release(self, account_id: int, resource: Resource, amount: int = 1) -> None:
        """Take back a charge of an account."""
        self.charge(account_id, resource, -amount)

    def source_account(self, account_id: int) -> int:
        """Return the account of the source that an account is part of; for a larger account, the account itself."""
        account = self._get(account_id)
        while account.kind > AccountKind.SOURCE:
            account = self._get(account.parent)
        return account.id

    def outermost(self, account_id: int) -> int:
        """Return the account of the node's own parts that an account is part of: of a tenant, a user or a source."""
        account = self._get(account_id)
        while account.parent != NODE_ACCOUNT:
            account = self._get(account.parent)
        return account.id

    def _move(self, account: Account, parent: int) -> None:
        for resource in Resource:
            count = account.counts[resource]
            if count:
                self.charge(account.parent, resource, -count)
                self.charge(parent, resource, count)
        account.parent = parent
        self._changed[account.id] = account

    def causer_of(self, account_id: int) -> Causer:
        """Return who is charged by way of an account; the node if the ledger does not have the account."""
        names: dict[AccountKind, str] = {}
        account = self._find(account_id)
        while account is not None and account.id != NODE_ACCOUNT:
            names[account.kind] = account.name
            account = self._find(account.parent)
        return Causer(
            user=names.get(AccountKind.USER, ""),
            source=names.get(AccountKind.SOURCE, ""),
            client=names.get(AccountKind.CLIENT, ""),
            tenant=names.get(AccountKind.TENANT, ""),
            topic=names.get(AccountKind.MEMBER, ""),
        )

    # --- what lasts only as long as a connection --------------------------------------------------------------------

    def hold(self, causer: Causer, resource: Resource, amount: int = 1) -> None:
        """Charge a causer until `let_go`, or until the node stops. A negative amount is released.

        Args:
            causer: as `admit` has returned it.
            resource, amount: what it holds.
        """
        chain = causer.chain()
        if resource not in self._limited_for_clients:
            chain = tuple(step for step in chain if step.kind is not AccountKind.CLIENT)
        for depth in range(len(chain) + 1):
            self._add_passing(chain[:depth], resource, amount)
        if causer.topic:
            self._add_passing((tenant_step(causer.topic),), resource, amount)

    def _add_passing(self, steps: tuple[Step, ...], resource: Resource, amount: int) -> None:
        """Charge the account to which some steps lead from the node."""
        account_id = steps[-1].account if steps else NODE_ACCOUNT
        counts = self._passing.get(account_id)
        if counts is None:
            counts = self._passing[account_id] = [0] * len(Resource)
            self._passing_steps[account_id] = steps
        counts[resource] += amount
        assert counts[resource] >= 0, (steps, resource)
        if not any(counts):
            del self._passing[account_id], self._passing_steps[account_id]

    def let_go(self, causer: Causer, resource: Resource, amount: int = 1) -> None:
        """Take back what `hold` has charged."""
        self.hold(causer, resource, -amount)

    # --- who holds most ---------------------------------------------------------------------------------------------

    def largest_sources(self, resource: Resource, parent: int = NODE_ACCOUNT) -> Iterator[int]:
        """Yield the ids of the sources that hold most of a resource, beginning with those of the user that holds most.

        The order is about that of the last save. Accounts that hold little are not found: see `store.space.accounts`.
        """
        for account_id in largest_of(self._index, resource, parent, ACCOUNTS_REMEMBERED):
            kind = self._get(account_id).kind
            if kind is AccountKind.SOURCE:
                yield account_id
            elif kind is not AccountKind.CLIENT:
                yield from self.largest_sources(resource, account_id)

    def top(self, resource: Resource, count: int) -> list[Holder]:
        """Return the accounts that hold most of a resource, about as of the last save, and what connections hold now."""
        found: dict[int, Holder] = {}
        for account in islice(self._ranked(resource), count):
            found[account.id] = Holder(account.kind, self._names(account), self._held(account.id, resource))
        for account_id, path in self._passing_steps.items():
            if path and self._passing[account_id][resource]:
                names = tuple(step.name for step in path)
                found[account_id] = Holder(path[-1].kind, names, self._held(account_id, resource))
        return nlargest(count, found.values(), key=lambda holder: holder.held)

    def largest(self, resource: Resource) -> dict[AccountKind, int]:
        """Return how much the largest tenant, user, source and client hold of a resource, about; 0 if that is little."""
        found = dict.fromkeys((AccountKind.TENANT, AccountKind.USER, AccountKind.SOURCE, AccountKind.CLIENT), 0)
        for holder in self.top(resource, LARGEST_LOOKS):
            found[holder.kind] = max(found[holder.kind], holder.held)
        return found

    def _ranked(self, resource: Resource) -> Iterator[Account]:
        """Yield accounts in descending order: an account comes after the one that it is part of, which holds no less."""
        waiting: list[tuple[int, int, Iterator[int]]] = []

        def push(siblings: Iterator[int]) -> None:
            following = next(siblings, None)
            if following is not None:
                heappush(waiting, (-self._get(following).counts[resource], following, siblings))

        push(largest_of(self._index, resource, NODE_ACCOUNT, ACCOUNTS_REMEMBERED))
        while waiting:
            _, account_id, siblings = heappop(waiting)
            push(siblings)
            push(largest_of(self._index, resource, account_id, ACCOUNTS_REMEMBERED))
            yield self._get(account_id)

    def _names(self, account: Account) -> tuple[str, ...]:
        names = [account.name]
        while account.parent != NODE_ACCOUNT:
            account = self._get(account.parent)
            names.insert(0, account.name)
        return tuple(names)

    # --- accounts ---------------------------------------------------------------------------------------------------

    def _held(self, account_id: int, resource: Resource) -> int:
        account = self._find(account_id)
        passing = self._passing.get(account_id)
        return (account.counts[resource] if account is not None else 0) + (passing[resource] if passing is not None else 0)

    def _find(self, account_id: int) -> Account | None:
        if account_id == NODE_ACCOUNT:
            return self._node
        account = self._changed.get(account_id) or self._recent.get(account_id)
        if account is None:
            account = load_account(self._index, account_id)
            if account is not None:
                self._recent.add(account_id, account)
        return account

    def _get(self, account_id: int) -> Account:
        account = self._find(account_id)
        assert account is not None, account_id
        return account

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the account of the node. The store calls it once, before any record is applied."""
        self._node = load_account(self._index, NODE_ACCOUNT) or self._node

    def save(self, batch: Batch) -> None:
        """Put all rows that have changed since the last call into `batch`."""
        for account in self._changed.values():
            save_account(batch, account)
            if account.id != NODE_ACCOUNT:
                self._recent.add(account.id, account)
        self._changed.clear()


def _fixed_limit(limits: QuotaLimitOptions, step: Step, resource: Resource) -> int:
    """Return the limit that a table sets for an account; 0 if it sets none."""
    if limits.of != step.kind.name.lower() or not fnmatchcase(step.name, limits.name):
        return 0
    return int(getattr(limits, resource.name.lower()))
