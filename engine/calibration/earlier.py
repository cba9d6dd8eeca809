"""Measured steps of earlier starts, which a start takes instead of measuring, if a few steps agree with them.

A file has the measurements of one configuration on one kind of CPU and GPU; everything by which steps may take
otherwise is in its name. It need not be right: the CPU may have other guests than then, or the start that wrote it may
have been disturbed. So every start first runs two small shapes. They take a tenth of the time of a calibration, and
also warm the engine up. If they take otherwise, everything is measured again, and so it is when an idle node finds its
estimates wrong (recalibration.py). Both replace the file. --calibration-cache off always measures.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from engine import __version__
from engine.calibration.calibration import SHAPES, Clock, Room, Shape, calibrate, expected_s, mistaken, never, sample
from engine.config.config import Config
from engine.config.machine import survey
from engine.core.costs import StepCosts
from engine.step.runner import Runner
from net import compiled

log = logging.getLogger("mooncake.engine")

COMPARED = SHAPES[:2]
"""A small prompt and a decode."""

KEPT = 256
"""Files in the folder: the oldest ones leave. Each has some kilobytes."""

DECIDING = (
    *("device", "num_threads", "engine_nice", "cpu_level", "attention_backend", "enforce_eager", "latent_prompts"),
    *("dtype", "weight_dtype", "kv_cache_dtype", "block_size", "kv_groups", "offload"),
    *("tensor_parallel_size", "expert_parallel_size", "expert_remote_ranks", "expert_replicas"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "beyond_memory", "calibration_ms"),
)
"""Flags that change what a step computes or how, or which steps a calibration runs. Not those that a start resolves by
the memory that is free at this moment."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The file of one configuration."""

    path: Path

    def read(self) -> StepCosts | None:
        """Models that have learned these measurements; None without a usable file."""
        try:
            kept = json.loads(self.path.read_bytes())
            costs = StepCosts()
            for model, name in ((costs.prefill, "prefill"), (costs.decode, "decode")):
                for *features, seconds in kept[name]:
                    if not all(map(math.isfinite, (*features, seconds))) or len(features) != 3:
                        raise ValueError(f"{name}: {features}, {seconds}")
                    model.regression.observe(features, seconds)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the measured steps in %s cannot be used (%s); measuring again", self.path, error)
            return None
        return costs if costs.prefill.regression.observations and costs.decode.regression.observations else None

    def write(self, costs: StepCosts) -> None:
        """Replace the file. A failure is only logged: the next start measures again."""
        learned = {"prefill": costs.prefill.regression.observed(), "decode": costs.decode.regression.observed()}
        if not all(learned.values()):
            return
        text = json.dumps({name: [[*features, s] for features, s in rows] for name, rows in learned.items()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".new", delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    Path(file.name).replace(self.path)
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            _leave(self.path.parent)
        except OSError as error:
            log.info("the measured steps are not kept for the next start: %s", error)


def earlier_of(config: Config, fingerprint: str, backend: str, shapes: Sequence[Shape]) -> Earlier | None:
    """Where the measurements of this configuration are. `fingerprint`: of the weights; `backend`: of attention, as it
    was chosen; `shapes`: those that the node has the memory for. None: --calibration-cache off, or nothing is measured
    at all."""
    if config.calibration_cache == "off" or not config.calibration_ms:
        return None
    flags = {name: getattr(config, name) for name in DECIDING}
    versions = {"mooncake": __version__, "torch": version("torch")}
    found = {"flags": flags, "weights": fingerprint, "attention": backend, "versions": versions, "shapes": list(shapes)}
    parts = [json.dumps(found, sort_keys=True).encode(), compiled.this_cpu()]
    if config.device == "cuda" and (gpu := survey(look_for_gpu=True).gpu) is not None:
        parts.append(gpu.name.encode())
    path = compiled.path_of("calibration", "steps", parts, ".json")
    own = config.calibration_cache
    return Earlier(path if own == "auto" else Path(own).expanduser() / path.name)


def measured(
    runner: Runner, costs: StepCosts, room: Room, seconds: float, earlier: Earlier | None, clock: Clock = time.monotonic
) -> int:
    """Give `costs` the measurements of an earlier start, or those of a calibration of `seconds`. Returns the number of
    steps that it measured. The call blocks, so run it in the engine thread."""
    known = None if earlier is None else earlier.read()
    if known is None or earlier is None:
        count = 0
    else:
        shapes = room.fitting(COMPARED)
        took = sample(runner, shapes, room, clock, never)
        count = len(took)
        if shapes and not mistaken(
            [(expected_s(known, shape), s) for shape, s in zip(shapes, took, strict=True)], shapes
        ):
            costs.replace(known)
            log.info("steps take as long as at an earlier start, whose measurements count: %s", earlier.path)
            return count
    count += calibrate(runner, costs, room, seconds, clock)
    if earlier is not None:
        earlier.write(costs)
    return count


def _leave(folder: Path) -> None:
    """Delete the oldest files beyond KEPT."""
    files = sorted(folder.glob("steps-*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[: max(0, len(files) - KEPT)]:
        path.unlink(missing_ok=True)
