"""Flags that contradict each other on every machine and with every model, and the message for each. Pure.

engine/config/resolve.py refuses flags that do not fit the model or the machine; engine/node/node.py refuses those that
do not fit the devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.backend_address import addresses as parse_addresses
from engine.config.config import NO_MODEL, Config
from engine.config.scaling import command_parts
from net.kv_events.settings import parse as parse_event_settings
from sched.membership.member import text as gossiped
from sched.scaling.bounds import parse as parse_bounds

BOTH = {"prefill", "decode"}


def contradictions(config: Config) -> Iterator[str]:
    """The messages for a Config with valid roles. Each one is a single line that names the flag to change.

    A flag without effect on a role is no contradiction: a launcher gives all nodes of a cluster the same flags."""
    roles = set(config.roles)
    for flag, name in (
        ("--node-id", config.node_id),
        ("--site", config.site),
        ("--network-place", config.network_place),
    ):
        try:
            gossiped("-" if name is None else name)
        except ValueError as error:
            yield f"{flag}: {error}"
    if config.model == NO_MODEL and config.roles != ("store",) and config.backend is None:
        yield f"--model none keeps values and computes nothing: it needs --role store, not {config.role}"
    if config.model == NO_MODEL and config.batch_path is not None:
        yield "--batch-path: a node with --model none answers no prompts; give it to a node with a model"
    if config.host in ("0.0.0.0", "::"):
        yield f"--host {config.host} is no address peers could use; name one of this machine (hostname -I lists them)"
    if config.port and config.port == config.control_port:
        yield f"--port and --control-port are both {config.port}: the HTTP API and the other nodes need one each"
    if config.join is not None and _is(config.join, config.host, config.port):
        yield f"--join {config.join} is this node itself: name another node, or leave it out to start a cluster"
    if config.first_role != "both" and len(roles & BOTH) == 1:
        yield (
            f"--first-role {config.first_role}: a node of --role {config.role} cannot change over; "
            "give --role mixed or prefill,decode"
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        yield f"--prompt-lookup-min {config.prompt_lookup_min} exceeds --prompt-lookup-max {config.prompt_lookup_max}"
    if (config.speculative_method in ("draft", "eagle")) != (config.speculative_model is not None):
        yield "--speculative-method draft or eagle and --speculative-model go together: give both or neither"
    if config.speculative_method in ("mtp", "eagle"):
        for flag, given in (
            (f"--tensor-parallel-size {config.tensor_parallel_size}", config.tensor_parallel_size > 1),
            (f"--expert-parallel-size {config.expert_parallel_size}", config.expert_parallel_size > 1),
            (f"--prefill-parallel {config.prefill_parallel}", config.prefill_parallel != "none"),
            ("--beyond-memory on", config.beyond_memory == "on"),
            ("--offload auto", config.offload == "auto"),
        ):
            if given:
                yield (
                    f"--speculative-method {config.speculative_method} does not work with {flag}: one node and one "
                    "rank compute the layer that drafts, from weights and KV in memory; use one of the two"
                )
    if config.batching_policy == "mixed" and config.prefill_chunk_tokens > config.max_num_batched_tokens:
        yield (
            f"--prefill-chunk-tokens {config.prefill_chunk_tokens} exceeds --max-num-batched-tokens "
            f"{config.max_num_batched_tokens}: a step has no room for a chunk"
        )
    if config.prefill_parallel != "none":
        sizes = {"tensor": config.tensor_parallel_size, "expert": config.expert_parallel_size}
        for name in [name for name, size in sizes.items() if size > 1]:
            yield (
                f"--prefill-parallel {config.prefill_parallel}: the ranks of --{name}-parallel-size compute all layers "
                "of a prompt; use one of the two"
            )
    if config.beyond_memory == "on":
        for name, size in (("tensor", config.tensor_parallel_size), ("expert", config.expert_parallel_size)):
            if size > 1:
                yield (
                    f"--beyond-memory on: only one rank reads blocks of the pool, --{name}-parallel-size is {size}; "
                    "use one of the two"
                )
    if config.attention_elsewhere != "off" and config.model == NO_MODEL:
        yield (
            f"--attention-elsewhere {config.attention_elsewhere}: a node with --model none has no layers of KV to "
            "attend to; leave it out"
        )
    if config.offload == "auto":
        for flag, given in (
            (f"--tensor-parallel-size {config.tensor_parallel_size}", config.tensor_parallel_size > 1),
            (f"--expert-parallel-size {config.expert_parallel_size}", config.expert_parallel_size > 1),
            ("--weights-from-store", config.weights_from_store),
            ("--beyond-memory on", config.beyond_memory == "on"),
        ):
            if given:
                yield f"--offload auto reads all layers of a model in each step, not with {flag}; use one of the two"
    elif config.offload_path is not None or config.weight_memory_bytes != -1:
        yield "--offload-path and --weight-memory-bytes are about the layers of --offload auto: give it too"
    if config.weights_from_store and config.tensor_parallel_size > 1:
        yield "--weights-from-store: the ranks of --tensor-parallel-size load from disk; use one of the two"
    if config.expert_parallel_size > 1:
        for flag, given in (
            (f"--tensor-parallel-size {config.tensor_parallel_size}", config.tensor_parallel_size > 1),
            ("--weights-from-store", config.weights_from_store),
            ("--device cuda", config.device == "cuda"),
        ):
            if given:
                ranks = f"--expert-parallel-size {config.expert_parallel_size}"
                yield f"{ranks} does not work with {flag}; use one of the two"
        if config.expert_remote_ranks > config.expert_parallel_size:
            yield (
                f"--expert-remote-ranks {config.expert_remote_ranks} is more than --expert-parallel-size "
                f"{config.expert_parallel_size}, all ranks; give fewer"
            )
        if config.shares_experts:
            for flag, given in (
                ("--max-expert-parallel-size", config.max_expert_parallel_size > config.expert_parallel_size),
                (f"--expert-balance-steps {config.expert_balance_steps}", config.expert_balance_steps > 0),
            ):
                if given:
                    yield (
                        f"{flag}: experts stay where they are on ranks that nodes share (--expert-remote-ranks "
                        f"{config.expert_remote_ranks} of {config.expert_parallel_size}); use one of the two"
                    )
        if 0 < config.max_expert_parallel_size < config.expert_parallel_size:
            yield (
                f"--max-expert-parallel-size {config.max_expert_parallel_size} is less than --expert-parallel-size "
                f"{config.expert_parallel_size}, the ranks that the node has at the least"
            )
        if config.max_expert_parallel_size > config.expert_parallel_size and config.expert_balance_steps:
            yield (
                f"--expert-balance-steps {config.expert_balance_steps}: experts move between ranks that stay, not with "
                "--max-expert-parallel-size; use one of the two"
            )
    elif config.expert_remote_ranks or config.max_expert_parallel_size:
        name = "--expert-remote-ranks" if config.expert_remote_ranks else "--max-expert-parallel-size"
        yield f"{name} is about the ranks of --expert-parallel-size: give it too"
    elif config.expert_replicas > 1 or config.num_redundant_experts:
        yield "--expert-replicas and --num-redundant-experts are about the ranks of --expert-parallel-size: give it too"
    if config.weight_dtype not in ("auto", "wide"):
        for flag, given in (
            ("--tensor-parallel-size", config.tensor_parallel_size > 1),
            ("--expert-parallel-size", config.expert_parallel_size > 1),
            ("--weights-from-store", config.weights_from_store),
        ):
            if given:
                yield f"--weight-dtype {config.weight_dtype} does not work with {flag}; use one of the two"
    if config.transport == "rdma" and config.cluster_key_file is not None and not config.rdma_plaintext:
        yield (
            "--transport rdma moves KV unencrypted, --cluster-key-file is given: --transport auto (sealed TCP between "
            "hosts), or --rdma-plaintext for a network you trust"
        )
    if config.transport in ("shm", "tcp") and config.rdma_devices != "auto":
        yield f"--rdma-devices {config.rdma_devices}: --transport {config.transport} uses none; give --transport auto"
    if config.transport in ("shm", "rdma") and config.wire_codec == "exponent":
        yield (
            f"--wire-codec exponent codes what goes over TCP, and --transport {config.transport} uses none; give "
            "--transport auto or tcp, or --wire-codec none"
        )
    if config.model == NO_MODEL and 0 <= config.dram_bytes < config.value_bytes:
        yield f"--dram-bytes {config.dram_bytes} holds no value of --value-bytes {config.value_bytes}; give more"
    if config.kv_events_config is not None:
        try:
            parse_event_settings(config.kv_events_config)
        except ValueError as error:
            yield f"--kv-events-config {error}"
    if config.backend is not None:
        if roles:
            yield f"--backend: a node that places requests on workers computes nothing: leave out --role {config.role}"
        if config.model == NO_MODEL:
            yield "--backend needs the tokenizer of the model that the workers serve: give --model"
        try:
            parse_addresses(config.backend)
        except ValueError as error:
            yield f"--backend {error}"
    yield from _scaling(config)
    for origin in (config.allowed_origins or "*").split(","):
        if origin.strip() != "*" and not origin.strip().startswith(("http://", "https://")):
            yield f"--allowed-origins {origin.strip()!r}: an origin is http://HOST[:PORT] or https://HOST[:PORT], or *"


def _scaling(config: Config) -> Iterator[str]:
    if (config.scale_command is None) != (config.scale_nodes is None):
        yield "--scale-command and --scale-nodes go together: give both or neither"
    if config.scale_command is not None and config.backend is not None:
        yield "--scale-command starts nodes of ours; with --backend, the workers' own launcher does: use one of the two"
    if config.expert_scale_command is not None and config.max_expert_parallel_size <= config.expert_parallel_size:
        yield (
            "--expert-scale-command starts ranks beyond --expert-parallel-size: give --max-expert-parallel-size, the "
            "number of ranks at most"
        )
    if config.placement == "mooncake-cost" and config.backend is not None:
        yield "--placement mooncake-cost: workers behind --backend have no --node-cost; choose another placement"
    for flag, value, parse in (
        ("--scale-command", config.scale_command, command_parts),
        ("--scale-nodes", config.scale_nodes, parse_bounds),
        ("--expert-scale-command", config.expert_scale_command, command_parts),
    ):
        if value is not None:
            try:
                parse(value)
            except ValueError as error:
                yield f"{flag} {value!r}: {error}"


def _is(address: str, host: str, port: int) -> bool:
    return port != 0 and address in (f"{host}:{port}", f"[{host}]:{port}", f"http://{host}:{port}")
