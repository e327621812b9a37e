"""An address behind which a node moves, as behind the name of a service."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Relay:
    """Passes TCP connections on to a port that may change."""

    def __init__(self) -> None:
        self.port = 0
        """Where the node is now."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def target(self) -> str:
        """The address of the relay."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            try:
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return  # Nobody is there now.
            try:
                both = (_copy(reader, to_writer), _copy(to_reader, writer))
                await asyncio.wait([asyncio.ensure_future(each) for each in both], return_when=asyncio.FIRST_COMPLETED)
            finally:
                to_writer.close()
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
