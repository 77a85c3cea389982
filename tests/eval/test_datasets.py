import numpy as np
import pytest
import soundfile

from eval import datasets
from eval.errors import DatasetError


def clip(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(folder / name, np.zeros((160, 2)), 16_000)


def test_bundled_lists():
    english, hard = datasets.load("english"), datasets.load("hard")
    assert len(english.utterances) >= 60 and len(hard.utterances) >= 40
    assert {"digits", "dates", "prices", "phone", "letters", "url", "abbreviations", "questions", "one word",
            "repeated", "code-switching", "long"} <= {u.category for u in hard.utterances}  # fmt: skip
    assert set(english.references) == {u.voice for u in english.utterances}
    pcm, rate = english.references["Heart"].pcm()
    assert pcm.ndim == 1 and rate == 24_000


def test_voices_by_name_whatever_the_case():
    assert {u.voice for u in datasets.load("english", voices=["heart", "DANIEL"]).utterances} == {"Heart", "Daniel"}
    with pytest.raises(DatasetError, match="Nobody.*there are Heart"):
        datasets.load("english", voices=["Nobody"])


def test_seed_tts_eval_with_four_and_five_columns(tmp_path):
    clip(tmp_path, "prompt-wavs/a.wav")
    clip(tmp_path, "prompt-wavs/b.wav")
    (tmp_path / "meta.lst").write_text(
        "utt-1|What a says.|prompt-wavs/a.wav|Say this.\n"
        "utt-2.wav|What b says.|prompt-wavs/b.wav|And this.|wavs/utt-2.wav\n"
        "\n"
        "utt-3|gone|prompt-wavs/missing.wav|Lost.\n"
        "utt-4|What a says.|prompt-wavs/a.wav|...\n"
    )
    got = datasets.load(str(tmp_path))
    assert [(u.id, u.text) for u in got.utterances] == [("utt-1", "Say this."), ("utt-2", "And this.")]
    assert got.references[got.utterances[0].voice].transcript == "What a says."
    assert len(got.skipped) == 2 and "missing.wav" in got.skipped[0]


def test_seed_tts_eval_chinese_is_known_by_its_folder(tmp_path):
    clip(tmp_path, "zh/p.wav")
    (tmp_path / "zh" / "meta.lst").write_text("u|你好|p.wav|世界\n", encoding="utf-8")
    assert datasets.load(str(tmp_path)).language == "chinese"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a|b|c\n", "3 columns"),
        ("a|b|../../etc/passwd|text\n", "outside the folder"),
        ("../a|b|p.wav|text\n", "id"),
        ("a|b|p.wav|text\na|b|p.wav|text\n", "twice"),
        ("", "nothing to speak"),
    ],
)
def test_malformed_seed_tts_lists_are_refused(tmp_path, content, words):
    clip(tmp_path, "p.wav")
    (tmp_path / "meta.lst").write_text(content)
    with pytest.raises(DatasetError, match=words):
        datasets.load(str(tmp_path / "meta.lst"))


def test_a_text_file_and_a_table_of_the_users(tmp_path):
    (tmp_path / "mine.txt").write_text("First line.\n\n  !!!\nSecond line.\n")
    got = datasets.load(str(tmp_path / "mine.txt"))
    assert [u.text for u in got.utterances] == ["First line.", "Second line."] and len(got.skipped) == 1
    (tmp_path / "mine.tsv").write_text('text\tvoice\tspoken\nSay "20".\tEmma\tSay twenty.\n')
    (utterance,) = datasets.load(str(tmp_path / "mine.tsv")).utterances
    assert (utterance.text, utterance.voice, utterance.spoken) == ('Say "20".', "Emma", "Say twenty.")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.tsv", b"no header here\n", "columns"),
        ("x.tsv", b"text\tvoice\nHi.\tStranger\n", "Stranger"),
        ("x.tsv", b"id\ttext\n../../x\tHi.\n", "id"),
        ("x.txt", b"\xff\xfe\x00bad", "UTF-8"),
        ("x.txt", b"\n\n", "nothing to speak"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=words):
        datasets.load(str(tmp_path / name))


def test_unknown_names_and_limits():
    with pytest.raises(DatasetError, match="no dataset 'nope'"):
        datasets.load("nope")
    with pytest.raises(DatasetError, match="at least one"):
        datasets.load("english", limit=0)
    assert len(datasets.load("english", limit=5).utterances) == 5
