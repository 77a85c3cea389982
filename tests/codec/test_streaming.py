"""A stream decoded in any chunks, beside any others, gives the samples of one whole decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.codec.decoder import CodecDecoder
from engine.codec.layers import CausalUpsample

FRAME = 1920
LIMIT = 1e-4  # max abs error, float32

# Grouped-query heads and a window of 6 frames, so that short sequences already outlive the window.
CONFIG = {
    "codebook_size": 32,
    "codebook_dim": 16,
    "hidden_size": 16,
    "latent_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_quantizers": 5,
    "decoder_dim": 32,
    "layer_scale_initial_scale": 0.5,
}


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    torch.manual_seed(3)
    decoder = CodecDecoder(CONFIG)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if "embedding_sum" in name:
                p.normal_()
            elif p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    return decoder.freeze()


def codes(batch: int, frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (batch, 5, frames), generator=torch.Generator().manual_seed(seed))


def stream(decoder: CodecDecoder, sequence: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    state, pieces, at = decoder.init_state(sequence.shape[0]), [], 0
    for size in chunks:
        pcm, state = decoder.step(sequence[..., at : at + size], state)
        pieces.append(pcm)
        at += size
    assert at == sequence.shape[-1]
    return torch.cat(pieces, dim=-1)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 23])
def test_even_chunks_with_a_ragged_end(decoder, size):
    whole = codes(2, 23)
    chunks = [size] * (23 // size) + ([23 % size] if 23 % size else [])
    got = stream(decoder, whole, chunks)
    assert got.shape == (2, 1, 23 * FRAME)
    assert (got - decoder(whole)).abs().max() <= LIMIT


@pytest.mark.parametrize("chunks", [[1, 2, 4, 8, 8], [8, 8, 4, 2, 1], [1, 7, 1, 13, 1]])
def test_ramps(decoder, chunks):
    whole = codes(1, sum(chunks), seed=1)
    assert (stream(decoder, whole, chunks) - decoder(whole)).abs().max() <= LIMIT


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_streams_that_join_leave_and_restart_stay_independent(decoder, data):
    """Slots at different positions in one batch: each row's samples are those of its own whole decode."""
    slots, state = 3, decoder.init_state(3)
    sequences: dict[int, torch.Tensor] = {}
    at, got = [0] * slots, [[] for _ in range(slots)]
    seed = 0

    def check(slot: int) -> None:
        if got[slot]:
            made = torch.cat(got[slot], dim=-1)
            want = decoder(sequences[slot][None, :, : at[slot]])[0]
            assert made.shape == want.shape
            assert (made - want).abs().max() <= LIMIT

    for _ in range(data.draw(st.integers(2, 7), label="steps")):
        for slot in range(slots):
            if slot not in sequences or data.draw(st.integers(0, 4), label="restart") == 0:
                check(slot)
                seed += 1
                sequences[slot], at[slot], got[slot] = codes(1, 40, seed)[0], 0, []
                state.reset(torch.tensor([slot]))
        rows = data.draw(st.permutations(range(slots)), label="rows")[: data.draw(st.integers(1, slots), label="n")]
        frames = data.draw(st.integers(1, 5), label="frames")
        chunk = torch.stack([sequences[slot][:, at[slot] : at[slot] + frames] for slot in rows])
        index = torch.tensor(rows)
        pcm, moved = decoder.step(chunk, state.select(index))
        state.write(index, moved)
        for row, slot in enumerate(rows):
            got[slot].append(pcm[row])
            at[slot] += frames
    for slot in range(slots):
        check(slot)


def test_state_is_a_value(decoder):
    """A step leaves the state it was given as it was: two continuations of one state are independent."""
    start = decoder.init_state(1)
    _, middle = decoder.step(codes(1, 4), start)
    before = [t.clone() for t in middle.tensors()]
    first, _ = decoder.step(codes(1, 3, seed=5), middle)
    decoder.step(codes(1, 3, seed=6), middle)
    assert all(torch.equal(a, b) for a, b in zip(before, middle.tensors(), strict=True))
    again, _ = decoder.step(codes(1, 3, seed=5), middle)
    assert torch.equal(first, again)


def test_shapes_of_the_state_do_not_depend_on_the_chunk(decoder):
    state = decoder.init_state(2)
    for frames in (1, 4, 9):
        _, moved = decoder.step(codes(2, frames), state)
        assert [t.shape for t in moved.tensors()] == [t.shape for t in state.tensors()]
        assert moved.position.tolist() == [frames, frames]


def test_long_streams_keep_their_precision(decoder):
    """An hour in: the same codes after 45,000 frames of position give finite, bounded samples."""
    state = decoder.init_state(1)
    state.position.fill_(45_000)
    pcm, _ = decoder.step(codes(1, 2), state)
    assert torch.isfinite(pcm).all() and pcm.abs().max() <= 1


def test_gradients_reach_every_weight_that_decodes():
    torch.manual_seed(0)
    decoder = CodecDecoder(CONFIG)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if "embedding_sum" in name:
                p.normal_()
    decoder(codes(1, 3)).square().mean().backward()
    missing = [name for name, p in decoder.named_parameters() if p.grad is None]
    assert all("input_proj" in name and "quantizer" in name for name in missing), missing


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (16, 8), (6, 3), (7, 3)])
def test_upsampling_as_a_matrix_product_is_the_transposed_convolution(kernel, stride):
    torch.manual_seed(1)
    layer, x = CausalUpsample(5, 4, kernel, stride), torch.randn(2, 5, 9)
    with torch.no_grad():
        want = layer.conv(x)[..., : 9 * stride]
        plain = layer(x)
        layer.fold()
        assert torch.equal(plain, want)
        assert (layer(x) - want).abs().max() < 1e-5


def test_freezing_does_not_change_the_samples():
    torch.manual_seed(2)
    decoder = CodecDecoder(CONFIG)
    with torch.no_grad():
        decoder.quantizer.rvq_rest.vq.layers[0]._codebook.embedding_sum.normal_()
        before = decoder(codes(1, 5))
        assert (decoder.freeze()(codes(1, 5)) - before).abs().max() < 1e-5
