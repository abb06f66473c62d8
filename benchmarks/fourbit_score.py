"""How far a model with other weights is from its source, in transformers, in float32.

    KL    sum p (log p - log q) of each position, p of the source: mean and 99.9th percentile
    se    of the mean, from the means of texts: positions of one text are not independent
    top1  how often the likeliest token is the same

Weights are named as in a text model whose experts are apart:
`model.layers.0.mlp.experts.7.up_proj`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

LENGTH = 256


def load_text_model(source: Path, dtype: torch.dtype) -> Any:
    """Return a checkpoint's text model in transformers; nothing of it may be missing."""
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"], told["missing_keys"]
    return model.to(dtype).eval()


def linears(model: Any) -> dict[str, Tensor]:
    """Return views of the weights of all matrices in layers by module, experts one by one."""
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        module, _, last = name.rpartition(".")
        if module.endswith(".experts"):
            found |= dict(_experts(module, last, weight.data))
        elif ".layers." in name and last == "weight" and weight.dim() == 2:
            found[module] = weight.data
    return found


def _experts(module: str, last: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    for expert, weight in enumerate(stack):
        for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
            yield f"{module}.{expert}.{part}", rows


class Judge:
    """A source and texts; `score` says how far the source with other weights is from it."""

    def __init__(self, source: Path, ids: Sequence[int]) -> None:
        self.model = load_text_model(source, torch.float32)
        self.texts = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
        self.weights = linears(self.model)
        self.kept = {name: weight.clone() for name, weight in self.weights.items()}
        self.log_p = self._log_softmax()

    def _log_softmax(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([F.log_softmax(self.model(x[None]).logits, -1) for x in self.texts])

    def score(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the figures of a model with these weights in place of its own."""
        for name, kept in self.kept.items():
            self.weights[name].copy_(weights.get(name, kept))
        return _figures(self.log_p, self._log_softmax()) | {
            "weight_rms": self._rms(weights),
            "linears": len(weights),
            "tokens": self.texts.numel(),
        }

    def _rms(self, weights: Mapping[str, Tensor]) -> float:
        """Return the error of all weights together, relative to their size."""
        pairs = [(w.double(), self.kept[name].double()) for name, w in weights.items()]
        error = sum(float((w - own).square().sum()) for w, own in pairs)
        return round((error / sum(float(own.square().sum()) for _, own in pairs)) ** 0.5, 5)


def _figures(log_p: Tensor, log_q: Tensor) -> dict[str, Any]:
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).double()
    by_text = kl.mean(1)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    return {
        "kl": round(float(kl.mean()), 6),
        "kl_se": round(float(by_text.std() / len(by_text) ** 0.5), 6),
        "kl_p999": round(float(kl.flatten().quantile(0.999)), 5),
        "top1": round(float(same.mean()), 5),
        "kl_by_text": [round(float(x), 6) for x in by_text],
    }
