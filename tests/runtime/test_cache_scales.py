"""Scales of an FP8 cache, against what transformers caches, and models that run with one."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from formats.errors import FormatError
from quant.errors import QuantError
from qwen35_convert.containers.registry import open_checkpoint
from runtime.cache_scales import CacheAmax
from runtime.compare import compare_logits, streamed_logits
from runtime.kernels.attention.fp8_cache import rounded
from runtime.layerwise import observe_all
from runtime.workers import Workers
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.runtime.models import SHORT, distance, load, pools_for, run, some_ids

logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
HUB = "model.language_model."
ATTENTION = "layers.1.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
BLOCK = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


def written(folder, scales=None, block=BLOCK, *, moe=False):
    """Write a short checkpoint; with scales by name, also a config that asks for an FP8 cache."""
    config = hub_config(moe=moe, sizes="ragged", **SHORT)
    weights = make_weights(config)
    if scales is not None:
        config["quantization_config"] = block
        weights |= {f"{HUB}{name}": torch.tensor([s]) for name, s in scales.items()}
    return write_checkpoint(folder, config, weights)


def pair(k=0.003, v=0.0004):
    return {f"{ATTENTION}.k_scale": k, f"{ATTENTION}.v_scale": v}


@pytest.mark.parametrize("moe", [False, True])
def test_a_scale_is_the_largest_that_transformers_caches_over_448(tmp_path, moe):
    folder = written(tmp_path, moe=moe)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(some_ids(50, load(folder)))
    texts, largest = list(ids.split([30, 2, 18])), []
    for text in texts:
        cache = DynamicCache(config=model.config)
        model(text[None], past_key_values=cache, use_cache=True)
        largest.append([cache.layers[1].keys.abs().max(), cache.layers[1].values.abs().max()])
    expected = torch.tensor(largest).amax(0) / 448
    amax = CacheAmax()
    with Workers("cpu") as workers:
        observe_all(open_checkpoint(folder), texts, None, workers=workers, see_cache=amax.see)
    scales = amax.scales()
    assert scales.keys() == {ATTENTION}
    got = torch.cat([*scales[ATTENTION].values()])
    assert (got.dtype, got.shape) == (torch.bfloat16, (2,))
    assert ((got.float() - expected).abs() <= expected * 2**-8).all()


def test_what_is_not_finite_gets_no_scale_and_zeros_get_one():
    amax = CacheAmax()
    amax.see("a", torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1, 4), -448.0))
    scales = amax.scales()["a"]
    assert [scale.item() for scale in scales.values()] == [1.0, 1.0]
    amax.see("a", torch.full((1, 2, 1, 4), torch.nan), torch.zeros(1, 2, 1, 4))
    with pytest.raises(QuantError, match="a has keys or values that are NaN or infinite"):
        amax.scales()


def test_scale_and_rounding_are_those_of_compressed_tensors():
    args = QuantizationArgs(**SCHEME)
    x = torch.randn(3, 40, 2, 16, generator=torch.Generator().manual_seed(3)) * 7
    scale, zero = calculate_qparams(*(end.bfloat16() for end in x.aminmax()), args)
    amax = CacheAmax()
    amax.see("a", x.bfloat16(), x.bfloat16())
    assert all(torch.equal(ours, scale) for ours in amax.scales()["a"].values())
    theirs = fake_quantize(x, scale.float(), zero.float(), args)
    assert torch.equal(rounded(x, scale.float()), theirs)


def test_a_model_with_an_fp8_cache_rounds_whatever_way_it_is_run(tmp_path):
    plain, fp8 = written(tmp_path / "plain"), written(tmp_path / "fp8", pair())
    ids = some_ids(40, load(plain))
    model, states = load(fp8), [pools_for(load(fp8)) for _ in range(3)]
    whole = run(model, ids, states[0])
    cut = run(model, ids, states[1], cuts=(9, 20))
    stepped = run(model, ids, states[2], decode=25)
    assert distance(cut, whole) < 1e-5
    assert distance(stepped, whole) < 1e-5
    (streamed,) = streamed_logits(open_checkpoint(fp8), torch.tensor([ids]), device="cpu")
    assert distance(streamed, whole) < 1e-5
    assert distance(run(load(plain), ids, pools_for(model)), whole) > 1e-4
    keys, values = states[0].pools()[1]
    assert torch.equal(keys, rounded(keys, torch.tensor(0.003)))
    assert torch.equal(values, rounded(values, torch.tensor(0.0004)))


@pytest.mark.parametrize(
    "names",
    [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_spelling_of_a_scale_is_the_same_cache(tmp_path, names):
    here, there = pair(), dict(zip(names, pair().values(), strict=True))
    folders = [
        written(tmp_path / "here", here),
        written(tmp_path / "there", {f"{ATTENTION}.{name}": s for name, s in there.items()}),
    ]
    ids = torch.tensor([some_ids(20, load(folders[0]))])
    one, other = (
        torch.cat([*streamed_logits(open_checkpoint(f), ids, device="cpu")], 1) for f in folders
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("asked", [None, SCHEME | {"strategy": "attn_head"}])
def test_without_the_config_that_asks_for_it_nothing_is_rounded(tmp_path, asked):
    plain = written(tmp_path / "plain")
    other = written(tmp_path / "other", pair(), BLOCK | {"kv_cache_scheme": asked})
    assert load(other).layers[1].mixer.cache is None
    assert load(plain).layers[1].mixer.cache is None


def test_a_missing_scale_is_1_as_in_engines_and_two_numbers_are_refused(tmp_path):
    (_, v), *_ = ([*pair().items()],)
    cache = load(written(tmp_path / "one", dict([v]))).layers[1].mixer.cache
    assert (cache.key_scale.item(), cache.value_scale.item()) == (1.0, pytest.approx(0.0004))
    folder = written(tmp_path / "two", {f"{ATTENTION}.k_scale": [0.1, 0.2]})
    with pytest.raises(FormatError, match=r"k_scale is F32 of shape \[1, 2\], expected one number"):
        load(folder)


def test_the_mtp_head_keeps_its_cache(tmp_path):
    model = load(written(tmp_path, pair()))
    assert model.mtp.layer.mixer.cache is None


def test_as_a_source_it_is_what_its_weights_say(tmp_path):
    plain, fp8 = written(tmp_path / "plain"), written(tmp_path / "fp8", pair())
    opened = {f.name: open_checkpoint(f) for f in (plain, fp8)}
    ids = torch.tensor([some_ids(30, load(plain))])
    report = compare_logits(opened["fp8"], opened["plain"], ids, device="cpu")
    assert report.kl_mean == 0
    report = compare_logits(opened["plain"], opened["fp8"], ids, device="cpu")
    assert 0 < report.kl_mean < 0.1
