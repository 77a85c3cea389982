"""The whole engine on random weights: real vLLM, real codec. What comes out is noise, but every promise holds."""

import json
import threading
import time

import numpy as np
import pytest
import torch

from engine.errors import EngineBusy, InvalidRequest, InvalidText, UnknownVoice
from engine.request import SAMPLES_PER_FRAME, SamplingOverrides, SpeechRequest

GREEDY = SamplingOverrides(do_sample=False, subtalker_dosample=False)
TEXTS = [
    "One.",
    "A second, somewhat longer sentence.",
    "Third time lucky?",
    "The fourth has a comma, and an end.",
    "Five!",
    "A sixth voice joins the others here.",
]


def speak(engine, text, voice, **options):
    stream = engine.stream(SpeechRequest(text, voice=voice, **options))
    chunks = stream.read_all()
    pcm = np.concatenate([chunk.pcm for chunk in chunks]) if chunks else np.zeros(0, np.float32)
    return pcm, chunks, stream.result


def idle(engine, timeout=10.0):
    """Wait until nothing runs; returns the gauges."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        metrics = engine.metrics()
        if not metrics["active"] and not metrics["waiting"]:
            return metrics
        time.sleep(0.01)
    raise AssertionError(f"still busy: {engine.metrics()}")


def test_chunks_are_whole_frames_in_order(engine, voice):
    pcm, chunks, result = speak(engine, "Hello there, this is a test.", voice, seed=3, max_frames=20)
    assert result.frames * SAMPLES_PER_FRAME == len(pcm) and result.frames >= 2
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert [c.first_frame for c in chunks] == list(np.cumsum([0] + [c.frames for c in chunks])[:-1])
    assert chunks[0].frames == 1  # the schedule begins with one frame
    assert pcm.dtype == np.float32 and np.abs(pcm).max() <= 1
    assert result.weights == "random" and result.seed == 3
    assert result.config_hash == engine.config.hash == engine.info.config_hash
    assert result.finish_reason in ("stop", "length")
    assert result.ttfa_ms is not None and 0 < result.ttfa_ms <= 1e3 * result.wall_s


def test_same_seed_same_audio_other_seed_other_audio(engine, voice):
    first = speak(engine, "Repeat me.", voice, seed=11, max_frames=12)[0]
    again = speak(engine, "Repeat me.", voice, seed=11, max_frames=12)[0]
    other = speak(engine, "Repeat me.", voice, seed=12, max_frames=12)[0]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_then_b_equals_b_alone(engine, voice):  # gabriele-mastrapasqua/qwen3-tts #19: leaks from the last request
    alone = speak(engine, TEXTS[1], voice, seed=5, max_frames=16)[0]
    speak(engine, TEXTS[3], voice, seed=6, max_frames=9)
    assert np.allclose(speak(engine, TEXTS[1], voice, seed=5, max_frames=16)[0], alone, atol=1e-4)


def test_six_at_once_equal_each_alone(engine, voice):  # vllm-omni #4370: another caller's voice in the first second
    options = [{"seed": 20 + i, "max_frames": 10 + 5 * i, "x_vector_only": bool(i % 2)} for i in range(len(TEXTS))]
    alone = [speak(engine, text, voice, **o)[0] for text, o in zip(TEXTS, options, strict=True)]
    together: list = [None] * len(TEXTS)

    def run(i):
        time.sleep(0.03 * i)
        together[i] = speak(engine, TEXTS[i], voice, **options[i])[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(TEXTS))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert a.shape == b.shape, i
        assert np.abs(a - b).max() < 1e-3, i


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"text": "😀😀"}, InvalidText, "text"),
        ({"text": " . "}, InvalidText, "text"),
        ({"language": "klingon"}, InvalidRequest, "language"),
        ({"speaker": "vivian"}, InvalidRequest, "speaker"),
        ({"instruct": "cheerful"}, InvalidRequest, "instruct"),
        ({"voice": None}, InvalidRequest, "voice"),
        ({"voice": "nobody of this name"}, UnknownVoice, "voice"),
        ({"voice": "../../etc/passwd"}, InvalidRequest, "voice"),
        ({"seed": -1}, InvalidRequest, "seed"),
        ({"max_frames": 1}, InvalidRequest, "max_frames"),
        ({"max_frames": 10**6}, InvalidRequest, "max_frames"),
        ({"max_frames": 9.0}, InvalidRequest, "max_frames"),
        ({"min_frames": 10, "max_frames": 9}, InvalidRequest, "min_frames"),
        ({"min_frames": 10**6}, InvalidRequest, "min_frames"),
        ({"min_frames": None}, InvalidRequest, "min_frames"),
        ({"chunk_schedule": (0,)}, InvalidRequest, "chunk_schedule"),
        ({"deadline_s": 0.0}, InvalidRequest, "deadline_s"),
        ({"sampling": SamplingOverrides(temperature=-1)}, InvalidRequest, "temperature"),
        ({"sampling": SamplingOverrides(top_p=0)}, InvalidRequest, "top_p"),
        ({"sampling": SamplingOverrides(subtalker_dosample=1)}, InvalidRequest, "subtalker_dosample"),
        ({"sampling": SamplingOverrides(subtalker_temperature="hot")}, InvalidRequest, "subtalker_temperature"),
    ],
)
def test_bad_input_is_refused_before_it_costs_anything(engine, voice, options, error, field):
    before = engine.metrics()
    with pytest.raises(error) as caught:
        engine.stream(SpeechRequest(**({"text": "Fine.", "voice": voice} | options)))
    assert caught.value.field == field
    after = engine.metrics()
    assert (after["active"], after["waiting"]) == (before["active"], before["waiting"])


def test_cancel_at_each_stage_frees_everything(engine, voice):
    before = idle(engine)
    for i in range(50):
        stream = engine.stream(
            SpeechRequest("Never to be finished, this one.", voice=voice, seed=i, max_frames=100, min_frames=100)
        )
        if i % 5:
            for _ in range(i % 5):
                next(stream)
        assert stream.cancel()
        rest = stream.read_all()
        assert stream.result.finish_reason == "cancelled", i
        assert stream.result.frames == i % 5 + sum(chunk.frames for chunk in rest) or i % 5
        assert not stream.cancel()  # it has ended
    after = idle(engine)
    for name in ("talker_slots_free", "codec_slots_free"):
        assert after[name] == before[name]
    assert after["talker_kv_blocks_free"] == before["talker_kv_blocks_free"]
    assert after["finished_cancelled"] - before.get("finished_cancelled", 0) == 50


def test_queue_is_bounded_and_deadlines_hold(engine, voice):
    running = [engine.stream(SpeechRequest("Busy.", voice=voice, seed=i, max_frames=60)) for i in range(8 + 16)]
    with pytest.raises(EngineBusy) as busy:
        engine.stream(SpeechRequest("One too many.", voice=voice))
    assert busy.value.retry_after_s > 0 and busy.value.http_status == 503
    for stream in running:
        stream.cancel()
    for stream in running:
        stream.read_all()
        assert stream.result.finish_reason in ("cancelled", "stop", "length")
    stream = engine.stream(
        SpeechRequest("Too slow.", voice=voice, seed=1, max_frames=200, min_frames=200, deadline_s=0.3)
    )
    stream.read_all()
    assert stream.result.finish_reason == "deadline" and stream.result.frames < 200


def test_long_text_is_one_stream_of_parts(engine, voice):
    sentence = "This sentence is spoken many times over, so that the text grows long. "
    pcm, _, result = speak(engine, sentence * 8, voice, seed=2, max_frames=6)
    # Random weights seldom end by themselves: the first part that hits its limit ends the request, and says so.
    assert result.finish_reason in ("stop", "length")
    assert len(pcm) == result.frames * SAMPLES_PER_FRAME
    assert result.text.count("sentence") == 8


def test_min_frames_and_length_finish(engine, voice):
    _, _, result = speak(engine, "Cut me.", voice, seed=4, max_frames=2)
    assert result.frames == 2 and result.finish_reason == "length" and not result.ok


def test_info_and_metrics_are_plain(engine):
    assert engine.info.task == "Base" and engine.info.weights == "random"
    assert engine.info.config_hash == engine.config.hash
    assert all(isinstance(value, (int, float)) for value in engine.metrics().values())


@pytest.mark.slow
def test_a_step_takes_in_what_it_can_prefill(tmp_path):
    """Of many that come at once, the first need not wait until the last has its place."""
    from engine.engine import Engine
    from tests.conftest import small_engine_config

    path, room = tmp_path / "trace.jsonl", 100
    config = small_engine_config(**{"trace": str(path), "talker.max_num_batched_tokens": room})
    with Engine(config) as engine:
        voice = engine.voices.get(engine.voices.list()[0].name)
        requests = [SpeechRequest(text, voice=voice, seed=1, max_frames=4) for text in [*TEXTS, *TEXTS[:2]]]
        streams = [engine.stream(request) for request in requests]
        assert all(stream.read_all() for stream in streams)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    taken = [[]]  # rows of the prompts that came in before each step
    for event in events:
        if event["event"] == "step":
            taken.append([])
            assert event["waited_ms"] == 0 < event["ms"]  # sync: nothing runs ahead
        elif event["event"] == "prefill":
            taken[-1].append(event["rows"])
    assert sum(map(len, taken)) == len(streams)
    assert max(map(len, taken)) > 0 and all(sum(rows[:-1]) < room for rows in taken)


@pytest.mark.slow
def test_threads_are_those_of_the_engines_thread(voice, monkeypatch):
    """Who shares the process keeps his own."""
    from engine.engine import Engine
    from engine.talker.talker import Talker
    from tests.conftest import small_engine_config

    before, seen, step = torch.get_num_threads(), [], Talker.step
    torch.set_num_threads(max(2, before))

    def watched(talker):
        seen.append(torch.get_num_threads())
        return step(talker)

    monkeypatch.setattr(Talker, "step", watched)
    with Engine.from_config(small_engine_config(threads=1)) as limited:
        seen.clear()  # the warm-up's, in this thread
        speak(limited, "Hello there.", voice, max_frames=4)
        later = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert limited.info.device_name == "CPU, 1 thread"
    assert set(seen) == {1} and torch.get_num_threads() == max(2, before) and later == [max(2, before)]
    torch.set_num_threads(before)


def test_codec_modes_and_policies_speak_alike():
    """Windowed decoding, no batching, admission 1; codec state on the host, predictor after the step: experiments, and
    other ways to the same stream while it is short."""
    from engine.engine import Engine
    from tests.conftest import small_engine_config

    want, lengths = None, set()
    for overrides in (
        {},
        {"codec.mode": "windowed", "codec.left_context": 72, "codec.batching": False, "codec.admission": 1},
        {"codec.state": "host", "talker.predictor_placement": "eager"},
    ):
        with Engine.from_config(small_engine_config(**overrides)) as engine:
            voice = engine.voices.get(engine.voices.list()[0].name)
            pcm, _, _ = speak(engine, "Hello.", voice, seed=3, max_frames=8, min_frames=8, x_vector_only=True)
            lengths.add(len(pcm))
            after = overrides.get("talker.predictor_placement") == "eager"
            assert (engine.metrics().get("predictor_eager", 0) >= 8) is after
            want = pcm if want is None else want
            # 8 frames lie inside the window of 72: nothing is cut off, so the samples are the same.
            assert np.abs(pcm - want).max() < 1e-4
    assert lengths == {8 * SAMPLES_PER_FRAME}
