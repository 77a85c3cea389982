"""Written English → spoken English: numbers, money, dates, times, phone numbers, addresses, abbreviations.

A model that reads "03/04/2026" or "$19.99" often guesses (QwenLM/Qwen3-TTS #265, F5-TTS #618, pocket-tts #216); one
whose training text was all words cannot read digits at all. Number words come from num2words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from num2words import num2words

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_MONTH_NAMES = "|".join(_MONTHS) + "|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "sen", "sen"),
}
_UNITS = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms", "g": "grams",
    "mg": "milligrams", "lb": "pounds", "lbs": "pounds", "oz": "ounces", "ft": "feet", "mph": "miles per hour",
    "km/h": "kilometers per hour", "°C": "degrees Celsius", "°F": "degrees Fahrenheit", "GB": "gigabytes",
    "MB": "megabytes", "kHz": "kilohertz", "Hz": "hertz", "ms": "milliseconds", "kW": "kilowatts", "W": "watts",
}  # fmt: skip
_ABBREVIATIONS = {
    "Mr.": "Mister", "Mrs.": "Missus", "Ms.": "Miss", "Dr.": "Doctor", "Prof.": "Professor", "Sr.": "Senior",
    "Jr.": "Junior", "vs.": "versus", "etc.": "et cetera", "e.g.": "for example", "i.e.": "that is", "approx.":
    "approximately", "dept.": "department", "a.m.": "a m", "p.m.": "p m", "No.": "Number",
}  # fmt: skip
_DIGITS = "zero one two three four five six seven eight nine".split()
_MAGNITUDES = "thousand|million|billion|trillion"


def _words(number: int | float | str) -> str:
    return num2words(number).replace(" and ", " ").replace(",", "")


def _number(text: str) -> str:
    """ "1,234.5" → "one thousand two hundred thirty-four point five"."""
    text = text.replace(",", "")
    whole, _, fraction = text.partition(".")
    spoken = _words(int(whole or 0)) if len(whole) <= 15 else _spell(whole)
    return f"{spoken} point {_spell(fraction)}" if fraction else spoken


def _spell(digits: str) -> str:
    return " ".join(_DIGITS[int(d)] for d in digits if d.isdigit())


def _year(year: int) -> str:
    high, low = divmod(year, 100)
    if 2000 <= year <= 2009 or (low == 0 and high % 10 == 0):
        return _words(year)
    if low == 0:
        return f"{_words(high)} hundred"
    return f"{_words(high)} {'oh ' if low < 10 else ''}{_words(low)}"


def _ordinal(number: int) -> str:
    return num2words(number, to="ordinal").replace(" and ", " ")


def _money(m: re.Match[str]) -> str:
    one, many, cent, cents = _CURRENCIES[m["sign"]]
    whole, _, fraction = m["amount"].replace(",", "").partition(".")
    if m["scale"]:
        return f"{_number(m['amount'])} {m['scale'].lower()} {many}"
    spoken = f"{_words(int(whole))} {one if int(whole) == 1 else many}"
    if len(fraction) == 2 and int(fraction):
        small = f"{_words(int(fraction))} {cent if int(fraction) == 1 else cents}"
        return small if int(whole) == 0 else f"{spoken} and {small}"
    return spoken if not int(fraction or 0) else f"{_number(m['amount'])} {many}"


def _date(m: re.Match[str]) -> str:
    month, day, year = int(m["month"]), int(m["day"]), int(m["year"])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return m[0]
    return f"{_MONTHS[month - 1]} {_ordinal(day)}, {_year(year)}"


def _time(m: re.Match[str]) -> str:
    hour, minute, half = int(m["hour"]), int(m["minute"]), (m["half"] or "").lower().replace(".", "")
    if hour > 23 or minute > 59:
        return m[0]
    if minute == 0:
        spoken = _words(hour) + ("" if half else " o'clock" if hour <= 12 else " hundred hours")
    else:
        spoken = f"{_words(hour)} {'oh ' if minute < 10 else ''}{_words(minute)}"
    return spoken + (f" {half[0]} m" if half else "")


def _address(m: re.Match[str]) -> str:
    text = re.sub(r"^https?://(www\.)?|^www\.", "", m[0]).rstrip("/")
    spoken = {"@": " at ", ".": " dot ", "/": " slash ", "-": " dash ", "_": " underscore ", ":": " colon "}
    spoken |= {"?": " question mark ", "=": " equals ", "&": " and ", "#": " hash ", "%": " percent ", "~": " tilde "}
    return re.sub(r"\s+", " ", "".join(spoken.get(char, char) for char in text)).strip()


_Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_ABBREVIATED: _Rule = (
    re.compile("|".join(rf"(?<!\w){re.escape(a)}" for a in _ABBREVIATIONS)),
    lambda m: _ABBREVIATIONS[m[0]],
)
# Every other rule needs one of these; most text has none, and of many requests at once each would cost 24 passes.
_NEEDED = re.compile(r"[\d$€£¥&+=*_@/]|www\.|\.\w")
_RULES: tuple[_Rule, ...] = (
    (re.compile(r"\b(?:https?://|www\.)[^\s<>\"]*[\w/]|\b[\w.+-]+@[\w-]+\.[\w.]*\w"), _address),
    (re.compile(r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:com|org|net|io|dev|edu|gov|ai)(?:/[\w./-]*\w)?\b"), _address),
    (
        re.compile(rf"(?P<sign>[$€£¥])\s?(?P<amount>{_NUMBER})(?:\s+(?P<scale>{_MAGNITUDES})\b)?", re.I),
        _money,
    ),
    (re.compile(r"\b(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})\b"), _date),
    (re.compile(r"\b(?P<month>\d{1,2})/(?P<day>\d{1,2})/(?P<year>\d{4})\b"), _date),
    (
        re.compile(rf"\b(?P<month>{_MONTH_NAMES})\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b(?!:)"),
        lambda m: f"{next(n for n in _MONTHS if n.startswith(m['month'][:3]))} {_ordinal(int(m['day']))}",
    ),
    (
        re.compile(r"\b(?P<hour>\d{1,2}):(?P<minute>\d{2})(?:\s?(?P<half>[ap]\.?m\b\.?))?", re.I),
        _time,
    ),
    (re.compile(r"\b(\d{1,2})\s?([ap])\.?m\b\.?", re.I), lambda m: f"{_words(int(m[1]))} {m[2].lower()} m"),
    # phone numbers: three or more groups joined by dashes, dots or spaces, with or without a country code
    (
        re.compile(r"(?<!\w)\+?(?:\d{1,3}[-. ])?\(?\d{3}\)?[-. ]\d{3}[-. ]\d{4}\b"),
        lambda m: ", ".join(_spell(group) for group in re.findall(r"\d+", m[0])),
    ),
    (re.compile(r"\b(\d+)(?:st|nd|rd|th)\b"), lambda m: _ordinal(int(m[1]))),
    (re.compile(r"\b(\d{3,4})0s\b"), lambda m: _decade(int(m[1] + "0"))),
    (re.compile(r"(?<=\d)\s?[-–]\s?(?=\d)"), lambda m: " to "),
    (re.compile(rf"(?<!\w)[-−](?={_NUMBER})"), lambda m: "minus "),
    (re.compile(rf"({_NUMBER})\s?%"), lambda m: f"{_number(m[1])} percent"),
    (
        re.compile(rf"({_NUMBER})\s?({'|'.join(sorted(map(re.escape, _UNITS), key=len, reverse=True))})(?![\w/])"),
        lambda m: f"{_number(m[1])} {_UNITS[m[2]]}",
    ),
    (re.compile(r"\b(\d+)/(\d+)\b"), lambda m: _fraction(int(m[1]), int(m[2]))),
    (re.compile(r"(?<![\w.,])(1[1-9]\d\d|20\d\d)(?!\w|,\d|\.\d)"), lambda m: _year(int(m[1]))),
    (re.compile(rf"{_NUMBER}"), lambda m: _digits_or_number(m[0])),
    _ABBREVIATED,
    (re.compile(r"\s&\s"), lambda m: " and "),
    (re.compile(r"(?<=\w) \+ (?=\w)"), lambda m: " plus "),
    (re.compile(r"(?<=\w) = (?=\w)"), lambda m: " equals "),
    (re.compile(r"(?<=\w) \* (?=\w)"), lambda m: " times "),
    (re.compile(r"(?<=\w)_(?=\w)"), lambda m: " "),
)


def _decade(year: int) -> str:
    spoken = _year(year)
    return spoken[:-1] + "ies" if spoken.endswith("y") else spoken + "s"


def _fraction(top: int, bottom: int) -> str:
    names = {2: "half", 3: "third", 4: "quarter"}
    if bottom in names and 0 < top < bottom:
        return f"{_words(top)} {names[bottom]}{'s' if top > 1 else ''}"
    return f"{_words(top)} over {_words(bottom)}"


def _digits_or_number(text: str) -> str:
    """A leading zero or a very long number is read digit by digit."""
    whole = text.partition(".")[0]
    if (len(whole) > 1 and whole.startswith("0")) or len(whole.replace(",", "")) > 12:
        return _spell(text)
    return _number(text)


def english(text: str) -> str:
    """Spoken form of English text; text without digits, symbols or abbreviations comes back as it was."""
    for pattern, spoken in _RULES if _NEEDED.search(text) else (_ABBREVIATED,):
        text = pattern.sub(partial(_spaced, spoken), text)
    return re.sub(r"\s+", " ", text).strip()


def _spaced(rule: Callable[[re.Match[str]], str], m: re.Match[str]) -> str:
    """Keep a word that touched the number apart from it: "5kg" and "B2B" become several words."""
    before = m.string[m.start() - 1 : m.start()]
    after = m.string[m.end() : m.end() + 1]
    return (" " if before.isalnum() else "") + rule(m) + (" " if after.isalnum() else "")
