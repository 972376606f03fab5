"""Requests to web servers: what fsspec, which sends them, does not compare with the answers.

A server, or a proxy on the way, may compress what it sends, send another part of a file than it was
asked for, or another version. Each of these is an error here, and none becomes samples. Servers
that are busy or hang up are asked again, and an answer that does not come whole ends at
DLIO_TIMEOUT.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from dlio.data.identity import stamp_of
from dlio.util.machine_memory import usable_memory
from dlio.util.printable import log_warning, tell_once
from dlio.util.settings import settings
from dlio.util.units import counted

_BUSY: Final = (429, 503)
_TRIES: Final = 5
_FIRST_PAUSE_S: Final = 0.5
_ERROR_BYTES: Final = 1 << 20
"""Of the text that comes with an error."""
_SHARE: Final = 4
"""Of this process's memory, one of so many parts may be taken for an answer of the size that it
tells itself."""
_FREE_BYTES: Final = 64 << 20
"""That an answer may always have, whatever was said of it before: also lists of files."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """The last words of a web server about a whole file."""

    size: int | None
    """Bytes; None if the server does not tell."""
    times: str
    """Text of its ETag or time of change, as `stamp_of` has it."""


_newest: Final[dict[str, WebFile | None]] = {}
"""By URL without user: of the files that were last asked for by HEAD."""
_MOST: Final = 1 << 17
"""Files whose last words are kept, in some 50 MB."""


def web_options(url: str) -> dict[str, object]:
    """Return options of fsspec for a URL: of each link that is a web server's, by its scheme."""
    schemes = (link.partition("://")[0] for link in url.split("::"))
    return {
        each: {"get_client": _client(settings().timeout_s)}
        for each in schemes
        if each in ("http", "https")
    }


def newest(url: str) -> WebFile | None:
    """Return the last words of a server about a file; None for files of other places."""
    return _newest.get(_key(url)) if url.startswith(("http://", "https://")) else None


def is_absent(error: FileNotFoundError) -> bool:
    """True if a web server says that a file is not there, or may not be seen; False if it
    is busy or broken, or its answer is none, which fsspec raises as FileNotFoundError as well."""
    status = getattr(error.__cause__, "status", 404 if error.__cause__ is None else 0)
    return 400 <= status < 500 and status != 429


def _keep(key: str, said: WebFile | None) -> None:
    """Keep a server's last words about a file; those about the file asked for longest ago go."""
    _newest.pop(key, None)
    _newest[key] = said
    if len(_newest) > _MOST:
        # Other threads read by key only, and all answers come in fsspec's one thread.
        del _newest[next(iter(_newest))]
        tell_once(
            f"more than {_MOST} files of web servers are open: that the first ones change on the "
            "server is noticed no more; pack them (`dlio pack`) to have few files"
        )


def _key(url: object) -> str:
    return re.sub(r"://[^/@]*@", "://", str(import_module("yarl").URL(str(url)))).partition("#")[0]


def _error(text: str) -> Exception:
    error: Exception = import_module("aiohttp").ClientPayloadError(text)
    return error


@cache
def _client(timeout_s: float) -> Callable[..., Awaitable[Any]]:
    """Return what makes a client; the same for the same deadline, as fsspec keeps file systems by
    their options."""

    async def client(**options: Any) -> Any:
        aiohttp = import_module("aiohttp")
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(_check)
        own = {
            "trace_configs": [trace, *options.pop("trace_configs", ())],
            "headers": {"Accept-Encoding": "identity", **options.pop("headers", {})},
            "timeout": aiohttp.ClientTimeout(total=timeout_s),
        }
        try:
            return aiohttp.ClientSession(**{"middlewares": (_ask_again,), **own, **options})
        except TypeError:  # aiohttp before 3.12, which asks once.
            return aiohttp.ClientSession(**own | options)

    return client


async def _ask_again(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
    """Ask a server again that is busy, when it says, or that hung up, unless that is after the
    deadline."""
    aiohttp = import_module("aiohttp")
    left_s, number, kept = settings().timeout_s, 0, True
    while True:
        pause_s = _FIRST_PAUSE_S * 2**number
        try:
            response = await handler(request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                raise
            if kept:  # Perhaps the connection of an earlier answer, which servers close at will.
                kept = False
                continue
            why = "the server hung up without an answer"
            if number == _TRIES - 1 or left_s <= pause_s:
                raise
        else:
            with suppress(ValueError):  # A date, which few servers send.
                pause_s = max(0.0, float(response.headers.get("Retry-After", pause_s)))
            why, kept = f"the server is busy ({response.status})", True
            if response.status not in _BUSY or number == _TRIES - 1 or left_s <= pause_s:
                return response
            response.close()
        left_s -= pause_s
        number += 1
        log_warning("%s: %s: asked again in %.1f s", request.url, why, pause_s)
        await asyncio.sleep(pause_s)


async def _check(_session: Any, _context: Any, params: Any) -> None:
    """Raise an error, and give the connection up, unless an answer is to what was asked."""
    answer = params.response
    if params.method == "HEAD" and answer.status in (405, 501):  # GET will tell.
        _keep(_key(params.url), None)
    answer.content = _BoundedContent(answer)
    if answer.status < 300:
        try:
            await _compare(params.method, params.headers.get("Range", ""), answer)
        except BaseException:
            answer.close()
            raise


class _BoundedContent:
    """The content of an answer, of which a server may send without an end: up to a number of bytes
    it is read whole; see `aiohttp.StreamReader`."""

    def __init__(self, answer: Any) -> None:
        self._answer, self._content, self.most = answer, answer.content, _ERROR_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, count: int = -1) -> bytes:
        if count >= 0:
            part: bytes = await self._content.read(count)
            return part
        parts, size = [], 0
        while part := await self._content.readany():
            size += len(part)
            if size > self.most:
                self._answer.close()
                if self._answer.status >= 300:
                    break  # The status is the error.
                raise _error(
                    f"the server sent over {counted(self.most, 'byte')}, more than it told: "
                    "use another server, or copy the files"
                )
            parts.append(part)
        return b"".join(parts)


async def _compare(method: str, asked: str, answer: Any) -> None:
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding not in ("", "identity"):
        raise _error(
            f"the server sends it compressed ({encoding}), although asked not to: have it send the "
            "file as it is, or copy the file"
        )
    size = answer.content_length
    if method == "GET" and size is None and "Transfer-Encoding" not in answer.headers:
        raise _error(
            "the server does not tell the length of its answer, so that one that was cut off looks "
            "whole: use another server, or copy the file"
        )
    key = _key(answer.history[0].url if answer.history else answer.url)
    before = _newest.get(key)
    size = None if before is None else before.size
    if size is None:
        size = min(answer.content_length or 0, usable_memory() // _SHARE)
    answer.content.most = max(size, _FREE_BYTES)
    if asked:
        size = await _check_part(asked, answer)
    about = {key: answer.headers[key] for key in ("ETag", "Last-Modified") if key in answer.headers}
    said = WebFile(size, stamp_of(about))
    if method == "HEAD" or (not asked and key in _newest):
        _keep(key, said)
    elif asked and before is not None:
        sizes = {before.size, size} - {None}
        # A server may leave either out of an answer.
        if len(sizes) > 1 or (before.times and said.times and before.times != said.times):
            raise _error("the file on the server has changed since it was opened: run again")


async def _check_part(asked: str, answer: Any) -> int | None:
    """Compare a part of a file with the range that was asked for; return the file's size."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if last:
        answer.content.most = int(last) + 1 - int(first or 0)
    size: int | None = answer.content_length
    if answer.status != 206:
        if first != "0" or size is None or (last and size > int(last) + 1):
            raise _error(
                "the server sends the whole file for a part of it: it does not serve parts of "
                "files (HTTP range requests); use one that does, such as nginx, or copy the files"
            )
        return size
    content_range = answer.headers.get("Content-Range", "")
    sent = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", content_range)
    if sent is None:
        if content_range or answer.content_type == "multipart/byteranges":
            shown = content_range[:99] or answer.content_type
            raise _error(f"the server's answer says no part of the file ({shown})")
        return None
    size = None if sent[3] == "*" else int(sent[3])
    begin = int(first) if first else max(0, size - int(last)) if size is not None else int(sent[1])
    is_beyond = size is not None and int(sent[2]) >= size
    if int(sent[1]) != begin or is_beyond or (first and last and int(sent[2]) > int(last)):
        raise _error(
            f"the server sent the bytes {content_range[6:]}, and was asked for {asked[6:]}: use "
            "another server, or copy the files"
        )
    # Libraries take the bytes that are missing for zeros.
    told_bytes = int(sent[2]) + 1 - int(sent[1])
    sent_bytes = answer.content_length
    if sent_bytes in (None, told_bytes):
        sent_bytes = len(await answer.read())
    if sent_bytes != told_bytes:
        raise _error(f"the server sent {sent_bytes} of {counted(told_bytes, 'byte')}: run again")
    return size
