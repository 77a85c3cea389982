"""One web application: the page's routes, the speech API, and the Gradio page, behind an optional password."""

from __future__ import annotations

import base64
import datetime
import hmac
import ipaddress
import socket
import tempfile
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.responses import Response

from engine.server import create_app
from ui import downloads, page, routes, run_routes
from ui.handle import EngineHandle
from ui.references import References
from ui.run_manager import RunManager

MAX_UPLOAD = "64mb"


def create(handle: EngineHandle, *, password: str | None = None, https: bool = False) -> FastAPI:
    """Everything that answers on the port.

    Args:
        password: HTTP Basic, any user name, for page and API alike.
        https: whether it is served with `self_signed`: the curl commands of the page then say so.
    """
    app = create_app(handle.raw)  # /v1/..., /health, /ready, /metrics
    references = References()
    app.include_router(routes.router(handle, references))
    app.include_router(downloads.router(handle))
    runs = RunManager(handle)
    app.include_router(run_routes.router(runs))
    app.mount("/chorus/static", routes.static_files())
    if password:
        app.add_middleware(BasicPassword, password=password)
    return gr.mount_gradio_app(
        app,
        page.build(handle, references, runs),
        path="/",
        theme=page.theme(),
        head=page.HEAD + curl_options(password, https),
        max_file_size=MAX_UPLOAD,
        ssr_mode=False,
        footer_links=[],
        show_error=True,
    )


def curl_options(password: str | None, https: bool) -> str:
    """For the page: what its curl commands need to come in. The word itself is for whoever pastes them to fill in."""
    options = ("-k " if https else "") + ("-u chorus:PASSWORD " if password else "")
    return f'<meta name="chorus-curl" content="{options}">\n'


class BasicPassword:
    """HTTP Basic for every route (pure ASGI: streamed answers and disconnects pass untouched)."""

    def __init__(self, app: Any, password: str) -> None:
        self.app, self._password = app, password.encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self._allowed(dict(scope["headers"])):
            await self.app(scope, receive, send)
            return
        answer = Response("A password is needed.", 401, {"WWW-Authenticate": 'Basic realm="Chorus", charset="UTF-8"'})
        await answer(scope, receive, send)

    def _allowed(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"basic":
            return False
        try:
            given = base64.b64decode(value).partition(b":")[2]
        except ValueError:
            return False
        return hmac.compare_digest(given, self._password)


def self_signed(host: str) -> tuple[Path, Path]:
    """(certificate, key) for this machine, made anew: browsers warn once, and then allow the microphone."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Chorus")])
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.DNSName(socket.gethostname())]
    for address in {host, "127.0.0.1"}:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = Path(tempfile.mkdtemp(prefix="chorus-tls-"))
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file
