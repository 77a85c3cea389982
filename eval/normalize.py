"""Text normalisers for word error rates. Which one was used stands beside every figure.

`SeedTTS` follows the rules of BytedanceSpeech/seed-tts-eval's run_wer.py, so that figures can stand beside published
ones: delete punctuation except the apostrophe, collapse double spaces once, lower-case English, one token per
character in Chinese. It leaves numbers and spellings alone, so "fifty" read as "50" is an error (their issue 12).

`WhisperEnglish` is openai-whisper's EnglishTextNormalizer: numbers, contractions, British spelling, fillers.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Protocol

# CJK and full-width punctuation: the set the seed-tts-eval script takes from the `zhon` package, written as the
# Unicode blocks and signs it covers.
_HANZI_PUNCTUATION = (
    "＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"  # full-width forms
    "　、〃〈〉《》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏﹑﹔·．！？｡。"
)
_DELETED = (set(_HANZI_PUNCTUATION) | set(string.punctuation)) - {"'"}
_SAYS = re.compile(r"\w")  # Whisper's normalisers leave a lone "." of "..." standing: no token
_DELETE_TABLE = {ord(sign): None for sign in _DELETED}


class Normalizer(Protocol):
    """Text in, the tokens that are compared out."""

    name: str

    def tokens(self, text: str) -> list[str]: ...


class SeedTTS:
    """seed-tts-eval's official rules for `language` "en" or "zh"."""

    def __init__(self, language: str = "en") -> None:
        self.language = language
        self.name = f"seed-tts-eval ({'characters' if language == 'zh' else 'words'})"

    def tokens(self, text: str) -> list[str]:
        text = text.translate(_DELETE_TABLE).replace("  ", " ")
        if self.language == "zh":
            return [character for character in text if not character.isspace()]
        return text.lower().split()


class WhisperEnglish:
    """openai-whisper's English normaliser."""

    name = "Whisper English"

    def __init__(self) -> None:
        from whisper.normalizers import EnglishTextNormalizer

        self._normalize = EnglishTextNormalizer()

    def tokens(self, text: str) -> list[str]:
        return [token for token in self._normalize(text).split() if _SAYS.search(token)]


class WhisperBasic:
    """openai-whisper's language-independent normaliser; Chinese, Japanese and the like by characters."""

    def __init__(self, by_character: bool = False) -> None:
        from whisper.normalizers import BasicTextNormalizer

        self._normalize = BasicTextNormalizer(split_letters=by_character)
        self.name = f"Whisper basic ({'characters' if by_character else 'words'})"

    def tokens(self, text: str) -> list[str]:
        return [token for token in self._normalize(text).split() if _SAYS.search(token)]


_BY_CHARACTER = {"zh", "ja", "th", "yue"}
_CODES = {"english": "en", "chinese": "zh", "japanese": "ja", "cantonese": "yue", "thai": "th"}


def language_code(language: str) -> str:
    """ "English", "en", "auto" -> "en"; unknown names keep their first two letters."""
    language = language.lower()
    if language in ("", "auto"):
        return "en"
    return _CODES.get(language, language if len(language) <= 3 else language[:2])


@lru_cache(maxsize=16)
def pair(language: str = "en") -> tuple[Normalizer, Normalizer]:
    """The two normalisers reported side by side for a language: seed-tts-eval's and Whisper's."""
    code = language_code(language)
    seed = SeedTTS("zh" if code in _BY_CHARACTER else code)
    if code == "en":
        return seed, WhisperEnglish()
    return seed, WhisperBasic(by_character=code in _BY_CHARACTER)


def has_nothing_to_say(text: str) -> bool:
    """Whether no letter or digit is left: such a reference cannot be scored."""
    return _SAYS.search(text) is None
