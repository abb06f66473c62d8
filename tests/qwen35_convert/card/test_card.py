"""The card of an artifact: the front matter that the hub reads, and nothing made up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import qwen35_convert as q
from tests.adapters import lora, write_adapter
from tests.qwen35_convert.card.test_front_matter import CARD
from tests.variants import nano as nano_with


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return nano_with(tmp_path / "in", files={"README.md": CARD})


def card_of(out: Path) -> tuple[dict[str, Any], str]:
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_front_matter_is_the_source_s_and_true(source, tmp_path):
    q.convert(source, tmp_path / "out", "fp8-block")
    front, body = card_of(tmp_path / "out")
    assert front == {
        "license": "other",
        "license_name": "borealis",
        "license_link": "https://example.org/LICENSE",
        "language": ["en", "no", "zh"],
        "pipeline_tag": "text-generation",  # vision is dropped
        "library_name": "transformers",
        "tags": ["chat", "qwen3.5", "qwen35"],
    }
    assert "Verified against its source at level tensors: passed." in body
    assert body.rstrip().endswith("# Borealis")
    assert ModelCard((tmp_path / "out" / "README.md").read_text()).data.license == "other"


def test_what_is_kept_decides_the_task(source, tmp_path):
    q.convert(source, tmp_path / "out", "fp8-block-hub")
    vision = json.loads((source / "config.json").read_text()).get("vision_config")
    kept = "image-text-to-text" if vision else "text-generation"
    assert card_of(tmp_path / "out")[0]["pipeline_tag"] == kept


def test_without_a_card_nothing_is_made_up(nano, tmp_path):
    q.convert(nano, tmp_path / "out", "bf16-split", q.RunOptions(verify=False))
    front, body = card_of(tmp_path / "out")
    assert set(front) == {"pipeline_tag", "library_name", "tags"}
    assert "was not verified" in body
    assert "the card of the source" not in body


def test_the_recipe_in_the_card_makes_the_same_model_again(source, tmp_path):
    changes = ["quantize.scale=float32", "mtp=drop"]
    q.convert(source, tmp_path / "one", "fp8-block", overrides=changes)
    _, body = card_of(tmp_path / "one")
    (tmp_path / "recipe.yaml").write_text(body.split("```yaml\n")[1].split("```")[0])
    q.convert(source, tmp_path / "two", tmp_path / "recipe.yaml")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two


def test_the_receipt_lists_the_card_and_a_new_one_is_right(source, tmp_path):
    out = tmp_path / "out"
    q.convert(source, out, "fp8-block")
    receipt = json.loads((out / "qwen35-receipt.json").read_text())
    assert "README.md" in receipt["output"]["files"]
    assert q.verify(out, source).passed
    (out / "README.md").write_text("# Another card\n")
    assert q.verify(out, source).passed
    (out / "README.md").unlink()
    assert q.verify(out, source).passed


def test_measured_predictions_are_told(source, tmp_path, short_text):
    measured = ["verify.max_kl=1.0", f"verify.text={short_text}"]
    q.convert(source, tmp_path / "out", "fp8-block", overrides=measured)
    body = card_of(tmp_path / "out")[1]
    assert "at level logits: passed" in body
    assert "Mean KL divergence 0." in body


def test_an_adapter_is_told(source, tmp_path):
    config = json.loads((source / "config.json").read_text())["text_config"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors = lora("model.layers.0.mlp.up_proj", inner, hidden)
    adapter = write_adapter(tmp_path / "tuned", tensors)
    q.convert(q.Merge(adapter, source), tmp_path / "out", "bf16-split")
    body = card_of(tmp_path / "out")[1]
    assert body.startswith("\n# tuned, bf16-split")
    assert "qwen35 convert ADAPTER --base SOURCE -o OUT" in body


def test_the_place_of_an_artifact_is_not_in_its_card(source, tmp_path):
    moved = shutil.copytree(source, tmp_path / "elsewhere" / "in")
    for folder, name in ((source, "a"), (moved, "b")):
        q.convert(folder, tmp_path / name, "fp8-block")
    assert card_of(tmp_path / "a") == card_of(tmp_path / "b")
