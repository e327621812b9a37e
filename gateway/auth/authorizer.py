"""Access control: which clients may connect, and what they may publish, subscribe to and receive.

The plugins of amqtt (`plugins`) decide, on another thread. If an answer is needed that is not known yet, the code raises
`AuthorizationPending`: the connection stops reading, keeps what it has read, and continues at the same packet when the answer
has come. Answers about topics are kept per client for `mqtt.access.decision_ms`; with an answer kept, a publish costs one dict
lookup. Without plugins a client has no `Permissions`, and nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.auth.actions import CONNECT, PUBLISH, SUBSCRIBE
from penstock.gateway.auth.decisions import Decisions
from penstock.gateway.auth.pending import AuthorizationPending
from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.auth.questions import Questions
from penstock.gateway.client_id import assign_client_id
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.reasons import ConnectCode
from penstock.gateway.protocol.topics import DELAYED, SHARE, without_prefix
from penstock.gateway.transport.peer import Peer
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.plugins import ClientSession, Plugins, Publish, Verdict


class Applicant(Protocol):
    """A connection, as far as access control knows it."""

    peer: Peer
    """The other end."""
    plugin_session: ClientSession | None
    """The client as the plugins see it."""
    verdict: tuple[ClientSession, Verdict | None] | None
    """The answer of the plugins to the CONNECT that waits for it."""
    permissions: Permissions | None
    """What the client may do with topics, if there are plugins for topics."""

    def pump_soon(self) -> None:
        """Continue the client's deliveries in the next turn of the loop."""
        ...


class Authorizer:
    """The access control of a node.

    Parameters:
        options: the options of access control.
        store: the topics of messages that clients are about to receive are read there.
        logbook: events that clients cause are logged there.
        publish: publishes the message of a plugin. It is called on the plugins' thread.
    """

    def __init__(self, options: AccessOptions, store: Store, logbook: Logbook, publish: Publish) -> None:
        self.options = options
        self.decisions = Decisions(options)
        self.questions = Questions(options, logbook)
        self._store = store
        self._publish = publish
        self._plugins: Plugins | None = None

    async def start(self, now_s: Callable[[], float]) -> None:
        """Load the plugins, if any are configured.

        Args:
            now_s: returns the monotonic time in seconds.

        Raises:
            PluginsUnavailable: a plugin can't be loaded.
        """
        self.decisions.start(now_s)
        self.questions.start(now_s)
        options = self.options
        if options.plugins is None and options.auth is None and options.topic_check is None:
            return
        from penstock.gateway.auth.plugins import Plugins  # amqtt is slow to import, so only nodes with plugins do.

        plugins = Plugins(options, self._publish)
        await plugins.start()
        self._plugins = plugins

    async def stop(self) -> None:
        """Let the plugins close."""
        if self._plugins is not None:
            await self._plugins.stop()
            self._plugins = None

    def expire(self) -> None:
        """Forget expired answers, and answer the questions that the plugins don't. The caller calls this once a second."""
        self.decisions.expire()
        self.questions.expire()

    # --- connecting -------------------------------------------------------------------------------------------------

    def admit(self, connection: Applicant, wish: Connect) -> None:
        """Let a client connect, as a client with the CONNECT `wish`.

        Raises:
            AuthorizationPending: the plugins have not been asked yet.
            ConnectRefused: the client may not connect.
        """
        peer, plugins = connection.peer, self._plugins
        is_known = peer.username is not None
        if plugins is None or not plugins.authenticates:
            is_known = is_known or self._is_anonymous_allowed(peer)
            if not is_known:
                self.questions.count(CONNECT, "denied")
                raise ConnectRefused(
                    f"The listener {peer.listener.name} accepts no anonymous clients. See mqtt.access.anonymous.",
                    ConnectCode.NOT_AUTHORIZED,
                )
        if plugins is None:
            return
        from penstock.gateway.auth.plugins import ClientSession  # The module is loaded already.

        if connection.verdict is None:
            session = ClientSession(wish, wish.client_id or assign_client_id(), peer)
            if not is_known or (wish.will is not None and plugins.filters_topics):
                raise self._ask_identity(connection, plugins, session, is_known=is_known)
            connection.plugin_session = session
            return
        session, verdict = connection.verdict
        connection.verdict = None
        if verdict is None or not verdict.authenticated:
            code = ConnectCode.NOT_AUTHORIZED if wish.username is None else ConnectCode.BAD_USER_NAME_OR_PASSWORD
            raise ConnectRefused("The plugins have not authenticated the client.", code)
        if not verdict.will_allowed:
            raise ConnectRefused("The client may not publish to the topic of its will.", ConnectCode.NOT_AUTHORIZED)
        connection.plugin_session = session

    def user_of(self, connection: Applicant) -> str:
        """Return the user name of an admitted client.

        The name is empty if neither a certificate nor a plugin has authenticated it.
        """
        if connection.peer.username is not None:
            return connection.peer.username
        session, plugins = connection.plugin_session, self._plugins
        is_authenticated = session is not None and plugins is not None and plugins.authenticates
        return session.username or "" if session is not None and is_authenticated else ""

    def entered(self, connection: Applicant, client_id: str) -> None:
        """Tell the plugins of an admitted client that has its session, and give it `Permissions` if topics have plugins."""
        session = connection.plugin_session
        if session is not None and self._plugins is not None:
            session.client_id = client_id
            if self._plugins.filters_topics:
                connection.permissions = Permissions(self, self.decisions, self._store, connection, session)
            self._plugins.connected(session)

    def left(self, connection: Applicant) -> None:
        """Forget a client that was admitted."""
        if connection.permissions is not None:
            connection.permissions.close()
        if connection.plugin_session is not None:
            if self._plugins is not None:
                self._plugins.disconnected(connection.plugin_session)
            connection.plugin_session = None

    def _is_anonymous_allowed(self, peer: Peer) -> bool:
        anonymous = self.options.anonymous
        return anonymous == "always" or (anonymous == "loopback" and peer.listener.is_local)

    def _ask_identity(
        self, connection: Applicant, plugins: Plugins, session: ClientSession, *, is_known: bool
    ) -> AuthorizationPending:
        def answered(verdict: Verdict | None, outcome: str) -> None:
            connection.verdict = session, verdict
            allowed = verdict is not None and verdict.authenticated and verdict.will_allowed
            self.questions.count(CONNECT, outcome or ("allowed" if allowed else "denied"))

        def ask(then: Callable[[], None]) -> None:
            self.questions.ask(plugins, plugins.connect(session, is_known=is_known), answered, then)

        return AuthorizationPending(ask)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ask_topics(
        self,
        session: ClientSession | None,
        action: str,
        topics: list[bytes],
        answered: Callable[[list[bool]], None],
        then: Callable[[], None],
    ) -> None:
        """Ask the plugins what a client may do with topics or filters.

        Args:
            session: the client as the plugins see it, or None if it has gone.
            action: `PUBLISH`, `SUBSCRIBE` or `RECEIVE`.
            topics: at most `TOPICS_ASKED_MAX` topics, or the filters of a SUBSCRIBE.
            answered: gets the answers in the order of the topics. Without an answer a topic is denied.
            then: called after `answered`.
        """
        plugins, questions = self._plugins, self.questions

        def note(found: list[bool | str] | None, outcome: str) -> None:
            answers = found if found is not None else [False] * len(topics)
            for answer in answers:
                if isinstance(answer, str):
                    questions.note_failure(answer)
                    questions.count(action, "error")
                else:
                    questions.count(action, outcome or ("allowed" if answer else "denied"))
            answered([answer is True for answer in answers])

        if plugins is None or session is None:  # The node is stopping, or the client has gone.
            note(None, "denied")
            then()
            return
        subjects = [_subject(topic, action) for topic in topics]
        questions.ask(plugins, plugins.topics(session, subjects, action), note, then)


def _subject(topic: bytes, action: str) -> str:
    """Return the topic or filter to which a rule applies: what follows `$share/{name}/` and `$delayed/{seconds}/`."""
    if (action == SUBSCRIBE and topic.startswith(SHARE.encode())) or (action == PUBLISH and topic.startswith(DELAYED)):
        topic = without_prefix(topic)
    return topic.decode(errors="replace")
