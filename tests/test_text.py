import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidText
from engine.text import clean, frame_cap, sentences, split


@pytest.mark.parametrize(
    ("raw", "spoken"),
    [
        ("Hello there.", "Hello there."),
        ("Hello there", "Hello there."),  # CosyVoice #57: text without a final stop
        ("  two\tspaces\u00a0here ", "two spaces here."),
        ("**Bold** and *soft* and `code`.", "Bold and soft and code."),
        ("# Title\n\n- first\n- second", "Title. first. second."),
        ("See [the page](https://example.org/a_b) now!", "See the page now!"),
        ("Nice 😀 day 👍🏽!", "Nice day !"),
        ("a\x00b\x07c", "abc."),
        ("zero\u200bwidth", "zerowidth."),
        ("3 * 4 = 12 and snake_case_name stay", "3 * 4 = 12 and snake_case_name stay."),
        ("今天天气很好", "今天天气很好。"),
        ("Really?!", "Really?!"),
        ("wait, what,", "wait, what."),
        ("line one\r\nline two", "line one. line two."),
    ],
)
def test_clean(raw, spoken):
    assert clean(raw) == spoken


def test_plain_text_is_cleaned_as_any_other(monkeypatch):
    """It skips the patterns, as nothing in it would match."""
    import random

    from engine import text

    rng, letters = random.Random(0), "aZ9.,;:!?'\"/%$()& -" + "*_`#[]<>~\n\t\u00a0é"
    drawn = ["".join(rng.choices(letters[: rng.choice((20, 29))], k=rng.randrange(2, 40))) for _ in range(3000)]
    drawn = [each for each in drawn if any(char.isalnum() for char in each)]
    fast = [text._PLAIN.fullmatch(each) is not None for each in drawn]
    found = [clean(each) for each in drawn]
    monkeypatch.setattr(text, "_PLAIN", text.re.compile("(?!)"))
    assert found == [clean(each) for each in drawn]
    assert 300 < sum(fast) < len(fast) - 500


@pytest.mark.parametrize("raw", ["", "   ", "...", "?!", "😀😀", "\n\t", "—", "```x```", "\u200b"])
def test_nothing_to_say_is_refused(raw):  # CosyVoice #710
    with pytest.raises(InvalidText, match="nothing to say") as error:
        clean(raw)
    assert error.value.field == "text"


def test_too_long_and_not_a_string():
    with pytest.raises(InvalidText, match="20000"):
        clean("a" * 20_001)
    with pytest.raises(InvalidText, match="string"):
        clean(7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith paid 3.50 dollars. He left.", ["Dr. Smith paid 3.50 dollars.", "He left."]),
        ("J. R. Tolkien wrote it. Yes.", ["J. R. Tolkien wrote it.", "Yes."]),
        ('"Stop!" he said. Then ran.', ['"Stop!"', "he said.", "Then ran."]),
        ("你好。今天好吗？很好！", ["你好。", "今天好吗？", "很好！"]),
        ("no end", ["no end"]),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


def test_split_groups_and_cuts():
    text = "Short one. " * 30
    parts = split(text.strip(), 100)
    assert all(len(part) <= 100 for part in parts)
    assert " ".join(parts) == text.strip()
    parts = split("word " * 100 + "end.", 80)
    assert all(len(part) <= 80 for part in parts) and sum(part.count("word") for part in parts) == 100


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=400), st.integers(40, 120))
def test_split_loses_nothing(raw, limit):
    try:
        text = clean(raw)
    except InvalidText:
        return
    parts = split(text, limit)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(any(char.isalnum() for char in part) for part in parts[:1])


def test_frame_cap_follows_the_text():
    assert frame_cap("1次.", 1024) < 70  # vllm-omni #4576: this text ran for 16 s
    assert frame_cap("A sentence of ordinary length, with some words in it.", 1024) > 125
    assert frame_cap("x" * 5000, 1024) == 1024
