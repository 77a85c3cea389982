"""Buffers on their way to a GPU: which may be written again, and what they hold."""

import torch

from engine.staging import Staging


class Reading:
    """An event of a device that has not got as far, until `done`."""

    done = False

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_tensors_and_arrays_are_the_same_memory():
    staged = Staging((3, torch.int64), (2, torch.float32), pinned=False).take()
    staged.arrays[0][:] = 1 << 40, -1, 7
    staged.arrays[1][:] = 0.5, 2.0
    assert staged.tensors[0].tolist() == [1 << 40, -1, 7] and staged.tensors[1].tolist() == [0.5, 2.0]
    assert [tensor.dtype for tensor in staged.tensors] == [torch.int64, torch.float32]


def test_on_the_cpu_one_set_serves_all():
    staging = Staging((1, torch.int64), pinned=False)
    first = staging.take()
    staging.sent(first)
    assert staging.take() is first


def test_a_set_that_is_still_read_is_left_alone():
    staging, reading = Staging((1, torch.int64), pinned=False), Reading()
    first = staging.take()
    first.read = reading  # as on a GPU
    staging.sent(first)
    second = staging.take()
    assert second is not first
    staging.sent(second)
    reading.done = True
    assert staging.take() is first and staging.take() is second


def test_buffers_stay_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert Staging((2, torch.int64), pinned=False).take().tensors[0].device.type == "cpu"
