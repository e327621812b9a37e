"""Who may connect, and what a client may publish, subscribe to and receive.

The answers are those of amqtt's plugins (`gateway.auth.plugins`), which run on another thread. So whoever needs one that isn't
known raises `Undecided`: the connection stops reading, keeps what it has read, and goes on where it stood when the answer
has come. Answers about topics are kept by each connection for `mqtt.access.decision_ms`; with one at hand, a publish costs
one dict lookup. Where no plugin is configured there is no guard, and nothing is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

import structlog

from penstock.gateway.client_id import assign_client_id
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.packets import PUBLISH as PUBLISH_PACKET
from penstock.gateway.protocol.packets import PUBLISH_RUN, PUBLISH_WITH
from penstock.gateway.protocol.reasons import ConnectCode
from penstock.gateway.protocol.topics import DELAYED, SHARE, without_prefix
from penstock.gateway.sessions.session import Session
from penstock.gateway.transport.peer import Peer
from penstock.store.errors import PositionUnknown
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.record import topic_of
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.plugins import ClientSession, Plugins, Publish, Verdict
    from penstock.gateway.logbook import Logbook
    from penstock.gateway.protocol.connect import Connect
    from penstock.gateway.protocol.packets import Packet

logger = structlog.get_logger("gateway")

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
RECEIVE: Final = "receive"
CONNECT: Final = "connect"
"""What is asked for: the names of amqtt's actions, and the one that it has another call for."""

TOPICS_ASKED_MAX: Final = 16
"""Topics in one question. No more than the least `decisions_per_client_max`, or answers would be forgotten unheard."""

_PUBLISHES: Final = (PUBLISH_PACKET, PUBLISH_WITH, PUBLISH_RUN)


class Undecided(Exception):
    """Raised when a packet can't be handled before the plugins have answered. Not an error: `ask` says how to go on.

    Parameters:
        ask: asks; to be called with what is to be done when the answer has come.
    """

    def __init__(self, ask: Callable[[Callable[[], None]], None]) -> None:
        self.ask = ask
        super().__init__("the plugins have not answered yet")


class Applicant(Protocol):
    """A connection, as far as its access is concerned."""

    peer: Peer
    """The other end."""
    session: Session
    """The client's session, once the client is accepted."""
    plugin_session: ClientSession | None
    """The client as the plugins see it."""
    verdict: tuple[ClientSession, Verdict | None] | None
    """The answer of the plugins to the CONNECT that waits for it."""
    permissions: Guard | None
    """What the client may do with topics, if there are plugins for topics."""

    def pump_soon(self) -> None:
        """Go on with the client's deliveries, in the next turn of the loop."""
        ...


class Access:
    """The gate of a node.

    Parameters:
        options: see `AccessOptions`.
        store: where the topics of messages are read that clients are about to receive.
        logbook: what clients cause is logged there.
        publish: publishes what a plugin sends; called on the plugins' thread.
    """

    def __init__(self, options: AccessOptions, store: Store, logbook: Logbook, publish: Publish) -> None:
        self.options = options
        self.store = store
        self._logbook = logbook
        self._plugins: Plugins | None = None
        self._publish = publish
        self._now_s: Callable[[], float]
        self._waiting: deque[tuple[float, Question]] = deque()
        self._fresh: deque[tuple[float, Guard]] = deque()
        """Guards with answers, and until when these are good."""
        self.kept = 0
        """Answers about topics that are kept."""
        self.questions = 0
        """Questions that wait for an answer."""
        self.decisions: dict[tuple[str, str], int] = {}
        """How often the plugins were asked, by what for and what came of it: allowed, denied, error, timeout, overload."""

    async def start(self, now_s: Callable[[], float]) -> None:
        """Load the plugins, if any are configured. Raises PluginsUnavailable."""
        self._now_s = now_s
        options = self.options
        if options.plugins is None and options.auth is None and options.topic_check is None:
            return
        from penstock.gateway.auth.plugins import Plugins  # amqtt takes 0.1 s to import: only for those who use it

        plugins = Plugins(options, self._publish)
        await plugins.start()
        self._plugins = plugins

    async def stop(self) -> None:
        """Let the plugins close."""
        if self._plugins is not None:
            await self._plugins.stop()
            self._plugins = None

    # --- connecting -------------------------------------------------------------------------------------------------

    def admit(self, connection: Applicant, wish: Connect) -> None:
        """Let a client connect.

        Raises:
            Undecided: the plugins were not asked yet.
            ConnectRefused: it may not connect.
        """
        peer, plugins = connection.peer, self._plugins
        is_known = peer.username is not None
        if plugins is None or not plugins.authenticates:
            is_known = is_known or self._is_anonymous_allowed(connection)
            if not is_known:
                self._count(CONNECT, "denied")
                raise ConnectRefused(
                    f"listener {peer.listener.name} takes no anonymous clients: see mqtt.access.anonymous",
                    ConnectCode.NOT_AUTHORIZED,
                )
        if plugins is None:
            return
        from penstock.gateway.auth.plugins import ClientSession  # loaded by now

        if connection.verdict is None:
            session = ClientSession(wish, wish.client_id or assign_client_id(), peer)
            if not is_known or (wish.will is not None and plugins.filters_topics):
                raise self._ask_who(connection, plugins, session, is_known=is_known)
            connection.plugin_session = session
            return
        session, verdict = connection.verdict
        connection.verdict = None
        if verdict is None or not verdict.authenticated:
            code = ConnectCode.NOT_AUTHORIZED if wish.username is None else ConnectCode.BAD_USER_NAME_OR_PASSWORD
            raise ConnectRefused("the plugins have not authenticated the client", code)
        if not verdict.will_allowed:
            raise ConnectRefused("the client may not publish to the topic of its will", ConnectCode.NOT_AUTHORIZED)
        connection.plugin_session = session

    def user_of(self, connection: Applicant) -> str:
        """Return the user name of a client that was admitted; empty where neither a certificate nor a plugin vouches for it."""
        if connection.peer.username is not None:
            return connection.peer.username
        session, plugins = connection.plugin_session, self._plugins
        is_vouched_for = session is not None and plugins is not None and plugins.authenticates
        return session.username or "" if session is not None and is_vouched_for else ""

    def entered(self, connection: Applicant) -> None:
        """Begin with a client that was admitted and has its session: give it a guard where one is needed."""
        session = connection.plugin_session
        if session is not None and self._plugins is not None:
            session.client_id = connection.session.client_id
            if self._plugins.filters_topics:
                connection.permissions = Guard(self, connection, session)
            self._plugins.connected(session)

    def left(self, connection: Applicant) -> None:
        """Forget a client that was admitted."""
        if connection.permissions is not None:
            connection.permissions.close()
        if connection.plugin_session is not None:
            if self._plugins is not None:
                self._plugins.disconnected(connection.plugin_session)
            connection.plugin_session = None

    def _is_anonymous_allowed(self, connection: Applicant) -> bool:
        anonymous = self.options.anonymous
        return anonymous == "always" or (anonymous == "loopback" and connection.peer.listener.is_local)

    def _ask_who(self, connection: Applicant, plugins: Plugins, session: ClientSession, *, is_known: bool) -> Undecided:
        def answered(verdict: Verdict | None, outcome: str) -> None:
            connection.verdict = session, verdict
            allowed = verdict is not None and verdict.authenticated and verdict.will_allowed
            self._count(CONNECT, outcome or ("allowed" if allowed else "denied"))

        def ask(then: Callable[[], None]) -> None:
            self._ask(plugins.connect(session, is_known=is_known), answered, then)

        return Undecided(ask)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ask_topics(
        self,
        guard: Guard,
        action: str,
        topics: list[bytes],
        answered: Callable[[list[bool]], None],
        then: Callable[[], None],
    ) -> None:
        """Ask what a client may do with topics, or filters. `answered` gets the answers, in order; then comes `then`."""
        plugins, session = self._plugins, guard.session

        def note(found: list[bool | str] | None, outcome: str) -> None:
            answers = found if found is not None else [False] * len(topics)
            for answer in answers:
                if isinstance(answer, str):
                    self.failed(answer)
                    self._count(action, "error")
                else:
                    self._count(action, outcome or ("allowed" if answer else "denied"))
            answered([answer is True for answer in answers])

        if plugins is None or session is None:  # the node is stopping, or the client has gone
            note(None, "denied")
            then()
            return
        subjects = [_subject(topic, action) for topic in topics]
        self._ask(plugins.topics(session, subjects, action), note, then)

    def make_room(self, count: int) -> None:
        """Forget the oldest answers until there is room for so many."""
        while self.kept + count > self.options.decisions_max and self._fresh:
            self._forget_oldest()

    def keep(self, guard: Guard, count: int) -> None:
        """Count answers that a guard keeps from now on."""
        if not guard.is_fresh:
            guard.is_fresh = True
            self._fresh.append((self._now_s() + self.options.decision_ms / 1000, guard))
        guard.kept += count
        self.kept += count

    def _forget_oldest(self) -> None:
        _, guard = self._fresh.popleft()
        guard.is_fresh = False
        guard.forget()

    def expire(self) -> None:
        """Forget the answers whose time is over, and answer questions that the plugins don't. Called once a second."""
        now_s = self._now_s()
        while self._fresh and self._fresh[0][0] <= now_s:
            self._forget_oldest()
        while self._waiting and (self._waiting[0][0] <= now_s or self._waiting[0][1].is_answered):
            self._waiting.popleft()[1].answer(None, "timeout")

    # --- questions --------------------------------------------------------------------------------------------------

    def _ask(self, question: Coroutine[Any, Any, Any], answered: Callable[[Any, str], None], then: Callable[[], None]) -> None:
        assert self._plugins is not None
        if self.questions >= self.options.questions_max:
            question.close()
            answered(None, "overload")
            then()
            return
        asked = Question(self, answered, then)
        self.questions += 1
        # The plugins' thread cancels what takes too long; this is for a plugin that blocks the thread.
        self._waiting.append((self._now_s() + self.options.plugin_timeout_ms / 1000 + 1, asked))
        self._plugins.ask(question, asked.answer)

    def _count(self, action: str, outcome: str) -> None:
        self.decisions[action, outcome] = self.decisions.get((action, outcome), 0) + 1

    def failed(self, error: str) -> None:
        """Log what went wrong in a plugin."""
        self._logbook.note("plugins.failed", why=error)


class Question:
    """A question on its way. It is answered once: by the plugins, or because they don't."""

    __slots__ = ("_access", "_answered", "_then", "is_answered")

    def __init__(self, access: Access, answered: Callable[[Any, str], None], then: Callable[[], None]) -> None:
        self._access = access
        self._answered = answered
        self._then = then
        self.is_answered = False

    def answer(self, found: Any, error: str) -> None:
        if self.is_answered:
            return
        self.is_answered = True
        self._access.questions -= 1
        if error:
            self._access.failed(error)
        self._answered(found, "" if not error else "timeout" if error == "timeout" else "error")
        self._then()


class Guard:
    """What the plugins have said about one client and topics.

    Parameters:
        access: the gate.
        connection: the client's.
        session: the client as plugins see it.
    """

    __slots__ = ("_access", "_asking", "_of", "_subscribe", "is_fresh", "kept", "publish", "receive", "session")

    def __init__(self, access: Access, connection: Applicant, session: ClientSession) -> None:
        self._access = access
        self._of = ref(connection)  # no circle: a connection goes when it ends, not when the collector has a look
        self.session: ClientSession | None = session
        self.publish: dict[bytes, bool] = {}
        """Topics of which it is known whether the client may publish to them."""
        self.receive: dict[bytes, bool] = {}
        """Topics of which it is known whether the client may have their messages."""
        self._subscribe: dict[bytes, bool] = {}
        self._asking = False
        self.kept = 0
        """How many answers it keeps."""
        self.is_fresh = False
        """Whether the gate knows when these are to be forgotten."""

    def forget(self) -> None:
        """Forget what was said."""
        self._access.kept -= self.kept
        self.kept = 0
        self.publish.clear()
        self.receive.clear()

    def close(self) -> None:
        """Forget it for good: the client has gone."""
        self.forget()
        self.session = None

    def _keep(self, answers: dict[bytes, bool], topics: list[bytes], allowed: list[bool]) -> None:
        if self.session is None:
            return
        if self.kept + len(topics) > self._access.options.decisions_per_client_max:
            self.forget()
        self._access.make_room(len(topics))
        answers.update(zip(topics, allowed, strict=True))
        self._access.keep(self, len(topics))

    # --- publishing -------------------------------------------------------------------------------------------------

    def may_publish(self, topic: bytes, packets: list[Packet]) -> bool:
        """Return whether the client may publish to a topic. For topics that `publish` doesn't hold as allowed.

        The topics of the other `packets` that were read with it are asked about together, so they are waited for once.

        Raises Undecided where the plugins have not answered yet.
        """
        allowed = self.publish.get(topic)
        if allowed is None:
            others = {packet[2] for packet in packets if packet[0] in _PUBLISHES} - self.publish.keys() - {topic, b""}
            topics = [topic, *others][:TOPICS_ASKED_MAX]
            raise Undecided(
                lambda then: self._access.ask_topics(
                    self, PUBLISH, topics, lambda answers: self._keep(self.publish, topics, answers), then
                )
            )
        return allowed

    # --- subscribing ------------------------------------------------------------------------------------------------

    def may_subscribe(self, filters: list[str]) -> dict[str, bool]:
        """Return for each filter of a SUBSCRIBE whether the client may have it. Each SUBSCRIBE asks anew.

        Raises:
            Undecided: the plugins have not answered yet.
        """
        names = [name.encode() for name in dict.fromkeys(filters)]
        if not all(name in self._subscribe for name in names):
            raise Undecided(lambda then: self._access.ask_topics(self, SUBSCRIBE, names, self._answer_for(names), then))
        answers = {name.decode(): self._subscribe[name] for name in names}
        self._subscribe.clear()
        return answers

    def _answer_for(self, names: list[bytes]) -> Callable[[list[bool]], None]:
        def answered(allowed: list[bool]) -> None:
            self._subscribe = dict(zip(names, allowed, strict=True))

        return answered

    # --- receiving --------------------------------------------------------------------------------------------------

    def admit(self, entries: bytes) -> tuple[bytes, int]:
        """Return those of some entries of a light queue whose messages the client may have, and how many were looked at.

        It stops before the first of which that isn't known. Then the plugins are asked about all of them, and the
        connection's subscriptions go on when they have answered.
        """
        admitted = bytearray()
        topics = topics_of(self._access.store, entries)
        receive = self.receive
        for number, topic in enumerate(topics):
            if not topic:
                continue
            allowed = receive.get(topic)
            if allowed is None:
                self._ask_receive([each for each in dict.fromkeys(topics[number:]) if each and each not in receive])
                return bytes(admitted), number
            if allowed:
                admitted += entries[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        return bytes(admitted), len(topics)

    def passes(self, topics: frozenset[bytes]) -> bool:
        """Return whether the client is known to be allowed messages of all of these topics."""
        get = self.receive.get
        return all(get(topic) for topic in topics)

    def receivable(self, topics: list[bytes], then: Callable[[], None]) -> list[bytes] | None:
        """Return those of some topics whose messages the client may have. Where not all is known: None, and later `then`."""
        unknown = [topic for topic in topics if topic not in self.receive]
        if not unknown:
            return [topic for topic in topics if self.receive[topic]]
        unknown = unknown[:TOPICS_ASKED_MAX]
        self._access.ask_topics(self, RECEIVE, unknown, lambda answers: self._keep(self.receive, unknown, answers), then)
        return None

    def _ask_receive(self, topics: list[bytes]) -> None:
        if self._asking:
            return
        self._asking = True
        topics = topics[:TOPICS_ASKED_MAX]

        def answered(allowed: list[bool]) -> None:
            self._asking = False
            self._keep(self.receive, topics, allowed)

        connection = self._of()
        assert connection is not None, "who asks is there"
        self._access.ask_topics(self, RECEIVE, topics, answered, connection.pump_soon)


def topics_of(store: Store, entries: bytes) -> list[bytes]:
    """Return the topics of the messages that entries of a light queue point at, in order: about 0.4 us each.

    Empty is that of a message that retention has given up.
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


def _subject(topic: bytes, action: str) -> str:
    """Return the topic or filter that a rule is about: what stands behind `$share/group/` and `$delayed/seconds/`."""
    if (action == SUBSCRIBE and topic.startswith(SHARE.encode())) or (action == PUBLISH and topic.startswith(DELAYED)):
        topic = without_prefix(topic)
    return topic.decode(errors="replace")
