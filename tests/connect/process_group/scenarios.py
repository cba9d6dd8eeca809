"""What the ranks of forked_ranks.py do. Each scenario checks its results by itself, or returns a text."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from connect.process_group.options import MooncakeBackendOptions
from connect.process_group.register import (
    activate_ranks,
    get_active_ranks,
    get_current_epoch,
    get_failed_ranks_hint,
    get_local_success,
    get_peer_state,
    join_group,
    register,
    sync_after_failure,
)
from net.collectives import mailbox
from net.collectives.errors import CallsDiffer, RanksGone

TIMEOUT = timedelta(seconds=20)


def start(rank, size, folder, backend="mooncake", timeout=TIMEOUT, **options):
    register()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), size)
    chosen = MooncakeBackendOptions(**options) if options else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=chosen)


def both(rank, size, folder):
    """Gloo's group as the default one, and ours."""
    start(rank, size, folder, "gloo")
    return dist.new_group(backend="mooncake", timeout=TIMEOUT)


def filled(shape, dtype, seed):
    values = torch.randint(
        -3, 4, shape if isinstance(shape, tuple) else (shape,), generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype)


def against_gloo(rank, size, folder):
    """Every collective, with the results of gloo; small, large, empty and strided tensors."""
    ours, gloo = both(rank, size, folder), dist.group.WORLD
    for count in (0, 1, 1000, 40_000, 700_001):
        given = filled(count, torch.float32, rank + count)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            a, b = given.clone(), given.clone()
            dist.all_reduce(a, op, group=ours)
            dist.all_reduce(b, op, group=gloo)
            assert torch.equal(a, b), (count, op)
        for root in {0, size - 1}:
            a, b = given.clone(), given.clone()
            dist.broadcast(a, root, group=ours)
            dist.broadcast(b, root, group=gloo)
            assert torch.equal(a, b), (count, root)
            a, b = given.clone(), given.clone()
            dist.reduce(a, root, group=ours)
            dist.reduce(b, root, group=gloo)
            assert rank != root or torch.equal(a, b)
            lists = [[torch.empty_like(given) for _ in range(size)] if rank == root else None for _ in range(2)]
            dist.gather(given, lists[0], root, group=ours)
            dist.gather(given, lists[1], root, group=gloo)
            assert rank != root or all(map(torch.equal, *lists))
            parts = [filled(count, torch.float32, 100 + i) for i in range(size)] if rank == root else None
            a, b = torch.empty_like(given), torch.empty_like(given)
            dist.scatter(a, parts, root, group=ours)
            dist.scatter(b, parts, root, group=gloo)
            assert torch.equal(a, b)
        lists = [[torch.empty_like(given) for _ in range(size)] for _ in range(2)]
        dist.all_gather(lists[0], given, group=ours)
        dist.all_gather(lists[1], given, group=gloo)
        assert all(map(torch.equal, *lists))
        a = torch.empty(size * count)
        dist.all_gather_into_tensor(a, given, group=ours)
        assert torch.equal(a, torch.cat(lists[1]))
        many = filled(size * count, torch.float32, rank)
        a, whole = torch.empty(count), many.clone()
        dist.reduce_scatter_tensor(a, many, group=ours)
        dist.all_reduce(whole, group=gloo)
        assert torch.equal(a, whole[rank * count : (rank + 1) * count])
        dist.reduce_scatter(a, list(many.chunk(size)) if count else [a.clone() for _ in range(size)], group=ours)
        assert torch.equal(a, whole[rank * count : (rank + 1) * count])
        a, b = torch.empty_like(many), torch.empty_like(many)
        dist.all_to_all_single(a, many, group=ours)
        dist.all_to_all_single(b, many, group=gloo)
        assert torch.equal(a, b)
    uneven(rank, size, ours, gloo)
    types(rank, size, ours)
    strided(rank, size, ours)
    messages(rank, size, ours)
    handles(rank, size, ours)
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank}, group=ours)
    assert [one["rank"] for one in found] == list(range(size))
    dist.barrier(group=ours)
    path = ours.ranks.path
    differing(rank, size, ours)
    dist.barrier(group=gloo)
    dist.destroy_process_group()
    return path


def uneven(rank, size, ours, gloo):
    """Rank i sends (i + 2 j) % 4 * 90,000 rows to rank j: also nothing."""
    sent = [(rank + 2 * other) % 4 * 90_000 for other in range(size)]
    taken = [(other + 2 * rank) % 4 * 90_000 for other in range(size)]
    given = filled((sum(sent), 3), torch.int32, rank)
    a, b = torch.empty(sum(taken), 3, dtype=torch.int32), torch.empty(sum(taken), 3, dtype=torch.int32)
    dist.all_to_all_single(a, given, taken, sent, group=ours)
    dist.all_to_all_single(b, given, taken, sent, group=gloo)
    assert torch.equal(a, b)
    outs = [torch.empty(n, 3, dtype=torch.int32) for n in taken]
    dist.all_to_all(outs, list(given.split(sent)), group=ours)
    assert torch.equal(torch.cat(outs), b)


def types(rank, size, ours):
    """Against the sum, or the mean, that torch computes from all inputs, rounded once."""
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    ):
        for count in (5000, 400_000):
            inputs = [filled(count, torch.int64, i).abs().to(dtype) for i in range(size)]
            a = inputs[rank].clone()
            dist.all_reduce(a, group=ours)
            stacked = torch.stack(inputs)
            expected = stacked.any(0) if dtype == torch.bool else stacked.to(torch.float64).sum(0).to(dtype)
            assert torch.equal(a, expected), dtype
            if dtype.is_floating_point:
                a = inputs[rank].clone()
                dist.all_reduce(a, dist.ReduceOp.AVG, group=ours)
                assert torch.equal(
                    a, (stacked.to(torch.float32 if dtype != torch.float64 else dtype).sum(0) / size).to(dtype)
                ), dtype
    rounded(rank, size, ours)
    bits = torch.tensor([1 << rank, 7, 5 + rank])
    for op, expected in (
        (dist.ReduceOp.BOR, (1 << size) - 1),
        (dist.ReduceOp.BAND, 0),
        (dist.ReduceOp.BXOR, (1 << size) - 1),
    ):
        a = bits.clone()
        dist.all_reduce(a, op, group=ours)
        assert a[0] == expected
    value = torch.full((3,), rank + 1j)
    dist.all_reduce(value, group=ours)
    assert torch.equal(value, torch.full((3,), sum(range(size)) + size * 1j))


def rounded(rank, size, ours):
    """Added in float32, in the order of the ranks, and rounded once; also infinities and what is no number."""
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [torch.randn(30_011, generator=torch.Generator().manual_seed(i)).mul(9).to(dtype) for i in range(size)]
        for i, one in enumerate(inputs):
            one[:3] = torch.tensor([float("inf"), float("nan"), float("inf") * (-1) ** i])
        wide = inputs[0].float()
        for one in inputs[1:]:
            wide += one.float()
        dist.all_reduce(inputs[rank], group=ours)
        torch.testing.assert_close(inputs[rank], wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def strided(rank, size, ours):
    base = torch.zeros(6, 8)
    view = base[:, ::2]
    view += rank + torch.arange(24).view(6, 4)
    dist.all_reduce(view, group=ours)
    assert torch.equal(view, size * torch.arange(24.0).view(6, 4) + sum(range(size)))
    assert not base[:, 1::2].any()
    outs = [torch.zeros(4, 6).t() for _ in range(size)]
    dist.all_gather(outs, view.clone() + rank, group=ours)
    assert all(torch.equal(out, view + i) for i, out in enumerate(outs))


def messages(rank, size, ours):
    """Both directions at once, tags out of order, empty ones, any source."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 3, 300_000):
        given, into = torch.full((count,), float(rank)), torch.empty(count)
        works = [dist.isend(given, after, group=ours), dist.irecv(into, before, group=ours)]
        for work in works:
            work.wait()
        assert torch.equal(into, torch.full((count,), float(before)))
    first, second = torch.tensor([1 + rank]), torch.tensor([100 + rank])
    works = [dist.isend(first, after, group=ours, tag=1), dist.isend(second, after, group=ours, tag=2)]
    into = torch.zeros(1, dtype=torch.int64)
    dist.recv(into, before, group=ours, tag=2)
    assert into == 100 + before
    dist.recv(into, before, group=ours, tag=1)
    assert into == 1 + before
    for work in works:
        work.wait()
    if rank:
        dist.send(torch.tensor([rank]), 0, group=ours, tag=9)
    else:
        sources = {dist.recv(into, group=ours, tag=9) for _ in range(size - 1)}
        assert sources == set(range(1, size))
    ops = [dist.P2POp(dist.isend, second, after, ours), dist.P2POp(dist.irecv, into, before, ours)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert into == 100 + before


def handles(rank, size, ours):
    tensors = [torch.full((50_000,), float(rank)) for _ in range(5)]
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    assert torch.equal(works[0].get_future().wait()[0], tensors[0])
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait() and work.is_completed() and get_local_success(work)
        assert torch.equal(tensor, torch.full((50_000,), float(sum(range(size)))))


def differing(rank, size, ours):
    """Rank 1 gives a tensor of another size. Through shared memory the group goes on, over sockets it has failed."""
    for _ in range(2):
        try:
            dist.all_reduce(torch.zeros(3 + (rank == 1)), group=ours)
        except CallsDiffer as error:
            assert "another collective" in str(error) or "bytes" in str(error)
        else:
            raise AssertionError("different sizes went unnoticed")
    if ours.ranks.path == "shared memory":
        dist.barrier(group=ours)


def killed(rank, size, folder):
    """The last rank is killed while the others wait for it."""
    start(rank, size, folder)
    dist.all_reduce(torch.ones(10))
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    try:
        work.wait()
    except RanksGone as error:
        assert not get_local_success(work) and get_failed_ranks_hint(work) == [size - 1]
        told = str(error)
    else:
        raise AssertionError("a rank is missing, and the call ended well")
    assert get_peer_state(None, range(size)) == [True] * (size - 1) + [False]
    try:
        dist.barrier()
    except RanksGone:
        pass
    else:
        raise AssertionError("the group has failed")
    assert sync_after_failure() == "Reconciled"
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value[0] == size - 1 and get_active_ranks().tolist() == [1] * (size - 1) + [0] and get_current_epoch() == 1
    return told


def stopped(rank, size, folder):
    """The last rank stops; the others go on without it, and it learns that when it goes on."""
    through_memory = not os.environ.get("MC_FORCE_TCP")
    start(rank, size, folder, timeout=timedelta(seconds=1), on_loss="continue" if through_memory else "shrink")
    value = torch.full((600_000,), float(rank + 1))
    dist.all_reduce(value)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for _ in range(10):
                dist.all_reduce(value)
        except RanksGone as error:
            return error
        raise AssertionError("a removed rank went on")
    if not through_memory:
        try:
            dist.all_reduce(torch.ones(600_000))
        except RanksGone as error:
            assert error.ranks == (size - 1,)
        else:
            raise AssertionError("a rank is missing, and the call ended well")
    value = torch.full((600_000,), float(rank + 1))
    dist.all_reduce(value)
    assert torch.equal(value, torch.full_like(value, float(sum(range(1, size)))))
    for count in range(20):
        parts = [torch.empty(3) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.full((3,), float(rank + count)))
        assert [part[0] for part in parts] == [float(i + count) for i in range(size - 1)]
    assert get_active_ranks().tolist() == [1] * (size - 1) + [0]
    return get_current_epoch()


def killed_among_calls(rank, size, folder):
    """A rank is killed at some time in a stream of calls; those that are left see sums of all, then of the rest."""
    start(rank, size, folder, on_loss="continue")
    dist.barrier()  # on a busy machine a rank may come to its first call long after another
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    whole, rest = float(sum(range(1, size + 1))), float(sum(range(1, size + 1)) - 2)
    seen, ended = [], time.monotonic() + 0.3
    for count in (10, 40_000, 700_000) * 400:
        value = torch.full((count,), float(rank + 1))
        dist.all_reduce(value)
        assert torch.equal(value, torch.full_like(value, value[0].item())), "a sum of two kinds"
        seen.append(value[0].item())
        if get_current_epoch() and time.monotonic() > ended and len(seen) % 3 == 0:
            break
    assert set(seen) == {whole, rest} and seen == sorted(seen, reverse=True)
    last = torch.tensor([len(seen)])
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return seen.count(whole)


def killed_sender(rank, size, folder):
    """Receives end with an error when their source ends, or is silent."""
    start(rank, size, folder, timeout=timedelta(seconds=0.5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = []
    for source in (1, (rank + 2) % size if (rank + 2) % size != 1 else (rank + 1) % size):
        try:
            dist.recv(torch.zeros(3), source if source != rank else 0)
        except (RanksGone, ValueError) as error:
            told.append(str(error))
    assert len(told) == 2
    time.sleep(0.6)  # the other one still waits
    return "; ".join(told)


def killed_with_messages_unread(rank, size, folder):
    """Rank 1 is killed after it sent more than the others have room for, so that they do not read its end."""
    mailbox.EARLY_BYTES = 100
    start(rank, size, folder, timeout=timedelta(seconds=1), on_loss="shrink")
    dist.barrier()
    if rank == 1:
        for other in {*range(size)} - {1}:
            for _ in range(2):
                dist.send(torch.zeros(80, dtype=torch.uint8), other)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RanksGone as error:
        assert error.ranks == (1,)
    else:
        raise AssertionError("a rank is missing, and the call ended well")
    dist.barrier()
    return get_active_ranks().tolist()


def rejoined(rank, size, folder):
    """Rank 1 is killed, another process takes its place, and a rank more joins."""
    start(rank, size, folder, max_group_size=size + 1, on_loss="shrink")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(RanksGone):
        dist.barrier()
    assert get_active_ranks().tolist() == [int(i != 1 and i != size) for i in range(size + 1)]
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value[0] == size - 1
    result = activate_ranks(None, [1, size], 30.0)
    assert result.status == "Applied", result
    value = torch.full((200_000,), float(rank))
    dist.all_reduce(value)
    assert value[5] == sum(range(size + 1)) and dist.get_world_size() == size + 1
    dist.barrier()
    return get_active_ranks().tolist()


def rejoined_joiner(rank, size, folder):
    """First alone, then a member."""
    register()
    store = dist.FileStore(str(folder / "store"), size)
    options = MooncakeBackendOptions(size + 1, True)
    dist.init_process_group(
        "mooncake", store=store, rank=rank, world_size=size + 1, timeout=TIMEOUT, pg_options=options
    )
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value[0] == 1
    join_group()
    value = torch.full((200_000,), float(rank))
    dist.all_reduce(value)
    assert value[5] == sum(range(size + 1))
    dist.barrier()
    return get_active_ranks().tolist()
