"""Attacks on the way in: logins, tokens, client ids, wills, sessions."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import ClassVar

import jwt

from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.store.options import KIB
from tests.attack.attacks.attack import FAILURES, Attack, side_by_side, together
from tests.attack.ground import HONEST, HONEST_SUBSCRIBER, MALLORY, MALLORY_PASSWORD
from tests.attack.link import WITH_LOGIN, Link, any_source, hello, logged_in, reason_of
from tests.gateway.packet_cases import connect
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.wire import CLEAN

BUSY, BAD_LOGIN, NOT_AUTHORIZED, BAD_ID, TAKEN_OVER, QUOTA = "0x89", "0x86", "0x87", "0x85", "0x8e", "0x97"
ACCEPTED = "0x00"


class LoginFlood(Attack):
    """Wrong passwords from everywhere, which each cost a hash."""

    name = "login-flood"
    summary = "64 connections at a time, from 131,072 sources, log in as the honest user with wrong passwords"
    must_get = "not authorized (0x86, 0x87) or server busy (0x89)"
    user = HONEST

    async def finish(self) -> None:
        """Wait for some answers: in a window shorter than the queue of logins there are none."""
        await asyncio.gather(*(self._log_in(number) for number in range(2)), return_exceptions=True)

    async def run(self) -> None:
        await side_by_side(64, self._log_in)

    async def _log_in(self, _: int) -> None:
        link = await Link.dial(self.ground, source=any_source(self.random))
        try:
            await link.send(hello(f"flood-{self.next_number()}", self.user, f"guess-{self.number}"))
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only(BAD_LOGIN, NOT_AUTHORIZED, BUSY, "closed")


class UnknownUsers(LoginFlood):
    """The same with user names that do not exist."""

    name = "login-flood-unknown"
    summary = "64 connections at a time, from 131,072 sources, log in as users that do not exist"
    user = "nobody"


class OldLoginFlood(Attack):
    """The same from one source, without PROXY, as a device of MQTT 3.1.1."""

    name = "login-flood-311"
    summary = "64 connections of MQTT 3.1.1 at a time, from loopback, log in with wrong passwords"
    must_get = "return code 4 or 5 (not authorized) or 3 (server unavailable)"

    async def run(self) -> None:
        await side_by_side(64, self._log_in)

    async def _log_in(self, _: int) -> None:
        link = await Link.dial(self.ground, is_v5=False)
        try:
            await link.send(connect(CLEAN | WITH_LOGIN, b"flood-%d" % self.next_number(), HONEST.encode(), b"guess"))
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only("0x03", "0x04", "0x05", "closed")


class ReconnectStorm(Attack):
    """A fleet that comes back at once."""

    name = "reconnect-storm"
    summary = "300 clients with the right password log in at once, leave, and come again"
    must_get = "accepted, or server busy (0x89); never a wrong password"

    async def run(self) -> None:
        while True:
            await together(self._log_in(number) for number in range(300))
            await self.close()

    async def _log_in(self, number: int) -> None:
        link = await Link.dial(self.ground, source=f"198.18.7.{number % 250 + 1}")
        self.links.append(link)
        await link.send(hello(f"fleet-{number}"))
        answer = await link.expect(CONNACK)
        self.saw[reason_of(answer) if answer else "closed"] += 1

    def problems(self) -> list[str]:
        return self.once(ACCEPTED) + self.never(*(one for one in self.saw if one not in (ACCEPTED, BUSY)))


class FirstLogins(Attack):
    """Many devices with the right password that the node has not verified before."""

    name = "first-logins"
    summary = "100 clients at once log in with the right password, mixed with 100 that have a wrong one"
    must_get = "right passwords: accepted or 0x89; wrong ones: refused"
    is_known = False

    async def run(self) -> None:
        while True:
            await together(self._log_in(number) for number in range(200))
            await self.close()

    async def _log_in(self, number: int) -> None:
        is_right = number % 2 == 0
        link = await Link.dial(self.ground, source=f"198.18.8.{number % 250 + 1}")
        self.links.append(link)
        await link.send(hello(f"first-{number}", MALLORY, MALLORY_PASSWORD if is_right else f"wrong-{self.next_number()}"))
        answer = await link.expect(CONNACK)
        self.saw[f"{'right' if is_right else 'wrong'} {reason_of(answer) if answer else 'closed'}"] += 1

    def problems(self) -> list[str]:
        allowed = {f"right {ACCEPTED}", f"right {BUSY}", "wrong 0x86", "wrong 0x87", f"wrong {BUSY}"}
        return self.once(f"right {ACCEPTED}") + self.never(*(one for one in self.saw if one not in allowed))


class TakeOver(Attack):
    """Another user with the client id of an honest subscriber."""

    name = "take-over"
    summary = "another user connects with the client ids of the honest clients"
    must_get = "client identifier not valid (0x85)"

    async def run(self) -> None:
        await side_by_side(8, self._connect)

    async def _connect(self, number: int) -> None:
        link = await Link.dial(self.ground)
        try:
            await link.send(hello((HONEST_SUBSCRIBER, "honest-publisher")[number % 2], flags=(0, CLEAN)[number // 2 % 2]))
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only(BAD_ID)


class TakeOverStorm(Attack):
    """Clients of one user that take over one session from each other."""

    name = "take-over-storm"
    summary = "32 connections of one user fight for one client id"
    must_get = "accepted, and session taken over (0x8E)"

    async def run(self) -> None:
        await side_by_side(32, self._connect)

    async def _connect(self, _: int) -> None:
        link = await logged_in(self.ground, "contested", about=write_properties({Property.SESSION_EXPIRY_S: 60}), flags=0)
        self.saw[ACCEPTED] += 1
        try:
            self.saw[await link.ended(5)] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.once(ACCEPTED) + self.once(TAKEN_OVER) + self.never(BAD_ID, BAD_LOGIN, NOT_AUTHORIZED)


class TokenGarbage(Attack):
    """Passwords that look like tokens."""

    name = "jwt-garbage"
    summary = "tokens that are unsigned, signed by others, expired, deeply nested, huge, or not JSON"
    must_get = "not authorized (0x86, 0x87) or server busy (0x89)"

    async def prepare(self) -> None:
        def part(value: object) -> str:
            return (
                base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).decode().rstrip("=")
            )

        claims = {"sub": HONEST, "exp": 4_000_000_000}
        other = "another-secret-of-more-than-32-bytes-altogether"
        nested = b'{"sub":' + b"[" * 3_000 + b"]" * 3_000 + b"}"
        self._tokens = [
            f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims)}.",
            jwt.encode(claims, other, "HS256"),
            jwt.encode(claims, other + other, "HS512"),
            jwt.encode({**claims, "exp": 1}, other, "HS256"),
            f"{part({'alg': 'HS256', 'crit': ['x'], 'x': 1})}.{part(claims)}.{part(b'x' * 32)}",
            f"{part({'alg': 'HS256', 'jku': 'http://198.18.0.1/k', 'kid': '../../secret'})}.{part(claims)}.{part(b'x' * 32)}",
            f"{part({'alg': 'HS256'})}.{part(nested)}.{part(b'x' * 32)}",
            f"{part({'alg': 'HS256'})}.{part(b'x' * 40_000)}.{part(b'x' * 32)}",
            f"{part(b'{' * 500)}.{part(claims)}.x",
            "..",
            "." * 900,
            "ey.ey.ey",
            "eyJhbGciOiJIUzI1NiJ9.\0.\0",
        ]

    async def run(self) -> None:
        await side_by_side(16, self._connect)

    async def _connect(self, _: int) -> None:
        link = await Link.dial(self.ground, source=any_source(self.random))
        try:
            user = (HONEST, "nobody")[self.random.randrange(2)]
            await link.send(hello(f"token-{self.next_number()}", user, self.random.choice(self._tokens)))
            self.saw[await link.ended()] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        return self.only(BAD_LOGIN, NOT_AUTHORIZED, BUSY, "closed")


class WillFlood(Attack):
    """Connections that each end with a will."""

    name = "will-flood"
    summary = "16 connections at a time leave a will of 32 KB, half of them retained and delayed, and end with RST"
    must_get = "accepted"

    async def run(self) -> None:
        await side_by_side(16, self._connect)

    async def _connect(self, number: int) -> None:
        link = await Link.dial(self.ground)
        try:
            odd = number % 2
            about = write_properties({Property.WILL_DELAY_S: 1}) if odd else b"\0"
            flags = CLEAN | WITH_LOGIN | 0x04 | (0x20 if odd else 0)
            fields = (f"will-{number}", f"wills/{number}")
            await link.send(
                connect_5(
                    flags,
                    fields[0].encode(),
                    fields[1].encode(),
                    bytes(32 * KIB),
                    MALLORY.encode(),
                    MALLORY_PASSWORD.encode(),
                    will=about,
                    about=write_properties({Property.SESSION_EXPIRY_S: 5}) if odd else b"\0",
                )
            )
            answer = await link.expect(CONNACK)
            self.saw[reason_of(answer) if answer else "closed"] += 1
        finally:
            link.reset()

    def problems(self) -> list[str]:
        return self.once(ACCEPTED)


class SessionsFlood(Attack):
    """One user that leaves a session under each of many client ids."""

    name = "sessions-flood"
    summary = "one user leaves sessions that last, under ever new client ids (mqtt.sessions_max = 400)"
    must_get = "quota exceeded (0x97) once it holds its share"
    options: ClassVar[dict[str, str]] = {"mqtt": "sessions_max = 400"}

    async def run(self) -> None:
        await side_by_side(16, self._connect)

    async def _connect(self, _: int) -> None:
        link = await Link.dial(self.ground)
        try:
            about = write_properties({Property.SESSION_EXPIRY_S: 86_400})
            await link.send(hello(f"session-{self.next_number()}", about=about, flags=0))
            answer = await link.expect(CONNACK)
            self.saw[reason_of(answer) if answer else "closed"] += 1
        finally:
            link.close()

    def problems(self) -> list[str]:
        found = self.once(QUOTA)
        if self.saw[ACCEPTED] > 240:
            found.append(f"one user got {self.saw[ACCEPTED]} sessions of 400")
        return found


class Flapping(Attack):
    """Connections that are reset in each state of a login."""

    name = "reset-path"
    summary = "connections are reset before, in and after their CONNECT, and while their password is verified"
    must_get = "nothing"

    async def run(self) -> None:
        await side_by_side(32, self._connect)

    async def _connect(self, number: int) -> None:
        link = await Link.dial(self.ground, source=any_source(self.random))
        said = hello(f"flap-{self.next_number()}", MALLORY, MALLORY_PASSWORD if number % 2 else "wrong")
        try:
            await link.send(said[: self.random.choice((0, 1, 10, len(said) - 1, len(said), len(said)))])
            await asyncio.sleep(self.random.random() * 0.05)
            self.saw["reset"] += 1
        except FAILURES:
            self.saw["closed"] += 1
        finally:
            link.reset()

    def problems(self) -> list[str]:
        return self.once("reset")
