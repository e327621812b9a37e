"""Codecs: how the body of a message becomes the argument of a handler, chosen by the argument's annotation.

| annotation | body |
|---|---|
| `bytes`, or none | as it is |
| `str` | UTF-8 |
| a pydantic model or dataclass | JSON, validated by pydantic (extra `pydantic`) |
| a `msgspec.Struct` | JSON, validated by msgspec (extra `msgspec`) |
| `dict`, `list`, `int`, `float`, `bool`, and `Any` | JSON, of this kind |
| any other type, such as `list[int]` | JSON, validated by pydantic |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_origin

import orjson

from penstock.install import install_hint
from penstock.worker.errors import HandlerInvalid, Undecodable

Codec = Callable[[bytes], Any]
"""Returns the argument for a body. Any ValueError or TypeError that it raises means that the body is not valid."""

_JSON_KINDS: dict[Any, tuple[type, ...]] = {
    dict: (dict,),
    list: (list,),
    int: (int,),
    float: (int, float),
    bool: (bool,),
}


def raw(body: bytes) -> bytes:
    """Return a body as it is."""
    return body


def text(body: bytes) -> str:
    """Return a body as text."""
    return body.decode()


def codec_of(annotation: Any) -> Codec:
    """Return the codec for an annotated argument.

    Raises:
        HandlerInvalid: The annotation needs a package that is not installed.
    """
    if annotation is bytes or annotation is None:
        return raw
    if annotation is str:
        return text
    if annotation is Any:
        return orjson.loads
    if annotation in _JSON_KINDS:
        return _json_of_kind(annotation)
    if _is_msgspec(annotation):
        return _msgspec(annotation)
    return _pydantic(annotation)


def decoded(codec: Codec, body: bytes) -> Any:
    """Return the argument for a body.

    Raises:
        Undecodable: The body is not valid. The message says why.
        Exception: Anything but ValueError and TypeError that the codec raises. It says nothing about the body.
    """
    try:
        return codec(body)
    except (ValueError, TypeError) as error:
        raise undecodable(body, error) from error


def undecodable(body: bytes, error: BaseException) -> Undecodable:
    """Return the error that says why a body is not valid."""
    return Undecodable(f"the body of {len(body)} bytes is not valid: {_shortened(error)}")


def _shortened(error: BaseException) -> str:
    found = " ".join(str(error).split())
    return found if len(found) <= 500 else found[:497] + "..."


def _json_of_kind(kind: type) -> Codec:
    kinds = _JSON_KINDS[kind]

    def decode(body: bytes) -> Any:
        found = orjson.loads(body)
        if not isinstance(found, kinds) or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"it is JSON of the type {type(found).__name__}, not {kind.__name__}")
        return found

    return decode


def _is_msgspec(annotation: Any) -> bool:
    return any(f"{each.__module__}.{each.__qualname__}" == "msgspec.Struct" for each in getattr(annotation, "__mro__", ()))


def _msgspec(annotation: Any) -> Codec:
    import msgspec

    decode: Codec = msgspec.json.Decoder(annotation).decode
    return decode


def _pydantic(annotation: Any) -> Codec:
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise HandlerInvalid(
            f"the annotation {annotation!r} needs pydantic: {install_hint('pydantic')}, or give a codec"
        ) from error
    if not (isinstance(annotation, type) or get_origin(annotation) is not None or dataclasses.is_dataclass(annotation)):
        raise HandlerInvalid(f"{annotation!r} is no type: annotate the argument with one, or give a codec")
    return TypeAdapter(annotation).validate_json
