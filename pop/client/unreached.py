"""Why a node can't be reached, in words that say what to do."""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio

from penstock.pop.client.health import check_health, check_health_sync

REACH_S = 0.5
"""How long a client looks for the reason why a node did not answer, in seconds."""

CHECK = (
    "check that it runs, that the client's target is the address of its gRPC listener (pop.listen), and that both sides use "
    "TLS or neither does"
)

_HINTS = (
    ("Connection refused", "nothing listens there: start the node, or give the address of its gRPC listener (pop.listen)"),
    ("errors resolving", "the name of the host is not known"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS there: connect without TLS, or let the node speak it"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted: give the roots that have signed it (root_certificates)"),
    ("CERTIFICATE_REQUIRED", "it asks for the client's own certificate (certificate, key)"),
    ("SETTINGS", "it does not speak gRPC there, or only over TLS: give the address of pop.listen, not of MQTT or HTTP"),
    ("Cancelling all calls", "it stops"),
    ("Socket closed", "the node ended or closed the connection; check that it runs, and try again"),
    ("Connection reset", "the node ended or closed the connection; check that it runs, and try again"),
)
"""What to do about an error that gRPC describes with these words."""


def explained(detail: str) -> str:
    """Return gRPC's description of an unreachable node, with what to do about it."""
    reason = detail.rpartition("last error: ")[2].removeprefix("UNKNOWN: ").removeprefix("INTERNAL: ")
    return next((f"{reason}: {hint}" for words, hint in _HINTS if words in reason), reason)


async def why_unreachable(channel: grpc.aio.Channel, target: str) -> str:
    """Return why the node at the other end of a channel can't be reached, by a health check; an empty text if it can."""
    try:
        await check_health(channel, REACH_S)
    except grpc.aio.AioRpcError as error:
        return _why(target, error.code(), error.details())
    except grpc.aio.UsageError:  # The client was closed meanwhile.
        return _why(target, grpc.StatusCode.DEADLINE_EXCEEDED, "")
    return ""


async def why_unanswered(channel: grpc.aio.Channel, target: str) -> str:
    """Return why a call over a channel was not answered within its timeout."""
    return await why_unreachable(channel, target) or _slow(target)


def why_unreachable_sync(channel: grpc.Channel, target: str) -> str:
    """Do what `why_unreachable` does, and block meanwhile."""
    try:
        check_health_sync(channel, REACH_S)
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)
        return _why(target, call.code(), call.details())
    except ValueError:  # The client was closed meanwhile.
        return _why(target, grpc.StatusCode.DEADLINE_EXCEEDED, "")
    return ""


def why_unanswered_sync(channel: grpc.Channel, target: str) -> str:
    """Do what `why_unanswered` does, and block meanwhile."""
    return why_unreachable_sync(channel, target) or _slow(target)


def _why(target: str, code: grpc.StatusCode, detail: str | None) -> str:
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"the node at {target} can't be reached: {explained(detail or '')}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the node at {target} did not answer in time: {CHECK}"
    return ""  # Any other answer is one of the node.


def _slow(target: str) -> str:
    return (
        f"the node at {target} did not answer in time, though it can be reached: try again, with a longer timeout if it is busy"
    )
