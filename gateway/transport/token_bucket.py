"""Token buckets: the rate limits of listeners and clients."""

from __future__ import annotations


class TokenBucket:
    """A token bucket that holds at most the tokens of one second, which is the burst that it allows.

    The level is counted in thousandths of a token, so that it stays an integer.

    Parameters:
        per_s: tokens that flow in each second; 0 sets no limit.
    """

    __slots__ = ("_at_ms", "_level", "_most", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        self._most = per_s * 1000
        self._level = self._most
        self._at_ms = 0

    def wait_ms(self, tokens: int, now_ms: int) -> int:
        """Return after how many ms the bucket has `tokens` tokens; 0 if it has them now.

        Args:
            tokens: how many tokens the caller wants.
            now_ms: monotonic time in ms.
        """
        if not self.per_s:
            return 0
        if now_ms > self._at_ms:
            self._level = min(self._most, self._level + (now_ms - self._at_ms) * self.per_s)
            self._at_ms = now_ms
        missing = tokens * 1000 - self._level
        return -(-missing // self.per_s) if missing > 0 else 0

    def spend(self, tokens: int) -> None:
        """Take tokens. The level may become negative: that is a debt, which delays the next caller."""
        if self.per_s:
            self._level -= tokens * 1000
