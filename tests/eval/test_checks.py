"""Each check on a text that has the fault, and on one that only looks like it."""

import pytest

from eval import checks, normalize, wer

WORDS = normalize.pair("en")[1]
REFERENCE = "Good morning and welcome to the garden. The roses opened early this year."


def run(text, heard, *, seconds=None, others=None, spoken=""):
    wanted = WORDS.tokens(text)
    return checks.check(
        utterance="me",
        heard=WORDS.tokens(heard),
        wanted=wanted,
        reference=WORDS.tokens(REFERENCE),
        others=checks.OtherTexts({"me": wanted} | {k: WORDS.tokens(v) for k, v in (others or {}).items()}),
        errors=wer.score(text, heard, WORDS),
        spoken_text=spoken or text,
        audio_s=checks.expected_seconds(text) if seconds is None else seconds,
    )


TEXT = "The boat left the harbour at noon and nobody waved."


def test_a_clean_clip_raises_no_flag():
    got = run(TEXT, TEXT, others={"other": "Nobody waved when the train left the station."})
    assert got.flags() == [] and got.duration_ratio == pytest.approx(1)


def test_words_of_the_reference_clip():
    assert run(TEXT, "Opened early this year. " + TEXT).reference_leak == "opened early this year"
    assert run("The roses opened early this year.", "The roses opened early this year.").reference_leak == ""
    assert run(TEXT, "Welcome to the boat. " + TEXT).reference_leak == ""  # three words are chance


def test_words_of_another_request():
    others = {"other": "She sold her bicycle to the baker last spring."}
    got = run(TEXT, TEXT + " bicycle to the baker last spring", others=others)
    assert got.other_leak == "bicycle to the baker last"
    assert run(TEXT, TEXT, others={"same words": TEXT + " Again."}).other_leak == ""


@pytest.mark.parametrize(
    ("text", "heard", "found"),
    [
        (TEXT, f"{TEXT} {TEXT}", True),
        (TEXT, TEXT + " at noon and nobody waved", True),
        ("Hello!", "Hello! Hello!", True),
        ("No, no, no, no, that is wrong.", "No, no, no, no, that is wrong.", False),
        (TEXT, TEXT + " the boat left", False),
    ],
)
def test_spoken_twice(text, heard, found):
    assert bool(run(text, heard).repeated) is found


@pytest.mark.parametrize(
    ("heard", "head", "tail"),
    [
        (TEXT, 0, 0),
        ("The boat left the harbour at noon and", 0, 2),
        ("harbour at noon and nobody waved", 4, 0),
        ("", 0, 10),
        ("the boat left the harbour at and nobody waved", 0, 0),
    ],
)
def test_missing_ends(heard, head, tail):
    got = run(TEXT, heard)
    assert (got.missing_head, got.missing_tail) == (head, tail)
    assert ("missing_tail" in got.flags()) is (tail >= 2)


@pytest.mark.parametrize(("seconds", "wrong"), [(0.5, True), (4.0, False), (12.0, True), (0.0, False)])
def test_too_much_and_too_little_audio(seconds, wrong):
    assert run(TEXT, TEXT, seconds=seconds).wrong_length is wrong


def test_the_16_seconds_of_a_half_second_text():
    """vllm-omni 4576: "1次" came out as 16.24 s."""
    assert run("One.", "One.", seconds=16.24).wrong_length


def test_pace_of_a_reference_is_kept_within_reason():
    assert checks.reference_pace("x" * 60, 4.0) == 15
    assert checks.reference_pace("x" * 600, 4.0) == 22
    assert checks.reference_pace("x", 4.0) == 8
