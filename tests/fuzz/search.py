"""Timed searches: Hypothesis generates inputs until the time is over, and shrinks an input that fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.calls import call_sequences
from tests.fuzz.codec import check_codec
from tests.fuzz.inputs import VARIANTS, Attack, attacks, damaged, framed, known, mqtt, proxied, variants, variants_of
from tests.fuzz.sequences import sequences
from tests.fuzz.target import Target, deadline

T = TypeVar("T")

ENDLESS = 10**9

BATCH = 100
"""The number of inputs of one search. Hypothesis remembers all of them, so a long run consists of many searches. When the time
is over, Hypothesis still makes the rest of a batch."""

SEEDS_APART = 1_000_003
"""Keeps batches of one seed apart from those of the next one."""


def search(
    strategy: st.SearchStrategy[T],
    check: Callable[[T], object],
    seconds: float,
    examples: int = ENDLESS,
    seed: int | None = None,
) -> int:
    """Check inputs until the time or `examples` is used up; return how many. Raise the error of the smallest failing one.

    The same seed gives the same inputs in the same order.
    """
    until_s = time.monotonic() + seconds
    count = 0

    @settings(
        max_examples=min(BATCH, examples),
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=True,
    )
    @given(strategy)
    def run(value: T) -> None:
        nonlocal count
        if time.monotonic() < until_s and count < examples:
            check(value)
            count += 1

    for batch in itertools.count():
        if time.monotonic() >= until_s or count >= examples:
            break
        (run if seed is None else hypothesis.seed(seed * SEEDS_APART + batch)(run))()
    return count


def search_codec(seconds: float, examples: int = ENDLESS) -> int:
    """Check the codec; return the number of inputs with their variants. `examples` bounds the inputs of Hypothesis."""

    def check(seeded: tuple[bytes, int]) -> None:
        data, seed = seeded
        for variant in variants(data, Random(seed)):
            with deadline():
                check_codec(variant)

    data = mqtt() | damaged(known()) | framed() | proxied()
    return search(st.tuples(data, st.integers(0, 2**32)), check, seconds, examples) * (1 + VARIANTS)


def search_listener(
    target: Target, seconds: float, examples: int = ENDLESS, told: Callable[[Target], None] | None = None
) -> int:
    """Attack a node; return the number of attacks with their variants. `told` is called now and then."""

    def check(attack: Attack) -> None:
        for variant in variants_of(attack):
            target.attack(variant)
        if told is not None:
            told(target)

    return search(attacks(), check, seconds, examples) * (1 + VARIANTS)


def search_sequences(
    target: Target, seconds: float, examples: int = ENDLESS, transport: str = "", seed: int | None = None
) -> int:
    """Play sequences of MQTT over a transport, or over all of them; return how many."""
    return search(sequences(transport), target.play, seconds, examples, seed)


def search_calls(target: Target, seconds: float, examples: int = ENDLESS, api: str = "", seed: int | None = None) -> int:
    """Play sequences of calls of one API over gRPC, or of both; return how many."""
    return search(call_sequences(api), target.call, seconds, examples, seed)
