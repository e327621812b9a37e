"""All attacks, by name."""

from __future__ import annotations

import inspect

from tests.attack.attacks import calls, logins, packets, rooms, sockets
from tests.attack.attacks.attack import Attack

MODULES = (logins, packets, rooms, sockets, calls)

ATTACKS: dict[str, type[Attack]] = {
    one.name: one
    for module in MODULES
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Attack) and one.__module__ == module.__name__ and hasattr(one, "name")
}

QUICK = ("huge-connect", "take-over", "forbidden-pops")
"""The attacks that `make test` runs, on one node."""


class AttackUnknown(Exception):
    """Raised when no attack has a name that the user gave."""


def chosen(names: str) -> list[type[Attack]]:
    """Return the attacks that a list such as `login-flood,huge-*` names; `all` names all.

    Raises:
        AttackUnknown: no attack has the name.
    """
    found: list[type[Attack]] = []
    for name in map(str.strip, names.split(",")):
        head = name.removesuffix("*")
        matching = [one for each, one in ATTACKS.items() if name in ("all", each) or (head != name and each.startswith(head))]
        if not matching:
            raise AttackUnknown(f"there is no attack {name!r}; the attacks are {', '.join(ATTACKS)}")
        found += [one for one in matching if one not in found]
    return [one for one in found if not inspect.isabstract(one)]
