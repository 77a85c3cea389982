"""The voice library: names, files, the prompt cache and what it must never do."""

from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.audio import Audio, load_audio
from engine.errors import ChorusError, EngineClosed, InvalidAudio, InvalidRequest, UnknownVoice
from engine.voice_files import BUNDLED_FOLDER, clean_name
from engine.voices import VoiceLibrary

BUNDLED = ("Heart", "Michael", "Emma", "Daniel", "Puck", "River", "Reader", "Arctic")


class Encoder:
    """Counts its calls; embedding and codes depend on the samples, as those of the real encoders do."""

    def __init__(self, delay: float = 0.0):
        self.calls, self.seconds, self.delay = 0, [], delay

    def __call__(self, audio: Audio):
        self.calls += 1
        self.seconds.append(audio.seconds)
        time.sleep(self.delay)
        frames = len(audio.pcm) // 1920
        level = np.abs(audio.pcm[: frames * 1920].reshape(frames, 1920)).mean(axis=1)
        return np.float32([audio.pcm.std(), audio.seconds]), np.int64(level * 1000)[:, None].repeat(16, axis=1)


def recording(pitch: float = 220.0, seconds: float = 3.0) -> Audio:
    return load_audio((0.3 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * 24_000)) / 24_000)), 24_000)


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def library(tmp_path, encoder):
    return VoiceLibrary(tmp_path, encoder, "model-a")


def test_bundled_voices_are_listed_with_words_source_and_licence(library):
    voices = {voice.name: voice for voice in library.list()}
    assert tuple(voices) == BUNDLED
    for voice in voices.values():
        assert voice.read_only and voice.transcript and voice.source and voice.licence
        assert 3 < voice.seconds < 15 and len(voice.audio_hash) == 64
    assert "Allison" not in str(voices) and "JFK" not in str(voices)


def test_bundled_files_are_all_described_and_carry_their_notice():
    rows = json.loads((BUNDLED_FOLDER / "voices.json").read_text())
    assert {row["file"] for row in rows} == {path.name for path in BUNDLED_FOLDER.glob("*.flac")}
    assert "Copyright (c) 2003" in (BUNDLED_FOLDER / "NOTICE-cmu-arctic.txt").read_text()


def test_a_second_request_with_the_same_voice_pays_nothing(library, encoder, tmp_path):
    assert not library.at_hand("heart") and library.at_hand("nobody")  # an unknown name is refused at once
    first = library.get("heart")
    assert library.at_hand("heart")
    assert encoder.calls == 1 and first.codes.dtype == np.int64 and first.speaker_embedding.dtype == np.float32
    assert library.get("HEART").codes is first.codes
    assert library.prepare(library.audio("Heart"), "Other words.").codes is first.codes
    assert encoder.calls == 1
    again = VoiceLibrary(tmp_path, encoder, "model-a").get("Heart")  # a restart
    assert encoder.calls == 1
    assert np.array_equal(again.codes, first.codes) and np.array_equal(again.speaker_embedding, first.speaker_embedding)
    assert again.transcript == first.transcript and again.audio_hash == first.audio_hash


def test_prompts_belong_to_a_checkpoint(library, encoder, tmp_path):
    library.get("Heart")
    VoiceLibrary(tmp_path, encoder, "model-b").get("Heart")
    VoiceLibrary(tmp_path, encoder, "model-a", tail_silence_s=0).get("Heart")
    assert encoder.calls == 3
    assert encoder.seconds[0] == pytest.approx(encoder.seconds[2] + 0.5)


def test_a_damaged_prompt_is_computed_again(library, encoder, tmp_path):
    good = library.get("Heart").codes
    (path,) = tmp_path.glob("prompts/*/*.npz")
    for damage in (b"", b"PK\x03\x04 nonsense", path.read_bytes()[:100]):
        path.write_bytes(damage)
        assert np.array_equal(VoiceLibrary(tmp_path, encoder, "model-a").get("Heart").codes, good)


def test_a_recording_that_is_not_saved_leaves_nothing_on_disk(library, encoder, tmp_path):
    prompt = library.prepare(recording(), "  Hello \n there. ")
    assert prompt.transcript == "Hello there." and prompt.seconds == pytest.approx(3, abs=0.05)
    library.prepare(recording(), None)
    assert encoder.calls == 1
    assert not list(tmp_path.rglob("*.npz"))


def test_two_at_once_compute_once(tmp_path):
    encoder = Encoder(delay=0.2)
    library = VoiceLibrary(tmp_path, encoder)
    prompts = []
    threads = [threading.Thread(target=lambda: prompts.append(library.get("Emma"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert encoder.calls == 1 and all(prompt.codes is prompts[0].codes for prompt in prompts)


def test_a_failed_encoding_is_not_remembered(tmp_path):
    def broken(audio):
        raise ValueError("out of memory")

    library = VoiceLibrary(tmp_path, broken)
    with pytest.raises(ValueError):
        library.get("Emma")
    library._encode = Encoder()
    assert library.get("Emma").codes is not None


def test_save_get_rename_delete(library, encoder, tmp_path):
    audio = recording()
    entry = library.save("  My   Voice ", audio, "Words.", consent=True, language="english")
    assert entry.name == "My Voice" and entry.consent and not entry.read_only
    assert [voice.name for voice in library.list()] == [*BUNDLED, "My Voice"]
    prompt = library.get("my voice")
    assert prompt.transcript == "Words." and prompt.audio_hash == audio.hash
    assert np.abs(library.audio("My Voice").pcm - audio.pcm).max() < 2**-23
    assert library.audio_bytes("My Voice")[:4] == b"fLaC"

    library.rename("my voice", "MY VOICE")  # case only
    library.rename("MY VOICE", "Other")
    assert "my voice" not in library and library.get("other").codes is prompt.codes
    assert encoder.calls == 1
    library.delete("other")
    assert "other" not in library and not list(tmp_path.rglob("*.flac")) and not list(tmp_path.rglob("*.npz"))
    assert library.get("Heart").codes is not None  # deleting disturbs nobody


def test_a_restart_finds_the_saved_voices(library, encoder, tmp_path):
    library.save("Anna", recording(), consent=True)
    again = VoiceLibrary(tmp_path, encoder, "model-a")
    assert again.entry("anna").seconds == pytest.approx(3, abs=0.05)
    assert again.get("anna").transcript is None


def test_refusals_name_the_field(library):
    audio = recording()
    library.save("Anna", audio, consent=True)
    for call, field in [
        (lambda: library.save("anna", audio, consent=True), "name"),
        (lambda: library.save("HEART", audio, consent=True), "name"),
        (lambda: library.save("Bea", audio, consent=False), "consent"),
        (lambda: library.save("Bea", audio, "x" * 3000, consent=True), "transcript"),
        (lambda: library.rename("Heart", "Bea"), "name"),
        (lambda: library.rename("Anna", "Heart"), "name"),
        (lambda: library.delete("Heart"), "name"),
        (lambda: VoiceLibrary(None).save("Bea", audio, consent=True), "name"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(UnknownVoice, match="did you mean Michael"):
        library.get("Micheal")
    with pytest.raises(EngineClosed):
        VoiceLibrary(None).get("Heart")


def test_overwriting_takes_the_new_recording(library):
    library.save("Anna", recording(220), "Old.", consent=True)
    library.save("anna", recording(330), "New.", consent=True, overwrite=True)
    assert library.get("Anna").transcript == "New." and library.get("Anna").audio_hash == recording(330).hash
    assert [voice.name for voice in library.list()][len(BUNDLED) :] == ["anna"]


@pytest.mark.parametrize("name", ["", "  ", "../../etc/passwd", "a/b", "a\\b", ".hidden", "x" * 65, "a\0b",
                                  "-rf", "a\nb/c",
                                  "<b>", "C:", "voice.json/..", None, "\u202eabc"])  # fmt: skip
def test_names_are_names_never_paths(library, tmp_path, name):
    before = sorted(tmp_path.rglob("*"))
    for call in (lambda: library.save(name, recording(), consent=True), lambda: library.get(name)):
        with pytest.raises(InvalidRequest):
            call()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["Anna", "J. R. Smith (2nd take)", "Frédéric", "小明", "O'Neil", "voice_1", "9 lives"])
def test_fit_names(library, name):
    assert library.save(name, recording(), consent=True).name == name
    assert library.entry(name.upper()).name == name


@given(st.text(max_size=80))
def test_any_name_is_cleaned_or_refused(name):
    try:
        cleaned = clean_name(name)
    except InvalidRequest as error:
        assert error.field == "name"
    else:
        assert clean_name(cleaned) == cleaned and not set(cleaned) & set("/\\\0:<>\n")


def test_half_written_voices_are_not_listed(library, tmp_path):
    library.save("Anna", recording(), consent=True)
    saved = tmp_path / "saved"
    (saved / "broken.json").write_text('{"name": "Bea", ')
    (saved / "list.json").write_text("[1, 2]")
    (saved / ".tmp.part").write_bytes(b"half")
    assert [voice.name for voice in library.list()] == [*BUNDLED, "Anna"]


def test_export_and_import_keep_the_voice(library, encoder, tmp_path):
    library.save("Anna", recording(), "Words.", consent=True, language="english")
    other = VoiceLibrary(tmp_path / "elsewhere", encoder, "model-a")
    entry = other.import_voice(library.export("Anna"), consent=True)
    assert (entry.name, entry.transcript, entry.language) == ("Anna", "Words.", "english")
    assert np.abs(other.audio("Anna").pcm - library.audio("Anna").pcm).max() < 2**-22
    assert other.import_voice(library.export("Heart"), consent=True, name="Heart 2").seconds > 5
    with pytest.raises(InvalidRequest):
        other.import_voice(library.export("Anna"), consent=False, name="B")


def test_foreign_files_are_refused_on_import(library, tmp_path):
    def archive(**members):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
            for name, data in members.items():
                out.writestr(name.replace("_", "."), data)
        return file.getvalue()

    good = library.export("Heart")
    bad = [b"", b"not a zip", good[: len(good) // 2], archive(voice_json="{}"),
           archive(voice_json="{", audio_flac=b"x"),
           archive(voice_json="[]", audio_flac=b"x"), archive(voice_json=b"\0" * (17 * 2**20), audio_flac=b"x"),
           archive(voice_json='{"name": "../x"}', audio_flac=b"not flac"), b"\0" * (17 * 2**20)]  # fmt: skip
    for data in bad:
        with pytest.raises((InvalidRequest, InvalidAudio)):
            library.import_voice(data, consent=True)
    assert not list(Path(tmp_path).rglob("*.flac"))


def test_many_threads_change_the_library_at_once(library):
    faults = []

    def work(number: int):
        try:
            for turn in range(5):
                library.save(f"Voice {number}", recording(100 + number), consent=True, overwrite=True)
                library.get(f"Voice {number}")
                library.list()
                if turn % 2:
                    library.delete(f"Voice {number}")
        except ChorusError as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(library.list()) == len(BUNDLED) + 6
