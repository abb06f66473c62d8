"""An embedding model stays one: its class, its names, its files; GGUF says how it pools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from qwen35_convert import api
from qwen35_convert.artifact import Conversion
from qwen35_convert.inspection.source import inspect
from qwen35_convert.recipe.recipe import build_recipe, read_recipe
from qwen35_convert.text.generation import Prompt
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.llama_cpp import LlamaCpp
from tests.runtime.models import distance, text_ids
from tests.variants import LAST, MODULES, NANO, base_model, embedder, nano, write

pytestmark = pytest.mark.filterwarnings("ignore")

FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
# Sums in float32 in another order, as in tests.test_llama_cpp.
FLOAT32 = 5e-5


def hidden(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return transformers' hidden states after the final norm [T, H]; no weight may be missing."""
    model, info = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).last_hidden_state[0]


def names_of(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def class_of(folder: Path) -> str:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return name


def to_gguf(source: Path, scheme: str = "f32") -> Conversion:
    recipe = build_recipe({"quantize": {"scheme": scheme}, "export": {"format": "gguf"}})
    return api.convert(source, source.with_name("out.gguf"), recipe)


@pytest.mark.parametrize("receipt", [True, False])
@pytest.mark.parametrize("recipe", ["bf16-split", "fp8-block", "fp8-channel"])
def test_a_folder_is_the_same_embedding_model(tmp_path, recipe, receipt):
    source, out = embedder(tmp_path / "in"), tmp_path / "out"
    assert api.convert(source, out, read_recipe(recipe)).report.passed
    assert class_of(out) == "Qwen3_5TextModel"
    plain = {n for n in names_of(out) if "scale" not in n}
    assert plain == names_of(source)
    for name in FILES:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    if recipe == "bf16-split":
        ids = text_ids(NANO, 100)
        assert torch.equal(hidden(out, ids), hidden(source, ids))
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    assert api.verify(out, source).failures == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_base_model_needs_no_head_whatever_the_flag_says(tmp_path, moe, tied):
    source, out = base_model(tmp_path / "in", moe=moe, tie_word_embeddings=tied), tmp_path / "out"
    assert api.convert(source, out, read_recipe("bf16-split")).report.passed
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    ids = list(range(40))
    assert torch.equal(hidden(out, ids), hidden(source, ids))
    (out / "qwen35-receipt.json").unlink()
    assert api.verify(out, source).failures == []


@pytest.mark.parametrize("layout", ["hub", "text"])
def test_a_base_model_with_vision_keeps_its_class_or_becomes_its_text_part(tmp_path, layout):
    source, out = base_model(tmp_path / "in", nested=True), tmp_path / "out"
    vision = "keep" if layout == "hub" else "drop"
    recipe = build_recipe({"layout": layout, "vision": vision, "quantize": {"scheme": "keep"}})
    assert api.convert(source, out, recipe).report.passed
    assert class_of(out) == ("Qwen3_5Model" if layout == "hub" else "Qwen3_5TextModel")
    if layout == "hub":
        assert names_of(out) == names_of(source)
    ids = list(range(40))
    assert torch.equal(hidden(out, ids), hidden(source, ids))


def test_a_causal_model_with_modules_stays_one_and_keeps_them(tmp_path):
    """Qwen3-Embedding is published so."""
    files = {"modules.json": MODULES, "1_Pooling/config.json": LAST}
    source, out = nano(tmp_path / "in", files=files), tmp_path / "out"
    assert api.convert(source, out, read_recipe("bf16-split")).report.passed
    assert class_of(out) == "Qwen3_5ForCausalLM"
    assert (out / "1_Pooling" / "config.json").is_file()


POOLED = {"lasttoken": 3, "cls_token": 2, "mean_tokens": 1}


@pytest.mark.parametrize("mode", POOLED)
def test_llama_cpp_pools_from_the_file_as_it_says(tmp_path, mode):
    source = embedder(tmp_path / "in", pooling={f"pooling_mode_{mode}": True})
    done = to_gguf(source)
    assert done.report.passed
    assert GgufFile(done.out).kv["qwen35.pooling_type"].value == POOLED[mode]
    assert any("Find: " in note for note in done.plan.notes)
    ids = text_ids(NANO, 100)
    states = hidden(source, ids)
    expected = {"lasttoken": states[-1], "cls_token": states[0], "mean_tokens": states.mean(0)}
    with LlamaCpp(done.out, 128) as theirs:
        assert theirs.pooling == POOLED[mode]
        found = torch.from_numpy(theirs.embedding(ids))
    assert distance(found, expected[mode]) < FLOAT32
    (tmp_path / "out.gguf.receipt.json").unlink()
    assert api.verify(done.out, source).failures == []
    assert api.verify(done.out).failures == []


def test_verify_names_another_pooling(tmp_path):
    source = embedder(tmp_path / "in")
    done = to_gguf(source, "bf16")
    (tmp_path / "out.gguf.receipt.json").unlink()
    write(source, {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}})
    (failure,) = api.verify(done.out, source).failures
    assert "qwen35.pooling_type is 3, expected 1" in str(failure)


OTHER = {
    "modules.json": MODULES[:2],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    "config_sentence_transformers.json": {"prompts": {"query": "Search: "}},
}


@pytest.mark.parametrize("receipt", [True, False])
@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("name", OTHER)
def test_verify_names_a_file_of_the_embedder_that_is_another_or_gone(tmp_path, name, gone, receipt):
    source, out = embedder(tmp_path / "in"), tmp_path / "out"
    api.convert(source, out, read_recipe("bf16-split"))
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    (out / name).unlink()
    if not gone:
        write(out, {name: OTHER[name]})
    assert name in {failure.tensor for failure in api.verify(out, source).failures}


def test_the_same_fields_in_other_words_pass(tmp_path):
    source, out = embedder(tmp_path / "in"), tmp_path / "out"
    api.convert(source, out, read_recipe("bf16-split"))
    (out / "qwen35-receipt.json").unlink()
    write(out, {"modules.json": json.dumps(MODULES, separators=(",", ":"))})
    assert api.verify(out, source).failures == []


def test_from_a_gguf_file_the_folder_is_an_embedding_model_again(tmp_path):
    source = embedder(tmp_path / "in")
    to_gguf(source, "bf16")
    out = tmp_path / "out"
    assert api.convert(tmp_path / "out.gguf", out, read_recipe("bf16-split")).report.passed
    assert class_of(out) == "Qwen3_5TextModel"
    assert names_of(out) == names_of(source)
    assert json.loads((out / "1_Pooling/config.json").read_text())["pooling_mode_lasttoken"] is True
    ids = text_ids(NANO, 60)
    assert distance(hidden(out, ids), hidden(source, ids)) < FLOAT32
    (out / "qwen35-receipt.json").unlink()
    assert api.verify(out, tmp_path / "out.gguf").failures == []


def test_a_pooling_that_llama_cpp_has_not_is_refused_before_a_byte(tmp_path):
    source = embedder(tmp_path / "in", pooling={"pooling_mode_max_tokens": True})
    with pytest.raises(FormatError, match="asks for max, expected one of mean") as refusal:
        to_gguf(source)
    assert refusal.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))


def test_a_module_with_weights_of_its_own_is_refused_by_name(tmp_path):
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    source = embedder(tmp_path / "in", modules=[*MODULES, dense])
    with pytest.raises(FormatError, match="3_Dense is a Dense, which has weights of its own"):
        api.convert(source, tmp_path / "out", read_recipe("bf16-split"))


def test_what_needs_a_head_says_that_there_is_none(tmp_path):
    source = embedder(tmp_path / "in")
    with pytest.raises(FormatError, match="is a Qwen3_5TextModel, which has no head"):
        list(api.run_text(source, Prompt("x", max_tokens=1)))
    recipe = read_recipe("bf16-split", ["verify.level=logits"])
    with pytest.raises(FormatError, match="has no head"):
        api.convert(source, tmp_path / "out", recipe)


def test_inspect_says_that_there_is_no_head(tmp_path):
    shown = inspect(embedder(tmp_path / "in"))
    assert shown.problems == []
    assert any("Qwen3_5TextModel has no head" in note for note in shown.notes)
    assert shown.config["tie_word_embeddings"] is False


def test_a_head_that_is_stored_under_a_base_class_makes_a_causal_model(tmp_path):
    """Nothing that is stored is lost."""
    config = hub_config() | {"architectures": ["Qwen3_5Model"]}
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    assert api.convert(source, tmp_path / "out", read_recipe("bf16-split")).report.passed
    assert class_of(tmp_path / "out") == "Qwen3_5ForCausalLM"
    assert "lm_head.weight" in names_of(tmp_path / "out")
