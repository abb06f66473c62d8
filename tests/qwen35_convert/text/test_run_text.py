"""`run`: text streams from any artifact, the same for the same seed, ending where it should."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.text.generation import Prompt, utf8
from qwen35_convert.text.tokens import chat_prompt, decode_stream, open_tokenizer, stop_ids
from tests.checkpoints import dense
from tests.qwen35_convert.command import called
from tests.variants import TOOL, beside
from tests.variants import nano as variant

ROOT = Path(__file__).parents[3]
PROMPT = "And God said"


def test_a_prompt_that_the_locale_cannot_decode_is_utf8():
    """As Python has it of a command line where LANG is C and its UTF-8 mode is off."""
    words = "Grüße, 你好"
    assert utf8(words) == words
    assert utf8(words.encode().decode("ascii", "surrogateescape")) == words
    with pytest.raises(RecipeError, match="the prompt is not UTF-8"):
        utf8(b"caf\xe9".decode("ascii", "surrogateescape"))


def text_of(artifact: Path, **options) -> str:
    return "".join(api.run_text(artifact, Prompt(PROMPT, max_tokens=24, **options)))


@pytest.mark.filterwarnings("ignore")
def test_greedy_text_is_that_of_transformers(nano):
    model = AutoModelForCausalLM.from_pretrained(nano, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(nano)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, do_sample=False)
    theirs = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert text_of(nano) == theirs


def test_speculation_changes_no_greedy_text(nano):
    assert text_of(nano, speculate=3) == text_of(nano)


def test_a_seed_repeats_and_another_seed_differs(nano):
    one = text_of(nano, temperature=1.0, seed=1)
    assert text_of(nano, temperature=1.0, seed=1) == one
    assert any(text_of(nano, temperature=1.0, seed=s) != one for s in (2, 3, 4))


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-channel", "fp8-block-hub", "bf16-split"])
def test_every_artifact_generates(tmp_path, nano, recipe):
    api.convert(nano, tmp_path / "out", read_recipe(recipe), options=api.RunOptions(verify=False))
    text = text_of(tmp_path / "out")
    assert len(text) > 20
    if recipe == "bf16-split":
        assert text == text_of(nano)


def test_the_command_streams_the_text_and_nothing_else(nano):
    done = called("run", nano, "--prompt", PROMPT, "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(nano) + "\n"


def test_a_chat_prompt_is_what_the_template_says(nano):
    said = chat_prompt(open_checkpoint(nano), "Who is there?")
    assert said == "<|im_start|>user\nWho is there?<|im_end|>\n<|im_start|>assistant\n"


LISTED = [{"name": "default", "template": TOOL}, {"name": "rag", "template": "{{ documents }}"}]
TEMPLATES = {
    "list": beside(chat_template=LISTED),
    "text": beside(chat_template=TOOL),
    "json": {"chat_template.json": {"chat_template": TOOL}},
}


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_knows_every_form_of_template(tmp_path, name, form):
    source = variant(tmp_path / "in", files=TEMPLATES[name], without=["chat_template.jinja"])
    artifact = tmp_path / "out.gguf"
    if form == "gguf":
        options = api.RunOptions(verify=False)
        api.convert(source, artifact, read_recipe("gguf-bf16"), options=options)
    opened = open_checkpoint(artifact if form == "gguf" else source)
    assert chat_prompt(opened, "Hi") == "<|im_start|>user: Hi<|im_end|>"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (beside(chat_template=LISTED[1:]), "has no default chat template, only 'rag'"),
        ({}, "has no chat template"),
    ],
)
def test_a_chat_without_a_default_template_is_refused(tmp_path, files, reason):
    source = variant(tmp_path / "in", files=files, without=["chat_template.jinja"])
    with pytest.raises(FormatError, match=reason):
        chat_prompt(open_checkpoint(source), "Hi")


def test_a_template_may_name_the_special_tokens(tmp_path):
    template = {"chat_template.jinja": "{{ eos_token }}|{{ bos_token }}|{{ messages[0].content }}"}
    source = variant(tmp_path / "in", files=template)
    theirs = AutoTokenizer.from_pretrained(source).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert chat_prompt(open_checkpoint(source), "Hi") == theirs


def test_stop_tokens_beside_the_text_config_count(tmp_path):
    source = variant(
        tmp_path / "in",
        root={"eos_token_id": [17, 18]},
        text={"eos_token_id": None},
        files=beside(eos_token=None),
        without=["generation_config.json"],
    )
    opened = open_checkpoint(source)
    assert stop_ids(opened, open_tokenizer(opened)) == {17, 18}
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    opened = open_checkpoint(tmp_path / "out")
    assert stop_ids(opened, open_tokenizer(opened)) == {17, 18}


def test_a_template_cannot_reach_python(nano, tmp_path):
    folder = shutil.copytree(nano, tmp_path / "in")
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(FormatError, match="chat template"):
        chat_prompt(open_checkpoint(folder), "hello")


def test_stop_tokens_are_those_of_every_file(nano, tmp_path):
    opened = open_checkpoint(nano)
    assert stop_ids(opened, open_tokenizer(opened)) == {1984, 1986}
    folder = shutil.copytree(nano, tmp_path / "in")
    (folder / "generation_config.json").unlink()
    opened = open_checkpoint(folder)
    assert stop_ids(opened, open_tokenizer(opened)) == {1984, 1986}


def test_half_a_character_waits_for_its_other_half(nano):
    tokenizer = open_tokenizer(open_checkpoint(nano))
    text = "Grüße aus Österreich — 你好"
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text)
    assert "".join(decode_stream(tokenizer, ids)) == text


def test_a_checkpoint_without_a_usable_tokenizer_is_refused(tmp_path):
    source = dense(tmp_path / "in")
    (source / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(FormatError, match="is not a tokenizer"):
        list(api.run_text(source, Prompt(PROMPT)))
    (source / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match=r"tokenizer\.json is missing"):
        list(api.run_text(source, Prompt(PROMPT)))


def test_a_dtype_that_is_none_is_refused(nano):
    with pytest.raises(RecipeError, match="dtype"):
        list(api.run_text(nano, Prompt(PROMPT, dtype="float8")))


def test_a_model_without_mtp_cannot_speculate(tmp_path, nano):
    api.convert(
        nano,
        tmp_path / "out",
        read_recipe("bf16-split", ["mtp=drop"]),
        options=api.RunOptions(verify=False),
    )
    done = called("run", tmp_path / "out", "--prompt", PROMPT, "--speculate", "1")
    assert done.returncode == 2
    assert "MTP" in done.stderr
    assert done.stdout == ""
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


@pytest.mark.parametrize("speculate", [0, 2])
def test_an_artifact_that_computes_nan_ends_with_an_error(tmp_path, nano, speculate):
    out = tmp_path / "out"
    api.convert(nano, out, "bf16-split", api.RunOptions(verify=False))
    weights = load_file(out / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][5] = torch.nan
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    done = called("run", out, "--prompt", PROMPT, "--speculate", str(speculate))
    assert done.returncode == 3
    assert done.stderr.startswith("qwen35: the logits of generated token 1 are NaN or infinite\n")
    assert "qwen35 verify" in done.stderr
    assert done.stdout == ""
    assert any("layers.1.input_layernorm" in f.tensor for f in api.verify(out).failures)
