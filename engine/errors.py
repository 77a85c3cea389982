"""Typed errors. Each message says what is wrong and what to do next; `field` names the culprit."""

from __future__ import annotations


class ChorusError(Exception):
    """Base of every error the engine raises on purpose.

    Attributes:
        code: short stable identifier for machines.
        http_status: what a server answers with.
        field: the request or settings field at fault, or None.
    """

    code = "error"
    http_status = 500

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self):  # keeps `field` and extras when an error crosses a process border
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[ChorusError], message: str, state: dict) -> ChorusError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidRequest(ChorusError):
    """The request cannot be served as it is; nothing was spent on it."""

    code = "invalid_request"
    http_status = 400


class InvalidText(InvalidRequest):
    code = "invalid_text"


class InvalidAudio(InvalidRequest):
    code = "invalid_audio"


class UnknownVoice(InvalidRequest):
    code = "unknown_voice"
    http_status = 404


class ConfigError(ChorusError):
    """A setting is unknown, of the wrong type, or out of range."""

    code = "invalid_config"


class CheckpointError(ChorusError):
    """The checkpoint is missing, damaged, or of another kind."""

    code = "invalid_checkpoint"


class EngineBusy(ChorusError):
    """The queue is full; the same request may succeed after `retry_after_s` seconds."""

    code = "engine_busy"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class EngineClosed(ChorusError):
    """The engine was closed, or is restarting; submit again once it is ready."""

    code = "engine_closed"
    http_status = 503


class EngineFailed(ChorusError):
    """The engine broke while serving; the request's audio so far is valid but incomplete."""

    code = "engine_failed"
    http_status = 500


class DeadlineExceeded(ChorusError):
    code = "deadline_exceeded"
    http_status = 504
