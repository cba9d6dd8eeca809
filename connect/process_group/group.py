"""MooncakeProcessGroup: torch's process group on net/collectives/. Ranks are numbers in the group, from 0.

torch calls these methods directly, those with one tensor per rank under several names of its versions. Strided tensors
are copied; a tensor is neither changed nor freed by the caller until the call has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from connect.process_group.options import SETTINGS, MooncakeBackendOptions
from connect.process_group.tensors import Given, Into, check, dtype_name, equal, one, op_name
from connect.process_group.work import MooncakeWork, Runner, is_async
from net.collectives import plan
from net.collectives.group import RankGroup

TorchGroup: Any = dist.ProcessGroup  # its methods have two or three forms each, of which torch calls the one here


class MooncakeProcessGroup(TorchGroup):
    """Blocks until all ranks are there. A call that fails raises the errors of net/collectives/errors.py in wait()."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, options: MooncakeBackendOptions) -> None:
        super().__init__(rank, size)
        self.options, self.timeout_s = options, timeout_s
        self.ranks = RankGroup(
            store,
            rank,
            size,
            timeout_s=timeout_s,
            on_loss=options.on_loss,
            shares_memory=not os.environ.get("MC_FORCE_TCP"),
            host=SETTINGS.host_ip or os.environ.get("MASTER_ADDR", ""),
            joins=options.is_extension,
            slots=max(size, options.max_group_size),
        )
        self._runner = Runner()

    def size(self) -> int:
        """The highest member + 1."""
        return self.ranks.members[-1] + 1

    def getBackendName(self) -> str:
        return "mooncake"

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def __repr__(self) -> str:
        return f"MooncakeProcessGroup(rank {self.rank()} of {self.size()}, {self.ranks.path})"

    def shutdown(self) -> None:
        self.ranks.close()
        self._runner.close()

    def abort(self) -> None:
        self.shutdown()

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.AllreduceOptions()
        return self.allreduce_coalesced([one(tensors)], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.AllreduceOptions()
        name, into = op_name(opts.reduceOp), Into(tensors)

        def call() -> None:
            for memory, address in zip(into.memory, into.addresses, strict=True):
                self.ranks.all_reduce(address, address, memory.numel(), dtype_name(memory), name)
            into.finish()

        return self._runner.run(call, tensors, is_async(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.BroadcastOptions()
        into = Into([one(tensors)])

        def call() -> None:
            self.ranks.broadcast(into.addresses[0], into.nbytes[0], opts.rootRank)
            into.finish()

        return self._runner.run(call, tensors, is_async(opts))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.ReduceOptions()
        name, into = op_name(opts.reduceOp), Into([one(tensors)])

        def call() -> None:
            memory, address = into.memory[0], into.addresses[0]
            self.ranks.reduce(address, address, memory.numel(), dtype_name(memory), name, opts.rootRank)
            into.finish()

        return self._runner.run(call, tensors, is_async(opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or AllgatherOptions()
        if len(outputs) != len(inputs):
            raise ValueError(f"all_gather: {len(inputs)} tensors and {len(outputs)} lists for the results")
        for outs, tensor in zip(outputs, inputs, strict=True):
            equal(outs, tensor, self.size(), "all_gather")
        given, intos = Given(inputs), [Into(outs) for outs in outputs]

        def call() -> None:
            for address, nbytes, into in zip(given.addresses, given.nbytes, intos, strict=True):
                self.ranks.all_gather(address, into.addresses, nbytes)
                into.finish()

        return self._runner.run(call, [tensor for outs in outputs for tensor in outs], is_async(opts))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MooncakeWork:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> MooncakeWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MooncakeWork:
        opts = opts or AllgatherOptions()
        for output, tensor in zip(outputs, inputs, strict=True):
            check(output, tensor)
            if output.dtype != tensor.dtype or output.numel() != tensor.numel() * self.size():
                raise ValueError(
                    "all_gather_into_tensor: the output has the input's type and `size` times its elements"
                )
        given, into = Given(inputs), Into(outputs)

        def call() -> None:
            for source, target, nbytes in zip(given.addresses, into.addresses, given.nbytes, strict=True):
                self.ranks.all_gather(source, self._places(target, nbytes), nbytes)
            into.finish()

        return self._runner.run(call, outputs, is_async(opts))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.GatherOptions()
        given = Given([one(inputs)])
        outs = outputs[0] if opts.rootRank == self.rank() else []
        if outs or opts.rootRank == self.rank():
            equal(outs, inputs[0], self.size(), "gather")
        into = Into(outs)

        def call() -> None:
            self.ranks.gather(given.addresses[0], into.addresses, given.nbytes[0], opts.rootRank)
            into.finish()

        return self._runner.run(call, list(outs), is_async(opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.ScatterOptions()
        into = Into([one(outputs)])
        ins = inputs[0] if opts.rootRank == self.rank() else []
        if opts.rootRank == self.rank():
            equal(ins, outputs[0], self.size(), "scatter")
        given = Given(ins)

        def call() -> None:
            self.ranks.scatter(given.addresses, into.addresses[0], into.nbytes[0], opts.rootRank)
            into.finish()

        return self._runner.run(call, outputs, is_async(opts))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.ReduceScatterOptions()
        for output, ins in zip(outputs, inputs, strict=True):
            equal(ins, output, self.size(), "reduce_scatter")
        name, into, givens = op_name(opts.reduceOp), Into(outputs), [Given(ins) for ins in inputs]

        def call() -> None:
            for memory, address, given in zip(into.memory, into.addresses, givens, strict=True):
                self.ranks.reduce_scatter(given.addresses, address, memory.numel(), dtype_name(memory), name)
            into.finish()

        return self._runner.run(call, outputs, is_async(opts))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> MooncakeWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MooncakeWork:
        opts = opts or dist.ReduceScatterOptions()
        for output, tensor in zip(outputs, inputs, strict=True):
            check(output, tensor)
            if output.dtype != tensor.dtype or output.numel() * self.size() != tensor.numel():
                raise ValueError("reduce_scatter_tensor: the input has the output's type and `size` times its elements")
        name, given, into = op_name(opts.reduceOp), Given(inputs), Into(outputs)

        def call() -> None:
            for source, memory, address in zip(given.addresses, into.memory, into.addresses, strict=True):
                parts = self._places(source, memory.nbytes)
                self.ranks.reduce_scatter(parts, address, memory.numel(), dtype_name(memory), name)
            into.finish()

        return self._runner.run(call, outputs, is_async(opts))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MooncakeWork:
        opts = opts or dist.AllToAllOptions()
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(f"all_to_all: lists of {self.size()} tensors are needed, one per rank")
        given, into = Given(inputs), Into(outputs)

        def call() -> None:
            self.ranks.all_to_all(given.addresses, given.nbytes, into.addresses, into.nbytes)
            into.finish()

        return self._runner.run(call, outputs, is_async(opts))

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> MooncakeWork:
        opts = opts or dist.AllToAllOptions()
        if output.dtype != given.dtype:
            raise ValueError(f"all_to_all_single: {given.dtype} cannot become {output.dtype}")
        source, into = Given([given]), Into([output])
        sent, taken = self._rows(given, input_sizes, "input"), self._rows(output, output_sizes, "output")

        def call() -> None:
            sources = [source.addresses[0] + at for at in plan.offsets(sent)]
            targets = [into.addresses[0] + at for at in plan.offsets(taken)]
            self.ranks.all_to_all(sources, sent, targets, taken)
            into.finish()

        return self._runner.run(call, [output], is_async(opts))

    def barrier(self, opts: Any = None) -> MooncakeWork:
        return self._runner.run(self.ranks.barrier, [], is_async(opts) if opts is not None else False)

    # the names of other versions of torch, and of its C++ code
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MooncakeWork:
        given = Given([one(tensors)])
        ticket = self.ranks.send(given.addresses[0], given.nbytes[0], rank, tag)
        ticket.then(lambda _: given.memory.clear())  # keeps the memory until then
        return MooncakeWork(ticket, tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MooncakeWork:
        return self._receive(tensors, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MooncakeWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], rank: int | None, tag: int) -> MooncakeWork:
        into = Into([one(tensors)])
        ticket, give_up = self.ranks.receive(into.addresses[0], into.nbytes[0], rank, tag)
        return MooncakeWork(ticket, tensors, into.finish, give_up, self.timeout_s)

    # --- inside

    def _places(self, address: int, nbytes: int) -> list[int]:
        return [address + rank * nbytes for rank in range(self.size())]

    def _rows(self, tensor: Tensor, sizes: Sequence[int] | None, what: str) -> list[int]:
        """The bytes for each rank; without `sizes` equal ones. Raises ValueError."""
        rows, size = (tensor.size(0) if tensor.dim() else 1), self.size()
        row_bytes = tensor.nbytes // rows if rows else 0
        if not sizes:
            if rows % size:
                raise ValueError(f"all_to_all_single: {rows} rows of the {what} do not divide by {size} ranks")
            return [rows // size * row_bytes] * size
        if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(f"all_to_all_single: {what} sizes {list(sizes)} are not {size} parts of {rows} rows")
        return [count * row_bytes for count in sizes]


def create(options: Any, pg_options: Any) -> MooncakeProcessGroup:
    """What torch calls for init_process_group and new_group. Raises TypeError for options of another backend."""
    if pg_options is not None and not isinstance(pg_options, MooncakeBackendOptions):
        raise TypeError(f"the backend mooncake takes MooncakeBackendOptions, not {type(pg_options).__name__}")
    given = options.timeout.total_seconds()
    default = dist.distributed_c10d.default_pg_timeout.total_seconds()
    timeout_s = SETTINGS.collective_timeout_s if given == default else given
    chosen = pg_options or MooncakeBackendOptions()
    return MooncakeProcessGroup(options.store, options.group_rank, options.group_size, timeout_s, chosen)


def of(group: dist.ProcessGroup | None) -> MooncakeProcessGroup:
    """`group`, or the default one. Raises TypeError if it is of another backend."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, MooncakeProcessGroup):
        raise TypeError(f"{found} is no process group of the backend mooncake")
    return found
