"""What a listener is told besides the sound: which part of a long text is where, and the place in the queue."""

import time

import numpy as np
import pytest

from engine import text
from engine.config import EngineConfig
from engine.process import EngineProcess
from engine.request import SpeechRequest
from tests.conftest import small_engine_config

SENTENCES = ["The harbor was quiet when we left it in the morning. ", "By noon the wind had turned to the north. "]
LONG = "".join(SENTENCES) * 3


@pytest.fixture(scope="module")
def narrow():
    """One request at a time, so that the next ones wait; short parts."""
    engine = EngineProcess(small_engine_config(**{"talker.max_num_seqs": 1, "stream.split_chars": 100}))
    yield engine
    engine.close()


def wait_for(true, timeout=30.0):
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
def test_parts_begin_at_frames_that_are_told(narrow):
    """Each part alone, with its own seed, has as many frames as lie between two beginnings."""
    voice = narrow.voices.list()[0].name
    stream = narrow.stream(SpeechRequest(LONG, voice=voice, seed=3, max_frames=40))
    chunks = stream.read_all()
    assert len(stream.parts) == 3 and " ".join(stream.parts) == stream.text
    starts = [start for chunk in chunks for start in chunk.starts]
    assert [part for part, _ in starts] == list(range(len(starts))) and starts[0] == (0, 0)
    for chunk in chunks:
        assert all(chunk.first_frame <= frame < chunk.first_frame + chunk.frames for _, frame in chunk.starts)
    ends = [frame for _, frame in starts[1:]] + [stream.result.frames]
    for (part, frame), end in zip(starts, ends, strict=True):
        alone = narrow.stream(SpeechRequest(stream.parts[part], voice=voice, seed=3 + part, max_frames=40))
        alone.read_all()
        assert alone.result.frames == end - frame
    assert stream.result.ok == (len(starts) == 3 and alone.result.ok)


@pytest.mark.slow
def test_the_place_in_the_queue_is_told_and_moves_up(narrow):
    voice = narrow.voices.list()[0].name
    streams = [narrow.stream(SpeechRequest(LONG, voice=voice, seed=4, max_frames=60)) for _ in range(4)]
    told = []
    streams[3].on_item(lambda: told.append(streams[3].position))
    wait_for(lambda: [s.position for s in streams] == [0, 1, 2, 3])
    streams[1].cancel()
    wait_for(lambda: [streams[i].position for i in (2, 3)] == [1, 2])
    for stream in streams:
        stream.read_all()
    assert streams[1].result.finish_reason == "cancelled" and streams[3].position == 0
    moves = [new for old, new in zip([None, *told], told, strict=False) if new != old]
    assert moves == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "written",
    [LONG * 4, "Dr. Smith paid $3.50 on May 3rd, 2024; Mrs. Jones (who had 12 cats) paid 1,000. " * 8,
     "word " * 200, "one, two, three, " * 60 + "end. Then more! " * 30, "北京的天气很好。我们去公园吧！" * 60,
     "A — B; “quoted words.” He said: ‘No!’ … and left. " * 20],
)  # fmt: skip
@pytest.mark.parametrize("spoken", [True, False])
def test_a_text_can_be_taken_up_again_at_any_part(written, spoken):
    """The page asks for the rest of a text after a part that failed: it must fall into the same parts."""
    settings = {"max_chars": 20_000, "split_chars": 120, "spoken_forms": spoken}
    parts = text.prepare(written, **settings).parts
    assert len(parts) > 2
    for first in range(1, len(parts)):
        again = text.prepare(" ".join(parts[first:]), **settings).parts
        assert [part.replace(" ", "") for part in again] == [part.replace(" ", "") for part in parts[first:]]
        assert len(text.prepare(parts[first], **settings).parts) == 1


def test_memory_is_among_the_metrics(engine):
    metrics = engine.metrics()
    assert 100 < metrics["memory_used_mib"] < metrics["memory_total_mib"]


def test_models_on_offer_do_not_change_the_hash_of_the_settings():
    one, other = EngineConfig.load(None), EngineConfig.load(None, models=["some/folder"])
    assert one.hash == other.hash and one.models != other.models
    assert np.all([isinstance(name, str) for name in one.models])
