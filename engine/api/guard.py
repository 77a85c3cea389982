"""Who may ask how much: key, rate and body size, before a route sees the request.

Plain ASGI middleware: it neither buffers responses nor hides a client's leaving from them.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import BodyTooLarge, CrossSite, RateLimited, Unauthorized, error_response
from engine.api.settings import ServerSettings
from engine.errors import ChorusError

GUARDED = "/v1/"  # the page beside the API has its own rules


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


class Guard:
    """ASGI middleware around the app."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._limiter = RateLimiter(settings.requests_per_minute) if settings.requests_per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._refuse(scope, headers)
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> ChorusError | None:
        if self._key is not None:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                return Unauthorized("this server wants its API key as Authorization: Bearer KEY")
        elif headers.get(b"sec-fetch-site") == b"cross-site" and scope["method"] in ("POST", "DELETE"):
            # Without a key, any web page that a user of this machine opens could speak and save voices here.
            return CrossSite("web pages of other sites may not use this server; set CHORUS_API_KEY and send it")
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
