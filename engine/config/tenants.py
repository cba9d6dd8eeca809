"""The value of --tenants: tenants of the store, and their quotas."""

from __future__ import annotations

from cache.tiers.usage import OTHER
from engine.config.flag_values import size


def parse(text: str) -> dict[str, int | None]:
    """'team-a=4G,team-b' -> bytes by tenant, None without a quota; 'none' -> {}. Raises ValueError."""
    found: dict[str, int | None] = {}
    for part in [] if text == "none" else text.split(","):
        name, equals, quota = (one.strip() for one in part.partition("="))
        if not name:
            raise ValueError(f"{part!r} has no tenant; write team-a=4G,team-b or none")
        if name == OTHER:
            raise ValueError(f"{OTHER!r} stands for all that is not named; a quota needs the name of a tenant")
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = size(quota) if equals else None
    return found
