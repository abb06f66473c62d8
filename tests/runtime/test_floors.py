from __future__ import annotations

import pytest

from benchmarks.models import CONFIGS
from runtime.floors import (
    CARDS,
    card_of,
    decode_floor_ms,
    mixing_flops,
    prefill_floor_ms,
    product_flops,
    sequence_bytes,
    weight_bytes,
)

H100 = next(card for card in CARDS if card.name == "H100")

# worked out by hand from the sizes of the released models, to the digits given
DECODED = {
    #          fp8 GB, state and cache at 4096 GB, fp8 ms on H100, bf16 GB, bf16 ms on H100
    "0.8B": (1.008, 0.089, 0.33, 1.59, 0.48),
    "9B": (8.963, 0.237, 2.75, 16.11, 4.81),
    "27B": (26.928, 0.576, 8.21, 51.83, 15.47),
    "35B-A3B": (3.481, 0.213, 1.10, 6.11, 1.82),
}
#                GFLOP a token: products, attention and rule at 8192; ms of 8192 tokens bf16, fp8
PREFILLED = {
    "0.8B": (1.00, 0.25, 12.8, 8.0),
    "9B": (13.84, 0.67, 148, 82.4),
    "27B": (48.7, 1.99, 519, 286),
    "35B-A3B": (4.88, 0.83, 58.4, 35.1),
}


@pytest.mark.parametrize("name", DECODED)
def test_a_decode_step_moves_what_was_counted_by_hand(name):
    config = CONFIGS[name]()
    weights, rest, fp8_ms, bf16_gb, bf16_ms = DECODED[name]
    assert weight_bytes(config, stored="fp8") / 1e9 == pytest.approx(weights, rel=0.002)
    assert sequence_bytes(config, 4096) / 1e9 == pytest.approx(rest, rel=0.01)
    assert decode_floor_ms(config, H100, stored="fp8") == pytest.approx(fp8_ms, rel=0.01)
    both = weight_bytes(config, stored="bf16") + sequence_bytes(config, 4096)
    assert both / 1e9 == pytest.approx(bf16_gb, rel=0.005)
    assert decode_floor_ms(config, H100, stored="bf16") == pytest.approx(bf16_ms, rel=0.01)


@pytest.mark.parametrize("name", PREFILLED)
def test_a_prompt_takes_the_operations_counted_by_hand(name):
    config = CONFIGS[name]()
    products, mixing, bf16_ms, fp8_ms = PREFILLED[name]
    assert product_flops(config) / 1e9 == pytest.approx(products, rel=0.01)
    assert mixing_flops(config, 8192) / 1e9 == pytest.approx(mixing, rel=0.02)
    assert prefill_floor_ms(config, H100, stored="bf16", tokens=8192) == pytest.approx(
        bf16_ms, rel=0.01
    )
    assert prefill_floor_ms(config, H100, stored="fp8", tokens=8192) == pytest.approx(
        fp8_ms, rel=0.01
    )


def test_more_sequences_read_more_experts_but_no_more_than_there_are():
    config = CONFIGS["35B-A3B"]()
    one, eight, many = (weight_bytes(config, stored="fp8", batch=b) for b in (1, 8, 100_000))
    assert one < eight < 8 * one
    assert many == pytest.approx(35.7e9 - 2 * 248320 * 2048, rel=0.01)


def test_a_short_prompt_is_bounded_by_reading_the_weights():
    config = CONFIGS["27B"]()
    read = weight_bytes(config, stored="fp8") / H100.bandwidth * 1e3
    assert prefill_floor_ms(config, H100, stored="fp8", tokens=16) == read


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144G"),
    ],
)
def test_a_card_is_known_by_the_name_that_cuda_gives(given, name):
    card = card_of(given)
    assert card is not None
    assert card.name == name
    assert card_of("NVIDIA A100-SXM4-80GB") is None
