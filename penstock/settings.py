"""How the command line, the clients and the worker find a node: environment variables and named contexts.

A setting is what the call or the flag gives, else its variable, else what the current context says, else its default. The
variable of `target` is `PENSTOCK_TARGET`, and so on; an empty variable counts as unset. `penstock context` writes the contexts.

Whoever names a node without its context gets nothing else from a context: the token for one node is not sent to another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "PENSTOCK_"

CONTEXT = "PENSTOCK_CONTEXT"
"""Variable with the name of the context to use in place of the current one."""

DEFAULTS = {"target": "127.0.0.1:8081", "mqtt": "127.0.0.1:1883", "admin": "127.0.0.1:8080", "data_dir": "penstock-data"}
"""Defaults of the settings that name a node."""

NAMES = (
    *DEFAULTS,
    "token",
    "token_file",
    "tls",
    "ca_file",
    "certificate_file",
    "key_file",
    "user",
    "password_file",
)
"""All settings."""

TOGETHER = (("token", "token_file"), ("certificate_file", "key_file"), ("user", "password_file"))
"""Settings of which a context counts only if nothing else gives one of them."""

_ONE_SOURCE = ("token", "token_file")
"""Either of them is the token, so a flag for one hides the variable of the other."""


class SettingInvalid(ValueError):
    """Raised when a variable or a context can't be used. The message says which, and what to do."""


class Settings(dict[str, str]):
    """Values of settings by name, with the variable or the context that each of them comes from."""

    __slots__ = ("_sources",)

    def __init__(self, values: Mapping[str, str], sources: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self._sources = sources or {}

    def named(self, name: str) -> str:
        """Return the name of a setting for an error, with where its value comes from unless the call or a flag gives it."""
        return f"{name} (from {self._sources[name]})" if name in self._sources else name

    def is_given(self, name: str) -> bool:
        """Return whether a variable or a context has a setting."""
        return name in self._sources


def find_settings(address: str, given: Mapping[str, str | None], context: str | None = None) -> Settings:
    """Return the settings that are set, by name. The setting of the address is always among them.

    Args:
        address: the setting that names the node: `target`, `mqtt`, `admin` or `data_dir`.
        given: what the call or the flags give. None is not given.
        context: name of a context; None for that of the variable, or the current one.

    Raises:
        SettingInvalid: there is no such context, or the file of contexts can't be used.
    """
    found = {name: value for name, value in given.items() if value is not None}
    sources: dict[str, str] = {}
    has_token = any(name in found for name in _ONE_SOURCE)
    for name in NAMES:
        value = os.environ.get(PREFIX + name.upper())
        if value and name not in found and not (has_token and name in _ONE_SOURCE):
            found[name] = value
            sources[name] = PREFIX + name.upper()
    if context is not None or address not in found:
        contexts = read_contexts()
        current = contexts.chosen(context)
        hidden = {name for names in TOGETHER if any(each in found for each in names) for name in names} | found.keys()
        for name, value in contexts.settings(context).items():
            if name not in hidden:
                found[name] = value
                sources[name] = f"the context {current!r}"
    return Settings({address: DEFAULTS[address]} | found, sources)


def file_bytes(settings: Settings, name: str) -> bytes | None:
    """Return the content of the file that a setting names; None if it is not set. Raises SettingInvalid."""
    if name not in settings:
        return None
    try:
        return Path(settings[name]).read_bytes()
    except OSError as error:
        raise SettingInvalid(f"{settings.named(name)} is {settings[name]}, which can't be read: {error.strerror}.") from error


def token_of(settings: Settings) -> str:
    """Return the token of the settings, or an empty text. Raises SettingInvalid."""
    if "token" in settings:
        token = settings["token"]
        if problem := token_problem(token):
            raise SettingInvalid(f"{settings.named('token')} has {problem}: give one line of printable ASCII.")
        return token
    content = file_bytes(settings, "token_file")
    if content is None:
        return ""
    token = content.decode("utf-8", "surrogateescape").strip()
    problem = token_problem(token) if token else "no token"
    if problem:
        at = f"{settings.named('token_file')} is {settings['token_file']}"
        raise SettingInvalid(f"{at}, which has {problem}: write one line of printable ASCII into it.")
    return token


def token_problem(token: str) -> str:
    """Return what keeps a token from being the value of an HTTP header; empty for nothing. It does not repeat the token."""
    if "\n" in token or "\r" in token:
        return "several lines"
    place = next((at for at, each in enumerate(token, 1) if not (each.isascii() and each.isprintable())), 0)
    return f"the character {token[place - 1]!r} at place {place}" if place else ""


TLS_TEXTS = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}
"""Texts that say whether to speak TLS. Case does not matter."""


def has_tls(settings: Settings) -> bool | None:
    """Return whether to speak TLS: None if the settings leave it to the files that they name. Raises SettingInvalid."""
    wanted = settings.get("tls")
    if wanted is None:
        return None
    if wanted.lower() not in TLS_TEXTS:
        raise SettingInvalid(f"{settings.named('tls')} is {wanted!r}: set it to yes or no.")
    return TLS_TEXTS[wanted.lower()]


# --- contexts ---------------------------------------------------------------------------------------------------------


class Contexts:
    """The named contexts of a user.

    Parameters:
        file: where they are stored.
        by_name: settings of each context.
        current: name of the context in use; empty for none.
    """

    __slots__ = ("by_name", "current", "file")

    def __init__(self, file: Path, by_name: dict[str, dict[str, str]], current: str) -> None:
        self.file = file
        self.by_name = by_name
        self.current = current

    def settings(self, name: str | None = None) -> dict[str, str]:
        """Return the settings of a context; None for the one in use, which has no settings if there is none."""
        chosen = self.chosen(name)
        return self.checked(chosen) if chosen else {}

    def chosen(self, name: str | None = None) -> str:
        """Return the name of a context that is given, else that of the variable, else the one in use; empty for none."""
        return name if name is not None else os.environ.get(CONTEXT) or self.current

    def checked(self, name: str) -> dict[str, str]:
        """Return the settings of a context. Raises SettingInvalid if it does not exist."""
        if name not in self.by_name:
            names = ", ".join(sorted(self.by_name)) or "none"
            raise SettingInvalid(f"There is no context {name!r}: {self.file} has {names}. `penstock context add` adds one.")
        return self.by_name[name]

    def save(self) -> None:
        """Replace the file at once, for nobody else to read."""
        import json
        import tempfile

        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = json.dumps({"current": self.current, "contexts": self.by_name}, indent=2) + "\n"
        handle, temporary = tempfile.mkstemp(dir=self.file.parent, prefix=".contexts")  # has the mode 0600
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.file)
        except BaseException:
            os.unlink(temporary)
            raise


def read_contexts() -> Contexts:
    """Return the contexts of the user. Raises SettingInvalid if their file can't be used."""
    import json  # a client whose settings are all given does without

    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    file = Path(configuration, "penstock", "contexts.json")
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return Contexts(file, {}, "")
    except OSError as error:
        raise SettingInvalid(f"The contexts in {file} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise SettingInvalid(f"The contexts in {file} are no JSON ({error}). Correct the file, or delete it.") from error
    problem = _problem_of(content)
    if problem:
        raise SettingInvalid(f"The contexts in {file} can't be used: {problem}. Correct the file, or delete it.")
    return Contexts(file, content["contexts"], content["current"])


def _problem_of(content: object) -> str:
    """Return what is wrong with the content of a file of contexts; empty for nothing."""
    if not isinstance(content, dict) or content.keys() != {"current", "contexts"}:
        return "it must have `current` and `contexts`, and nothing else"
    by_name, current = content["contexts"], content["current"]
    if not isinstance(by_name, dict) or not isinstance(current, str) or (current and current not in by_name):
        return f"`current` is {current!r}, which must be one of `contexts`"
    for name, settings in by_name.items():
        if not isinstance(settings, dict):
            return f"the context {name!r} is no table"
        for setting, value in settings.items():
            if setting not in NAMES or not isinstance(value, str):
                return f"the context {name!r} has the setting {setting!r} with {value!r}"
    return ""
