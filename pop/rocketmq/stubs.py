"""The messages of `apache.rocketmq.v2`, as the package rocketmq-python-client ships them.

Its package `rocketmq` is a client. Importing the package opens a log file in the user's home and loads OpenTelemetry. A node
needs only the generated messages, so this module imports them without their parent package.
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
        ModuleNotFoundError: The extra `rocketmq` is not installed.
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
        del sys.modules[PACKAGE]  # A later `import rocketmq` loads the whole client.


pb = _load(f"{PACKAGE}.grpc_protocol.definition_pb2")
service_pb = _load(f"{PACKAGE}.grpc_protocol.service_pb2")

SERVICE = service_pb.DESCRIPTOR.services_by_name["MessagingService"]
"""Descriptor of the service."""
