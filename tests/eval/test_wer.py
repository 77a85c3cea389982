"""Table tests of the two normalisers and of the error rates."""

import pytest

from eval import normalize, wer

SEED, WHISPER = normalize.pair("en")
CHINESE = normalize.pair("zh")[0]


@pytest.mark.parametrize(
    ("text", "seed", "whisper"),
    [
        ("Hello, World!", "hello world", "hello world"),
        ("The primary coil has fifty turns.", "the primary coil has fifty turns", "the primary coil has 50 turns"),
        ("It's twenty five, isn't it?", "it's twenty five isn't it", "it is 25 is not it"),
        ("Mr. Smith paid $20.", "mr smith paid 20", "mister smith paid $20"),
        ("the colour of a grey harbour", "the colour of a grey harbour", "the color of a gray harbor"),
        ("Um, well-known -- things", "um wellknown things", "well known things"),
        ("«quoted», “curly” and ‘single’", "«quoted» curly and single", "quoted curly and single"),
        ("", "", ""),
        ("...", "", ""),
    ],
)
def test_normalisers(text, seed, whisper):
    assert " ".join(SEED.tokens(text)) == seed
    assert " ".join(WHISPER.tokens(text)) == whisper


def test_chinese_is_compared_by_characters():
    assert CHINESE.tokens("你好，世界！") == ["你", "好", "世", "界"]
    assert "characters" in CHINESE.name
    one = wer.score("你好世界", "你好地界", CHINESE)
    assert one.rate == 0.25 and one.substitutions == 1


@pytest.mark.parametrize(
    ("reference", "hypothesis", "rate", "counts"),  # counts: hits, substitutions, deletions, insertions
    [
        ("this is a test", "this is a test", 0, (4, 0, 0, 0)),
        ("this is a test", "this a test", 1 / 4, (3, 0, 1, 0)),
        ("this is a test", "this is not a test", 1 / 4, (4, 0, 0, 1)),
        ("this is a test", "this is the test", 1 / 4, (3, 1, 0, 0)),
        ("i like python", "i like pythons a lot", 1, (2, 1, 0, 2)),
        ("hello", "hello hello hello hello hello hello", 5, (1, 0, 0, 5)),
        ("one two three", "", 1, (0, 0, 3, 0)),
        ("", "", 0, (0, 0, 0, 0)),
        ("", "something made up", 1, (0, 0, 0, 3)),
    ],
)
def test_rates_and_counts(reference, hypothesis, rate, counts):
    got = wer.score(reference, hypothesis, SEED)
    assert got.rate == pytest.approx(rate)
    assert (got.hits, got.substitutions, got.deletions, got.insertions) == counts


def test_fifty_written_as_50_is_an_error_for_seed_tts_eval_and_none_for_whisper():
    """BytedanceSpeech/seed-tts-eval issue 12: figures of the paper count it."""
    asked, heard = "The primary coil has fifty turns.", "The primary coil has 50 turns."
    assert wer.score(asked, heard, SEED).rate == pytest.approx(1 / 6)
    assert wer.score(asked, heard, WHISPER).rate == 0


def test_silence_counts_once_whatever_the_recogniser_made_up():
    heard = "you " * 90
    assert wer.score("hello there you", heard, SEED).rate > 25
    assert wer.score("hello there you", heard, SEED, no_speech=True).rate == 1


def test_differences_rebuild_both_texts():
    asked, heard = "the quick brown fox jumps high", "a quick fox jumps up very high"
    got = wer.score(asked, heard, SEED)
    assert [w for d in got.differences for w in d.reference] == asked.split()
    assert [w for d in got.differences for w in d.hypothesis] == heard.split()
    assert {d.kind for d in got.differences} == {"equal", "substitute", "delete", "insert"}


def test_one_runaway_ruins_the_macro_mean_but_not_the_filtered_one():
    rows = [wer.score("one two three four", "one two three four", SEED)] * 9
    rows.append(wer.score("one two three four", "one two three four " + "word " * 360, SEED))
    got = wer.summarize(rows, normalizer=SEED.name, asked=12)
    assert got.macro == pytest.approx(9.0)
    assert got.macro_filtered == 0 and got.above_half == 1
    assert got.micro == pytest.approx(360 / 40)
    assert (got.scored, got.asked, got.coverage) == (10, 12, pytest.approx(10 / 12))


def test_macro_and_micro_differ_when_lengths_do():
    long_right = wer.score("a b c d e f g h i j", "a b c d e f g h i j", SEED)
    short_wrong = wer.score("a b", "x b", SEED)
    got = wer.summarize([long_right, short_wrong], normalizer=SEED.name)
    assert got.macro == pytest.approx(0.25)
    assert got.micro == pytest.approx(1 / 12)
    assert got.substitutions == pytest.approx(1 / 12)


def test_half_exactly_is_kept_above_half_is_not():
    half = wer.score("a b", "a x", SEED)
    more = wer.score("a b c", "a x y", SEED)
    assert wer.summarize([half, more], normalizer="").above_half == 1


def test_nothing_scored_gives_no_rate_rather_than_zero():
    got = wer.summarize([], normalizer="", asked=3)
    assert got.macro is None and got.micro is None and got.coverage == 0
