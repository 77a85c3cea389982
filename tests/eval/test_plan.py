"""What is planned before a load run, and how its answers' bytes become samples: no server needed."""

import numpy as np
import pytest

from eval import plan
from eval.datasets import Utterance
from eval.errors import EvalError
from eval.http_target import PcmReader
from tests.eval.known_server import RATE, pcm, wav_header


@pytest.mark.parametrize("size", [1, 2, 3, 7, 44, 45, 1000])
@pytest.mark.parametrize("wav", [False, True])
def test_samples_survive_any_cut_of_the_bytes(size, wav):
    wanted = pcm(0.05)
    data = (wav_header() if wav else b"") + wanted
    reader = PcmReader(8000, wav=wav)
    got = [reader.feed(data[i : i + size]) for i in range(0, len(data), size)]
    assert np.concatenate(got).tobytes() == wanted
    assert reader.sample_rate == (RATE if wav else 8000)


def test_a_stereo_wav_is_refused():
    header = bytearray(wav_header())
    header[22] = 2
    with pytest.raises(ValueError, match="2 channels"):
        PcmReader(RATE, wav=True).feed(bytes(header))


def test_cells_are_parsed_and_named():
    for text, title in [("c8", "8 at once"), ("poisson2.5", "2.5 requests/s, poisson"), ("burst16", "bursts of 16")]:
        cell = plan.Cell.parse(text)
        assert (cell.name, cell.title) == (text, title)
    for bad in ("c0", "c2.5", "8", "poisson", "poisson0", "c9999", "x3"):
        with pytest.raises(EvalError, match="say c8|whole number"):
            plan.Cell.parse(bad)


def test_an_utterance_has_the_same_sampling_seed_in_every_cell():
    utterances = [Utterance(f"u{i}", "x") for i in range(10)]
    a = plan.plan_cell(plan.Cell("closed", 1), utterances, requests=20, warmup=2, seed=5)
    b = plan.plan_cell(plan.Cell("closed", 64), utterances, requests=20, warmup=0, seed=5)
    assert [(p.utterance.id, p.seed) for p in a if not p.warmup] == [(p.utterance.id, p.seed) for p in b]
    assert len({p.seed for p in b}) == 20  # repetitions of a text differ
    assert len({p.id for p in a}) == 22


def test_each_voice_is_met_before_it_is_measured():
    """A voice that is prepared on first use cost the first load setting up to 0.4 s of TTFA, and no other."""
    utterances = [Utterance(f"u{i}", "x", voice=f"v{i % 5}") for i in range(20)]

    def warm(warmup, given=utterances):
        planned = plan.plan_cell(plan.Cell("closed", 1), given, requests=20, warmup=warmup, seed=5)
        assert len({p.id for p in planned}) == len(planned)
        assert [p.index for p in planned] == list(range(-sum(p.warmup for p in planned), 20))
        return [p.utterance.voice for p in planned if p.warmup]

    assert sorted(warm(2)) == sorted(warm(5)) == ["v0", "v1", "v2", "v3", "v4"]
    assert len(warm(7)) == 7 and len(set(warm(7))) == 5
    assert warm(0) == []
    assert len(warm(2, [Utterance(f"u{i}", "x", voice=f"v{i}") for i in range(20)])) == 2  # a voice for every text
    assert warm(3, [Utterance("u", "x")]) == ["", "", ""]
