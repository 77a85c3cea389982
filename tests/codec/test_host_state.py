"""State that waits in host memory between chunks: the same samples as state that stays on the device."""

import pytest
import torch

from engine import wiring
from engine.codec.graphs import CodecRunner
from engine.codec.host_state import HostState, HostStateDecoder
from engine.codec.windowed import WindowedDecoder
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.codec.test_streaming import codes, decoder  # noqa: F401  (the fixture)


def speak(runner: CodecRunner) -> list:
    """Three streams that join, leave, restart from a saved state and share batches; every sample that came out."""
    sequence, out = codes(3, 14, seed=4), []
    first, second = runner.open(), runner.open()
    runner.prime(first, sequence[:1, :, :3])
    saved = runner.save(first)
    out.append(runner.decode([first], sequence[:1, :, 3:5]))
    out.append(runner.decode([second, first], torch.stack([sequence[1, :, :4], sequence[0, :, 5:9]])))
    runner.close(second)
    third = runner.open()  # the same slot, clean again
    out.append(runner.decode([third, first], torch.stack([sequence[2, :, :5], sequence[0, :, 9:14]])))
    runner.restore(third, saved)
    out.append(runner.decode([third], sequence[:1, :, 3:5]))
    return out


@pytest.mark.parametrize("windowed", [False, True], ids=["stateful", "windowed"])
def test_every_sample_equals_device_state(decoder, windowed):  # noqa: F811
    inner = WindowedDecoder(decoder, 4) if windowed else decoder
    want = speak(CodecRunner(inner, slots=2))
    runner = CodecRunner(HostStateDecoder(inner), slots=2)
    got = speak(runner)
    assert isinstance(runner._state, HostState)
    for a, b in zip(got, want, strict=True):
        assert (a == b).all() and abs(a).max() > 0
    assert (got[3] == got[0]).all()  # what follows the saved state, both times


def test_copies_go_to_the_decoders_device_and_come_back(decoder):  # noqa: F811
    """`meta` stands for a device that is not the host: the rows handed out lie there, what is kept does not."""
    state = HostStateDecoder(decoder).init_state(3, "meta")
    assert all(t.device.type == "cpu" for t in state.tensors())
    rows = state.select(torch.tensor([2, 0]))
    assert rows.batch == 2 and all(t.device.type == "meta" for t in rows.tensors())
    kept = state.tensors()[1]
    kept.fill_(1.0)
    new = HostStateDecoder(decoder).init_state(1, "cpu").kept
    state.write(torch.tensor([1]), new)
    assert kept[0].min() == 1.0 and kept[1].abs().max() == 0.0
    state.reset(torch.tensor([0]))
    assert kept[0].abs().max() == 0.0 and kept[2].min() == 1.0


def test_the_setting_makes_it_without_graphs(decoder):  # noqa: F811
    config = EngineConfig.load(None, **{"codec.state": "host", "talker.max_num_seqs": 2})
    assert wiring.capture(config) == () and wiring.capture(config.replace(**{"codec.state": "device"})) != ()

    class Loaded:
        pass

    Loaded.decoder = decoder
    assert isinstance(wiring.codec_runner(config, Loaded, torch.device("cpu"))._state, HostState)
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.load(None, **{"codec.state": "host", "codec.capture": [[1, 4]]})
    assert refusal.value.field == "codec.capture"
