"""transformers loads what we write: no key missing, values as we decode them, logits close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.utils import logging

from quant.opening import open_value
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.recipe.recipe import read_recipe
from tests.checkpoints import hub_config, make_weights, write_checkpoint

logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = Path(__file__).parent.parent / "qwen35_convert" / "text" / "default_text.txt"


def load(folder: Path, dtype=torch.bfloat16, **options):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **options
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not [k for k in info["unexpected_keys"] if not k.startswith("mtp.")]
    assert not info["mismatched_keys"]
    return model.eval()


def fp8(folder: Path):
    return load(folder, quantization_config=FineGrainedFP8Config(dequantize=True))


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.float()


def mean_kl(source: torch.Tensor, ours: torch.Tensor) -> float:
    p, q = source.log_softmax(-1), ours.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def random_ids(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("sizes", ["ragged", "blocky"])
def test_bf16_split_has_the_logits_of_the_source(tmp_path, is_moe, sizes):
    config = hub_config(moe=is_moe, sizes=sizes)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    ids = random_ids(config["text_config"]["vocab_size"])
    assert torch.equal(logits(load(source), ids), logits(load(tmp_path / "out"), ids))


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-block-hub"])
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("sizes", ["ragged", "blocky"])
def test_fp8_block_loads_as_we_decode_it(tmp_path, is_moe, sizes, recipe):
    config = hub_config(moe=is_moe, sizes=sizes)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    out = tmp_path / "out"
    api.convert(source, out, read_recipe(recipe))
    assert_equal_to_our_decode(fp8(out), out)


def assert_equal_to_our_decode(model, out: Path) -> None:
    theirs = {n.replace("language_model.", ""): p for n, p in model.named_parameters()}
    opened = open_checkpoint(out)
    seen = 0
    for atom in opened.layout.atoms.values():
        if atom.hub.split(".")[0] in ("mtp", "visual"):
            continue
        ours = open_value(opened, atom).all().float()
        name = atom.hub if atom.hub.startswith("lm_head") else "model." + atom.hub
        value = theirs[name] if atom.role != "expert" else expert(theirs, atom.name)
        # transformers casts F32 A_log and norms to the model's type when it loads
        assert torch.equal(value, ours.to(value.dtype)), name
        seen += 1
    assert seen > 40


def expert(parameters, name: str) -> torch.Tensor:
    head, number, projection = name.rsplit(".", 2)
    if projection == "down_proj":
        return parameters[f"model.{head}.down_proj"][int(number)]
    both = parameters[f"model.{head}.gate_up_proj"][int(number)]
    return both.chunk(2)[projection == "up_proj"]


def test_the_bundled_model_keeps_its_mind_in_fp8(tmp_path, nano):
    """Held-out text. E4M3 weights are 2.65 % off; that costs this 128-wide model 0.011 nats, and a
    swapped, shifted or lost tensor costs more than 0.1: the bound lies between.
    """
    api.convert(nano, tmp_path / "fp8", read_recipe("fp8-block"))
    api.convert(nano, tmp_path / "bf16", read_recipe("bf16-split"))
    tokens = Tokenizer.from_file(str(nano / "tokenizer.json")).encode(TEXT.read_text()).ids
    ids = torch.tensor(tokens[:1024]).reshape(2, 512)
    source, plain = logits(load(nano), ids), logits(load(tmp_path / "bf16"), ids)
    assert torch.equal(source, plain)
    assert 1e-7 < mean_kl(source, logits(fp8(tmp_path / "fp8"), ids)) < 2e-2


def test_qwen3_next_becomes_a_qwen3_5_with_the_same_logits(tmp_path):
    """Two value heads per key head of unequal width: a wrong split of qkvz or ba cannot agree."""
    config = Qwen3NextConfig(
        vocab_size=300,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=48,
        num_experts=5,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    torch.manual_seed(35)
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    api.convert(tmp_path / "in", tmp_path / "out", read_recipe("bf16-split"))
    # float32: products of other shapes are added in another order, and bf16 would show it
    theirs = load(tmp_path / "in", dtype=torch.float32)
    ours = load(tmp_path / "out", dtype=torch.float32)
    assert type(ours).__name__ == "Qwen3_5MoeForCausalLM"
    assert type(theirs).__name__ == "Qwen3NextForCausalLM"
    ids = random_ids(300)
    apart = (logits(theirs, ids) - logits(ours, ids)).abs().max()
    assert apart <= 1e-6 * logits(theirs, ids).abs().max()


def test_fp8_channel_loads_with_compressed_tensors_as_we_decode_it(tmp_path):
    config = hub_config()
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    out = tmp_path / "out"
    api.convert(source, out, read_recipe("fp8-channel"))
    model = load(out)
    opened = open_checkpoint(out)
    stored = {n: p.detach() for n, p in model.named_parameters()}
    seen = 0
    for atom in opened.layout.atoms.values():
        if atom.quantized and not atom.hub.startswith("mtp."):
            name = f"model.{atom.hub}"
            raw, scale = (opened.read(part) for part in atom.parts)
            assert torch.equal(stored[name].view(torch.uint8), raw.view(torch.uint8)), name
            assert torch.equal(stored[f"{name}_scale"], scale), name
            seen += 1
    assert seen == 3 * 6 + 7
