"""What a fault is."""

from __future__ import annotations

from typing import ClassVar

from tests.chaos.scene import Scene


class Fault:
    """Something that goes wrong under load.

    `inject` makes it go wrong, brings the node back, and leaves the clients at work again. It raises `Broken` when the node
    does what the fault does not excuse. In `scene.outcome.injected` it counts what really went wrong: each signal, power cut,
    failed request, step of the clock, damaged file or damaged place of one.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    store_options: ClassVar[str] = ""
    """Options of `[store]` that the rounds of this fault need."""
    on: ClassVar[str] = "directory"
    """Where the node is: in a "directory", on a simulated "disk" with ext4, on a small "tmpfs" or "ext4", with the "index" on
    one, or with a "clock" of its own."""
    is_last: ClassVar[bool] = False
    """Whether no other fault may follow in the same round."""
    per_round: ClassVar[int] = 10
    """How many faults of a round may be of this kind, unless it is the last one."""
    log: ClassVar[str] = ""
    """What the log of a round needs for this fault: "segments" for more than one, "retention" for snapshots as well."""

    @classmethod
    def missing(cls) -> str:
        """Return why this machine can't inject the fault, or an empty string."""
        return ""

    async def inject(self, scene: Scene) -> None:
        raise NotImplementedError
