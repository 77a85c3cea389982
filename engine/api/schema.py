"""The body of POST /v1/audio/speech: OpenAI's fields and ours, checked strictly; and what they ask of the engine."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.datastructures import UploadFile

from engine.api.errors import UnsupportedMediaType, from_validation
from engine.chunks import MAX_CHUNK_FRAMES, MAX_SCHEDULE_LENGTH
from engine.errors import InvalidRequest
from engine.request import SamplingOverrides

Task = Literal["Base", "CustomVoice", "VoiceDesign"]


class VoiceId(BaseModel):
    """A voice the way OpenAI names custom ones."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str = Field(min_length=1, max_length=200)


class SpeechBody(BaseModel):
    """One text to speak. Unknown fields are refused, so that a misspelt one is not silently ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # OpenAI's
    input: str = Field(min_length=1, description="The text to speak.")
    model: str | None = Field(None, max_length=300, description="The loaded model; see /v1/models.")
    voice: Annotated[str, Field(max_length=200)] | VoiceId | None = Field(
        None,
        description="Base: a saved or bundled voice; CustomVoice: a speaker; VoiceDesign: leave out, or `default`. "
        "See /v1/audio/voices.",
    )
    instructions: str | None = Field(
        None, max_length=4000, description="CustomVoice: the style; VoiceDesign: the voice to make up."
    )
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus"] = Field(
        "wav", description="wav and pcm: 24 kHz, 16 bit, mono. opus comes in Ogg."
    )
    speed: float = Field(1.0, description="Only 1.0: the model has no other speed.")
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="Streams raw audio, or OpenAI's speech.audio.delta and speech.audio.done events."
    )
    # ours
    stream: bool | None = Field(
        None,
        description="Send audio while it is made. Left out: true with stream_format or response_format pcm, else the "
        "finished file with true sizes.",
    )
    task_type: Task | None = Field(None, description="Must be the task of the loaded model; left out: that one.")
    language: str | None = Field(None, max_length=40, description="A language of the model, or auto.")
    ref_audio: str | None = Field(
        None, description="Base: the voice to clone, as data: URL (base64); in multipart/form-data also a file."
    )
    ref_text: str | None = Field(None, max_length=4000, description="What ref_audio says.")
    x_vector_only_mode: bool = Field(False, description="Base: use the speaker embedding alone.")
    seed: int | None = Field(None, ge=0, lt=2**53, description="Left out: drawn, and told in x-chorus-seed.")
    max_new_tokens: int | None = Field(None, ge=1, le=2**20, description="Limit in frames of 80 ms.")
    min_new_tokens: int | None = Field(
        None, ge=2, le=2**20, description="No end before so many frames; with max_new_tokens a fixed length."
    )
    non_streaming_mode: bool | None = Field(None, description="Give the model the whole text at once.")
    chunk_schedule: list[Annotated[int, Field(ge=1, le=MAX_CHUNK_FRAMES)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_SCHEDULE_LENGTH,
        description="Frames of 80 ms in the first, second, ... chunk; the last size repeats.",
    )
    deadline_s: float | None = Field(None, gt=0, le=86_400, description="Give up after this many seconds.")
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    subtalker_dosample: bool | None = None
    subtalker_temperature: float | None = None
    subtalker_top_k: int | None = None
    subtalker_top_p: float | None = None

    @field_validator("speed")
    @classmethod
    def _only_natural(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("only 1.0 is possible; leave speed out")
        return value

    @property
    def streams(self) -> bool:
        if self.stream is not None:
            return self.stream
        return self.stream_format is not None or self.response_format == "pcm"

    @property
    def voice_name(self) -> str | None:
        """The name asked for; None when none was, or only the placeholder that OpenAI's client insists on."""
        name = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        return None if name is None or name.strip().lower() in ("", "default") else name

    @property
    def sampling(self) -> SamplingOverrides:
        return SamplingOverrides(**{name: getattr(self, name) for name in SamplingOverrides.__dataclass_fields__})


def parse_json(data: bytes) -> SpeechBody:
    """Raises InvalidRequest naming each fault."""
    try:
        return SpeechBody.model_validate_json(data or b"{}")
    except ValidationError as error:
        raise from_validation(error) from None


def parse_form(fields: dict[str, str]) -> SpeechBody:
    """Form fields are text: numbers, flags and lists among them are written as in JSON."""
    values: dict[str, Any] = {}
    for name, text in fields.items():
        info = SpeechBody.model_fields.get(name)
        plain = info is None or str in _plain_types(info.annotation)
        try:
            values[name] = text if plain else json.loads(text)
        except ValueError:
            values[name] = text  # the model says what it should have been
    try:
        return SpeechBody.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from None


def _plain_types(annotation: Any) -> set[Any]:
    """The types a field takes, with the type of each literal."""
    found = {annotation}
    for part in get_args(annotation):
        found |= _plain_types(part) if get_args(part) else {part if isinstance(part, type) else type(part)}
    return found


async def read_body(request: Request) -> tuple[SpeechBody, bytes | None]:
    """The checked body, and the bytes of an uploaded `ref_audio`.

    Raises:
        InvalidRequest, UnsupportedMediaType: with the field at fault.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == "application/json":
        return parse_json(await request.body()), None
    if kind != "multipart/form-data":
        raise UnsupportedMediaType(f"a body of type {kind} is not read; send application/json or multipart/form-data")
    fields: dict[str, str] = {}
    upload: bytes | None = None
    async with request.form(max_files=1, max_fields=64) as form:
        for name, value in form.multi_items():
            if name in fields or (name == "ref_audio" and upload is not None):
                raise InvalidRequest(f"{name} is given twice", field=name)
            if not isinstance(value, UploadFile):
                fields[name] = value
            elif name == "ref_audio":
                upload = await value.read()
            else:
                raise InvalidRequest(f"{name} is no file; only ref_audio is", field=name)
    return parse_form(fields), upload
