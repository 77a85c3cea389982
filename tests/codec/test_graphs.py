"""The slot runner: graph bookkeeping on the CPU through the same code path that replays graphs on a GPU."""

import numpy as np
import pytest
import torch

from engine.codec.decoder import CodecDecoder
from engine.codec.graphs import CodecRunner
from engine.codec.host_inputs import HostInputs
from engine.codec.lane import SlotOrder
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


def scattered(runner, streams, turns, seed):
    """Streams come, speak in chunks of one and two frames and go, without a wait; yields (codes, PCM) of each."""
    rng = np.random.default_rng(seed)
    running: list[tuple[int, torch.Tensor, list]] = []
    ended, made = [], 0
    for turn in range(turns):
        while runner.free_slots and made < streams:
            slot, whole = runner.open(), codes(1, int(rng.integers(1, 9)), seed=1000 + made)
            running.append((slot, whole, [runner.launch([slot], whole[..., :1], ahead=True)]))
            made += 1
        for frames in (2, 1):
            due = [(at, one) for one in running if (at := done(one)) + frames <= one[1].shape[-1]]
            chosen = [one for one in due if rng.random() < 0.7]
            if chosen:
                piece = torch.cat([whole[..., at : at + frames] for at, (_, whole, _) in chosen])
                launched = runner.launch([slot for _, (slot, _, _) in chosen], piece)
                for row, (_, (_, _, parts)) in enumerate(chosen):
                    parts.append((launched, row, frames))
        for one in [one for one in running if done(one) == one[1].shape[-1] or (turn % 5 == 4 and rng.random() < 0.2)]:
            running.remove(one)
            runner.close(one[0])  # some in the middle, with work under way
            ended.append(one)
    assert made == streams and len(ended) > streams // 2
    for _, whole, parts in ended:
        first, *rest = parts
        yield whole, np.concatenate([first.wait()[0], *(launched.wait()[row] for launched, row, _ in rest)])


def done(one):
    return 1 + sum(frames for _, _, frames in one[2][1:])


def test_first_chunks_in_a_lane_of_their_own_are_the_same_speech(decoder):
    """On the CPU, where lanes take turns; the same on a GPU, where they do not, below."""
    sizes = [(1, 1), (4, 1), (4, 2)]
    runner = CodecRunner(decoder, slots=4, capture=sizes, ahead=[(1, 1)], capture_with=run_eagerly)
    for whole, pcm in scattered(runner, streams=12, turns=60, seed=3):
        want = decoder(whole)[0, 0].numpy()[: len(pcm)]
        assert len(pcm) >= 1920 and abs(pcm - want).max() < 1e-5
    assert runner.stats["eager"] == 0 and runner.ahead == {(1, 1)}
    with pytest.raises(ConfigError, match="codec.capture"):
        CodecRunner(decoder, slots=1, ahead=[(1, 0)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lanes_that_run_side_by_side_keep_each_streams_order():
    decoder = small_decoder().cuda().freeze()
    runner = CodecRunner(decoder, 8, [(1, 1), (8, 1), (8, 2)], "cuda", ahead=[(1, 1)])
    for whole, pcm in scattered(runner, streams=400, turns=1200, seed=4):
        want = decoder(whole.cuda())[0, 0].cpu().numpy()[: len(pcm)]
        assert abs(pcm - want).max() < 1e-2  # TF32 against float32; another stream's history is far from it


class FakeEvent:
    def __init__(self, over=False):
        self.over = over

    def query(self):
        return self.over


class FakeLane:
    """A lane as SlotOrder sees it."""

    def __init__(self):
        self.stream, self.waited, self.marks = self, [], []

    def wait_event(self, event):
        self.waited.append(event)

    def mark(self):
        self.marks.append(FakeEvent())
        return self.marks[-1]


def test_a_lane_waits_for_another_lanes_work_on_the_same_slot():
    order, one, other = SlotOrder(), FakeLane(), FakeLane()
    for lane, slots in ((one, [1, 2]), (one, [2]), (other, [3])):
        order.enter(lane, slots)
        order.leave(lane, slots)
    assert one.waited == other.waited == []  # a lane runs in order anyway
    order.enter(other, [1, 2, 3, 4])
    assert set(other.waited) == set(one.marks) and len(other.waited) == 2
    order.leave(other, [1, 2, 3, 4])
    order.enter(one, [1, 2])
    assert one.waited == [other.marks[-1]]  # once, for both
    other.marks[-1].over = True
    order.enter(one, [4])
    assert len(one.waited) == 1  # over already
