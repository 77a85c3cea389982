"""Settings of the HTTP side. The engine's own are in `engine/config.py`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ServerSettings(BaseModel):
    """What the API allows its callers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr | None = None  # asked for as `Authorization: Bearer ...` under /v1; None: open to all
    max_body_bytes: int = Field(
        default=40 * 2**20, ge=1024
    )  # a reference file of 25 MiB in base64 and the text beside it
    max_in_flight: int = Field(default=256, ge=1)  # speech requests being read, prepared, waiting or spoken
    requests_per_minute: int = Field(default=0, ge=0)  # POST and DELETE of one client under /v1; 0: no limit
    preparing: int = Field(default=4, ge=1)  # reference clips decoded at the same time
    allow_remote_audio: bool = False  # ref_audio as http(s) URL; never to a private address
    remote_timeout_s: float = Field(default=10.0, gt=0)
    max_reference_bytes: int = Field(default=25 * 2**20, ge=1024)
    # Names that OpenAI clients send by default, answered by the loaded model; x-chorus-model tells the truth.
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
