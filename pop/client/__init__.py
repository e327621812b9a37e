"""The clients of `penstock.pop.v1`, for asyncio and for threads. They import no part of the node."""
