"""Typed errors of the evaluation; they follow the rules of `engine.errors`."""

from __future__ import annotations

from engine.errors import ChorusError


class EvalError(ChorusError):
    """An evaluation cannot go on as asked."""

    code = "invalid_evaluation"
    http_status = 400


class DatasetError(EvalError):
    """A prompt list is missing, malformed or empty."""

    code = "invalid_dataset"


class ModelUnavailable(EvalError):
    """A scoring model's weights are not on this machine and could not be fetched."""

    code = "model_unavailable"
    http_status = 503


class RunFolderError(EvalError):
    """A run folder is missing, damaged, or belongs to other settings."""

    code = "invalid_run"
