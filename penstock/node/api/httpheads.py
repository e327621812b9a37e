"""What the admin API checks in the head of a request: its target, and which versions its conditions name."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from penstock.node.api.operation import ANY_VERSION, ApiError

PARAMETERS_MAX: Final = 64
"""Parameters of a query, of which no request has as many. To decode those that a whole first line holds would hold the loop."""

_HEX: Final = "[0-9A-Fa-f]"
_NEXT: Final = f"%[89AaBb]{_HEX}"
"""The escape of a further byte of a character."""

_TARGET: Final = re.compile(
    "(?:"
    r"[^%\ud800-\udfff]++"
    f"|%[0-7]{_HEX}"
    f"|%(?:[Cc][2-9A-Fa-f]|[Dd]{_HEX}){_NEXT}"
    f"|%(?:[Ee]0%[AaBb]{_HEX}|[Ee][1-9A-CEFa-cef]{_NEXT}|[Ee][Dd]%[89]{_HEX}){_NEXT}"
    f"|%(?:[Ff]0%[9AaBb]{_HEX}|[Ff][1-3]{_NEXT}|[Ff]4%8{_HEX}){_NEXT}{_NEXT}"
    ")*+"
)
"""The part of a target up to the first escape that is none, or none of UTF-8. Bytes that are not UTF-8 come as surrogates."""

_TAG: Final = r'(?:W/)?("[^"\x00-\x20\x7f]*")'
_TAGS: Final = re.compile(rf"{_TAG}(?:[ \t]*,[ \t]*{_TAG})*+")


def check_target(request: web.BaseRequest) -> None:
    """Raise ApiError if path and query are not UTF-8 in valid escapes, or the query has too many parameters.

    aiohttp would take what is invalid literally.
    """
    target = request.raw_path
    if target.count("&") >= PARAMETERS_MAX:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"path and query have {target.count('&')} times '&', so there are more than {PARAMETERS_MAX} parameters; give "
            "fewer, and write '&' within a name as %26",
        )
    found = _TARGET.match(target)
    end = found.end() if found is not None else 0
    if end < len(target):
        what = target[end : end + 12].encode(errors="backslashreplace").decode()
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"path or query has {what!r}, which is no UTF-8 in percent-escapes; write a percent sign as %25",
        )


def versions_of(request: web.BaseRequest, header: str) -> tuple[str, ...]:
    """Return the versions that If-Match or If-None-Match lists, `ANY_VERSION` for `*`, or nothing if the header is missing.

    Weak ones count like strong ones, because proxies that compress make them weak. Raises ApiError.
    """
    given = ", ".join(request.headers.getall(header, ())).strip(" \t,")
    if given in ("", "*"):
        return (ANY_VERSION,) if given else ()
    if _TAGS.fullmatch(given) is None:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f'{header} is {given[:80]!r}, but must be * or a list of versions in double quotes, such as "1a2b"',
        )
    return tuple(tag.strip('"') for tag in re.findall(_TAG, given))


def unless_known(request: web.BaseRequest, response: web.Response) -> web.Response:
    """Return a response, or one without a body if If-None-Match names its version. Raises ApiError."""
    tag = response.headers.get(hdrs.ETAG)
    known = versions_of(request, hdrs.IF_NONE_MATCH)
    if tag is None or not (ANY_VERSION in known or tag.strip('"') in known):
        return response
    return web.Response(status=HTTPStatus.NOT_MODIFIED, headers={hdrs.ETAG: tag, hdrs.CACHE_CONTROL: "no-store"})
