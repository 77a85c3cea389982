"""Who may ask how much: key, rate and body size of the API, before a route sees the request; and for every route,
the page's included, whether another site's page is asking.

Plain ASGI middleware: it neither buffers responses nor hides a client's leaving from them.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import BodyTooLarge, CrossSite, RateLimited, Unauthorized, error_response
from engine.api.settings import ServerSettings
from engine.errors import ChorusError

GUARDED = "/v1/"  # key, rate and size; the page beside the API has its own rules
SAFE_METHODS = ("GET", "HEAD", "OPTIONS", "TRACE")  # RFC 9110, 9.2.1: these change nothing


class RateLimiter:
    """A bucket of tokens per client: `per_minute` at once, filled again evenly over a minute."""

    MAX_CLIENTS = 10_000

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (tokens, as of)

    def wait_s(self, client: str) -> float:
        """0 and one token less, or the seconds until there is one."""
        now = self._clock()
        tokens, since = self._buckets.pop(client, (float(self._per_minute), now))
        tokens = min(float(self._per_minute), tokens + (now - since) * self._per_minute / 60)
        wait = 0.0 if tokens >= 1 else (1 - tokens) * 60 / self._per_minute
        self._buckets[client] = (tokens if wait else tokens - 1, now)
        while len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


def cross_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says that another site's page sends this: any page that a user of this machine opens could
    otherwise speak, cancel, save voices and start runs here.

    Browsers send Sec-Fetch-Site to https and to this machine; over plain http to another machine only Origin, which is
    held against the host that was asked for (as a proxy names it, too). Other programs send neither.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site == b"cross-site"
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        asking = urlsplit(origin.decode("latin-1")).netloc.lower()
    except ValueError:
        return True
    hosts = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"x-forwarded-host"))
    return not asking or asking not in hosts  # "null": a sandboxed page or a file


class Guard:
    """ASGI middleware around the app."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._limiter = RateLimiter(settings.requests_per_minute) if settings.requests_per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        guarded = scope["path"].startswith(GUARDED)
        error = self._refuse(scope, headers) if guarded else None
        # A key that a caller sends proves that it is no stranger; a password that browsers send by themselves does not.
        if (
            error is None
            and not (guarded and self._key)
            and scope["method"] not in SAFE_METHODS
            and cross_site(headers)
        ):
            way = "set CHORUS_API_KEY and send it" if guarded else "open this server's own page"
            error = CrossSite(f"web pages of other sites may not use this server; {way}")
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._counting(receive) if guarded else receive, send)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> ChorusError | None:
        if self._key is not None:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                return Unauthorized("this server wants its API key as Authorization: Bearer KEY")
        if self._limiter is not None and scope["method"] in ("POST", "DELETE"):
            client = (scope.get("client") or ("local", 0))[0]
            if wait := self._limiter.wait_s(client):
                limit = self._settings.requests_per_minute
                return RateLimited(f"more than {limit} requests a minute; wait {wait:.0f} s", retry_after_s=wait)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            return self._too_large()
        return None

    def _counting(self, receive: Receive) -> Receive:
        """Bodies without a stated length are counted while they come."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._settings.max_body_bytes:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> BodyTooLarge:
        limit = self._settings.max_body_bytes / 2**20
        return BodyTooLarge(f"the body has more than {limit:.0f} MB; a reference clip of 3 to 15 seconds is enough")
