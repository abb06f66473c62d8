"""AutoRound's and mlx-lm's artifacts of mixed precision, for `benchmarks.frontier --peers`.

    PYTHON -m benchmarks.frontier_peers auto-round|mlx SOURCE TEXT OUT [--targets BITS ...]
                                        [--samples N] [--length N] [--types TYPE ...]

PYTHON has the tool. The text calibrates. Every artifact becomes something that qwen35 opens, in the
folder OUT; a line for each, with its path and its bytes, is appended to OUT/peers.jsonl.

    auto-round  AutoScheme over llama.cpp's K-quants, no tuning, as it advises for GGUF: its file
    mlx         convert's mixed recipes, and dynamic_quant, its threshold found for the target;
                groups of 64. qwen35 does not read mlx's packing: mlx's own decoder writes a float
                folder, and bytes are those of the packed weights

Targets are bits a weight as the tool counts them. What is set beside defaults: no GPU; a tokenizer
that llama.cpp's converter does not know is called qwen35; 16 sequences of 256 tokens, of 64 for
mlx, whose delta rule goes token by token, and so do gradients.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.lines import append

GROUP = 64
TARGETS = (3.5, 4.5, 5.0, 6.0)
K_QUANTS = tuple(
    f"gguf:{name}" for name in ("q2_k_s", "q3_k_s", "q4_k_s", "q5_k_s", "q6_k", "q8_0")
)
# Bits of the two widths that dynamic_quant chooses between, by the target.
WIDTHS = {3.5: (2, 4), 4.5: (3, 5), 5.0: (4, 5), 6.0: (4, 8)}
Line = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What a tool is asked for: artifacts of each target in `out`, calibrated by sequences."""

    source: Path
    text: Path
    out: Path
    targets: tuple[float, ...]
    samples: int
    length: int
    types: tuple[str, ...]

    def pieces(self) -> list[str]:
        """Return the text in as many pieces as there are sequences."""
        text = self.text.read_text()
        size = len(text) // self.samples
        return [text[i * size : (i + 1) * size] for i in range(self.samples)]


def auto_round(task: Task) -> Iterator[Line]:
    """Quantise to GGUF files, types chosen for each target."""
    import torch
    from auto_round import AutoRound, AutoScheme
    from auto_round.export.export_to_gguf.conversion import base
    from transformers import AutoTokenizer

    from benchmarks.fourbit_score import load_text_model

    base.TextModel.get_vocab_base_pre = lambda *_: "qwen35"
    folder, calibration = task.out / task.source.name, task.out / "calibration.json"
    load_text_model(task.source, torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(task.source)
    tokenizer.save_pretrained(folder)
    calibration.write_text(json.dumps(task.pieces()))
    of_text: dict[str, Any] = {"nsamples": task.samples, "seqlen": task.length}
    for target in task.targets:
        model = load_text_model(folder, torch.bfloat16)
        scheme = AutoScheme(target, task.types, **of_text)
        peer = AutoRound(
            model, tokenizer, scheme=scheme, iters=0, dataset=str(calibration), device_map="cpu",
            enable_torch_compile=False, **of_text,
        )  # fmt: skip
        made = task.out / f"auto-round-{target}"
        peer.quantize_and_save(output_dir=str(made), format="gguf:q4_k_m")
        path = next(made.rglob("*.gguf"))
        yield {"name": f"AutoScheme {target:g}", "path": str(path.resolve())}


def mlx(task: Task) -> Iterator[Line]:
    """Quantise by dynamic_quant for each target, and by each mixed recipe."""
    import mlx.core as mx
    from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder
    from mlx_lm.utils import load, quantize_model

    model, tokenizer, config = load(str(task.source), return_config=True)
    data = mx.array([tokenizer.encode(piece)[: task.length] for piece in task.pieces()])
    for recipe in QUANT_RECIPES:
        rule = mixed_quant_predicate_builder(recipe, model, GROUP)
        made, _ = quantize_model(_copied(model), config, GROUP, None, quant_predicate=rule)
        yield _decoded(made, recipe, task)
    for target in task.targets:
        low, rule = _dynamic(_copied(model), data, target)
        made, _ = quantize_model(_copied(model), config, GROUP, low, quant_predicate=rule)
        yield _decoded(made, f"dynamic {target:g}", task)


def _copied(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def _dynamic(model: Any, data: Any, target: float) -> tuple[int, Callable[[str, Any], Any]]:
    """Return the low width, and the rule that gives modules above a threshold the high one."""
    import mlx.core as mx
    from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold

    model.set_dtype(mx.float32)  # on a CPU experts are multiplied in no other
    low, high = WIDTHS[target]
    widths = (low, GROUP, high, GROUP)
    known = dict(estimate_sensitivities(model, data, *widths))
    threshold = estimate_threshold(model, known, target, *widths)

    def rule(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return {"bits": high, "group_size": GROUP} if known[path] > threshold else True

    return low, rule


def _decoded(model: Any, name: str, task: Task) -> Line:
    """Write the source with the values that mlx decodes in place of its own."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    source, folder = task.source, task.out / f"mlx-{name.replace(' ', '-')}"
    folder.mkdir()
    for file in (*source.glob("*.json"), *source.glob("*.jinja")):
        shutil.copy(file, folder)
    changed = dict(_values(model))
    for file in source.glob("*.safetensors"):
        tensors = {
            key: changed.pop(key, value)
            for key, value in mx.load(str(file)).items()
            if not key.startswith(("model.visual.", "mtp."))
        }
        mx.save_safetensors(str(folder / file.name), tensors, {"format": "pt"})
    assert not changed, f"not in the source: {list(changed)}"
    _without_parts(folder)
    nbytes = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    return {"name": name, "path": str(folder.resolve()), "bytes": nbytes}


def _without_parts(folder: Path) -> None:
    """Leave vision and MTP, which mlx drops, out of the index."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    kept = {
        k: v for k, v in index["weight_map"].items() if not k.startswith(("model.visual.", "mtp."))
    }
    file.write_text(json.dumps(index | {"weight_map": kept}))


def _values(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what quantised modules decode to, under the hub's names."""
    import mlx.core as mx

    experts: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "scales"):
            continue
        value = mx.dequantize(
            module.weight, module.scales, module.biases, module.group_size, module.bits
        ).astype(mx.float32)
        name = path.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head", "lm_head")
        layer, switch, part = name.partition(".switch_mlp.")
        if switch:
            experts.setdefault(f"{layer}.experts", {})[part] = value
        else:
            yield f"{name}.weight", value
    for name, parts in experts.items():
        yield f"{name}.down_proj", parts["down_proj"]
        both = [parts["gate_proj"], parts["up_proj"]]
        yield f"{name}.gate_up_proj", mx.concatenate(both, axis=1)


# Of each tool the packages, and how long sequences are.
TOOLS = {
    "auto-round": (auto_round, ("auto-round", "torch"), 256),
    "mlx": (mlx, ("mlx", "mlx-lm"), 64),
}


def main() -> None:
    """Run one tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("source", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--targets", type=float, nargs="*", default=TARGETS)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, help="of sequences, in tokens")
    parser.add_argument("--types", nargs="*", default=K_QUANTS, help="that AutoScheme may choose")
    options = parser.parse_args()
    make, packages, length = TOOLS[options.tool]
    versions = {name: metadata.version(name) for name in packages}
    options.out.mkdir(parents=True, exist_ok=True)
    task = Task(
        options.source, options.text, options.out, tuple(options.targets), options.samples,
        options.length or length, tuple(options.types),
    )  # fmt: skip
    for line in make(task):
        line |= {"tool": options.tool, "model": options.source.name, "versions": versions}
        append(options.out / "peers.jsonl", line)


if __name__ == "__main__":
    main()
