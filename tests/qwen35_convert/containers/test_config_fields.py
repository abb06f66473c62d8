"""config.json of another tool: what it adds, loses or says elsewhere is compared by meaning.

Every field and every spelling that is known to be right or wrong: `tests.planted`.
"""

from __future__ import annotations

import shutil

import pytest

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.checkpoints import dense
from tests.qwen35_convert.verification.damage import edit_config

NO_PROOF = api.RunOptions(verify=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source and its artifact in the text layout."""
    folder = tmp_path_factory.mktemp("fields")
    source = dense(folder / "in")
    api.convert(source, folder / "out", read_recipe("bf16-split"), options=NO_PROOF)
    return source, folder / "out"


@pytest.fixture
def check(made, tmp_path):
    """Return what is said of an artifact whose config has been changed."""

    def changed(change):
        out = shutil.copytree(made[1], tmp_path / "out")
        edit_config(out, change)
        return [
            f"{f.tensor} {f.problem}" for f in api.verify(out, made[0], level="structure").failures
        ]

    return changed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"anything": 5}, "anything is 5, expected absent"),
        ({"pad_token_id": 0}, "pad_token_id is 0, expected absent"),
        ({"mamba_ssm_dtype": None}, 'mamba_ssm_dtype is null, expected "float32"'),
        ({"torch_dtype": "float16"}, 'torch_dtype is "float16", expected "bfloat16"'),
        ({"dtype": "torch.bfloat16"}, 'dtype is "torch.bfloat16", expected "bfloat16"'),
        ({"full_attention_interval": 3}, "full_attention_interval is 3, expected absent"),
        ({"rope_theta": 10000}, "rope_theta is 10000.0, expected 10000000.0"),
        ({"num_experts": 4}, "num_experts is 4, expected absent"),
    ],
)
def test_what_is_not_the_source_s_is_named(check, fields, said):
    assert check(lambda config: config.update(fields)) == [f"config.json {said}"]


@pytest.mark.parametrize(
    "fields",
    [
        {"anything": None, "something": [], "more": {}},
        {"transformers_version": "5.24.0", "use_cache": False, "initializer_range": 0.01},
        {"full_attention_interval": 4, "output_gate_type": "swish", "is_causal": True},
        {"rope_theta": 1e7, "torch_dtype": "bfloat16", "attn_output_gate": True},
    ],
)
def test_what_changes_nothing_is_not(check, fields):
    assert check(lambda config: config.update(fields)) == []


def test_a_block_of_rope_without_theta_is_named_where_transformers_prefers_it(check):
    """transformers lets rope_scaling win over rope_parameters, and then takes 10000."""

    def add(config):
        config["rope_scaling"] = {"type": "mrope"} | config["rope_parameters"]
        del config["rope_scaling"]["rope_theta"]

    blocks, field = check(add)
    assert blocks.startswith("config.json has rope_scaling beside rope_parameters, and they differ")
    assert field == "config.json rope_scaling.rope_theta is absent, expected 10000000.0"
