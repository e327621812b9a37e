"""The access control of a node: what is in force, and its replacement while the node runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.access.audit import Audit
from penstock.access.bans import Ban, Bans, Kind
from penstock.access.errors import AccessInvalid
from penstock.access.file import load_access_policy
from penstock.access.identity import BY_KEY, BY_PASSWORD, ProvenIdentity, TokenInvalid, is_token, proof_by_password
from penstock.access.options import AccessControlOptions
from penstock.access.policy import AccessPolicy
from penstock.access.subject import Subject

if TYPE_CHECKING:  # they take long to import, so only nodes that use them do
    from penstock.access.passwords import PasswordFile
    from penstock.access.tokens import Tokens


FETCHED_KEYS: Final = "access.jwt.keys"
"""Who changes what is in force, for the audit log, when a fetched key set lacks a key."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files say."""

    policy: AccessPolicy | None
    passwords: PasswordFile | None
    tokens: Tokens | None


class AccessControl:
    """What is in force now.

    Parameters:
        options: name the files.
        data_dir: of the node; the bans are in it.
        now_ms: returns the time in ms since 1970.

    Raises:
        AccessInvalid: a file can't be read, or its content is invalid.
        OSError: the audit file can't be opened.
    """

    def __init__(self, options: AccessControlOptions, data_dir: Path, now_ms: Callable[[], int]) -> None:
        self._options = options
        self.now_ms: Final = now_ms
        self.on_change: Final[list[Callable[[], None]]] = []
        """Called after each change, to look again at what clients are doing."""
        self.reloads = 0
        """How often the files were read again."""
        self.reloads_failed = 0
        """How often that was tried, and one was not valid."""
        self._files = _Files(None, None, None)
        self._files = self._load()
        self.bans: Final = Bans(data_dir, now_ms)
        self.audit: Final = Audit(options.audit_file, options.audit_lines_per_s, now_ms)

    @property
    def policy(self) -> AccessPolicy | None:
        """Decides who may do what; None if nothing is restricted."""
        return self._files.policy

    @property
    def passwords(self) -> PasswordFile | None:
        """The users that may log in over MQTT; None if there is no password file."""
        return self._files.passwords

    @property
    def tokens(self) -> Tokens | None:
        """Verifies tokens; None if none is accepted."""
        return self._files.tokens

    @property
    def authenticates(self) -> bool:
        """Whether clients can prove over MQTT who they are, with a password or a token."""
        return self._files.passwords is not None or self._files.tokens is not None

    def prove(self, user: str | None, password: str | None, is_last: bool) -> ProvenIdentity | bool | None:
        """Return who a client of MQTT is; False if it is not who it says; None if others may know.

        It takes some 0.1 s if there is a password to verify. Any thread may call it. Raises KeysUnavailable if a token can't be
        verified now.

        Args:
            user: the user name that it gives, if any. With a token it may be left out.
            password: the password, or a token.
            is_last: nobody else is asked, so that an unknown user must take as long as a known one.
        """
        passwords, tokens = self._files.passwords, self._files.tokens
        if tokens is not None and password is not None and is_token(password):
            try:
                identity = tokens.verify(password)
            except TokenInvalid:
                return False
            return identity if user in (None, "", identity.user) else False
        if passwords is None or user is None or password is None or not (is_last or user in passwords):
            return False if is_last else None
        # What is no text comes with surrogates, which no password that was set can have.
        is_right = passwords.verify(user, password.encode(errors="surrogateescape"))
        return ProvenIdentity(user, password_hash=passwords.hashes[user]) if is_right else False

    def use_key_set(self, data: bytes) -> None:
        """Verify tokens with the keys that were fetched from the URL `access.jwt.keys`. Raises AccessInvalid.

        Clients whose tokens a key signed that is not among them any more are looked at again.
        """
        if self.tokens is not None and self.tokens.use_key_set(data):
            self._changed(Subject(FETCHED_KEYS), what="keys")

    def still_proves(self, user: str, proof: str) -> bool | None:
        """Return whether what proved who a client is would still prove it; None if nobody can tell, because no keys have come.

        A password does as long as it is that of its user. A token does as long as the key that signed it is known; when the
        token ends is a matter of its own.

        Args:
            user: the user name that was proved.
            proof: see `ProvenIdentity.proof`.
        """
        passwords, tokens = self._files.passwords, self._files.tokens
        if proof.startswith(BY_PASSWORD):
            known = passwords.hashes.get(user) if passwords is not None else None
            return known is not None and proof_by_password(known) == proof
        if proof.startswith(BY_KEY):
            return tokens.has_key(proof.removeprefix(BY_KEY)) if tokens is not None else False
        return True

    def reload(self, by: Subject, over: str = "") -> None:
        """Read the files again, and apply what they say to what clients are doing.

        Args:
            by: who wants it, for the audit log.
            over: how that was asked for, for the audit log; empty for nothing to say.

        Raises:
            AccessInvalid: a file can't be read, or its content is invalid. Then nothing has changed.
        """
        self.audit.reopen()
        try:
            self._files = self._load()
        except AccessInvalid as error:
            self.reloads_failed += 1
            self.audit.note("failed", by, over=over, what="reload", why=str(error))
            raise
        self.reloads += 1
        self._changed(by, over=over, what="reload")

    async def ban(self, kind: Kind, name: str, *, for_ms: int, why: str, by: Subject, over: str = "") -> Ban:
        """Make a ban, end what it concerns, and return when the ban is durable.

        See `Bans.add` and `Bans.save` for the errors; what it concerns ends with OSError too.
        """
        ban = self.bans.add(kind, name, for_ms=for_ms, why=why)
        self._changed(by, over=over, what="ban", of=kind, name=ban.name, until_ms=ban.until_ms or None, why=why)
        await self.bans.save()
        return ban

    async def lift(self, kind: Kind, name: str, *, by: Subject, over: str = "") -> Ban:
        """Lift a ban, and return when that is durable. See `Bans.lift` and `Bans.save` for the errors."""
        try:
            ban = self.bans.lift(kind, name)
        except AccessInvalid:
            await self.bans.save()  # the file may still have it, if it could not be written when the ban was lifted
            raise
        self._changed(by, over=over, what="lift", of=kind, name=ban.name)
        await self.bans.save()
        return ban

    def close(self) -> None:
        """Close the audit log."""
        self.audit.close()

    def _load(self) -> _Files:
        options = self._options
        passwords, tokens = None, None
        if options.password_file:
            from penstock.access.passwords import PasswordFile

            passwords = PasswordFile(Path(options.password_file))
        if options.jwt.algorithms:
            from penstock.access.tokens import Tokens

            tokens = Tokens(options.jwt, self.now_ms)
            if self._files.tokens is not None:
                tokens.take_fetched(self._files.tokens)
        return _Files(load_access_policy(Path(options.file)) if options.file else None, passwords, tokens)

    def _changed(self, by: Subject, **values: object) -> None:
        self.audit.note("changed", by, **values)
        for changed in self.on_change:
            changed()
