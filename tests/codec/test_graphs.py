"""The slot runner: graph bookkeeping on the CPU through the same code path that replays graphs on a GPU."""

import pytest
import torch

from engine.codec.decoder import CodecDecoder
from engine.codec.graphs import CodecRunner
from engine.codec.host_inputs import HostInputs
from engine.cuda_graphs import run_eagerly
from engine.errors import ConfigError, EngineBusy

CONFIG = {
    "codebook_size": 16,
    "codebook_dim": 8,
    "hidden_size": 8,
    "latent_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 5,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_quantizers": 3,
    "decoder_dim": 16,
}


def small_decoder():
    torch.manual_seed(0)
    decoder = CodecDecoder(CONFIG)
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return decoder


@pytest.fixture(scope="module")
def decoder():
    return small_decoder().freeze()


def codes(n, frames, seed=0):
    return torch.randint(0, 16, (n, 3, frames), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capture", [(), [(1, 2), (2, 2), (4, 2), (4, 3)]], ids=["eager", "captured"])
def test_slots_equal_whole_decode(decoder, capture):
    runner = CodecRunner(decoder, slots=4, capture=capture, capture_with=run_eagerly)
    whole = codes(3, 7)
    want = decoder(whole)[:, 0].numpy()
    a, b, c = (runner.open() for _ in range(3))
    first = runner.decode([a, b, c], whole[..., :2])  # padded to 4 when captured
    middle = runner.decode([c, a], whole[[2, 0]][..., 2:4])
    late = runner.decode([b], whole[1:2][..., 2:5])
    assert abs(first - want[:, : 2 * 1920]).max() < 1e-5
    assert abs(middle[0] - want[2, 2 * 1920 : 4 * 1920]).max() < 1e-5
    assert abs(middle[1] - want[0, 2 * 1920 : 4 * 1920]).max() < 1e-5
    assert abs(late[0] - want[1, 2 * 1920 : 5 * 1920]).max() < 1e-5
    # by hand: three graph hits (4 padded by one, 2, 4-of-(4,3) padded by three) or three eager runs
    expected = (
        {"graph_hits": 3, "eager": 0, "padded_rows": 4} if capture else {"graph_hits": 0, "eager": 3, "padded_rows": 0}
    )
    assert runner.stats == expected


def test_a_batch_above_the_largest_graph_is_split(decoder):
    runner = CodecRunner(decoder, slots=5, capture=[(2, 1)], capture_with=run_eagerly)
    slots = [runner.open() for _ in range(5)]
    whole = codes(5, 1)
    assert abs(runner.decode(slots, whole) - decoder(whole)[:, 0].numpy()).max() < 1e-5
    assert runner.stats["graph_hits"] == 3


def test_a_reused_slot_starts_clean_and_slots_run_out(decoder):
    runner = CodecRunner(decoder, slots=1)
    slot = runner.open()
    with pytest.raises(EngineBusy):
        runner.open()
    runner.decode([slot], codes(1, 4, seed=9))
    runner.close(slot)
    whole = codes(1, 3)
    again = runner.open()
    assert abs(runner.decode([again], whole) - decoder(whole)[:, 0].numpy()).max() < 1e-5


def test_priming_is_saved_and_restored(decoder):
    runner = CodecRunner(decoder, slots=2)
    whole = codes(1, 8)
    want = decoder(whole)[0, 0].numpy()[5 * 1920 :]
    first, second = runner.open(), runner.open()
    runner.prime(first, whole[..., :5])
    assert runner.stats["eager"] == 0
    saved = runner.save(first)
    assert abs(runner.decode([first], whole[..., 5:])[0] - want).max() < 1e-5
    runner.restore(second, saved)
    assert abs(runner.decode([second], whole[..., 5:])[0] - want).max() < 1e-5


def test_impossible_capture_sizes_are_refused(decoder):
    with pytest.raises(ConfigError, match="codec.capture"):
        CodecRunner(decoder, slots=1, capture=[(0, 4)])


def test_priming_replays_graphs_where_there_are_some(decoder):
    """Thirteen frames: 5 + 5 + 2 in graphs, and one that fits none. The same speech follows; nothing is counted."""
    whole = codes(1, 17)
    want = decoder(whole)[0, 0].numpy()[13 * 1920 :]
    runner = CodecRunner(decoder, slots=2, capture=[(1, 5), (2, 2)], capture_with=run_eagerly)
    ran = []
    runner._run_graph = lambda graphs, *rest: (
        ran.append(rest[1].shape[-1]),
        CodecRunner._run_graph(runner, graphs, *rest),
    )[1]
    slot = runner.open()
    runner.prime(slot, whole[..., :13])
    assert ran == [5, 5, 2] and runner.stats == {"graph_hits": 0, "eager": 0, "padded_rows": 0}
    assert abs(runner.decode([slot], whole[..., 13:])[0] - want).max() < 1e-5


def test_inputs_of_a_graph_arrive_as_they_were_given():
    """Slots and codes travel as one; rows beyond those given are the trash row, whatever was there before."""
    inputs = HostInputs(4, 3, 7, torch.device("cpu"))
    for n in (4, 1, 3):
        given = codes(n, 7, seed=n)  # [n, G, T], transposed as the codec stage hands it over
        inputs.send(list(range(10, 10 + n)), given.transpose(1, 2).contiguous().transpose(1, 2), 99)
        assert inputs.rows.tolist() == [*range(10, 10 + n), *[99] * (4 - n)]
        assert torch.equal(inputs.codes[:n], given)
