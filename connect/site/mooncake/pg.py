"""mooncake.pg: connect/process_group/ under upstream's name; its import registers the backends of torch.distributed."""

from __future__ import annotations

from mooncake_rooms.connect.process_group.group import MooncakeProcessGroup
from mooncake_rooms.connect.process_group.options import MooncakeBackendOptions
from mooncake_rooms.connect.process_group.register import (
    activate_ranks,
    deactivate_ranks,
    get_active_ranks,
    get_current_epoch,
    get_failed_ranks_hint,
    get_local_success,
    get_num_synced_ranks,
    get_peer_state,
    join_group,
    recover_ranks,
    register,
    set_collective_timeout_us,
    set_host_ip,
    sync_after_failure,
)

__all__ = [
    "MooncakeBackendOptions",
    "MooncakeProcessGroup",
    "activate_ranks",
    "deactivate_ranks",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_host_ip",
    "sync_after_failure",
]

register()
