"""The messages of `apache.rocketmq.v2`, as the package rocketmq-python-client ships them.

Its package `rocketmq` is a client: importing it opens a log file in the user's home and loads OpenTelemetry. A node needs the
generated messages only, so they are imported without their parent.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "rocketmq"


def _load(name: str) -> Any:
    """Return a module of the stubs.

    Raises:
        ModuleNotFoundError: the extra is not installed.
    """
    if sys.modules.get(PACKAGE) is not None:
        return import_module(name)
    spec = find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    parent = ModuleType(PACKAGE)
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = parent
    try:
        return import_module(name)
    finally:
        del sys.modules[PACKAGE]  # who wants the client gets it whole


pb = _load(f"{PACKAGE}.grpc_protocol.definition_pb2")
service_pb = _load(f"{PACKAGE}.grpc_protocol.service_pb2")

SERVICE = service_pb.DESCRIPTOR.services_by_name["MessagingService"]
"""The descriptor of the service."""
