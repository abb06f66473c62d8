"""Right configs by transformers' own reading: the same logits, to the bit or nearly so."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.planted.artifact import Workshop, find_base
from tests.planted.right_configs import changes

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.all]

# These round activations in another way, or not at all.
COMPUTED_OTHERWISE = ("computed in float32", "weights alone", "block structure as text")
CASES = [
    pytest.param(base, change, id=f"{name} {base}".replace(" ", "-"))
    for _, name, base, change in changes()
    if name not in COMPUTED_OTHERWISE
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("configs"))


def classes(base: str) -> list[str]:
    """Return the classes that load this base."""
    return ["AutoModelForCausalLM", *(["AutoModelForImageTextToText"] if "hub" in base else [])]


def logits(folder, name: str) -> torch.Tensor:
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 33, 77, 101, 12] * 4])).logits.float()


@pytest.mark.parametrize(("base", "change"), CASES)
def test_transformers_computes_the_same(base, change, workshop):
    before = {name: logits(workshop.open(find_base(base)).path, name) for name in classes(base)}
    with workshop.room() as folder:
        artifact = workshop.place(find_base(base), folder)
        change(artifact)
        after = {name: logits(artifact.path, name) for name in classes(base)}
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for name in before:
        close(after[name], before[name])
