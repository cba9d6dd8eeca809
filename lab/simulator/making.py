"""The parts of a simulated cluster, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from cache.pool.admission import choose as choose_admission
from cache.pool.policies import choose
from lab.simulator.arena.accounts import Arena, FactsByPosition, Room
from lab.simulator.arena.block_pool import PooledArena
from lab.simulator.arena.stand_in import StandIn
from lab.simulator.config import KINDS, NodeClass, SimConfig, node_classes
from lab.simulator.fabric.tree import FatTree
from lab.simulator.fabric.tree_network import TreeNetwork
from lab.simulator.lengths import Lengths
from lab.simulator.models.costs import costs
from lab.simulator.models.disk import Disk
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from lab.simulator.models.noise import Noise
from lab.simulator.models.pool import Pool
from lab.simulator.models.shares import HomedPool
from lab.simulator.models.step_models import StepModel
from lab.simulator.node import Events, Identity, Knowledge, Machine, Node, StepRules
from lab.simulator.placing import Placing
from lab.simulator.sessions.turns import Turns
from net.user_file import chosen
from sched import batching, queueing
from sched.batching import BoundedSteps, Tuning, batching_policies
from sched.classes import with_objectives
from sched.placement.phases import prefill_heavy
from sched.placement.view import Candidate
from sched.queueing import queue_orders
from sched.scaling.bounds import parse
from sched.sessions.parking import ParkingRules

POOL_MODELS = ("auto", "real", "fast")


def nodes(
    config: SimConfig,
    model: StepModel,
    loop: Loop,
    events: Events,
    slowness: Callable[[int], float],
    lengths: Lengths,
    facts: FactsByPosition,
) -> list[Node]:
    """All nodes; slowness(index): the present factor of one. Raises ValueError."""
    make_policy = chosen("--batching-policy", config.batching_policy, batching_policies, batching.METHODS)
    make_order = chosen("--queue-order", config.queue_order, queue_orders, queueing.METHODS)
    mixed = [name for name, roles in _names(config) if len(roles) == 2]
    heavy = prefill_heavy(mixed) if config.heavy_chunk_tokens else set()

    def node(index: int, name: str, roles: tuple[str, ...]) -> Node:
        unlike = _class_of(config, name)
        own = model if unlike is None else model.faster(unlike.speed)
        if config.prefill_share:
            own = half_memory(own, roles)
        chunk = config.chunk_tokens or own.chunk_tokens
        classes = with_objectives(config.slo)
        order = make_order(classes)
        mixed_chunk = config.heavy_chunk_tokens if name in heavy else config.prefill_chunk_tokens
        calibration = Noise(config.seed, f"{name} calibration", config.step_noise)
        known = costs(config.step_models, replace(own, chunk_tokens=chunk), calibration.factor)
        policy = make_policy(Tuning(mixed_chunk, config.tbt_budget_s, known.chunks, classes))
        if config.max_step_s:
            policy = BoundedSteps(policy, config.max_step_s, known.chunks)
        rules = StepRules(order, chunk, policy, config.step_prompts)
        knows = Knowledge(known, lengths, Noise(config.seed, name, config.step_noise))
        seat = Identity(index, name, roles)
        machine = Machine(own, arena(config, own, facts, roles))
        return Node(loop, seat, machine, rules, events, lambda now: slowness(index), knows)

    return [node(index, name, roles) for index, (name, roles) in enumerate(_names(config))]


def half_memory(model: StepModel, roles: Sequence[str]) -> StepModel:
    """The model of one of the two halves of a GPU, which divide its KV memory evenly."""
    half = model.kv_tokens // 2
    return replace(model, kv_tokens=model.kv_tokens - half if "prefill" in roles else half)


def counts(config: SimConfig, at_begin: bool = False) -> dict[str, int]:
    """Nodes by role: all that there may be, or those at the beginning."""
    found = {kind: getattr(config, kind) for kind in KINDS}
    if config.autoscale and not at_begin:
        found |= {one.role: one.most for one in parse(config.autoscale)}
    return found


def homes(config: SimConfig) -> list[str]:
    """The nodes with a share of the pool."""
    return [f"store-{i}" for i in range(config.store)] or [name for name, _ in _names(config)]


def network(config: SimConfig, model: StepModel, loop: Loop) -> Network:
    """One switch, or the tree of --fat-tree."""
    if not config.fat_tree:
        return Network(loop, model.nic_bytes_s, model.nic_latency_s)
    tree = FatTree.parse(config.fat_tree)
    by_role: dict[tuple[str, ...], list[str]] = {}
    for name, roles in _names(config):
        by_role.setdefault(roles, []).append(name)
    places = tree.places([*by_role.values(), [f"store-{i}" for i in range(config.store)]])
    ordered = config.flow_order == "deadline"
    return TreeNetwork(loop, model.nic_bytes_s, model.nic_latency_s, tree, places, ordered)


def price(config: SimConfig, node: Node) -> float:
    """Of the node, per hour."""
    if (unlike := _class_of(config, node.name)) is not None:
        return unlike.cost
    return config.prefill_cost if node.roles == ("prefill",) else config.decode_cost


def _class_of(config: SimConfig, name: str) -> NodeClass | None:
    """None: the node is as the model and the role say."""
    role, _, number = name.rpartition("-")
    found = node_classes(config.node_classes).get(role)
    return found if found is not None and int(number) < found.count else None


def _names(config: SimConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    for kind, count in counts(config).items():
        roles = ("prefill", "decode") if kind == "mixed" else (kind,)
        yield from ((f"{kind}-{i}", roles) for i in range(count))


MOST_REAL_NODES = 64
"""Largest cluster with the classes of cache/ by default."""


def is_real(config: SimConfig) -> bool:
    """Whether pool and arenas are the classes of production. Raises ValueError."""
    if config.pool_model not in POOL_MODELS:
        raise ValueError(f"--pool-model must be one of {', '.join(POOL_MODELS)}, got {config.pool_model!r}")
    nodes = sum(counts(config).values())
    return config.pool_model == "real" or (config.pool_model == "auto" and nodes <= MOST_REAL_NODES)


def turns(config: SimConfig, loop: Loop, pool: Pool | HomedPool) -> Turns | None:
    """None: blocks of sessions are kept as all others. Raises ValueError."""
    if not config.session_parking:
        return None
    if isinstance(pool, Pool):
        raise ValueError("--session-parking needs --pool-model real")
    pool.raises = config.session_raising
    return Turns(loop, pool, ParkingRules())


def pool(config: SimConfig, model: StepModel, disks: Sequence[Disk], names: Sequence[str]) -> Pool | HomedPool:
    """Raises ValueError."""
    policy, nbytes = partial(choose, config.eviction), model.block_bytes(config.block_tokens) * config.kv_scale
    if is_real(config):
        admission = partial(choose_admission, config.cache_admission)
        return HomedPool(names, policy, admission, config.pool_blocks, config.ssd_blocks, disks, nbytes)
    if config.cache_admission != "always":
        raise ValueError(f"--cache-admission {config.cache_admission} needs --pool-model real")
    return Pool(policy, config.pool_blocks, config.ssd_blocks, disks, nbytes)


def arena(config: SimConfig, model: StepModel, facts: FactsByPosition, roles: Sequence[str]) -> Arena:
    """The KV memory of a node with these roles. Only where prompts are computed, blocks get names. Raises
    ValueError."""
    size, prefills = config.block_tokens, "prefill" in roles or config.role_changes
    kept_tokens = max(size, ceil(model.block_bytes(size) / model.token_bytes))
    room = Room(model.kv_tokens, size, kept_tokens, config.cache_blocks if prefills else 0)
    policy = choose(config.eviction)
    return PooledArena(room, facts, policy) if room.most_kept and is_real(config) else StandIn(room, facts, policy)


def announce(loop: Loop, placing: Placing, node: Node) -> None:
    """The others hear which blocks have names in the node's arena."""
    index, known, tell = node.index, placing.exact.apply, placing.told.tell

    def changed(block: int, here: bool) -> None:
        known(index, block, here)
        tell(loop.now, index, block, here)

    node.arena.watch(changed)


def disks(config: SimConfig, model: StepModel, loop: Loop, count: int) -> list[Disk]:
    """The SSD of every node. Raises ValueError."""
    if config.ssd_blocks and not config.pool_blocks:
        raise ValueError("--ssd-blocks are read through the pool's DRAM: give --pool-blocks")
    if config.ssd_blocks and model.fixed_tokens:
        raise ValueError(f"--ssd-blocks: a simulated SSD has blocks of one size; {model.name} has windows or states")
    bytes_s = config.ssd_gbyte_s * 1e9 or model.ssd_bytes_s
    return [Disk(loop, bytes_s, model.ssd_iops) for _ in range(count)]


def candidate(config: SimConfig, node: Node) -> Candidate:
    """The node as placement sees it at the beginning."""
    blocks = node.model.kv_tokens // config.block_tokens
    return Candidate(
        node_id=node.name,
        roles=node.roles,
        prefill=node.costs.prefill,
        free_blocks=node.free_tokens // config.block_tokens,
        total_blocks=blocks,
        step_s=node.step_s() if "decode" in node.roles else 0.0,
    )
