"""English names of numbers, so that figures in the training text and the speech agree."""

from __future__ import annotations

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def cardinal(n: int) -> str:
    """0 <= n < 1,000,000: 342 -> "three hundred and forty-two"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" and {cardinal(n % 100)}" if n % 100 else "")
    rest = n % 1000
    joiner = " and " if 0 < rest < 100 else " "
    return f"{cardinal(n // 1000)} thousand" + (joiner + cardinal(rest) if rest else "")


def ordinal(n: int) -> str:
    """1 <= n: 21 -> "twenty-first"."""
    head, mark, last = cardinal(n).rpartition("-")
    last = ORDINALS.get(last, last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return head + mark + last


def year(n: int) -> str:
    """1100 <= n < 2100, read in pairs: 1984 -> "nineteen eighty-four", 2007 -> "two thousand and seven"."""
    if 2000 <= n < 2010:
        return cardinal(n)
    first, second = divmod(n, 100)
    if second == 0:
        return f"{cardinal(first)} hundred"
    return f"{cardinal(first)} {'oh ' if second < 10 else ''}{cardinal(second)}"
