"""What the rules and the plugins allow one client to do with topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final
from weakref import ref

from penstock.access.rights import Rights
from penstock.gateway.auth.decisions import Decisions
from penstock.gateway.auth.pending import RETRY_S_MAX, AuthorizationPending, retry_s
from penstock.gateway.protocol.packets import PUBLISH as PUBLISH_PACKET
from penstock.gateway.protocol.packets import PUBLISH_RUN, PUBLISH_WITH, Packet
from penstock.gateway.protocol.topics import DELAYED, SHARE, without_prefix
from penstock.store.errors import PositionUnknown
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.record import topic_of
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.authorizer import Authorizer
    from penstock.gateway.auth.client_session import ClientSession
    from penstock.gateway.connection.connection import Connection

# The actions for which the plugins are asked. The first three are the names of amqtt's actions; for the fourth it has another
# call.
PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
RECEIVE: Final = "receive"
CONNECT: Final = "connect"

TOPICS_ASKED_MAX: Final = 16
"""The maximum number of topics in one question. It is at most the least value of `decisions_per_client_max`; otherwise answers
would be forgotten before they are used."""

_PUBLISHES: Final = (PUBLISH_PACKET, PUBLISH_WITH, PUBLISH_RUN)


class Permissions:
    """The decisions about one client and topics. What the rules deny is denied; about the rest the plugins are asked, if any.

    Parameters:
        asker: asks the plugins.
        decisions: bounds the decisions that are kept.
        store: the topics of messages that the client is about to receive are read there.
        connection: the connection of the client.
        session: the client as the plugins see it; None if no plugin decides about topics.
        rights: what the rules let the client do; None if there are no rules.
    """

    __slots__ = (
        "_asker",
        "_asks_plugins",
        "_connection",
        "_decisions",
        "_is_asking",
        "_is_closed",
        "_store",
        "_subscribe",
        "_unanswered_s",
        "is_fresh",
        "kept",
        "passes_all",
        "publish",
        "receive",
        "rights",
        "session",
        "will_topic",
    )

    def __init__(
        self,
        asker: Authorizer,
        decisions: Decisions,
        store: Store,
        connection: Connection,
        session: ClientSession | None,
        rights: Rights | None = None,
    ) -> None:
        self._asker = asker
        self._decisions = decisions
        self._store = store
        self._connection = ref(connection)  # A weak reference, so that a connection that ends is freed at once.
        self.session = session
        self.rights = rights
        self.will_topic = b""
        """The topic of the client's will; empty if it has none."""
        self._asks_plugins = session is not None
        self._is_closed = False
        self.passes_all = not self._asks_plugins
        """Whether the rules let the client receive every message of its subscriptions, so that none has to be looked at."""
        self.publish: dict[bytes, bool] = {}
        """By topic: whether the client may publish to it."""
        self.receive: dict[bytes, bool] = {}
        """By topic: whether the client may receive its messages."""
        self._subscribe: dict[bytes, bool] = {}
        self._is_asking = False
        """Whether a question about deliveries waits for its answer, or for the time to ask it again."""
        self._unanswered_s: float | None = None
        """When the plugins first gave no answer about deliveries, in monotonic seconds; None if they answered last."""
        self.kept = 0
        """The number of answers kept."""
        self.is_fresh = False
        """Whether `Decisions` knows when the answers have to be forgotten."""

    def forget(self) -> None:
        """Forget all answers."""
        self._decisions.remove(self)
        self.publish.clear()
        self.receive.clear()

    def close(self) -> None:
        """Forget all answers for good, because the client has gone."""
        self.forget()
        self._is_closed = True
        self.session = None

    def _keep(self, kept: dict[bytes, bool], topics: list[bytes], answers: list[bool | None]) -> None:
        found = {topic: answer for topic, answer in zip(topics, answers, strict=True) if answer is not None}
        if self._is_closed or not found:
            return
        if self.kept + len(found) > self._decisions.per_client_max:
            self.forget()
        self._decisions.make_room(len(found))
        kept.update(found)
        self._decisions.add(self, len(found))

    # --- rules ------------------------------------------------------------------------------------------------------

    def _by_rules(self, action: str, topic: bytes) -> bool | None:
        """Return what the rules say of a topic or filter; None if the plugins have to be asked, too."""
        rights = self.rights
        if rights is not None and not may(rights, action, topic):
            self._asker.note_denied(rights, action, [topic])
            return False
        return None if self._asks_plugins else True

    def _decide(self, kept: dict[bytes, bool], action: str, topic: bytes) -> bool | None:
        """Return what is known of a topic, or what the rules say of it, which is kept; None if the plugins have to be asked."""
        known = kept.get(topic)
        if known is None:
            known = self._by_rules(action, topic)
            if known is not None and not self._is_closed:
                if self.kept >= self._decisions.per_client_max:
                    self.forget()
                self._decisions.add_one(self)
                kept[topic] = known
        return known

    def consider(self, filters: Iterable[str]) -> None:
        """Find out whether every message of further subscriptions may be received."""
        if self.passes_all and self.rights is not None:
            rights = self.rights
            self.passes_all = all(rights.covers(RECEIVE, without_share(each)).is_allowed for each in filters)

    def allows_will(self) -> bool:
        """Return whether the rules let the client publish its will, if it has one."""
        rights, topic = self.rights, self.will_topic
        if not topic or rights is None or rights.may(PUBLISH, topic.decode(errors="replace")):
            return True
        self._asker.note_denied(rights, PUBLISH, [topic])
        return False

    def replace(self, rights: Rights, filters: Iterable[str]) -> list[str]:
        """Go by other rules from now on. Return those of the client's filters that they do not allow."""
        self.rights = rights
        self.forget()
        refused = [each for each in filters if not may(rights, SUBSCRIBE, each.encode())]
        self.passes_all = not self._asks_plugins
        self.consider(filters)
        return refused

    # --- publishing -------------------------------------------------------------------------------------------------

    def may_publish_at_once(self, topic: bytes) -> bool:
        """Return whether the client may publish to a topic, as far as that is known or the rules alone say so."""
        return bool(self._decide(self.publish, PUBLISH, topic))

    def may_publish(self, topic: bytes, packets: list[Packet]) -> bool:
        """Return whether the client may publish to a topic that `publish` does not allow.

        One question also covers the topics of the other `packets` of the same read, so that the connection waits once.

        Raises:
            AuthorizationPending: the plugins have not answered yet.
        """
        allowed = self._decide(self.publish, PUBLISH, topic)
        if allowed is None:
            others = {packet[2] for packet in packets if packet[0] in _PUBLISHES} - self.publish.keys() - {topic, b""}
            topics = [topic, *(each for each in others if self._by_rules(PUBLISH, each) is None)][:TOPICS_ASKED_MAX]
            raise AuthorizationPending(lambda then: self._ask_publish(topics, then))
        return allowed

    def _ask_publish(self, topics: list[bytes], then: Callable[[bool], None]) -> None:
        def answered(answers: list[bool | None]) -> None:
            self._keep(self.publish, topics, answers)
            then(answers[0] is not None)  # The packet that waits has the first topic.

        self._asker.ask_topics(self.session, PUBLISH, topics, answered)

    # --- subscribing ------------------------------------------------------------------------------------------------

    def may_subscribe(self, filters: list[str]) -> dict[str, bool]:
        """Return for each filter of a SUBSCRIBE whether the client may have it. Each SUBSCRIBE asks again.

        Raises:
            AuthorizationPending: the plugins have not answered yet.
        """
        names = [name.encode() for name in dict.fromkeys(filters)]
        undecided = []
        for name in names:
            if name not in self._subscribe:
                allowed = self._by_rules(SUBSCRIBE, name)
                if allowed is None:
                    undecided.append(name)
                else:
                    self._subscribe[name] = allowed
        if undecided:
            raise AuthorizationPending(lambda then: self._ask_subscribe(undecided, then))
        answers = {name.decode(): self._subscribe[name] for name in names}
        self._subscribe.clear()
        self.consider(name for name, is_allowed in answers.items() if is_allowed)
        return answers

    def _ask_subscribe(self, names: list[bytes], then: Callable[[bool], None]) -> None:
        def answered(answers: list[bool | None]) -> None:
            self._subscribe.update((name, answer) for name, answer in zip(names, answers, strict=True) if answer is not None)
            then(None not in answers)

        self._asker.ask_topics(self.session, SUBSCRIBE, names, answered)

    # --- receiving --------------------------------------------------------------------------------------------------

    def admit(self, entries: bytes) -> tuple[bytes, int]:
        """Return the entries whose messages the client may receive, and the number of entries that were decided.

        Args:
            entries: entries of a light queue.

        The method stops before the first entry that is not decided yet. Then it asks the plugins about all that are left, and
        the deliveries of the connection continue when they have answered. Without an answer it asks again after a while.
        """
        admitted = bytearray()
        topics = topics_of(self._store, entries)
        receive = self.receive
        for number, topic in enumerate(topics):
            if not topic:
                continue
            allowed = self._decide(receive, RECEIVE, topic)
            if allowed is None:
                others = (each for each in dict.fromkeys(topics[number:]) if each and each not in receive)
                self._ask_receive([each for each in others if self._by_rules(RECEIVE, each) is None])
                return bytes(admitted), number
            if allowed:
                admitted += entries[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        return bytes(admitted), len(topics)

    def passes(self, topics: frozenset[bytes]) -> bool:
        """Return whether the client is known to be allowed the messages of all these topics."""
        return all(self._decide(self.receive, RECEIVE, topic) for topic in topics)

    def receivable(self, topics: list[bytes], then: Callable[[], None]) -> list[bytes] | None:
        """Return the topics whose messages the client may receive.

        If some are not decided yet, the result is None, and `then` is called when the plugins have answered. Without an answer
        it is called after `RETRY_S_MAX`.
        """
        unknown = [topic for topic in topics if self._decide(self.receive, RECEIVE, topic) is None]
        if not unknown:
            return [topic for topic in topics if self._decide(self.receive, RECEIVE, topic)]
        unknown = unknown[:TOPICS_ASKED_MAX]

        def answered(answers: list[bool | None]) -> None:
            self._keep(self.receive, unknown, answers)
            connection = self._connection()
            if None not in answers:
                then()
            elif connection is not None:
                connection.call_later(RETRY_S_MAX, then)

        self._asker.ask_topics(self.session, RECEIVE, unknown, answered)
        return None

    def _ask_receive(self, topics: list[bytes]) -> None:
        if self._is_asking:
            return
        self._is_asking = True
        topics = topics[:TOPICS_ASKED_MAX]
        connection = self._connection()
        assert connection is not None, "a connection that delivers exists"

        def answered(answers: list[bool | None]) -> None:
            self._keep(self.receive, topics, answers)
            if answers[0] is not None:  # The delivery that waits has the first topic.
                self._unanswered_s = None
                go_on()
                return
            now_s = self._asker.now_s()
            if self._unanswered_s is None:
                self._unanswered_s = now_s
            connection.call_later(retry_s(now_s - self._unanswered_s), go_on)
            connection.pump_soon()  # What the client shares with others may go to them.

        def go_on() -> None:
            self._is_asking = False
            connection.pump_soon()

        self._asker.ask_topics(self.session, RECEIVE, topics, answered)

    @property
    def is_unanswered(self) -> bool:
        """Whether the plugins give no answer about deliveries at present, and are asked again after a while."""
        return self._unanswered_s is not None and self._is_asking


def without_share(topic_filter: str) -> str:
    """Return the filter that follows `$share/{name}/`, or the filter itself."""
    return without_prefix(topic_filter.encode()).decode() if topic_filter.startswith(SHARE) else topic_filter


def subject_of(topic: bytes, action: str) -> str:
    """Return the topic or filter to which a rule applies: what follows `$share/{name}/` and `$delayed/{seconds}/`."""
    if (action == SUBSCRIBE and topic.startswith(SHARE.encode())) or (action == PUBLISH and topic.startswith(DELAYED)):
        topic = without_prefix(topic)
    return topic.decode(errors="replace")


def may(rights: Rights, action: str, topic: bytes) -> bool:
    """Return whether the rules let a client perform an action on a topic or filter, which may have a prefix."""
    # The group of a shared subscription has rules of its own.
    return rights.may(action, topic.decode(errors="replace") if action == SUBSCRIBE else subject_of(topic, action))


def topics_of(store: Store, entries: bytes) -> list[bytes]:
    """Return the topics of the messages to which entries of a light queue point, in order.

    The topic of a message that retention has dropped is empty.
    """
    read = store.read
    topics = []
    for position, size, _ in ENTRY.iter_unpack(entries):
        try:
            data = read(position, size)
        except PositionUnknown:
            topics.append(b"")
            continue
        topics.append(topic_of(data))
    return topics
