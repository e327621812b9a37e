"""Where a node is: the `target` of a client."""

from __future__ import annotations

import re
from typing import Final

_HOST_PORT: Final = re.compile(r"(?:\[[^\s\[\]/]+\]|[^\s:\[\]/]+):(\d{1,5})")

_SCHEMES: Final = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:")
"""How the names of gRPC begin that are no `HOST:PORT`."""

_PORT_MAX: Final = 65_535


def check_target(target: str) -> None:
    """Check that a client can call a target. gRPC itself would only wait for the node until the timeout is over.

    Raises:
        TypeError: The target is no text.
        ValueError: It is neither `HOST:PORT` nor one of gRPC's own names.
    """
    wanted = "give HOST:PORT of the node's gRPC listener (pop.listen), such as '127.0.0.1:8081' or '[::1]:8081'"
    if not isinstance(target, str):
        raise TypeError(f"target is {target!r}: {wanted}")
    if target.startswith(_SCHEMES):
        return
    found = _HOST_PORT.fullmatch(target)
    if found is None or not 0 < int(found[1]) <= _PORT_MAX:
        raise ValueError(f"target is {target!r}: {wanted}")
