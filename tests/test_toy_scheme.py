"""A scheme is one file and one row: this one is added here, and every command works on it.

Codes of eight bits, a scale for each row, and a scale for all rows of what engines run as one
matrix (q, k, v; gate, up), which must be known before the first row is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qwen35_convert as q
from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant import registry
from quant.measure import Error, measure
from quant.part import Cost, Part, Shape
from quant.usual import Usual
from qwen35_convert import api
from qwen35_convert.options import RunOptions
from qwen35_convert.text.generation import Prompt

LEVELS = ("structure", "tensors", "logits")


@dataclass(frozen=True, slots=True)
class Toy(Usual):
    """w ~ codes * scale of the row * scale of the matrix."""

    name: str = "toy-int8"
    label: str = "toy-int8"

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        base, row = name.removesuffix("weight") + "weight_", (*shape[:-1], 1)
        return (
            Part("codes", TensorInfo(base + "packed", "I8", tuple(shape))),
            Part("scale", TensorInfo(base + "scale", "F32", row)),
            Part("global_scale", TensorInfo(base + "global_scale", "F32", (1,)), rows=None),
        )

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        for name, info in infos.items():
            weight = name.removesuffix("_packed")
            parts = [infos.get(part.info.name) for part in self.parts(weight, info.shape)]
            if name != weight and all(parts):
                yield StoredWeight(weight, info.shape, "BF16", self, tuple(parts))

    def prepare(self, values: Iterator[Tensor]) -> Tensor:
        return torch.stack([w.float().abs().max() for w in values]).max().reshape(1)

    def encode(
        self,
        w_NK: Tensor,
        prepared: Tensor | None = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: None = None,
    ) -> dict[str, Tensor]:
        assert prepared is not None, "the scale of the matrix comes first"
        scale = w_NK.float().abs().amax(-1, keepdim=True) / 127 / prepared
        codes = (w_NK.float() / (scale * prepared)).nan_to_num().round().to(torch.int8)
        return {"codes": codes, "scale": scale, "global_scale": prepared}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return rows["codes"].float() * rows["scale"] * rows["global_scale"]

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        return measure(w_NK, self.decode(rows))

    def compare(
        self,
        w: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        error = self.measure(w, rows)
        step = rows["scale"] * rows["global_scale"]
        # half a step, and what float32 loses of 127 steps
        error.outside = int(((w.float() - self.decode(rows)).abs() > step * 0.5001).sum())
        return error

    def cost(self, *, moved: bool) -> Cost:
        return Cost(read=9, write=8, compare=64)

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        return {"targets": list(modules), "weights": weights, "input_activations": None}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """Add the scheme for these tests alone."""
    schemes, recognisers = dict(registry.SCHEMES), list(registry.RECOGNISERS)
    registry.register(Toy())
    yield
    registry.SCHEMES.clear()
    registry.SCHEMES.update(schemes)
    registry.RECOGNISERS[:] = recognisers


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, nano_path):
    out = tmp_path_factory.mktemp("toy") / "out"
    recipe = q.read_recipe("bf16-split", ["quantize.scheme=toy-int8"])
    assert q.convert(nano_path, out, recipe).report.passed
    return out


def tensors_of(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_all_parts_are_written_under_their_names(artifact):
    tensors = tensors_of(artifact)
    base = "model.layers.0.mlp.down_proj.weight"
    assert base not in tensors
    assert tensors[base + "_packed"].dtype == torch.int8
    assert tensors[base + "_scale"].shape == (tensors[base + "_packed"].shape[0], 1)
    assert tensors[base + "_global_scale"].shape == (1,)


def test_what_is_fused_shares_its_scale_and_what_is_not_does_not(artifact, nano_path):
    tensors, source = tensors_of(artifact), tensors_of(nano_path)
    layer, stored = "model.layers.3.self_attn.", "model.language_model.layers.3.self_attn."
    names = ("q_proj", "k_proj", "v_proj")
    largest = max(source[f"{stored}{name}.weight"].float().abs().max() for name in names)
    for name in names:
        assert tensors[f"{layer}{name}.weight_global_scale"] == largest
    own = source[stored + "o_proj.weight"].float().abs().max()
    assert tensors[layer + "o_proj.weight_global_scale"] == own


@pytest.mark.parametrize("level", LEVELS)
def test_verification_passes_at_every_level(artifact, nano_path, level, short_text):
    checks = q.LogitsCheck(short_text) if level == "logits" else q.LogitsCheck()
    report = q.verify(artifact, nano_path, level=level, logits=checks)
    assert report.passed, report.failures
    assert report.structure["schemes"]["toy-int8"] == 32
    if level != "structure":
        assert report.schemes["toy-int8"]["relative_rms"] < 0.01


def test_a_changed_code_does_not_pass(artifact, nano_path, tmp_path):
    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in artifact.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = tensors_of(broken)
    name = "model.layers.0.mlp.down_proj.weight_packed"
    tensors[name][3, 4] += 9
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    (broken / "qwen35-receipt.json").unlink()
    failures = q.verify(broken, nano_path).failures
    assert [failure.tensor for failure in failures] == [name]


def test_inspect_names_the_scheme(artifact):
    inspection = q.inspect(artifact)
    assert inspection.quantization == "toy-int8"
    assert inspection.problems == []


def test_the_artifact_generates_text(artifact):
    assert "".join(api.run_text(artifact, Prompt("In the beginning", max_tokens=4)))


def test_it_is_converted_back_and_on(artifact, nano_path, tmp_path):
    back = q.convert(artifact, tmp_path / "back")
    assert back.plan.recipe.name == "bf16-split"
    weight = tensors_of(tmp_path / "back")["model.layers.0.mlp.down_proj.weight"].float()
    original = tensors_of(nano_path)["model.language_model.layers.0.mlp.down_proj.weight"].float()
    assert 0 < (weight - original).norm() / original.norm() < 0.01
    assert q.convert(artifact, tmp_path / "m.gguf", "gguf-q8_0").report.passed


def test_quantize_keeps_the_names(nano_path, tmp_path):
    done = q.quantize(nano_path, tmp_path / "out", "toy-int8", RunOptions(workers=2))
    assert done.report.passed
    assert "model.language_model.layers.0.mlp.up_proj.weight_packed" in tensors_of(done.out)
