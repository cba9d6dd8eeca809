"""The options of the connector: vLLM's kv_role and kv_connector_extra_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from connect.store.settings import size_of

LOADS = ("auto", "layers", "background")
SAVES = ("all", "prompt", "none")
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """docs/connect/vllm-connector.md describes each field."""

    master: str = ""
    load: str = "auto"
    save: str = "all"
    wait_s: float = 30.0
    lookup_s: float = 0.5
    staging_bytes: int = 256 << 20
    model_id: str = ""
    salt: str = ""
    role: str = "kv_both"

    @classmethod
    def of(cls, role: str, given: Mapping[str, Any]) -> Options:
        """Raises ValueError for an unknown key or value."""
        known = {one.name for one in fields(cls)} - {"role"}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        usual = cls()
        made = cls(
            role=_one_of("kv_role", role, ROLES),
            master=str(given.get("master", usual.master)),
            load=_one_of("load", given.get("load", usual.load), LOADS),
            save=_one_of("save", given.get("save", usual.save), SAVES),
            wait_s=_seconds("wait_s", given.get("wait_s", usual.wait_s)),
            lookup_s=_seconds("lookup_s", given.get("lookup_s", usual.lookup_s)),
            staging_bytes=size_of(given.get("staging_bytes", usual.staging_bytes)),
            model_id=str(given.get("model_id", usual.model_id)),
            salt=str(given.get("salt", usual.salt)),
        )
        if made.role == "kv_producer" and made.save == "none":
            raise ValueError("a kv_producer must save: save is none")
        return made


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known: {', '.join(known)}")
    return str(value)


def _seconds(name: str, value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {value!r}: it must be a number of seconds")
    return seconds
