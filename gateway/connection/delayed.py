"""`$delayed/{seconds}/{topic}`: publish to this, and the message goes to `{topic}` that many seconds later.

The form is EMQX's, so that devices which use it there can move over.
"""

from __future__ import annotations

from penstock.store.errors import LimitExceeded, TopicInvalid

_DIGITS_MAX = 10


def parse_delayed(topic: bytes, now_ms: int, delay_ms_max: int) -> tuple[bytes, int]:
    """Return the topic that a message is for, and when it is due in ms since 1970; 0 is at once.

    Args:
        topic: begins with `$delayed/`.
        now_ms: the time.
        delay_ms_max: the longest delay allowed.

    Raises:
        TopicInvalid: seconds or topic are missing.
        LimitExceeded: the delay is longer than allowed.
    """
    _, _, rest = topic.partition(b"/")
    seconds, slash, name = rest.partition(b"/")
    if not (seconds.isdigit() and seconds.isascii() and slash and name):
        raise TopicInvalid(f"the topic {topic[:64]!r} is not of the form $delayed/SECONDS/TOPIC")
    if len(seconds) > _DIGITS_MAX or int(seconds) * 1000 > delay_ms_max:
        raise LimitExceeded(f"a delay of {seconds[:20].decode()} s is longer than timer.delay_ms_max allows: {delay_ms_max} ms")
    return name, now_ms + int(seconds) * 1000 if int(seconds) else 0
