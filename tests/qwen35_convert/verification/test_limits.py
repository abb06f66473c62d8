"""Default limits of the logits: every scheme has one, the costliest of a file decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from formats.tensor import TensorInfo
from quant.ggml.kinds import WRITABLE
from quant.registry import SCHEMES
from qwen35_convert.verification.limits import LIMITS, LOOSEST, costliest, limits_of


def artifact(**kilobytes: int) -> SimpleNamespace:
    """Return what looks like a checkpoint with so many kB of each scheme."""
    schemes = {name.replace("_block", "-block"): size for name, size in kilobytes.items()}
    atoms = {name: SimpleNamespace(scheme=name, parts=(name,)) for name in schemes}
    infos = {name: TensorInfo(name, "F32", (250 * size,)) for name, size in schemes.items()}
    config = SimpleNamespace(quantization=None)
    return SimpleNamespace(layout=SimpleNamespace(atoms=atoms), infos=lambda: infos, config=config)


@pytest.mark.parametrize("scheme", [*SCHEMES, *map(str.lower, WRITABLE), "keep"])
def test_every_scheme_that_is_written_has_a_limit_that_a_model_of_zeros_fails(scheme):
    assert 0 < LIMITS[scheme] <= LOOSEST


@pytest.mark.parametrize(
    ("sizes", "scheme"),
    [
        ({"keep": 10}, "keep"),
        ({"keep": 500, "fp8_block": 500}, "fp8-block"),
        ({"f32": 10, "q8_0": 400, "q6_k": 300, "q4_k": 290}, "q4_k"),
        ({"q8_0": 995, "q2_k": 5}, "q8_0"),
        ({"q8_0": 985, "q2_k": 15}, "q2_k"),
        ({"q8_0": 900, "of_a_plugin": 100}, "of_a_plugin"),
    ],
)
def test_the_costliest_scheme_decides_unless_it_holds_next_to_nothing(sizes, scheme):
    assert costliest(artifact(**sizes)) == scheme
    limits = limits_of(artifact(**sizes), None, None)
    assert limits.why == f"default for {scheme}"
    assert limits.max_kl == pytest.approx(LIMITS.get(scheme, LOOSEST))


def test_an_fp8_cache_adds_what_it_costs():
    cached = artifact(keep=995, fp8_block=5)
    cached.config.quantization = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    limits = limits_of(cached, None, None)
    assert limits.max_kl == pytest.approx(LIMITS["keep"] + 0.0088, rel=1e-3)
    assert limits.why == "default for keep and an FP8 cache"
    assert limits_of(cached, 0.5, None).max_kl == 0.5


def test_what_is_stated_counts_and_a_top1_alone_leaves_the_default_of_the_kl():
    assert limits_of(artifact(keep=1), 0.5, None).as_dict() == {
        "max_kl": 0.5,
        "min_top1": None,
        "why": "stated",
    }
    limits = limits_of(artifact(q8_0=1), None, 0.9)
    assert (limits.max_kl, limits.min_top1) == (0.0068, 0.9)
