"""A model by its published name or from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import orjson

from lab.geometry.architecture import Architecture
from lab.geometry.published import PUBLISHED, Model
from lab.geometry.read_config import parts_of, weights_of


def find(name: str) -> Model:
    """A published name in any case, or the path of a directory with config.json or of the file. Raises ValueError,
    OSError."""
    for model in PUBLISHED:
        if model.name.casefold() == name.casefold():
            return model
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = ", ".join(model.name for model in PUBLISHED)
        raise ValueError(f"{name!r} is neither a directory with a config.json nor one of {names}")
    try:
        config = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no configuration: it has no keys")
    return Model(file.resolve().parent.name, str(file), config)


def architecture(name: str) -> Architecture:
    """With KV in bfloat16. Raises ValueError, OSError."""
    model = find(name)
    return Architecture(name=model.name, parts=parts_of(model.config), weights=weights_of(model.config))
