"""An address of the hub is the repository that it shows; what is none says what to type."""

from __future__ import annotations

import pytest

from formats.errors import FormatError
from qwen35_convert.hub.client import parse_repo
from qwen35_convert.inspection.source import inspect
from qwen35_convert.source import open_source

REPO, COMMIT = "acme/Borealis-4B", "5" * 40


@pytest.mark.parametrize(
    ("address", "revision"),
    [
        ("https://huggingface.co/acme/Borealis-4B", None),
        ("https://huggingface.co/acme/Borealis-4B/", None),
        ("http://www.huggingface.co/acme/Borealis-4B", None),
        ("huggingface.co/acme/Borealis-4B", None),
        ("hf.co/acme/Borealis-4B", None),
        ("hf://acme/Borealis-4B", None),
        ("hf://models/acme/Borealis-4B@v1", "v1"),
        ("git@hf.co:acme/Borealis-4B.git", None),
        ("https://huggingface.co/acme/Borealis-4B.git", None),
        ("https://huggingface.co/acme/Borealis-4B?library=transformers#usage", None),
        ("https://huggingface.co/acme/Borealis-4B/tree/main", None),
        ("https://huggingface.co/acme/Borealis-4B/tree/v1.0", "v1.0"),
        (f"https://huggingface.co/acme/Borealis-4B/commit/{COMMIT}", COMMIT),
        ("https://huggingface.co/acme/Borealis-4B/tree/refs%2Fpr%2F3", "refs/pr/3"),
        ("https://huggingface.co/acme/Borealis-4B/tree/refs/pr/3", "refs/pr/3"),
        ("https://huggingface.co/acme/Borealis-4B/blob/main/config.json", None),
        (
            "https://huggingface.co/acme/Borealis-4B/resolve/v1/model.safetensors?download=true",
            "v1",
        ),
    ],
)
def test_an_address_is_a_repository_at_a_revision(address, revision):
    assert parse_repo(address) == (REPO, revision)


def test_another_hub_is_known_by_its_endpoint(monkeypatch):
    assert parse_repo("https://hub.example.com/acme/Borealis-4B") is None
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    assert parse_repo("https://hub.example.com/acme/Borealis-4B/tree/v1") == (REPO, "v1")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://huggingface.co/datasets/acme/text", "is not a model's page"),
        ("https://huggingface.co/acme", "is not a model's page"),
        ("https://huggingface.co/acme/Borealis-4B/settings", "is not a model's page"),
        (
            "https://huggingface.co/acme/Borealis-4B/tree/main/fp16",
            r"hf download acme/Borealis-4B --include 'fp16/\*' --revision main --local-dir DIR",
        ),
        (
            "https://huggingface.co/acme/Borealis-4B/blob/v1/b-q8_0.gguf",
            r"b-q8_0.gguf --revision v1 --local-dir DIR, then give DIR/b-q8_0.gguf$",
        ),
        ("https://modelscope.cn/models/acme/Borealis-4B", "is no address of a model on the hub"),
        ("s3://bucket/model", "is no address of a model on the hub"),
    ],
)
def test_another_address_is_refused_and_says_what_to_type(address, said, tmp_path):
    with pytest.raises(FormatError, match=said) as refused:
        open_source(address)
    assert refused.value.exit_code == 3
    assert refused.value.expected.startswith(("https://huggingface.co/", "a whole one"))


def test_a_folder_of_that_name_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "hf.co" / "acme" / "Borealis-4B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_repo("hf.co/acme/Borealis-4B") is None


def test_a_name_too_long_for_a_file_is_refused(tmp_path):
    with pytest.raises(FormatError):
        inspect("x" * 5000)
