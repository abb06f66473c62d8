"""Which device calibrated: on another one sums come out with other last digits."""

from __future__ import annotations

CPU, CUDA = "cpu", "cuda"


def device_name(device: str) -> str:
    """Return what a receipt calls a device: cpu, or the name of the GPU."""
    if device == CPU:
        return CPU
    import torch

    return torch.cuda.get_device_name()


def device_named(name: str) -> str | None:
    """Return the device of this machine that has this name, None if there is none."""
    if name == CPU:
        return CPU
    import torch

    return CUDA if torch.cuda.is_available() and device_name(CUDA) == name else None
