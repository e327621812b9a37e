"""Settings of every test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop
from hypothesis import settings

from tests.depth import DEPTH

# A slow machine is no failure: pytest-timeout bounds a test as a whole.
settings.register_profile("millrace", deadline=None, max_examples=50 * DEPTH)
settings.load_profile("millrace")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on the event loop that the node runs on."""
    return {"uvloop": uvloop.new_event_loop}
