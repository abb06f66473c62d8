"""Our merge beside peft's merge_and_unload(), on adapters that peft itself made and saved.

peft adds a linear layer's change in float32 and rounds the sum. The change of an embedding and of a
parameter (fused experts, a router) it rounds to the model's type before it adds it, and rounds the
sum again: by 2^-9 of the change it may then be further off in bfloat16. Ours is rounded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.source import merge
from tests.checkpoints import Weights, dense, moe, split_experts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"]
LINEAR = [*ATTENTION, "in_proj_a", "in_proj_b", "gate_proj", "up_proj", "down_proj"]
TEXT, WHOLE = "AutoModelForCausalLM", "AutoModelForImageTextToText"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# name: class, whether it has experts, whether peft rounds twice, config
CASES: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    "linear": (TEXT, False, False, {"target_modules": LINEAR}),
    "all-linear": (TEXT, False, False, {"target_modules": "all-linear"}),
    "vision": (WHOLE, False, False, {"target_modules": [*LINEAR, "qkv", "linear_fc1"]}),
    "its-bias": (WHOLE, False, False, {"target_modules": ["linear_fc2"], "lora_bias": True}),
    "biases": (WHOLE, False, False, {"target_modules": ["qkv"], "bias": "all"}),
    "rslora": (TEXT, False, False, {"target_modules": LINEAR, "use_rslora": True}),
    "patterns": (TEXT, False, False, {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 16},
        "alpha_pattern": {"^model.layers.3.mlp.gate_proj": 5},
    }),
    "fan-in": (TEXT, False, False, {"target_modules": ["q_proj"], "fan_in_fan_out": True}),
    "saved": (TEXT, False, False, {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"],
    }),
    "embedding": (TEXT, False, True, {"target_modules": ["embed_tokens", "lm_head"]}),
    "shared-expert": (TEXT, True, False, {"target_modules": LINEAR}),
    "experts": (TEXT, True, True, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts-down": (TEXT, True, True, {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "experts-up": (WHOLE, True, True, {
        "target_modules": ["o_proj"],
        "target_parameters": EXPERTS[:1],
        "rank_pattern": {"experts.gate_up_proj": 2},
    }),
    "router": (TEXT, True, True, {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
}  # fmt: skip


def train(base: Path, kind: str, config: dict[str, Any], folder: Path) -> None:
    """Save an adapter with seeded values in place of trained ones."""
    opened = getattr(transformers, kind).from_pretrained(base, dtype=torch.bfloat16)
    model = peft.get_peft_model(opened, peft.LoraConfig(**({"r": 4, "lora_alpha": 8} | config)))
    generator = torch.Generator().manual_seed(35)
    with torch.no_grad():
        for value in (p for p in model.parameters() if p.requires_grad):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)


def merge_by_peft(base: Path, kind: str, adapter: Path, folder: Path) -> Weights:
    opened = getattr(transformers, kind).from_pretrained(base, dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(opened, adapter).merge_and_unload().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def plainly_named(weights: Weights) -> Weights:
    """Return single experts under the names of a text model."""
    return {
        name.replace("model.language_model.", "model."): value
        for name, value in split_experts(weights).items()
    }


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {False: dense(folder / "dense"), True: moe(folder / "moe", sizes="ragged")}


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_is_peft_s_to_rounding(bases, tmp_path, case):
    kind, experts, twice, config = CASES[case]
    base = bases[experts]
    train(base, kind, config, tmp_path / "adapter")
    opened = merge(open_checkpoint(base), tmp_path / "adapter", "merged")
    ours = plainly_named({n: opened.load(n, opened.read(n), ...) for n in opened.where})
    theirs = plainly_named(merge_by_peft(base, kind, tmp_path / "adapter", tmp_path / "out"))
    before = plainly_named(load_file(base / "model.safetensors"))
    changed = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert changed
    for name, their in theirs.items():
        mine, was = ours[name].float(), before[name].float()
        if name not in changed:
            # transformers casts A_log and the delta rule's norm, which are F32, to the model's type
            assert torch.equal(their, before[name].to(their.dtype)), name
            continue
        step = 2.0**-7 * torch.maximum(mine.abs(), their.float().abs())
        # float32 sums of factors about 0.05; and what was rounded before it was added
        lost = 2.0**-22 * (was.abs() + 1) + twice * 2.0**-8 * (mine - was).abs()
        assert ((mine - their.float()).abs() <= step + lost).all(), name
        if not twice:
            assert (mine != their.float()).float().mean() < 0.002, name
