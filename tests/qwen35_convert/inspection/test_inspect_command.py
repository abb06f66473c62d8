"""The command `inspect`: what it refuses, what it shows of serving."""

from __future__ import annotations

import json

import pytest

from tests.adapters import lora, write_adapter
from tests.qwen35_convert.command import called


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "0"], "--context is 0"),
        (["--batch", "-1"], "--batch is -1"),
        (["--memory", "0GB"], "--memory is 0"),
        (["--memory", "much"], "--memory: 'much' is not a size"),
        (["--context", "many"], "'--context': Input should be a valid integer"),
        (["--serving", "vlm"], "--serving is 'vlm'"),
    ],
)
def test_what_is_no_number_or_engine_is_misuse(nano, arguments, said):
    done = called("inspect", nano, *arguments)
    assert (done.returncode, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert done.stdout == ""


def test_an_answer_about_memory_fits_on_the_screen(nano):
    done = called("inspect", nano, "--context", "8192", "--batch", "4", "--memory", "1GB")
    lines = done.stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("  vllm"))
    assert "1.00 GB hold 4 x " in row
    assert row.endswith(" x 8,192")
    assert len(lines) <= 24
    assert any(line.endswith("--max-model-len 8192 --max-num-seqs 4") for line in lines)


def test_too_little_memory_is_told(nano):
    done = called("inspect", nano, "--memory", "1MB")
    assert "1.00 MB is too little" in done.stdout


def test_the_same_is_in_json(nano):
    found = json.loads(called("inspect", nano, "--memory", "1GB", "--json").stdout)["serving"]
    assert found["memory"]["engines"]["vllm"]["fits"]
    assert {e["engine"]: e["loads"] for e in found["engines"]} == {
        "vllm": True, "sglang": True, "transformers": True, "llama.cpp": False, "ollama": False,
    }  # fmt: skip
    assert found["vllm"] == f"vllm serve {nano} --max-model-len 4096 --max-num-seqs 1"


def test_one_engine_alone(nano):
    done = called("inspect", nano, "--serving", "transformers")
    assert done.stdout.startswith("transformers transformers 5.2 or newer\nserve       import")


@pytest.mark.parametrize("command", ["inspect", "quantize", "imatrix"])
def test_an_adapter_is_taken_with_its_model(command, nano, tmp_path):
    config = json.loads((nano / "config.json").read_text())["text_config"]
    tensors = lora("model.layers.0.mlp.up_proj", config["intermediate_size"], config["hidden_size"])
    adapter = write_adapter(tmp_path / "tuned", tensors)
    more = {
        "inspect": ["--json"],
        "quantize": ["-o", tmp_path / "out", "--scheme", "fp8-block", "-q", "--json"],
        "imatrix": ["-o", tmp_path / "imatrix.gguf", "--chunks", "1", "-q", "--json"],
    }[command]
    done = called(command, adapter, "--base", nano, *more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema_version"] == 1


def test_an_imatrix_is_that_of_the_merged_model(nano, tmp_path):
    config = json.loads((nano / "config.json").read_text())["text_config"]
    tensors = lora("model.layers.0.mlp.up_proj", config["intermediate_size"], config["hidden_size"])
    adapter = write_adapter(tmp_path / "tuned", tensors)
    merged, plain = tmp_path / "merged.gguf", tmp_path / "plain.gguf"
    for out, source in ((merged, [adapter, "--base", nano]), (plain, [nano])):
        assert called("imatrix", *source, "-o", out, "--chunks", "1", "-q").returncode == 0
    assert merged.read_bytes() != plain.read_bytes()
