"""Every form of rope converts, since no weight depends on it; what is computed is transformers'."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.artifact import Conversion
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.inspection.source import inspect
from qwen35_convert.recipe.recipe import build_recipe, read_recipe
from qwen35_convert.text.generation import Prompt
from qwen35_convert.verification.logits import LogitsCheck
from tests.llama_cpp import LlamaCpp
from tests.runtime.models import distance, full, load, text_ids, transformers_logits
from tests.variants import NANO, nano

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN: dict[str, Any] = json.loads((NANO / "config.json").read_text())["text_config"][
    "rope_parameters"
]
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 2.5}
OLD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e7}
COMPUTED = {
    "linear": LINEAR,
    "yarn": YARN,
    "yarn-released": YARN | {"original_max_position_embeddings": 262144},
    "attention-factor": YARN | {"attention_factor": 1.5},
    "mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "smooth-ramp": YARN | {"truncate": False},
}
CARRIED = {
    "dynamic": PLAIN | {"rope_type": "dynamic", "factor": 2.0},
    "longrope": PLAIN
    | {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "llama3": PLAIN
    | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
ALL = COMPUTED | CARRIED
# The bounds of tests.runtime and tests.test_llama_cpp: sums in float32 in another order.
FLOAT32, LLAMA = 1e-5, 5e-5


def model(folder: Path, block: dict[str, Any] | None, **text: Any) -> Path:
    return nano(folder, text={"rope_parameters": block, **text})


def to_gguf(source: Path, out: Path, scheme: str = "f32") -> Conversion:
    recipe = build_recipe({"quantize": {"scheme": scheme}, "export": {"format": "gguf"}})
    return api.convert(source, out, recipe)


@pytest.mark.parametrize("name", COMPUTED)
def test_the_logits_are_those_of_transformers(tmp_path, name):
    source = model(tmp_path / "in", COMPUTED[name])
    ids = text_ids(NANO, 200)
    expected = transformers_logits(source, ids)
    assert distance(full(load(source), ids), expected) < FLOAT32
    assert distance(full(load(NANO), ids), expected) > 100 * FLOAT32


@pytest.mark.parametrize("name", ALL)
def test_a_folder_carries_the_block_and_proves_itself(tmp_path, name):
    source, out = model(tmp_path / "in", ALL[name]), tmp_path / "out"
    assert api.convert(source, out, read_recipe("bf16-split")).report.passed
    block = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert block | ALL[name] == block
    assert api.verify(out, source).failures == []
    (out / "qwen35-receipt.json").unlink()
    assert api.verify(out, source).failures == []


@pytest.mark.parametrize("name", ["linear", "yarn", "attention-factor", "mscale"])
def test_llama_cpp_computes_from_the_file_what_transformers_does(tmp_path, name):
    source, out = model(tmp_path / "in", COMPUTED[name]), tmp_path / "out.gguf"
    assert to_gguf(source, out).report.passed
    ids = text_ids(NANO, 200)
    with LlamaCpp(out, 256) as theirs:
        found = torch.from_numpy(theirs.logits(ids))
    assert distance(found, transformers_logits(source, ids)) < LLAMA
    assert distance(full(load(out), ids), found) < LLAMA
    (tmp_path / "out.gguf.receipt.json").unlink()
    assert api.verify(out, source).failures == []
    assert api.verify(out).failures == []


def test_from_a_gguf_file_the_folder_has_the_block_again(tmp_path):
    source = model(tmp_path / "in", YARN)
    to_gguf(source, tmp_path / "a.gguf", "bf16")
    api.convert(tmp_path / "a.gguf", tmp_path / "out", read_recipe("bf16-split"))
    ours, theirs = (open_checkpoint(p).config.rope for p in (tmp_path / "out", source))
    assert ours.as_dict() == pytest.approx(theirs.as_dict())


def test_a_note_says_what_llama_cpp_takes_from_its_command_line(tmp_path):
    done = to_gguf(model(tmp_path / "in", COMPUTED["betas"]), tmp_path / "out.gguf")
    assert any("--yarn-beta-fast 8 --yarn-beta-slow 2" in note for note in done.plan.notes)


@pytest.mark.parametrize(
    ("name", "what"),
    [("longrope", "'longrope'"), ("llama3", "'llama3'"), ("smooth-ramp", "truncate false")],
)
def test_what_gguf_cannot_say_is_refused_before_a_byte(tmp_path, name, what):
    source, out = model(tmp_path / "in", ALL[name]), tmp_path / "out.gguf"
    with pytest.raises(FormatError, match=f"{what}.*no place in a GGUF file") as refusal:
        to_gguf(source, out)
    assert refusal.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name):
    source = model(tmp_path / "in", CARRIED[name])
    with pytest.raises(FormatError, match=f"rope_type '{name}' is not computed"):
        list(api.run_text(source, Prompt("In the beginning", max_tokens=2)))
    recipe = read_recipe("bf16-split", ["verify.level=logits"])
    with pytest.raises(FormatError, match=f"rope_type '{name}' is not computed"):
        api.convert(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_level_logits_sees_another_scaling(tmp_path):
    source, out = model(tmp_path / "in", YARN), tmp_path / "out"
    (tmp_path / "text.txt").write_text("And the evening and the morning were the first day. " * 40)
    check = LogitsCheck(str(tmp_path / "text.txt"))
    api.convert(source, out, read_recipe("bf16-split"))
    assert api.verify(out, source, level="logits", logits=check).logits["kl_mean"] < 1e-6
    config = json.loads((out / "config.json").read_text())
    config["rope_parameters"]["factor"] = 8.0
    (out / "config.json").write_text(json.dumps(config))
    report = api.verify(out, source, level="logits", logits=check)
    failures = [str(one) for one in report.failures]
    assert any("factor is 8.0, expected 4.0" in one for one in failures)
    assert any("mean KL" in one for one in failures)


def test_the_older_block_becomes_the_newer_one(tmp_path):
    """transformers computes the same from both."""
    source = model(
        tmp_path / "in", None, rope_scaling=OLD, rope_theta=1e7, partial_rotary_factor=0.25
    )
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "rope_scaling" not in written
    (tmp_path / "out" / "qwen35-receipt.json").unlink()
    assert api.verify(tmp_path / "out", source).failures == []
    ids = text_ids(NANO, 100)
    expected = transformers_logits(source, ids)
    assert distance(transformers_logits(tmp_path / "out", ids), expected) == 0
    assert distance(full(load(source), ids), expected) < FLOAT32


STATED = {
    "attention_factor": 0.1 * log(4) + 1,
    "beta_fast": 32,
    "truncate": True,
    "original_max_position_embeddings": 64,
}


def test_what_yarn_works_out_may_be_stated_and_left_out(tmp_path):
    """Other tools write the defaults, or leave them out."""
    source = model(tmp_path / "in", YARN)
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    (tmp_path / "out" / "qwen35-receipt.json").unlink()
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= STATED
    path.write_text(json.dumps(config))
    assert api.verify(tmp_path / "out", source).failures == []
    config["rope_parameters"]["attention_factor"] = 1.5
    path.write_text(json.dumps(config))
    (failure,) = api.verify(tmp_path / "out", source).failures
    assert "rope_parameters.attention_factor is 1.5, expected 1.13" in str(failure)


def test_two_blocks_that_differ_are_refused(tmp_path):
    source = model(tmp_path / "in", PLAIN, rope_scaling=OLD)
    assert any("rope_scaling" in p["problem"] for p in inspect(source).problems)
    with pytest.raises(FormatError, match=r"rope_scaling beside .*rope_parameters"):
        api.convert(source, tmp_path / "out", read_recipe("bf16-split"))


def test_inspect_shows_the_scaling(tmp_path):
    shown = inspect(model(tmp_path / "in", YARN)).config
    assert shown["rope_type"] == "yarn"
    assert (shown["factor"], shown["original_max_position_embeddings"]) == (4.0, 64)
    assert "rope_type" not in inspect(NANO).config
