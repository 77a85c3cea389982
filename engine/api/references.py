"""Reference audio that comes with a request: data: URLs, and http(s) where the operator allows it.

Nothing here opens a file. A remote address is resolved once, must be a public one, and the connection goes to that
very address, so that a name cannot point elsewhere the second time; redirects are not followed.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import socket
from urllib.parse import unquote_to_bytes, urlsplit

import anyio
import httpx

from engine.api.settings import ServerSettings
from engine.errors import InvalidAudio

FIELD = "ref_audio"
_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(?:;[^,;]*)*),", re.ASCII)


async def reference_bytes(source: str, settings: ServerSettings) -> bytes:
    """The bytes behind `ref_audio`.

    Raises:
        InvalidAudio: no usable URL, too large, or an address that may not be read.
    """
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "data":
        return from_data_url(source, settings.max_reference_bytes)
    if scheme in ("http", "https"):
        if not settings.allow_remote_audio:
            raise InvalidAudio("audio is not fetched from URLs here; send it as data: URL or as a file", field=FIELD)
        return await _fetch(source, settings)
    raise InvalidAudio("send the clip as data: URL (data:audio/wav;base64,...) or as a multipart file", field=FIELD)


def from_data_url(url: str, limit: int) -> bytes:
    """RFC 2397. Raises InvalidAudio."""
    match = _DATA_URL.match(url)
    if match is None:
        raise InvalidAudio("not a data: URL; it reads data:audio/wav;base64,...", field=FIELD)
    if len(url) - match.end() > limit * 4 // 3 + 4:
        raise _too_large(limit)
    payload = unquote_to_bytes(url[match.end() :])
    if match["parameters"].lower().endswith(";base64"):
        try:
            payload = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidAudio("the data: URL is not valid base64", field=FIELD) from None
    if len(payload) > limit:
        raise _too_large(limit)
    return payload


def _too_large(limit: int) -> InvalidAudio:
    return InvalidAudio(f"the clip has more than {limit / 2**20:.0f} MB; 3 to 15 seconds are enough", field=FIELD)


async def public_address(host: str, port: int) -> str:
    """One address of `host`, after checking that every one is public. Raises InvalidAudio."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidAudio(f"the host {host} is unknown", field=FIELD) from None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for address in addresses:
        ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address)
        if isinstance(ip, ipaddress.IPv6Address):
            # An IPv4 address in IPv6 dress is judged as what it is.
            ip = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or ip
        if not ip.is_global or ip.is_multicast:
            raise InvalidAudio(f"{host} is not a public address", field=FIELD)
    if not addresses:
        raise InvalidAudio(f"the host {host} is unknown", field=FIELD)
    return addresses[0]


async def _fetch(url: str, settings: ServerSettings) -> bytes:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
    except ValueError:
        raise InvalidAudio("not a valid URL", field=FIELD) from None
    if not parts.hostname or parts.username or parts.password:
        raise InvalidAudio("the URL needs a host and carries no user name", field=FIELD)
    try:
        with anyio.fail_after(settings.remote_timeout_s):
            address = await public_address(parts.hostname, port)
            return await _download(url, parts.hostname, address, settings.max_reference_bytes)
    except TimeoutError:
        raise InvalidAudio(
            f"{parts.hostname} took longer than {settings.remote_timeout_s:.0f} s", field=FIELD
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidAudio(f"{parts.hostname} could not be read: {type(error).__name__}", field=FIELD) from None


async def _download(url: str, host: str, address: str, limit: int) -> bytes:
    """GET `url` from `address`; the certificate is checked against `host`."""
    target = httpx.URL(url).copy_with(host=address)
    headers = {"host": httpx.URL(url).netloc.decode()}
    data = bytearray()
    # trust_env=False: a proxy of the environment would resolve the name by itself.
    async with (
        httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None) as client,
        client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as response,
    ):
        if response.status_code != 200:
            raise InvalidAudio(f"{host} answered {response.status_code}; redirects are not followed", field=FIELD)
        async for part in response.aiter_bytes():
            data += part
            if len(data) > limit:
                raise _too_large(limit)
    return bytes(data)
