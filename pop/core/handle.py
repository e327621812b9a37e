"""Handles: a consumer shows one to acknowledge a delivery, a sender to recall a message or to end a transaction.

A handle consists of a name and a keyed code over the name, so that nobody can make one up or alter it, and no other group can
use it. It is hexadecimal text, and opaque to clients.

    delivery   position of the checkpoint u64, pop time ms u64, group id u32, index u16, code 8 bytes   (60 digits)
    recall     position of the message u64, due ms u64, code 8 bytes                                    (48 digits)
    half       position of the message u64, stored ms u64, code 8 bytes                                 (48 digits)

After a crash that cut the log, another checkpoint may get the same position. The pop time tells the two apart.

The code is the output of SHAKE128 over the secret and the name (a sponge keyed by a prefix is a MAC: Bertoni et al.,
"Cryptographic sponge functions", 2011). The output may have any length, so one call makes the codes of a block of 64 deliveries
of a checkpoint. Because of the blocks, refusing a forged handle costs no more than accepting a genuine one, whatever index it
names.
"""

from __future__ import annotations

import os
from binascii import hexlify, unhexlify
from hashlib import shake_128
from hmac import compare_digest
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import structlog

from penstock.pop.core.checkpoint import Indexes
from penstock.store.files import SYSTEM_FILES, Files, read_file, replace_file

logger = structlog.get_logger("pop")

SECRET = "secret"
"""File of a data directory that holds the key of its handles."""

SECRET_BYTES = 32
CODE_BYTES = 8
BLOCK = 64

_DELIVERY = Struct("<QQIH8s")
_POPPED = Struct("<QQI")
"""The beginning of all delivery handles of a checkpoint. The index in two bytes and the code follow."""
_INDEX_AT = _POPPED.size
_CODE_AT = _INDEX_AT + 2
_DELIVERY_BYTES = _DELIVERY.size
assert _DELIVERY_BYTES == _CODE_AT + CODE_BYTES
_DELIVERY_NAME = Struct("<cQQIH")
_MESSAGE = Struct("<QQ8s")
_MESSAGE_NAME = Struct("<cQQ")

DELIVERY_DIGITS = _DELIVERY.size * 2
RECALL_DIGITS = _MESSAGE.size * 2


class Delivery(NamedTuple):
    """The delivery that a handle names."""

    checkpoint: int
    pop_ms: int
    group_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class HandleRun(NamedTuple):
    """The deliveries that consecutive handles of one checkpoint name."""

    checkpoint: int
    pop_ms: int
    group_id: int
    indexes: Indexes


def load_secret(data_dir: Path, *, files: Files = SYSTEM_FILES, is_log_empty: bool = False) -> bytes:
    """Return the secret of a data directory; create it on the first call. Anybody who can read the secret can make handles.

    Args:
        data_dir: of the node.
        files: has the directory.
        is_log_empty: whether nobody can have a handle yet, so that a missing secret is no loss.

    Raises:
        ValueError: the file has the wrong length.
        OSError: the file can't be read or written.
    """
    path = data_dir / SECRET
    try:
        secret = read_file(files, path)
    except FileNotFoundError:
        secret = os.urandom(SECRET_BYTES)
        replace_file(files, path, secret, permissions=0o600)
        if not is_log_empty:
            logger.warning("secret.created", file=str(path), effect="handles that an earlier secret has signed are void")
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"{path} must have {SECRET_BYTES} bytes, not {len(secret)}. Restore it from a backup, or run `penstock "
            "repair`, which makes a new one: then all open handles become void"
        )
    return secret


def keep_secret(data_dir: Path, secret: bytes, *, files: Files = SYSTEM_FILES) -> None:
    """Replace the secret of a data directory by that of another replica of the same data. Raises ValueError, OSError."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the leader's secret has {len(secret)} bytes, not {SECRET_BYTES}; all replicas must have one version")
    replace_file(files, data_dir / SECRET, secret, permissions=0o600)


class Handles:
    """Makes and reads handles.

    Parameters:
        secret: the key, `SECRET_BYTES` random bytes that must not leave this node.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = shake_128(secret)

    def use(self, secret: bytes) -> None:
        """Sign with another secret from now on. Handles that the last one has signed are void."""
        self._key = shake_128(secret)

    def _codes(self, name: bytes, count: int) -> bytes:
        code = self._key.copy()
        code.update(name)
        return code.digest(CODE_BYTES * count)

    def _block(self, checkpoint: int, pop_ms: int, group_id: int, block: int) -> bytes:
        return self._codes(_DELIVERY_NAME.pack(b"D", checkpoint, pop_ms, group_id, block), BLOCK)

    def deliveries(self, checkpoint: int, pop_ms: int, group_id: int, count: int) -> list[str]:
        """Return the handles of the `count` deliveries of a checkpoint, in order."""
        joined = self.deliveries_joined(checkpoint, pop_ms, group_id, count).decode()
        return [joined[at : at + DELIVERY_DIGITS] for at in range(0, len(joined), DELIVERY_DIGITS)]

    def deliveries_joined(self, checkpoint: int, pop_ms: int, group_id: int, count: int) -> bytes:
        """Return the same handles joined. The cost is one hash for each block of 64."""
        return hexlify(self._packed(checkpoint, pop_ms, group_id, Indexes.below(count))) if count else b""

    def _packed(self, checkpoint: int, pop_ms: int, group_id: int, indexes: Indexes) -> bytearray:
        """Return the handles of deliveries of a checkpoint as joined bytes. They are filled in column by column."""
        empty = _POPPED.pack(checkpoint, pop_ms, group_id) + bytes(_DELIVERY_BYTES - _INDEX_AT)
        packed = bytearray(empty * indexes.number)
        packed[_INDEX_AT::_DELIVERY_BYTES], packed[_INDEX_AT + 1 :: _DELIVERY_BYTES] = indexes
        each = indexes.each()
        if isinstance(each, range):
            first = each.start // BLOCK
            blocks = [self._block(checkpoint, pop_ms, group_id, block) for block in range(first, each[-1] // BLOCK + 1)]
            begin = CODE_BYTES * (each.start - first * BLOCK)
            codes = b"".join(blocks)[begin : begin + CODE_BYTES * len(each)]
        else:
            numbers = {index // BLOCK for index in each}
            by_number = {number: self._block(checkpoint, pop_ms, group_id, number) for number in numbers}
            places = ((by_number[index // BLOCK], CODE_BYTES * (index % BLOCK)) for index in each)
            codes = b"".join([block[at : at + CODE_BYTES] for block, at in places])
        for at in range(CODE_BYTES):
            packed[_CODE_AT + at :: _DELIVERY_BYTES] = codes[at::CODE_BYTES]
        return packed

    def read_deliveries(self, handles: list[str]) -> list[Delivery | None]:
        """Return the delivery that each handle names; None if this node didn't make the handle. Consecutive ones cost least."""
        named: list[Delivery | None] = []
        last: tuple[int, int, int, int] | None = None
        codes = b""
        for handle in handles:
            try:
                checkpoint, pop_ms, group_id, index, code = _DELIVERY.unpack(bytes.fromhex(handle))
            except (ValueError, TypeError, StructError):
                named.append(None)
                continue
            block = (checkpoint, pop_ms, group_id, index // BLOCK)
            if last != block:
                last = block
                codes = self._block(*block)
            at = CODE_BYTES * (index % BLOCK)
            genuine = len(handle) == DELIVERY_DIGITS and compare_digest(codes[at : at + CODE_BYTES], code)
            named.append(Delivery(checkpoint, pop_ms, group_id, index) if genuine else None)
        return named

    def read_joined(self, joined: str) -> list[HandleRun] | None:
        """Return the deliveries that joined handles name, as a run for each checkpoint; None unless all handles are genuine.

        The cost is that of a run and of its blocks; a single handle adds little.
        """
        try:
            named = unhexlify(joined)
        except ValueError:
            return None
        if len(named) % _DELIVERY_BYTES:
            return None
        runs = []
        at, end = 0, len(named)
        while at < end:
            popped = named[at : at + _INDEX_AT]
            stop = at + _DELIVERY_BYTES
            while named.startswith(popped, stop):
                stop += _DELIVERY_BYTES
            low, high = named[at + _INDEX_AT : stop : _DELIVERY_BYTES], named[at + _INDEX_AT + 1 : stop : _DELIVERY_BYTES]
            checkpoint, pop_ms, group_id = _POPPED.unpack(popped)
            indexes = Indexes(low, high)
            if not compare_digest(self._packed(checkpoint, pop_ms, group_id, indexes), named[at:stop]):
                return None
            runs.append(HandleRun(checkpoint, pop_ms, group_id, indexes))
            at = stop
        return runs

    def recall(self, position: int, due_ms: int) -> str:
        """Return the handle that recalls the delayed message at `position`."""
        return self._message_handle(b"R", position, due_ms)

    def read_recall(self, handle: str) -> tuple[int, int] | None:
        """Return position and due time (ms) of a recall handle; None if this node didn't make it."""
        return self._read_message_handle(b"R", handle)

    def half(self, position: int, stored_ms: int) -> str:
        """Return the handle that commits or rolls back the half message at `position`."""
        return self._message_handle(b"H", position, stored_ms)

    def read_half(self, handle: str) -> tuple[int, int] | None:
        """Return position and store time (ms) of the handle of a half message; None if this node didn't make it."""
        return self._read_message_handle(b"H", handle)

    def _message_handle(self, use: bytes, position: int, stamp_ms: int) -> str:
        return _MESSAGE.pack(position, stamp_ms, self._codes(_MESSAGE_NAME.pack(use, position, stamp_ms), 1)).hex()

    def _read_message_handle(self, use: bytes, handle: str) -> tuple[int, int] | None:
        try:
            position, stamp_ms, code = _MESSAGE.unpack(bytes.fromhex(handle))
        except (ValueError, TypeError, StructError):
            return None
        genuine = compare_digest(self._codes(_MESSAGE_NAME.pack(use, position, stamp_ms), 1), code)
        return (position, stamp_ms) if genuine and len(handle) == RECALL_DIGITS else None
