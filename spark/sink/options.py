"""The options of a write with the format `penstock`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from penstock.pop.client.security import Security, check_target
from penstock.spark.errors import WriteOptionInvalid
from penstock.store.durations import format_duration, parse_duration

OPTIONS: Final = (
    "target",
    "token",
    "token_file",
    "tls",
    "ca_file",
    "certificate_file",
    "key_file",
    "timeout",
    "retry",
)
"""The options: see `SinkOptions`."""

SPARKS_OWN: Final = frozenset(("checkpointlocation", "path", "queryname"))
"""Options that Spark passes to each sink of a stream. They are for Spark itself."""

TIMEOUT_MS: Final = 10_000
RETRY_MS: Final = 120_000


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The checked options of a write. Each task reads the files, on its executor, so a new token needs no restart.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener.
        token: Token of a principal that may send to the topics.
        token_file: File that contains the token, instead of `token`.
        tls: Speak TLS.
        ca_file: PEM of the roots by which the node's certificate is checked. Implies `tls`; by default those of gRPC.
        certificate_file, key_file: PEM of the certificate and key of the client, for mutual TLS.
        timeout_ms: Timeout of one call in ms: the option `timeout`, such as "10s". The node must remember deduplication ids for
            as much longer.
        retry_ms: How long a task sends a call again that the node didn't answer or refused for its load, in ms: the option
            `retry`. Then it fails.
    """

    target: str
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    timeout_ms: int = TIMEOUT_MS
    retry_ms: int = RETRY_MS

    @classmethod
    def of(cls, options: Mapping[str, str], *, overwrite: bool = False) -> SinkOptions:
        """Return the options that Spark passes as text.

        Raises:
            WriteOptionInvalid: an option is unknown or has an invalid value, or the write is to replace what the topics have.
        """
        if overwrite:
            raise WriteOptionInvalid(
                "The write would replace earlier rows, but a log only grows. Use mode('append'), or outputMode('append') or "
                "outputMode('update') for a stream."
            )
        given = {name.lower(): value for name, value in options.items() if name.lower() not in SPARKS_OWN}
        for name in given:
            _check_name(name)
        found = cls(
            target=_target(given.get("target", "")),
            token=given.get("token", ""),
            token_file=given.get("token_file", ""),
            tls=_flag("tls", given.get("tls", "false")),
            ca_file=given.get("ca_file", ""),
            certificate_file=given.get("certificate_file", ""),
            key_file=given.get("key_file", ""),
            timeout_ms=_duration("timeout", given.get("timeout", format_duration(TIMEOUT_MS)), 1),
            retry_ms=_duration("retry", given.get("retry", format_duration(RETRY_MS)), 0),
        )
        _check_security(found)
        return found

    def security(self) -> Security:
        """Return the token and the certificates, as the files have them now.

        Raises:
            WriteOptionInvalid: a file can't be read.
        """
        token = _read("token_file", self.token_file).decode().strip() if self.token_file else self.token
        return Security(
            token=token,
            tls=self.tls,
            root_certificates=_read("ca_file", self.ca_file) if self.ca_file else None,
            certificate=_read("certificate_file", self.certificate_file) if self.certificate_file else None,
            key=_read("key_file", self.key_file) if self.key_file else None,
        )


def _check_name(name: str) -> None:
    if name not in OPTIONS:
        likely = get_close_matches(name, OPTIONS, 1)
        meant = f" Did you mean {likely[0]}?" if likely else ""
        raise WriteOptionInvalid(f"The option {name!r} does not exist.{meant} The options are {', '.join(OPTIONS)}.")


def _target(target: str) -> str:
    if not target:
        raise WriteOptionInvalid(
            "The option target is missing. Give HOST:PORT of the node's gRPC listener (pop.listen), as the executors reach it."
        )
    try:
        check_target(target)
    except ValueError as error:
        raise WriteOptionInvalid(f"The option {error}.") from error
    return target


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise WriteOptionInvalid(f"{name} is {text!r}, but must be true or false.")
    return text.lower() == "true"


def _duration(name: str, text: str, low: int) -> int:
    """Return the milliseconds of an option."""
    try:
        ms = 0 if text == "0" else parse_duration(text)
    except ValueError:
        ms = -1
    if ms < low:
        raise WriteOptionInvalid(f'{name} is {text!r}, but must be a duration with a unit, such as "10s".')
    return ms


def _check_security(options: SinkOptions) -> None:
    if options.token and options.token_file:
        raise WriteOptionInvalid("token and token_file are both given. Give one of them.")
    if bool(options.certificate_file) != bool(options.key_file):
        raise WriteOptionInvalid("certificate_file and key_file belong together. Give both of them, or neither.")
    if options.certificate_file and not (options.tls or options.ca_file):
        raise WriteOptionInvalid("certificate_file needs TLS. Give ca_file too, or tls=true.")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise WriteOptionInvalid(f"{name} is {path!r}, which the executor can't read: {reason}.") from error
