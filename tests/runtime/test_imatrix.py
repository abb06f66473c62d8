"""The sums behind an importance matrix, against hooks on transformers' own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from qwen35_convert.containers.registry import open_checkpoint
from runtime.errors import RequestError
from runtime.imatrix import Imatrix, collect
from runtime.load import Loader
from runtime.model import final_norm
from tests.checkpoints import hub_config, make_weights, write_checkpoint

logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
NANO = Path(__file__).parents[1] / "data" / "nano-dense"
# float32 activations, squared and summed: what two orders of addition make of them
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def some_texts(vocab: int, *lengths: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (n,), generator=rng) for n in lengths]


@torch.no_grad()
def hooked(folder: Path, texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the squares that enter every Linear of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums: dict[str, torch.Tensor] = {}

    def listen(name):
        def hook(_, inputs):
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + x.square().sum(0)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(listen(name.removeprefix("model.")))
    for ids in texts:
        model(ids[None])
    return sums


def test_every_linear_of_the_bundled_model_has_the_sums_of_transformers():
    texts = some_texts(2048, 90, 2, 33)
    imatrix, theirs = collect(open_checkpoint(NANO), texts), hooked(NANO, texts)
    theirs["embed_tokens"] = theirs.pop("lm_head")
    assert {name for name in imatrix.sums if not name.startswith("mtp.")} == set(theirs)
    for name, sums in theirs.items():
        torch.testing.assert_close(imatrix.sums[name], sums, **CLOSE, msg=name)
        assert imatrix.counts[name] == imatrix.tokens == 125, name


@pytest.fixture(scope="module", params=["ragged", "blocky", "same"])
def moe(request, tmp_path_factory):
    """A mixture of experts whose shared expert is of another size; in "same", of theirs."""
    same = {"shared_expert_intermediate_size": 40} if request.param == "same" else {}
    sizes = "blocky" if request.param == "blocky" else "ragged"
    config = hub_config(moe=True, sizes=sizes, **same)
    folder = tmp_path_factory.mktemp("moe")
    return write_checkpoint(folder, config, make_weights(config)), config["text_config"]


def test_what_is_beside_the_experts_has_the_sums_of_transformers(moe):
    folder, config = moe
    texts = some_texts(config["vocab_size"], 40, 21)
    imatrix, theirs = collect(open_checkpoint(folder), texts), hooked(folder, texts)
    assert any("shared_expert.down_proj" in name for name in theirs)
    for name, sums in theirs.items():
        torch.testing.assert_close(imatrix.sums[name], sums, **CLOSE, msg=name)


def test_the_experts_of_a_layer_share_its_tokens_k_times(moe):
    folder, config = moe
    imatrix = collect(open_checkpoint(folder), some_texts(config["vocab_size"], 40, 21))
    experts = range(config["num_experts"])
    counts = [imatrix.counts[f"layers.2.mlp.experts.{e}.up_proj"] for e in experts]
    assert sum(counts) == 61 * config["num_experts_per_tok"]
    through = sum(imatrix.sums[f"layers.2.mlp.experts.{e}.up_proj"] for e in experts)
    whole = imatrix.sums["layers.2.mlp.gate"] * config["num_experts_per_tok"]
    torch.testing.assert_close(through, whole)


def test_experts_without_tokens_are_reported_and_sum_to_zero(moe):
    folder, config = moe
    imatrix = collect(open_checkpoint(folder), some_texts(config["vocab_size"], 2))
    assert imatrix.unseen, "2 tokens reach 4 experts at most, and here often the same"
    for name in imatrix.unseen:
        assert imatrix.counts[f"{name}.down_proj"] == 0
        assert imatrix.sums[f"{name}.down_proj"].shape == (config["moe_intermediate_size"],)
        assert not imatrix.sums[f"{name}.down_proj"].any()


def test_the_mtp_head_sees_the_next_token_and_the_normed_state(tmp_path):
    config = hub_config()
    folder = write_checkpoint(tmp_path, config, make_weights(config))
    checkpoint, texts = open_checkpoint(folder), some_texts(256, 30, 11)
    imatrix = collect(checkpoint, texts)
    loader = Loader(checkpoint, torch.device("cpu"), torch.float32)
    following = loader.tensor("embed_tokens")[torch.cat([ids[1:] for ids in texts])]
    weight, eps = loader.tensor("mtp.pre_fc_norm_embedding"), checkpoint.config.eps
    embedding = final_norm(following, None, weight, eps).double().square().sum(0)
    size = config["text_config"]["hidden_size"]
    torch.testing.assert_close(imatrix.sums["mtp.fc"][:size], embedding)
    assert imatrix.counts["mtp.fc"] == imatrix.counts["mtp.layers.0.mlp.down_proj"] == 39


def test_texts_do_not_see_each_other_and_groups_change_nothing(monkeypatch):
    checkpoint, texts = open_checkpoint(NANO), some_texts(2048, 30, 40, 25)
    together = collect(checkpoint, texts)
    monkeypatch.setattr("runtime.layer_pass.GROUP_TOKENS", 35)
    apart = collect(checkpoint, texts)
    alone = [collect(checkpoint, [ids]) for ids in texts]
    for name, sums in together.sums.items():
        torch.testing.assert_close(apart.sums[name], sums, **CLOSE)
        torch.testing.assert_close(sum(one.sums[name] for one in alone), sums, **CLOSE)


def test_the_number_of_cores_does_not_matter(moe):
    folder, config = moe
    texts = some_texts(config["vocab_size"], 400, 200, 300, 2)
    expected = collect(open_checkpoint(folder), texts)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        imatrix = collect(open_checkpoint(folder), texts)
    finally:
        torch.set_num_threads(before)
    assert imatrix.counts == expected.counts
    assert list(imatrix.sums) == list(expected.sums)
    for name, sums in expected.sums.items():
        assert torch.equal(imatrix.sums[name], sums), name


def test_stacked_rows_follow_the_files_names_and_order():
    imatrix = Imatrix(3)
    for name, value in (("e.1.up", 2.0), ("e.0.up", 1.0), ("out", 3.0)):
        imatrix.observe([name], torch.tensor([[value, 0.0, 0.5]]))
    places = {"e.0.up": ("up_exps", 0), "e.1.up": ("up_exps", 1), "out": ("ssm_out", None)}
    swapped = torch.tensor([2, 0, 1])
    stacked = imatrix.stacked(places.__getitem__, lambda n: swapped if n == "out" else None)
    assert stacked["up_exps"][0].tolist() == [[1.0, 0.0, 0.25], [4.0, 0.0, 0.25]]
    assert stacked["up_exps"][1].tolist() == [1.0, 1.0]
    assert stacked["ssm_out"][0].tolist() == [[0.25, 9.0, 0.0]]
    assert stacked["ssm_out"][0].dtype == torch.float32


@pytest.mark.parametrize("texts", [[], [torch.tensor([1])], [torch.tensor([[1, 2]])]])
def test_texts_of_less_than_two_tokens_are_refused(texts):
    with pytest.raises(RequestError, match="2 tokens at least"):
        collect(open_checkpoint(NANO), texts)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="reach from 1 to 2048, expected 0 to 2047"):
        collect(open_checkpoint(NANO), [torch.tensor([1, 2048])])
