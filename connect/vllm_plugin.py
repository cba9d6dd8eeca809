"""The plug-in that vLLM loads in each of its processes if our package is installed (group vllm.general_plugins).

Upstream's MooncakeConnector asks torch for the index of the accelerator that the worker uses. A build of torch without
accelerators raises RuntimeError, so a worker on CPU cores ends at its start. With the plug-in such a build answers 0.
"""

from __future__ import annotations


def register() -> None:
    """Idempotent. It changes nothing in a build of torch that knows an accelerator, whether one is there or not."""
    import torch

    if torch.accelerator.current_accelerator(check_available=False) is None:
        torch.accelerator.current_device_index = _the_only_device


def _the_only_device() -> int:
    """The cores of this machine are device 0 of torch.cpu."""
    return 0
