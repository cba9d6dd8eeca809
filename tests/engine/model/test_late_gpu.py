"""The test device itself: it lets through what CUDA orders, and shows what CUDA does not."""

from __future__ import annotations

import pytest
import torch

from net.transfer.common.memory import Region
from tests.late_gpu import POISON, LateGpu, TooEarly

SEEDS = range(12)


def ours(gpu: LateGpu, values: list[int], device: int = 0) -> torch.Tensor:
    with gpu.making(device):
        return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture
def host():
    with Region.shared("host", 64) as region:
        yield region


def bytes_of(region: Region) -> torch.Tensor:
    return torch.frombuffer(region.memory, dtype=torch.uint8)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_waited_for_is_there_and_what_is_not_is_poison(seed, host):
    with LateGpu(seed, strays=0) as gpu:
        gpu.pin(host)
        device = ours(gpu, [1, 2, 3, 4])
        target = bytes_of(host)[:4]
        target.copy_(device + 1, non_blocking=True)
        assert host.memory[:4].tolist() == [POISON] * 4
        event = gpu.mark(device)
        device.zero_()
        event.synchronize()
        assert host.memory[:4].tolist() == [2, 3, 4, 5]
        assert gpu.peek(device).tolist() == [1, 2, 3, 4], "behind the event"
        assert gpu.read(device).tolist() == [0] * 4


def test_a_buffer_that_is_filled_again_too_early_shows(host):
    with LateGpu(0, strays=0) as gpu:
        gpu.pin(host)
        device = ours(gpu, [0])
        for value in (7, 8):
            host.memory[0] = value
            device.copy_(bytes_of(host)[:1], non_blocking=True)
            if value == 7:
                kept = device + 0
        assert gpu.read(kept).tolist() == [8]


def test_streams_run_in_any_order_unless_one_waits(host):
    """Without the wait most seeds show it, with it none does."""

    def run(seed: int, ordered: bool) -> bool:
        with LateGpu(seed, strays=3) as gpu:
            device, out = ours(gpu, [1] * 4), ours(gpu, [0] * 4)
            device.add_(1)
            side = gpu.stream(device)
            if ordered:
                side.wait_stream(gpu.current(0))
            with gpu.on(side):
                out.copy_(device)
                return gpu.read(out).tolist() == [2] * 4

    assert all(run(seed, True) for seed in SEEDS)
    assert sum(run(seed, False) for seed in SEEDS) < len(SEEDS) / 2


def test_a_copy_between_devices_is_behind_the_streams_of_both():
    for seed in SEEDS:
        with LateGpu(seed) as gpu:
            here, there = ours(gpu, [1]), ours(gpu, [0], device=1)
            here.add_(4)
            there.add_(100)
            there.copy_(here)
            there.add_(1)
            assert gpu.read(there).tolist() == [6]


def test_what_cuda_would_do_wrongly_or_slowly_is_an_error(host):
    with LateGpu(0) as gpu:
        device = ours(gpu, [1, 2])
        with pytest.raises(TooEarly, match="waits for the stream"):
            device.copy_(torch.zeros(2, dtype=torch.uint8), non_blocking=True)
        gpu.pin(host)
        with pytest.raises(TooEarly, match="waits for the stream"):
            device.copy_(bytes_of(host)[:2])
        with pytest.raises(RuntimeError, match="712"):
            gpu.pin(host)
        taken = device + 1
        with gpu.on(gpu.stream(device)), pytest.raises(TooEarly, match="one stream is used on another"):
            taken.add_(1)
        with pytest.raises(TooEarly, match="several devices"):
            device + torch.zeros(2, dtype=torch.uint8)
        with pytest.raises(TooEarly, match="graph is recorded"):
            gpu.recorder(lambda: gpu.read(device))


def test_a_graph_does_it_again_and_keeps_nothing_between_its_ends():
    with LateGpu(3) as gpu:
        inside: list[torch.Tensor] = []
        device, out = ours(gpu, [1, 2]), ours(gpu, [0, 0])

        def run() -> None:
            inside.append(device + 1)
            out.copy_(inside[-1] + 1)

        replay = gpu.recorder(run)
        other = gpu.recorder(lambda: out.add_(1))
        device.add_(10)
        replay()
        assert gpu.read(out).tolist() == [13, 14]
        assert gpu.read(inside[-1]).tolist() == [12, 13]
        other()
        assert gpu.read(inside[-1]).tolist() == [POISON] * 2, "the next graph has its memory"
        assert gpu.read(out).tolist() == [14, 15]
