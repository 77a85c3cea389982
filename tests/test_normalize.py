import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.normalize import _RULES, _spaced, english


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("It costs $19.99.", "It costs nineteen dollars and ninety-nine cents."),  # chatterbox #284
        ("$1 and £2.01 and $0.50", "one dollar and two pounds and one penny and fifty cents"),
        ("$3.5 million", "three point five million dollars"),
        ("Call 416-555-0192 now", "Call four one six, five five five, zero one nine two now"),
        ("on 03/04/2026", "on March fourth, twenty twenty-six"),
        ("on 2024-12-24.", "on December twenty-fourth, twenty twenty-four."),
        ("Sept 5 and May 21st", "September fifth and May twenty-first"),
        ("in 1999, 2004 and 1905", "in nineteen ninety-nine, two thousand four and nineteen oh five"),
        ("the 1980s", "the nineteen eighties"),
        ("at 12:30, 9:05 am and 7:00 pm", "at twelve thirty, nine oh five a m and seven p m"),
        ("1 2 3 4 5", "one two three four five"),  # QwenLM/Qwen3-TTS #265
        ("1,234 people", "one thousand two hundred thirty-four people"),
        ("pi is 3.14", "pi is three point one four"),
        ("50% off", "fifty percent off"),
        ("the 21st of 3rd", "the twenty-first of third"),
        ("3/4 cup, 1/2 spoon", "three quarters cup, one half spoon"),
        ("10-12 kg", "ten to twelve kilograms"),
        ("it was -5 °C", "it was minus five degrees Celsius"),
        ("agent 007", "agent zero zero seven"),
        ("Dr. Brown vs. Mr. Gray", "Doctor Brown versus Mister Gray"),
        ("See https://www.example.org/a-b.", "See example dot org slash a dash b."),
        ("mail bob@example.com", "mail bob at example dot com"),
        ("Q&A & more", "Q&A and more"),
        ("a B2B deal", "a B two B deal"),
        ("No numbers here, none.", "No numbers here, none."),
    ],
)
def test_english(written, spoken):
    assert english(written) == spoken


PIECES = st.sampled_from(
    "12|1,000|$5|50%|Dr.|e.g.|No.|example.com|www.a.b|a@b.org| & | + |_|-|/|.| |word|Ünï|٣|am|p.m.|−|–|'|,|"
    "http://x.y/z|May 3rd|10:30| = | * ".split("|")
)


@given(st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=40))
def test_text_that_skips_the_rules_needed_none(text):
    spoken = text
    for pattern, rule in _RULES:
        spoken = pattern.sub(partial(_spaced, rule), spoken)
    assert english(text) == re.sub(r"\s+", " ", spoken).strip()
