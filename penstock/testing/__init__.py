"""For tests of applications: a real node in the test's process, with a clock that the test moves.

    from penstock.testing import Node

    async def test_a_reading_is_billed():
        async with Node() as node, Client(node.target) as client:
            ...
            await node.advance(3_600)

With pytest, the fixtures `penstock_node` and `penstock_client` do the same for functions that are no coroutines, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.testing.nodeinprocess import NodeInProcess as Node

__all__ = ["Node"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # pytest loads this package for its fixtures. It must not load the node before a test needs one.
        if name != "Node":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from penstock.testing.nodeinprocess import NodeInProcess
        except ModuleNotFoundError as error:
            from penstock.install import install_hint

            text = f"penstock.testing runs a node, and {error.name} is not installed: {install_hint('node')}"
            raise ModuleNotFoundError(text, name=error.name) from None
        return NodeInProcess
