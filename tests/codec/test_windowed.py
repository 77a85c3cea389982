"""Windowed decoding equals decoding each window on its own, as the reference's chunked_decode does."""

import pytest
import torch

from engine.codec.graphs import CodecRunner
from engine.codec.windowed import WindowedDecoder
from engine.errors import ConfigError
from tests.codec.test_streaming import LIMIT, codes, decoder  # noqa: F401  (the fixture)

FRAME = 1920


def by_hand(decoder, sequence, chunks, context):  # noqa: F811
    """Window by window with the plain forward; sequence [1, G, T]."""
    pieces, at = [], 0
    for size in chunks:
        start = max(0, at - context)
        pieces.append(decoder(sequence[..., start : at + size])[..., (at - start) * FRAME :])
        at += size
    return torch.cat(pieces, dim=-1)


@pytest.mark.parametrize("context", [0, 3, 25])
@pytest.mark.parametrize("chunks", [[4, 4, 4, 4], [1, 2, 4, 8], [7, 1, 1, 6]])
def test_each_chunk_is_its_windows_decode(decoder, context, chunks):  # noqa: F811
    windowed = WindowedDecoder(decoder, context)
    sequence, state, pieces, at = codes(1, sum(chunks)), windowed.init_state(1), [], 0
    for size in chunks:
        pcm, state = windowed.step(sequence[..., at : at + size], state)
        assert pcm.shape == (1, 1, size * FRAME)
        pieces.append(pcm)
        at += size
    got = torch.cat(pieces, dim=-1)
    assert (got - by_hand(decoder, sequence, chunks, context)).abs().max() <= LIMIT


def test_it_is_exact_while_the_window_reaches_the_start_and_not_after(decoder):  # noqa: F811
    windowed, sequence = WindowedDecoder(decoder, 4), codes(1, 12)
    whole, state, pieces = decoder(sequence), windowed.init_state(1), []
    for at in range(0, 12, 4):
        pcm, state = windowed.step(sequence[..., at : at + 4], state)
        pieces.append(pcm)
    error = (torch.cat(pieces, dim=-1) - whole).abs().view(12, FRAME).amax(dim=1)
    assert error[:8].max() <= LIMIT
    assert error[8:].max() > LIMIT  # what the stateful decoder is for


def test_young_and_old_streams_share_a_batch_in_the_runner(decoder):  # noqa: F811
    runner = CodecRunner(WindowedDecoder(decoder, 5), slots=2)
    first, second = codes(2, 12)
    old, young = runner.open(), runner.open()
    runner.decode([old], first[None, :, :8])
    both = runner.decode([young, old], torch.stack([second[:, :3], first[:, 8:11]]))
    want_young = decoder(second[None, :, :3])[0, 0].numpy()
    want_old = by_hand(decoder, first[None, :, :11], [8, 3], 5)[0, 0, 8 * FRAME :].numpy()
    assert abs(both[0] - want_young).max() <= LIMIT
    assert abs(both[1] - want_old).max() <= LIMIT


def test_negative_context_is_refused(decoder):  # noqa: F811
    with pytest.raises(ConfigError) as error:
        WindowedDecoder(decoder, -1)
    assert error.value.field == "codec.left_context"
