"""Logins: whether clients are who they say, by the password file of the node, by tokens, and by plugins.

Passwords and plugins need threads. A password hash takes a tenth of a second of a processor, and a plugin may take any time.
Tokens, and credentials that were verified lately, need none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from penstock.access.control import AccessControl
from penstock.access.identity import ProvenIdentity, is_token
from penstock.gateway.auth.authenticator import Authenticator
from penstock.gateway.auth.login import Answer, Login
from penstock.gateway.auth.login_queue import LoginQueue
from penstock.gateway.auth.loop_thread import LOGIN_NICENESS, LoopThread
from penstock.gateway.auth.verified import Credential, Verified, VerifiedCredentials
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.connect import Connect

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession
    from penstock.gateway.auth.plugin_host import PluginHost
    from penstock.gateway.transport.peer import Peer

logger = structlog.get_logger("gateway")

THREADS_MAX: Final = 4
"""Threads that authenticate by default, at most. An Argon2 hash with the usual settings takes 64 MiB and computes on four
threads of its own, so more would cost memory and gain little: see `bench storm`."""

RELEASE_S: Final = 0.05
RELEASED_MAX: Final = 20
"""At most so many held logins are refused every `RELEASE_S` seconds, 400 a second. So the refusals of a fleet that logs in at
once take a small part of the loop, and the fleet does not come back all at once."""


class Logins:
    """Authenticates clients.

    Parameters:
        options: the options of access control.
        access: has the password file.
        patience_s: seconds that a login may wait.
        held_max: logins that may be held at a time beside those that wait.
    """

    def __init__(self, options: AccessOptions, access: AccessControl, patience_s: float, held_max: int) -> None:
        self._options = options
        self._access = access
        self._timeout_s = options.plugin_timeout_ms / 1000
        self.queue = LoginQueue(patience_s, options.questions_max, options.held_ms / 1000, held_max)
        """The logins that wait."""
        self.verified: VerifiedCredentials | None = None
        """The credentials that are remembered; None if none are."""
        self._asks_plugins = False
        self._names_all = False
        """Whether more than user name and password names credentials."""
        self._proven: dict[bytes, ProvenIdentity] = {}
        """Who has proved by a password who it is, by its credentials, until the loop hears of it. Threads change it."""
        self._own: list[LoopThread] = []
        self._is_releasing = False
        self._now_s: Callable[[], float]
        self._home: asyncio.AbstractEventLoop

    @property
    def authenticates(self) -> bool:
        """Whether clients can prove who they are."""
        return self._asks_plugins or self._access.authenticates

    def start(self, now_s: Callable[[], float], hosts: Sequence[PluginHost], *, only_passwords: bool) -> None:
        """Begin.

        Args:
            now_s: returns the monotonic time in seconds.
            hosts: the plugins that authenticate. All have the same ones.
            only_passwords: whether they go by user name and password alone, and always say the same of these.
        """
        self._now_s = now_s
        self._home = asyncio.get_running_loop()
        self._asks_plugins = bool(hosts)
        self.queue.start(now_s, threads_of(self._options))
        if not self.authenticates:
            return
        self._remember(only_passwords=only_passwords)
        if not hosts:
            self._own = [LoopThread(f"penstock-login-{number}", LOGIN_NICENESS) for number in range(threads_of(self._options))]
            for thread in self._own:
                thread.start()
        threads = [host.thread for host in hosts] or self._own
        self.queue.start(now_s, len(threads))
        asked: list[PluginHost | None] = [*hosts] if hosts else [None] * len(threads)
        for thread, host in zip(threads, asked, strict=True):
            Authenticator(thread, self.queue, partial(self._verify, host), self._timeout_s, self._home, self._answer).wake()

    def _remember(self, *, only_passwords: bool) -> None:
        options = self._options
        if options.verified == "none" or (options.verified == "passwords" and not only_passwords):
            return
        self._names_all = not only_passwords
        keep_s = options.verified_for_ms / 1000
        self.verified = VerifiedCredentials(keep_s, options.verified_max, while_connected=only_passwords)
        self.verified.start(self._now_s)

    async def stop(self) -> None:
        """End the threads. A thread that is blocked is not awaited."""
        for thread in self._own:
            thread.end()
        await asyncio.gather(*(thread.ended() for thread in self._own))
        self._own = []

    # --- the node's loop --------------------------------------------------------------------------------------------

    def begin(
        self, connect: Connect, session: ClientSession | None, peer: Peer, answered: Callable[[Answer, str], None]
    ) -> Login:
        """Ask whether a client is who it says; return the login, which `queue.drop` gives up.

        Args:
            connect: the CONNECT.
            session: the client as plugins see it, if there are plugins.
            peer: the client's end.
            answered: gets the answer, and why there is none, if there is none: "timeout" or "overload". This may happen before
                this method returns.
        """
        login = Login(connect, session, peer.source, self._credential_of(connect, peer), answered)
        refused = self.queue.add(login)
        if refused is not None:
            refused.answer(None, "overload")
        if self.queue.held:
            self._release_later()
        return login

    def give_way(self) -> bool:
        """Refuse a login that is held, because its connection is needed for others. Return False if none is held."""
        login = self.queue.give_way()
        if login is not None:
            login.answer(None, "overload")
        return login is not None

    def _release_later(self) -> None:
        if not self._is_releasing:
            self._is_releasing = True
            self._home.call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._is_releasing = False
        for login in self.queue.release(RELEASED_MAX):
            login.answer(None, "overload")
        if self.queue.held:
            self._release_later()

    def remembered(self, connect: Connect, session: ClientSession | None, peer: Peer) -> Credential | None:
        """Return the credentials of a client if they were verified before, or None. Then `session` is as it was after that."""
        name = self._credential_of(connect, peer)
        found = self.verified.find(name) if self.verified is not None and name is not None else None
        if found is not None and session is not None:
            verified = found.verified
            session.username, session.is_anonymous = verified.username, verified.is_anonymous
            session.attributes = dict(verified.attributes)
        return found

    def prove_token(self, connect: Connect) -> ProvenIdentity | bool | None:
        """Return who a client is that shows a token; False if the token proves nothing, and None if it shows none."""
        password = _text_of(connect.password)
        if self._access.tokens is None or password is None or not is_token(password):
            return None
        return self._access.prove(connect.username, password, True)

    def expire(self) -> None:
        """Give up the logins that can't be answered in time. The caller calls this once a second."""
        for login in self.queue.expire():
            login.answer(None, "overload")
        if self.queue.running:
            # A thread cancels what takes too long. This is for a plugin that blocks its thread.
            for login in self.queue.started_before(self._now_s() - self._timeout_s - 1):
                login.answer(None, "timeout")
        if self.verified is not None:
            self.verified.expire()

    def _answer(self, login: Login, answer: Answer, outcome: str) -> None:
        if login.credential is not None and self.verified is not None:
            if answer is True and self.verified.find(login.credential) is None:  # also if nobody waits any more
                self.verified.add(login.credential, _verified(login))
            self._proven.pop(login.credential, None)
        login.answer(answer, outcome)
        for shed in self.queue.shed():
            shed.answer(None, "overload")
        if self.queue.held:
            self._release_later()

    def _credential_of(self, connect: Connect, peer: Peer) -> bytes | None:
        """Return the name of a client's credentials; None if credentials are not remembered, or the client has none."""
        if self.verified is None or connect.username is None:
            return None
        parts = [connect.username.encode(), connect.password or b""]
        passwords = self._access.passwords
        if passwords is not None:  # With another hash, the name is another one: so a changed password is found out at once.
            parts.append(passwords.hashes.get(connect.username, "").encode())
        if self._names_all:
            certificate = peer.ssl_object.getpeercert(binary_form=True) if peer.ssl_object is not None else None
            parts += [connect.client_id.encode(), peer.host.encode(), peer.listener.name.encode(), certificate or b""]
        return self.verified.name_of(parts)

    # --- the threads ------------------------------------------------------------------------------------------------

    async def _verify(self, host: PluginHost | None, login: Login) -> Answer:
        """Return whether a client is who it says. The password file decides about its users, and plugins about others."""
        verified, credential = self.verified, login.credential
        if verified is not None and credential is not None:
            # Another client with these credentials may have been verified meanwhile.
            login.identity = self._proven.get(credential)
            found_before = verified.find(credential)
            if login.identity is None and found_before is not None:
                login.identity = found_before.verified.identity
            if login.identity is not None or found_before is not None:
                return True
        if self._access.passwords is not None:
            found = self._access.prove(login.connect.username, _text_of(login.connect.password), host is None)
            if isinstance(found, ProvenIdentity):
                login.identity = found
                if credential is not None:
                    self._proven[credential] = found
                return True
            if found is not None:
                return found
        if host is None or login.session is None:
            return False
        answer = await host.authenticate(login.session)
        if answer is False and self._access.passwords is not None and login.connect.username is not None:
            # A user of the file would have cost a hash: the time must not tell that this one is not in it.
            self._access.passwords.verify(login.connect.username, login.connect.password or b"")
        return answer


def threads_of(options: AccessOptions) -> int:
    """Return the number of threads that authenticate in parallel."""
    return options.authentication_threads or min(len(os.sched_getaffinity(0)), THREADS_MAX)


def _verified(login: Login) -> Verified:
    session = login.session
    if session is None:
        return Verified(login.identity)
    return Verified(login.identity, session.username, session.is_anonymous, dict(session.attributes))


def _text_of(password: bytes | None) -> str | None:
    """Return a password as text. One that is no text becomes one that nobody has."""
    return password.decode(errors="surrogateescape") if password is not None else None
