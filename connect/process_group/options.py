"""MooncakeBackendOptions and what upstream sets for a whole process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from net.collectives.epochs import ON_LOSS


@dataclass
class Settings:
    """Of this process; upstream's functions set_* write them. A group takes them when it is made."""

    collective_timeout_s: float = 10.0
    host_ip: str = ""


SETTINGS = Settings()


class MooncakeBackendOptions:
    """`pg_options` of init_process_group and new_group, in both of upstream's forms:
    (max_group_size[, is_extension, ...]) and (active_ranks[, is_extension, max_group_size]).

    on_loss: what follows when ranks are lost (net/collectives/epochs.py); ours alone. None: "shrink" if
    auto_sync_on_failure is given as True, else $MOONCAKE_PG_ON_LOSS, else "fail".
    """

    def __init__(
        self,
        ranks: Any = 0,
        is_extension: bool = False,
        *rest: Any,
        max_group_size: int = 0,
        auto_deactivate_on_failure: bool | None = None,
        auto_sync_on_failure: bool | None = None,
        on_loss: str | None = None,
    ) -> None:
        """Raises ValueError for values that have no meaning."""
        self.active_ranks: list[int] | None = None
        if isinstance(ranks, int):
            self.max_group_size = ranks or max_group_size
            given = (*rest, None, None)[:2]
            auto_deactivate_on_failure = given[0] if auto_deactivate_on_failure is None else auto_deactivate_on_failure
            auto_sync_on_failure = given[1] if auto_sync_on_failure is None else auto_sync_on_failure
        else:
            self.active_ranks = [int(value) for value in ranks]
            self.max_group_size = int(rest[0]) if rest else max_group_size or len(self.active_ranks)
            if not all(self.active_ranks):
                raise ValueError("active_ranks with holes: a group here begins with all ranks of its size")
        if auto_sync_on_failure and auto_deactivate_on_failure is False:
            raise ValueError("auto_sync_on_failure needs auto_deactivate_on_failure")
        if on_loss is None:
            on_loss = "shrink" if auto_sync_on_failure else os.environ.get("MOONCAKE_PG_ON_LOSS", "fail")
        if on_loss not in ON_LOSS:
            raise ValueError(f"on_loss is one of {', '.join(ON_LOSS)}, not {on_loss!r}")
        self.is_extension, self.on_loss = is_extension, on_loss
