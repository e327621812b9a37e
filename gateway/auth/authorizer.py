"""Access control: which clients may connect, and what they may publish, subscribe to and receive.

The plugins of amqtt (`plugins`) decide, on other threads. If an answer is needed that is not known yet, the code raises
`AuthorizationPending`: the connection stops reading, keeps what it has read, and continues at the same packet when the answer
has come. Answers about topics are kept per client for `mqtt.access.decision`; with an answer kept, a publish costs one dict
lookup. Without plugins a client has no `Permissions`, and nothing is asked.

No answer is neither a yes nor a no. If a plugin takes too long, fails or can't tell, or if too many questions wait, a client
that connects is told that the server is busy. A packet waits, and the plugins are asked again, until the connection closes
after `AccessOptions.unanswered_ms`; nothing is acknowledged meanwhile. A delivery keeps its cursor. No such outcome is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import ref

from penstock.access.control import AccessControl
from penstock.access.identity import KeysUnavailable, ProvenIdentity
from penstock.access.rights import Rights
from penstock.access.subject import Subject
from penstock.gateway.auth.candidate import Candidate
from penstock.gateway.auth.client_ids import ClientIdPattern, assign_client_id
from penstock.gateway.auth.decisions import Decisions
from penstock.gateway.auth.login import Answer
from penstock.gateway.auth.logins import Logins
from penstock.gateway.auth.pending import AuthorizationPending
from penstock.gateway.auth.permissions import CONNECT, PUBLISH, SUBSCRIBE, Permissions, may, subject_of
from penstock.gateway.auth.questions import Questions
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.protocol.errors import ConnectRefused, ProtocolError
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.transport.peer import Peer, username_of
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession
    from penstock.gateway.auth.plugin_context import Publish
    from penstock.gateway.auth.plugins import Plugins
    from penstock.gateway.connection.connection import Connection


ASKED_AGAIN_MAX: Final = 200
"""Questions that wait for the plugins, beyond which no client's subscriptions are looked at again for a second."""


REVOKED: Final = "its user was deleted or has another password, or the key that signed its token is not known any more"
"""Why a client may not stay, or not come in, that has proved who it is."""


class Recheck(NamedTuple):
    """What came of looking at a connected client again."""

    why: str = ""
    """Why it must go; empty if it may stay."""
    refused: Sequence[str] = ()
    """Those of its filters that it may no longer have."""
    may_have_will: bool = True
    """Whether its will may be published."""


class Authorizer:
    """The access control of a node over MQTT.

    Parameters:
        options: the options of access control.
        access: the rules, the bans and the audit log.
        store: the topics of messages that clients are about to receive are read there.
        logbook: events that clients cause are logged there.
        publish: publishes the message of a plugin. It is called on a thread of the plugins.
        connect_timeout_ms: see `GatewayOptions.connect_timeout_ms`.
        logins_held_max: logins that may be held for which there is no room.
    """

    def __init__(
        self,
        options: AccessOptions,
        access: AccessControl,
        store: Store,
        logbook: Logbook,
        publish: Publish,
        *,
        connect_timeout_ms: int,
        logins_held_max: int,
    ) -> None:
        self.options = options
        self.access = access
        self.decisions = Decisions(options)
        self.questions = Questions(options, logbook)
        self._logbook = logbook
        self.logins = Logins(options, access, connect_timeout_ms / 1000, logins_held_max)
        self._client_ids = ClientIdPattern(options.client_id)
        self._store = store
        self._publish = publish
        self._plugins: Plugins | None = None
        self._rechecks: deque[tuple[float, ref[Connection]]] = deque()
        """When to ask the plugins again about the subscriptions of each client, in monotonic seconds."""
        self._ends: dict[int, dict[Connection, None]] = {}
        """The clients whose tokens end, by the second in which they do, since 1970."""
        self.now_s: Callable[[], float]
        """Returns the monotonic time in seconds."""

    async def start(self, now_s: Callable[[], float]) -> None:
        """Load the plugins, if any are configured.

        Args:
            now_s: returns the monotonic time in seconds.

        Raises:
            PluginsUnavailable: a plugin can't be loaded.
        """
        self.now_s = now_s
        self.decisions.start(now_s)
        self.questions.start(now_s)
        options = self.options
        if options.plugins is None:
            self.logins.start(now_s, [], only_passwords=True)
            return
        from penstock.gateway.auth.plugins import Plugins  # amqtt is slow to import, so only nodes with plugins do.

        plugins = Plugins(options, self._publish)
        await plugins.start()
        self._plugins = plugins
        self.logins.start(now_s, plugins.authenticating, only_passwords=plugins.only_passwords)

    async def stop(self) -> None:
        """Let the plugins close."""
        await self.logins.stop()
        if self._plugins is not None:
            await self._plugins.stop()
            self._plugins = None

    def expire(self) -> None:
        """Forget expired answers, and give up what is not answered. The caller calls this once a second."""
        self.decisions.expire()
        self.questions.expire()
        self.logins.expire()
        self._ask_again()
        now_s = self.access.now_ms() // 1000
        for second in [second for second in self._ends if second < now_s]:
            for connection in self._ends.pop(second):
                connection.close("its token has ended", ReasonCode.MAXIMUM_CONNECT_TIME)

    # --- connecting -------------------------------------------------------------------------------------------------

    def admit(self, connection: Connection, connect: Connect) -> None:
        """Let a client connect, as a client with the CONNECT `connect`.

        Raises:
            AuthorizationPending: others have to be asked first. The caller calls this again when they have answered.
            ConnectRefused: the client may not connect.
        """
        peer, plugins = connection.peer, self._plugins
        is_known = peer.username is not None
        connection.user = peer.username or ""
        if not self.logins.authenticates:
            is_known = is_known or self._is_anonymous_allowed(peer)
            if not is_known:
                self.questions.count(CONNECT, "denied")
                raise ConnectRefused(
                    f"The listener {peer.listener.name} accepts no anonymous clients"
                    f"{'' if peer.is_local else ' beyond this machine'}. See mqtt.access.anonymous.",
                    ConnectCode.NOT_AUTHORIZED,
                )
            if plugins is None:
                return
        candidate = connection.candidate
        if candidate is None:
            candidate = connection.candidate = Candidate(connect, self._plugin_session(connect, peer))
            candidate.is_authenticated = True if is_known else self._recognize(candidate, peer)
        _check_answered(candidate)
        if candidate.is_authenticated is None:
            raise AuthorizationPending(lambda then: self._authenticate(candidate, peer, then))
        if not candidate.is_authenticated:
            code = ConnectCode.NOT_AUTHORIZED if connect.username is None else ConnectCode.BAD_USER_NAME_OR_PASSWORD
            raise ConnectRefused("The client is not authenticated: user name, password or token is not right.", code)
        if self._is_revoked(candidate.identity):  # by a reload since it was authenticated
            raise ConnectRefused(f"The client is not authenticated: {REVOKED}.", ConnectCode.BAD_USER_NAME_OR_PASSWORD)
        session, connection.identity = candidate.session, candidate.identity
        if not is_known:
            if candidate.identity is not None:
                connection.user = candidate.identity.user
                if session is not None:
                    session.username = candidate.identity.user
            elif session is not None:
                connection.user = session.username or ""
        if session is None or plugins is None:
            return
        if connect.will is not None and plugins.filters_topics:
            (is_allowed,) = self._answers(candidate, PUBLISH, [connect.will.topic])
            if not is_allowed:
                raise ConnectRefused("The client may not publish to the topic of its will.", ConnectCode.NOT_AUTHORIZED)
        connection.plugin_session = session

    def _recognize(self, candidate: Candidate, peer: Peer) -> bool | None:
        """Return whether a client is who it says, if no thread has to be asked; otherwise None."""
        try:
            found = self.logins.prove_token(candidate.connect)
        except KeysUnavailable as error:
            self._note(CONNECT, str(error), "")
            candidate.is_unanswered = True
            return None
        if found is not None:
            candidate.identity = found if isinstance(found, ProvenIdentity) else None
            return self._note(CONNECT, candidate.identity is not None, "")
        candidate.credential = self.logins.remembered(candidate.connect, candidate.session, peer)
        if candidate.credential is None or self.logins.verified is None:
            return None
        self.logins.verified.hits += 1
        candidate.identity = candidate.credential.verified.identity
        return True

    def _plugin_session(self, connect: Connect, peer: Peer) -> ClientSession | None:
        """Return a client as the plugins see it; None if there are none."""
        if self._plugins is None:
            return None
        from penstock.gateway.auth.client_session import ClientSession  # The module is loaded already.

        return ClientSession(connect, connect.client_id or assign_client_id(), peer)

    def check_ban(self, connection: Connection, connect: Connect, user: str) -> None:
        """Check that no ban concerns a client.

        Args:
            connection: of the client.
            connect: its CONNECT.
            user: its user name; empty as long as nobody has vouched for it.

        Raises:
            ConnectRefused: a ban does.
        """
        ban = self.access.bans.of(Subject(user, client_id=connect.client_id, address=connection.peer.host))
        if ban is not None:
            raise ConnectRefused(f"The {ban.kind} {ban.name!r} is banned.", ConnectCode.NOT_AUTHORIZED, ReasonCode.BANNED)

    def client_id_of(self, connection: Connection, connect: Connect) -> str:
        """Return the client id of a client that is authenticated, which the node assigns if the client sent none.

        Raises:
            ConnectRefused: the client may not have it: see `AccessOptions.client_id`.
        """
        pattern, peer, certificate = self._client_ids, connection.peer, ""
        if pattern.needs_certificate and peer.ssl_object is not None:
            certificate = username_of(peer.ssl_object.getpeercert() or {}, "cn") or ""
        client_id = connect.client_id or pattern.assign(connection.user, certificate)
        if client_id is None or not (pattern.is_open or pattern.matches(client_id, connection.user, certificate)):
            raise ConnectRefused(
                f"The client may not have the client id {connect.client_id[:80]!r}. See mqtt.access.client_id.",
                ConnectCode.IDENTIFIER_REJECTED,
            )
        return client_id

    def forbidden(self, connection: Connection, client_id: str, filters: list[str]) -> list[str]:
        """Return those filters of a stored session that its client may no longer have.

        Raises:
            AuthorizationPending: the plugins have to be asked first. The caller calls this again when they have answered.
        """
        found: list[str] = []
        candidate, plugins = connection.candidate, self._plugins
        if candidate is not None and plugins is not None and plugins.filters_topics and filters:
            answers = self._answers(candidate, SUBSCRIBE, filters)
            found = [each for each, is_allowed in zip(filters, answers, strict=True) if not is_allowed]
        rights = self._rights_of(connection, client_id)
        if rights is not None:
            refused = [each for each in filters if not may(rights, SUBSCRIBE, each.encode())]
            self.note_denied(rights, SUBSCRIBE, [each.encode() for each in refused])
            found = list(dict.fromkeys([*found, *refused]))
        return found

    def check_will(self, connection: Connection, connect: Connect) -> None:
        """Check that the rules let a client that is authenticated publish to the topic of its will. Raises ConnectRefused."""
        rights = self._rights_of(connection, connect.client_id)
        if connect.will is None or rights is None:
            return
        topic = connect.will.topic.encode()
        if not rights.may(PUBLISH, connect.will.topic):
            self.note_denied(rights, PUBLISH, [topic])
            raise ConnectRefused("The client may not publish to the topic of its will.", ConnectCode.NOT_AUTHORIZED)

    def author_of(self, connection: Connection, client_id: str) -> tuple[Subject, str]:
        """Return who an authenticated client is, and the `ProvenIdentity.proof` of that, for `may_publish_will`."""
        return self._subject_of(connection, client_id), connection.identity.proof if connection.identity is not None else ""

    def may_publish_will(self, author: Subject, proof: str, topic: str) -> bool | None:
        """Return whether bans, rules, users and keys as they are now let a client that has gone publish its will.

        None if nobody can tell yet, because no keys have come. Plugins are not asked: they decide about clients that are there,
        and have decided about this one when it connected.
        """
        access, policy = self.access, self.access.policy
        proves = access.still_proves(author.user, proof)
        is_denied = policy is not None and not policy.rights_of(author).may(PUBLISH, topic)
        if is_denied or proves is False or access.bans.of(author) is not None:
            self.questions.count(PUBLISH, "denied")
            self._note_denied(author, PUBLISH, topic.encode())
            return False
        return proves

    def note_refused(self, connection: Connection, connect: Connect | None, error: ProtocolError) -> None:
        """Write into the audit log that a CONNECT was refused. `connect` is None if it could not be read."""
        peer = connection.peer
        client_id, claimed = (connect.client_id, connect.username) if connect is not None else ("", None)
        user, about = connection.user or peer.username or "", {"reason": error.reason.name, "why": str(error)}
        if claimed != user:
            about["claimed"] = claimed or ""
        subject = Subject(user, client_id=client_id, address=peer.host)
        self.access.audit.note("refused", subject, listener=peer.listener.name, **about)

    def note_denied(self, rights: Rights, action: str, topics: list[bytes]) -> None:
        """Count topics or filters that the rules deny a client, and write them into the audit log."""
        for topic in topics:
            self.questions.count(action, "denied")
            self._note_denied(rights.subject, action, topic)

    def _note_denied(self, subject: Subject, action: str, topic: bytes, **by: str) -> None:
        """Write a denial into the audit log, and a denied publish into the node's log: MQTT 3.1.1 can't tell the client.

        The node's log has a line for each subscription that is refused, too (`Subscribing`).
        """
        name = topic.decode(errors="replace")
        self.access.audit.note("denied", subject, **by, action=action, topic=name)
        if action == PUBLISH:
            who = {"client": subject.client_id, "user": subject.user, "peer": subject.address}
            self._logbook.note("publish.denied", **who, topic=name[:80], **by)

    def _rights_of(self, connection: Connection, client_id: str) -> Rights | None:
        """Return what the rules let an authenticated client do; None if there are no rules."""
        policy = self.access.policy
        return policy.rights_of(self._subject_of(connection, client_id)) if policy is not None else None

    def _subject_of(self, connection: Connection, client_id: str) -> Subject:
        identity, peer = connection.identity, connection.peer
        roles = peer.roles | identity.roles if identity is not None else peer.roles
        return Subject(self.user_of(connection), roles, client_id, peer.host)

    def _is_revoked(self, identity: ProvenIdentity | None) -> bool:
        """Return whether the password or the key that proved who a client is does not count any more."""
        return identity is not None and self.access.still_proves(identity.user, identity.proof) is False

    def recheck(self, connection: Connection, client_id: str, filters: list[str]) -> Recheck:
        """Look again at a connected client, because access control has changed."""
        subject = self._subject_of(connection, client_id)
        ban = self.access.bans.of(subject)
        if ban is not None:
            return Recheck(f"the {ban.kind} {ban.name!r} is banned", may_have_will=False)
        if self._is_revoked(connection.identity):
            return Recheck(REVOKED, may_have_will=False)
        policy, permissions = self.access.policy, connection.permissions
        if policy is None or permissions is None:
            return Recheck()
        refused = permissions.replace(policy.rights_of(subject), filters)
        return Recheck("its rights have changed" if refused else "", refused, permissions.allows_will())

    def user_of(self, connection: Connection) -> str:
        """Return the user name of an admitted client; empty if neither certificate, password nor plugin vouch for one."""
        return connection.user

    def entered(self, connection: Connection, client_id: str) -> None:
        """Tell the plugins of an admitted client that has its session, and give it `Permissions` if topics have plugins."""
        session, candidate, connection.candidate = connection.plugin_session, connection.candidate, None
        if candidate is not None and candidate.credential is not None and self.logins.verified is not None:
            connection.credential = candidate.credential
            self.logins.verified.connected(candidate.credential)
        plugins, rights = self._plugins, self._rights_of(connection, client_id)
        asked = session if plugins is not None and plugins.filters_topics else None
        if asked is not None or rights is not None:
            connection.permissions = Permissions(self, self.decisions, self._store, connection, asked, rights)
        if asked is not None:
            self._ask_again_later(connection)
        if session is not None and plugins is not None:
            session.client_id = client_id
            plugins.connected(session)
        if connection.identity is not None and connection.identity.expires_ms is not None:
            self._ends.setdefault(connection.identity.expires_ms // 1000, {})[connection] = None
        peer = connection.peer
        self.access.audit.note("connected", self._subject_of(connection, client_id), listener=peer.listener.name)

    def left(self, connection: Connection) -> None:
        """Forget a client that was admitted."""
        if connection.candidate is not None and connection.candidate.login is not None:
            self.logins.queue.drop(connection.candidate.login)
        connection.candidate = None
        if connection.credential is not None and self.logins.verified is not None:
            self.logins.verified.left(connection.credential)
            connection.credential = None
        if connection.identity is not None and connection.identity.expires_ms is not None:
            self._ends.get(connection.identity.expires_ms // 1000, {}).pop(connection, None)
        if connection.permissions is not None:
            connection.permissions.close()
        if connection.plugin_session is not None:
            if self._plugins is not None:
                self._plugins.disconnected(connection.plugin_session)
            connection.plugin_session = None

    def _is_anonymous_allowed(self, peer: Peer) -> bool:
        anonymous = self.options.anonymous
        return anonymous == "always" or (anonymous == "loopback" and peer.is_local)

    def _authenticate(self, candidate: Candidate, peer: Peer, then: Callable[[bool], None]) -> None:
        def answered(answer: Answer, outcome: str) -> None:
            candidate.login = None
            candidate.is_authenticated = self._note(CONNECT, answer, outcome)
            candidate.is_unanswered = candidate.is_authenticated is None
            if candidate.is_authenticated:
                candidate.credential = self.logins.remembered(candidate.connect, candidate.session, peer)
                candidate.identity = login.identity
                if candidate.credential is not None:
                    candidate.identity = candidate.credential.verified.identity
            then(True)  # Without an answer the client is refused, because nothing of it waits yet.

        login = self.logins.begin(candidate.connect, candidate.session, peer, answered)
        candidate.login = login if not login.is_done else None

    def _answers(self, candidate: Candidate, action: str, topics: list[str]) -> list[bool]:
        """Return what a client that connects may do with each topic or filter.

        Raises:
            AuthorizationPending: the plugins have to be asked first.
        """
        known = candidate.topics
        unknown = [topic for topic in topics if (action, topic) not in known]
        if not unknown:
            return [known[action, topic] for topic in topics]

        def ask(then: Callable[[bool], None]) -> None:
            def answered(answers: list[bool | None]) -> None:
                for topic, answer in zip(unknown, answers, strict=True):
                    if answer is None:
                        candidate.is_unanswered = True
                    else:
                        known[action, topic] = answer
                then(True)

            encoded = [topic.encode() for topic in unknown]
            self.ask_topics(candidate.session, action, encoded, answered)

        raise AuthorizationPending(ask)

    # --- topics -----------------------------------------------------------------------------------------------------

    def ask_topics(
        self,
        session: ClientSession | None,
        action: str,
        topics: list[bytes],
        answered: Callable[[list[bool | None]], None],
    ) -> None:
        """Ask the plugins what a client may do with topics or filters.

        Args:
            session: the client as the plugins see it, or None if it has gone.
            action: `PUBLISH`, `SUBSCRIBE` or `RECEIVE`.
            topics: at most `TOPICS_ASKED_MAX` topics, or the filters of a SUBSCRIBE.
            answered: gets the answers in the order of the topics; None for a topic about which the plugins give no answer.
        """
        plugins = self._plugins
        if plugins is None or session is None:  # The node is stopping, or the client has gone.
            answered([None] * len(topics))
            return

        def note(found: list[Answer] | None, outcome: str) -> None:
            answers = [self._note(action, answer, outcome) for answer in found or [None] * len(topics)]
            subject = Subject(session.username or "", client_id=str(session.client_id), address=session.remote_address or "")
            for topic, answer in zip(topics, answers, strict=True):
                if answer is False:
                    self._note_denied(subject, action, topic, by="plugins")
            answered(answers)

        subjects = [subject_of(topic, action) for topic in topics]
        self.questions.ask(plugins, lambda: plugins.topics(session, subjects, action), note)

    def _ask_again_later(self, connection: Connection) -> None:
        if self.options.subscriptions_ms:
            self._rechecks.append((self.now_s() + self.options.subscriptions_ms / 1000, ref(connection)))

    def _ask_again(self) -> None:
        """Ask the plugins again about subscriptions that clients have had for long, some at a time."""
        rechecks, now_s = self._rechecks, self.now_s()
        while rechecks and rechecks[0][0] <= now_s and self.questions.waiting < ASKED_AGAIN_MAX:
            connection = rechecks.popleft()[1]()
            if connection is None or connection.permissions is None or connection.permissions.session is None:
                continue
            self._ask_again_later(connection)
            filters = connection.held_filters()
            if filters:
                self._ask_about_subscriptions(connection, connection.permissions.session, filters)

    def _ask_about_subscriptions(self, connection: Connection, session: ClientSession, filters: list[str]) -> None:
        def answered(answers: list[bool | None]) -> None:
            refused = [each for each, answer in zip(filters, answers, strict=True) if answer is False]
            connection.withdraw(refused, "the plugins no longer allow one of its subscriptions")

        self.ask_topics(session, SUBSCRIBE, [each.encode() for each in filters], answered)

    def _note(self, action: str, answer: Answer, outcome: str) -> bool | None:
        """Count an answer of the plugins, and return it; None if it is none.

        Args:
            action: what was asked.
            answer: True or False; the error of a plugin; or None if no plugin can tell.
            outcome: why there is no answer, if the question was not answered at all; otherwise empty.
        """
        if isinstance(answer, bool):
            self.questions.count(action, "allowed" if answer else "denied")
            return answer
        if answer:
            self.questions.note_failure(answer)
        self.questions.count(action, outcome or "error")
        return None


def _check_answered(candidate: Candidate) -> None:
    """Raise ConnectRefused if the plugins have given no answer."""
    if candidate.is_unanswered:
        raise ConnectRefused(
            "The plugins of mqtt.access have given no answer about the client in time. It may try again.",
            ConnectCode.SERVER_UNAVAILABLE,
            ReasonCode.SERVER_BUSY,
        )
