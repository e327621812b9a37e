"""Fetches the key set of an authority, again and again, so that the node follows when the authority changes its keys."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from aiohttp import ClientError, ClientSession, ClientTimeout

from penstock.access.control import AccessControl
from penstock.access.errors import AccessInvalid

logger = structlog.get_logger("access")

BYTES_MAX: Final = 1 << 20
"""Maximum size of a key set."""

FETCH_S_MAX: Final = 10.0
"""Seconds that a fetch may take."""

RETRY_S: Final = 10.0
"""Seconds after a failed fetch until the next one."""


class KeySetFetcher:
    """Keeps the keys of the URL `access.jwt.keys` up to date. After a failed fetch the keys of the last one stay in force.

    Parameters:
        access: of the node; its options name the URL.
        url: of the key set; empty for none.
        refresh_s: seconds between two fetches.
    """

    def __init__(self, access: AccessControl, url: str, refresh_s: float) -> None:
        self._access = access
        self._url = url
        self._refresh_s = refresh_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Fetch the keys, and go on doing so. Until a fetch succeeds, nobody can tell whether a token is valid."""
        if self._url:
            self._task = asyncio.get_running_loop().create_task(self._go_on())

    def stop(self) -> None:
        """Fetch nothing more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _go_on(self) -> None:
        while True:
            is_done = await self._fetch()
            await asyncio.sleep(self._refresh_s if is_done else min(RETRY_S, self._refresh_s))

    async def _fetch(self) -> bool:
        """Fetch the keys once; return whether that succeeded."""
        try:
            # A redirect could lead from https to a place that anybody can write.
            async with (
                ClientSession(timeout=ClientTimeout(total=FETCH_S_MAX)) as session,
                session.get(self._url, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise AccessInvalid(f"the answer has status {response.status}")
                data = await response.content.read(BYTES_MAX + 1)
                while len(data) <= BYTES_MAX and (more := await response.content.read(BYTES_MAX)):
                    data += more
            if len(data) > BYTES_MAX:
                raise AccessInvalid(f"the key set has more than {BYTES_MAX} bytes")
            self._access.use_key_set(data)
        except (ClientError, OSError, TimeoutError, ValueError) as error:  # AccessInvalid is a ValueError
            logger.warning("keys.not_fetched", url=self._url, why=str(error) or type(error).__name__)
            return False
        return True
