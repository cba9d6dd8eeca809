"""The sites of a run: their links, and what may cross them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

KV = ("none", "fetch", "copies")
"""What KV does between sites: nothing, cross for one use, or also stay as a copy by the rules of a CDN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRules:
    """All sites are alike, and so are all links. The rules that nodes have as flags have their meaning here too."""

    sites: int = 3
    distance_s: float = 0.04  # round trip between two sites
    link_gbit_s: float = 10.0  # bandwidth of a link in one direction
    budget: float = 1.0  # part of that bandwidth which KV may use, the value of --site-link-limit-bytes
    moves: bool = True  # whether a request may go to another site
    kv: Literal["none", "fetch", "copies"] = "copies"
    ttl_s: float = 600.0  # --site-copy-ttl-ms

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.sites < 1:
            raise ValueError(f"a run needs a site, not {self.sites}")
        if self.kv not in KV:
            raise ValueError(f"KV between sites is one of {', '.join(KV)}, not {self.kv!r}")
        for name in ("distance_s", "link_gbit_s", "budget", "ttl_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {value}")

    @property
    def link_bytes_s(self) -> float:
        return self.link_gbit_s * 1e9 / 8
