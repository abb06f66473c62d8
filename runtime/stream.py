"""What the next layer makes of an error in the residual stream.

    R = W diag(1 + norm)      for the linears W that read the stream first after a layer
    gram = R^T R              |R d|^2 = d gram d^T of an error d

After the last layer, and after the MTP head's, the head of the model reads it.

Shape letters: H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.layer_pass import GDN_IN, QKV

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.layerwise import Walk
    from runtime.load import Loader

MIXERS = {"linear_attention": ("linear_attn.", GDN_IN), "full_attention": ("self_attn.", QKV)}


def readers_gram(walk: Walk, layer: int | None) -> Tensor:
    """Return the gram [H, H], float32 on the walk's device, of what reads after a layer.

    layer  None: the MTP head's
    """
    import torch

    loader = walk.loader
    norm, names = _readers(walk, layer)
    scale = 1 + loader.tensor(norm).float()
    gram = torch.zeros(len(scale), len(scale), device=loader.device)
    for name in names:
        _add(gram, loader, name, scale)
    return gram


def _readers(walk: Walk, layer: int | None) -> tuple[str, list[str]]:
    """Return the norm and the linears that read the stream after a layer."""
    kinds = walk.config.layer_types
    if layer is None or layer + 1 == len(kinds):
        return ("mtp.norm" if layer is None else "norm"), [walk.head]
    prefix = f"layers.{layer + 1}."
    mixer, parts = MIXERS[kinds[layer + 1]]
    return prefix + "input_layernorm", [prefix + mixer + part for part in parts]


def _add(gram: Tensor, loader: Loader, name: str, scale: Tensor) -> None:
    value = loader.open(name)
    for start, stop in value.chunks(held=12):
        rows = loader.strip(value, start, stop).float() * scale
        gram.addmm_(rows.T, rows)
        value.release(start, stop)
