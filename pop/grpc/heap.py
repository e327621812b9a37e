"""The heap of the process, which the C library keeps after large blocks are freed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Any:
    """Return the function of glibc, or None where the C library is another one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim.restype = ctypes.c_int
    return trim


def trim() -> bool:
    """Give free memory back to the system; return whether there was any.

    glibc frees large blocks of its own accord only at the end of the heap, see malloc_trim(3). It is called without the
    interpreter's lock. Other C libraries give memory back by themselves, and then this does nothing.
    """
    function = _malloc_trim()
    return function is not None and bool(function(0))
