"""Who reads the residual stream after a layer, against the checkpoint's own tensors."""

from __future__ import annotations

import pytest
import torch

from qwen35_convert.containers.registry import open_checkpoint
from runtime.layerwise import Walk
from runtime.stream import embedding_gram, readers_grams
from tests.checkpoints import hub_config, make_weights, write_checkpoint

READERS = {
    "linear_attention": ["linear_attn.in_proj_" + part for part in ("qkv", "z", "b", "a")],
    "full_attention": ["self_attn." + part for part in ("q_proj", "k_proj", "v_proj")],
}

MTP = "mtp.layers.0."


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def walk(request, tmp_path_factory):
    config = hub_config(moe=request.param)
    folder = write_checkpoint(tmp_path_factory.mktemp("stream"), config, make_weights(config))
    texts = [torch.arange(4)]
    return Walk.over(open_checkpoint(folder), texts, device="cpu", dtype=torch.float32)


def expected(walk, norm, names):
    r = torch.cat([walk.loader.tensor(name) for name in names]) * (1 + walk.loader.tensor(norm))
    return r.T @ r


def over_mean(gram):
    return gram / gram.diagonal().mean()


def with_router(walk, gram, prefix):
    if not walk.config.moe or prefix is None:
        return over_mean(gram)
    router = expected(walk, prefix + "post_attention_layernorm", [prefix + "mlp.gate"])
    return over_mean(gram) + over_mean(router)


def check(walk, layer, gram, own, following):
    """Hold both grams against one, and the routers of two layers."""
    mixed, fed = readers_grams(walk, layer)
    assert (mixed is fed) == (not walk.config.moe)
    for found, prefix in ((mixed, own), (fed, following)):
        wanted = with_router(walk, gram, prefix)
        assert torch.allclose(over_mean(found), over_mean(wanted), rtol=1e-4, atol=1e-4)


def test_the_next_mixer_and_routers_read_what_a_layer_adds(walk):
    for layer, kind in enumerate(walk.config.layer_types[1:]):
        prefix = f"layers.{layer + 1}."
        gram = expected(walk, prefix + "input_layernorm", [prefix + x for x in READERS[kind]])
        check(walk, layer, gram, f"layers.{layer}.", prefix)


def test_the_head_reads_what_the_last_layer_adds(walk):
    last = len(walk.config.layer_types) - 1
    for layer, norm, own in ((last, "norm", f"layers.{last}."), (None, "mtp.norm", MTP)):
        check(walk, layer, expected(walk, norm, [walk.head]), own, None)


def test_the_first_layer_reads_the_embedding(walk):
    own = "layers.0."
    parts = READERS[walk.config.layer_types[0]]
    gram = expected(walk, own + "input_layernorm", [own + part for part in parts])
    if walk.config.moe:
        wanted = with_router(walk, gram, own)
    else:
        gate_up = [own + "mlp.gate_proj", own + "mlp.up_proj"]
        wanted = gram + expected(walk, own + "post_attention_layernorm", gate_up)
    found = embedding_gram(walk)
    assert torch.allclose(over_mean(found), over_mean(wanted), rtol=1e-4, atol=1e-4)
