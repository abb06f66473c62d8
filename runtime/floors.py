"""The least time that a step can take on a card: bytes over bandwidth, operations over rate.

    decode    every weight that is used, once; states read and written; keys and values read
    prefill   2 operations for each weight and token; attention over half the prompt on average;
              the delta rule in chunks of 64, 6 d^2 + 8 C d + 2 C^2 / 3 operations a token and head

FP8, or four bits, hold the linears of mixers and feed-forwards; what is kept in BF16 (embedding,
head, router, the delta rule's a and b, norms) stays BF16. A block's scale is 4 bytes for 128 x 128
codes, that of NVFP4 one for 16, that of INT4 two for 128. With several sequences a mixture of
experts reads the experts that at least one of them is expected to choose. The head is applied to
the last token of a prompt only.

Bandwidths and tensor rates are the makers'. No product reaches the latter: floors of prefill take
the practical 800 and 1500 TFLOP/s of BF16 and FP8 on Hopper, which the best products come near.

Trap: floors of time are compared with times on the card that they are for, by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.family.config import Config

BF16_BYTES = 2
FP8_BYTES = 1 + 4 / 128**2
# bytes of a weight in the linears of mixers and feed-forwards, by how they are stored
WIDTHS = {
    "bf16": BF16_BYTES,
    "fp8": FP8_BYTES,
    "nvfp4": 4 / 8 + 1 / 16,
    "int4": 4 / 8 + 2 / 128,
}
STATE_BYTES = 4
CHUNK = 64


@dataclass(frozen=True)
class Card:
    """What a card's maker says: bytes a second, dense BF16 and FP8 operations a second."""

    name: str
    bandwidth: float
    bf16_peak: float = 989e12
    fp8_peak: float = 1979e12
    bf16_rate: float = 800e12
    fp8_rate: float = 1500e12


# The GH200 with 96 GB has HBM3, that with 144 GB HBM3e.
CARDS = (
    Card("GH200 144G", 4.9e12),
    Card("GH200", 4.0e12),
    Card("H200", 4.8e12),
    Card("H100", 3.35e12),
)


def card_of(device_name: str) -> Card | None:
    """Return the card with this name as CUDA gives it ("NVIDIA H100 80GB HBM3"), if known."""
    words = device_name.split()
    return next((card for card in CARDS if all(w in words for w in card.name.split())), None)


def mixer_weights(config: Config, kind: str) -> tuple[int, int]:
    """Return (weights in linears that FP8 may hold, weights that stay BF16) of one mixer."""
    s = config.sizes
    if kind == "full_attention":
        rows = 2 * s["NH"] + 2 * s["NKV"] + s["NH"]
        return rows * s["HD"] * s["H"], 2 * s["HD"]
    keys, values = 2 * s["NK"] * s["DK"], s["NV"] * s["DV"]
    small = 2 * s["NV"] * s["H"] + (keys + values) * s["K"] + 2 * s["NV"] + s["DV"]
    return (keys + 3 * values) * s["H"], small


def feed_forward_weights(config: Config, batch: int = 1) -> tuple[float, int]:
    """Return (weights in linears that FP8 may hold, weights that stay BF16) that a batch uses."""
    s = config.sizes
    if not config.moe:
        return 3 * s["I"] * s["H"], 0
    used = s["E"] * (1 - (1 - s["TOPK"] / s["E"]) ** batch)
    return 3 * s["H"] * (used * s["F"] + s["S"]), (s["E"] + 1) * s["H"]


def weight_bytes(config: Config, *, stored: str, batch: int = 1) -> float:
    """Return the bytes of all weights that one step of `batch` sequences reads."""
    s, width = config.sizes, WIDTHS[stored]
    total = float(BF16_BYTES * (s["V"] + 1) * s["H"])
    for kind in config.layer_types:
        for linears, rest in (mixer_weights(config, kind), feed_forward_weights(config, batch)):
            total += width * linears + BF16_BYTES * rest
        total += BF16_BYTES * 2 * s["H"]
    return total


def sequence_bytes(config: Config, context: int) -> float:
    """Return the bytes of one sequence that one step moves, `context` tokens long with this one."""
    s = config.sizes
    gdn = config.layer_types.count("linear_attention")
    channels = 2 * s["NK"] * s["DK"] + s["NV"] * s["DV"]
    state = STATE_BYTES * s["NV"] * s["DK"] * s["DV"] + BF16_BYTES * channels * (s["K"] - 1)
    cache = BF16_BYTES * 2 * s["NKV"] * s["HD"] * context
    return 2 * gdn * state + (len(config.layer_types) - gdn) * cache


def decode_floor_ms(
    config: Config, card: Card, *, stored: str, batch: int = 1, context: int = 4096
) -> float:
    """Return the least milliseconds of a step that gives each of `batch` sequences a token."""
    moved = weight_bytes(config, stored=stored, batch=batch) + batch * sequence_bytes(
        config, context
    )
    return moved / card.bandwidth * 1e3


def product_flops(config: Config) -> float:
    """Return the operations of all linears but the head, for one token."""
    parts = [
        part
        for kind in config.layer_types
        for part in (*mixer_weights(config, kind), *feed_forward_weights(config))
    ]
    return 2 * sum(parts)


def mixing_flops(config: Config, tokens: int) -> float:
    """Return the operations of attention and the delta rule for one token, on average."""
    s, kinds = config.sizes, config.layer_types
    gdn = kinds.count("linear_attention")
    d = float((s["DK"] * s["DV"]) ** 0.5)
    rule = s["NV"] * (6 * d**2 + 8 * CHUNK * d + 2 * CHUNK**2 / 3)
    return gdn * rule + (len(kinds) - gdn) * 4 * s["NH"] * s["HD"] * tokens / 2


def prefill_floor_ms(config: Config, card: Card, *, stored: str, tokens: int) -> float:
    """Return the least milliseconds of a prompt; for short ones that of reading the weights."""
    rate = card.fp8_rate if stored == "fp8" else card.bf16_rate
    products, mixing = product_flops(config) / rate, mixing_flops(config, tokens) / card.bf16_rate
    computed = tokens * (products + mixing)
    read = weight_bytes(config, stored=stored, batch=tokens) / card.bandwidth
    return max(computed, read) * 1e3
