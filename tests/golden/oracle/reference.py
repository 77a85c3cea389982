"""Imports the reference implementation (qwen-tts 0.1.1) with stand-ins for what this use of it never calls.

The 25 Hz tokenizer of the package wants torchaudio, sox and onnxruntime at import time; the 12 Hz family needs none.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import warnings

UNUSED = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi", "sox", "onnxruntime")


class _Unused(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name} is not part of the oracle's environment")

        return refuse


for _name in UNUSED:
    _module = _Unused(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    _module.__path__ = []
    sys.modules[_name] = _module
    if "." in _name:
        _parent, _, _child = _name.rpartition(".")
        setattr(sys.modules[_parent], _child, _module)

warnings.filterwarnings("ignore")

from qwen_tts import Qwen3TTSModel  # noqa: E402
from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration  # noqa: E402
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (  # noqa: E402
    Qwen3TTSTokenizerV2Config,
)
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import (  # noqa: E402
    Qwen3TTSTokenizerV2Model,
)

__all__ = [
    "Qwen3TTSConfig",
    "Qwen3TTSForConditionalGeneration",
    "Qwen3TTSModel",
    "Qwen3TTSTokenizerV2Config",
    "Qwen3TTSTokenizerV2Model",
]
