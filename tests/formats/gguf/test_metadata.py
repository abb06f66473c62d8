"""A text model's metadata: llama.cpp's keys, kinds and order; and the config that they give."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.gguf.config import config_from_metadata
from formats.gguf.file import GgufFile, build_header
from formats.gguf.header import Kv
from formats.gguf.metadata import size_label, text_metadata
from formats.tensor import TensorInfo
from tests.checkpoints import hub_config, text_config

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
ABOUT = {"name": "Nano Dense", "size_label": "2.0M"}
L, F = "linear_attention", "full_attention"
Raw = dict[str, Any]


def nano() -> Raw:
    return json.loads((NANO / "config.json").read_text())


def alike(raw: Raw, **changes: Any) -> Raw:
    """Return the config with other text fields; a key and a value head of the delta rule alike."""
    width = raw["text_config"]["linear_key_head_dim"]
    text = raw["text_config"] | {"linear_value_head_dim": width} | changes
    return raw | {"text_config": {k: v for k, v in text.items() if v is not None}}


def dense(**changes: Any) -> Raw:
    return alike(hub_config(sizes="ragged"), **changes)


def moe(**changes: Any) -> Raw:
    return alike(hub_config(moe=True, sizes="ragged"), **changes)


def written(config: Config, **options: Any) -> list[Kv]:
    options = {"about": ABOUT, "file_type": 32, "mtp_layers": config.mtp_layers} | options
    return text_metadata(config, **options)


def tensors_of(config: Config, *, tied: bool = False) -> dict[str, TensorInfo]:
    """Return the tensors that say something beyond the metadata."""
    shape = config.sizes["V"], config.sizes["H"]
    names = ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    return {name: TensorInfo(name, "BF16", shape) for name in names}


def stored(kvs: list[Kv], folder: Path) -> dict[str, Kv]:
    """Return the pairs as a file gives them back: numbers in 32 bits."""
    path = folder / "x.gguf"
    path.write_bytes(build_header(kvs, [])[0])
    return dict(GgufFile(path).kv)


def pairs_of(raw: Raw, **options: Any) -> dict[str, Kv]:
    return {kv.key: kv for kv in written(read_config(raw), **options)}


def back(kv: dict[str, Kv], config: Config, *, tied: bool = False) -> Config:
    return read_config(config_from_metadata(kv, tensors_of(config, tied=tied)))


# What is written

NANO_PAIRS = [
    Kv("general.architecture", "string", "qwen35"),
    Kv("general.type", "string", "model"),
    Kv("general.sampling.top_k", "int32", 20),
    Kv("general.sampling.top_p", "float32", 0.95),
    Kv("general.sampling.temp", "float32", 0.6),
    Kv("general.name", "string", "Nano Dense"),
    Kv("general.size_label", "string", "2.0M"),
    Kv("qwen35.block_count", "uint32", 5),
    Kv("qwen35.context_length", "uint32", 262144),
    Kv("qwen35.embedding_length", "uint32", 128),
    Kv("qwen35.feed_forward_length", "uint32", 384),
    Kv("qwen35.attention.head_count", "uint32", 2),
    Kv("qwen35.attention.head_count_kv", "uint32", 1),
    Kv("qwen35.rope.dimension_sections", "array[int32]", [11, 11, 10, 0]),
    Kv("qwen35.rope.freq_base", "float32", 1e7),
    Kv("qwen35.attention.layer_norm_rms_epsilon", "float32", 1e-6),
    Kv("qwen35.attention.key_length", "uint32", 256),
    Kv("qwen35.attention.value_length", "uint32", 256),
    Kv("general.file_type", "uint32", 32),
    Kv("qwen35.nextn_predict_layers", "uint32", 1),
    Kv("qwen35.ssm.conv_kernel", "uint32", 4),
    Kv("qwen35.ssm.state_size", "uint32", 128),
    Kv("qwen35.ssm.group_count", "uint32", 1),
    Kv("qwen35.ssm.time_step_rank", "uint32", 2),
    Kv("qwen35.ssm.inner_size", "uint32", 256),
    Kv("qwen35.attention.recurrent_layers", "array[bool]", [True, True, True, False, False]),
    Kv("qwen35.full_attention_interval", "uint32", 4),
    Kv("qwen35.rope.dimension_count", "uint32", 64),
    Kv("general.quantization_version", "uint32", 2),
]


def test_a_dense_model_has_the_pairs_of_llama_cpps_converter_in_its_order():
    generation = json.loads((NANO / "generation_config.json").read_text())
    assert written(read_config(nano()), generation=generation) == NANO_PAIRS


def test_a_mixture_of_experts_has_its_own_pairs_in_their_places():
    keys = [kv.key.removeprefix("qwen35moe.") for kv in written(read_config(moe()))]
    assert "feed_forward_length" not in keys
    assert keys[12:17] == [
        "expert_count",
        "expert_used_count",
        "attention.key_length",
        "attention.value_length",
        "general.file_type",
    ]
    assert keys[17:19] == ["expert_feed_forward_length", "expert_shared_feed_forward_length"]
    pairs = pairs_of(moe())
    assert pairs["general.architecture"].value == "qwen35moe"
    assert [pairs[f"qwen35moe.{key}"].value for key in (*keys[12:14], *keys[17:19])] == [
        5,
        2,
        40,
        48,
    ]


def test_without_mtp_layers_nothing_is_said_of_them():
    pairs = pairs_of(nano(), mtp_layers=0)
    assert pairs["qwen35.block_count"].value == 4
    assert "qwen35.nextn_predict_layers" not in pairs
    assert pairs["qwen35.attention.recurrent_layers"].value == [True, True, True, False]


def test_sections_that_the_config_has_not_are_written_last():
    rope = nano()["text_config"]["rope_parameters"]
    del rope["mrope_section"]
    keys = [kv.key for kv in written(read_config(alike(nano(), rope_parameters=rope)))]
    assert keys[-2:] == ["qwen35.rope.dimension_sections", "general.quantization_version"]
    assert pairs_of(alike(nano(), rope_parameters=rope))[keys[-2]].value == [11, 11, 10, 0]


@pytest.mark.parametrize(
    ("types", "declared", "expected"),
    [
        ([L, L, L, F], 4, 4),
        ([L, L, L, F], None, 4),
        ([L, F, L, F], 4, 2),
        ([F, F, F, F], 4, 1),
        ([L, L, L, L], 9, 9),
        ([L, L, L, L], None, 5),
        ([F, L, L, F], 3, 3),
        ([L, L, F, F], None, 4),
    ],
)
def test_the_interval_is_one_that_gives_the_layer_types_if_any_does(types, declared, expected):
    raw = alike(nano(), layer_types=types, full_attention_interval=declared)
    pairs = pairs_of(raw)
    assert pairs["qwen35.full_attention_interval"].value == expected
    assert pairs["qwen35.attention.recurrent_layers"].value == [t == L for t in types] + [False]


def test_what_is_known_about_a_model_stands_under_general():
    about = {
        "tags": ["text-generation", "qwen"],
        "license": "apache-2.0",
        "author": "",
        "name": "N",
    }
    pairs = written(read_config(nano()), about=about)
    assert pairs[2:5] == [
        Kv("general.name", "string", "N"),
        Kv("general.license", "string", "apache-2.0"),
        Kv("general.tags", "array[string]", ["text-generation", "qwen"]),
    ]
    with pytest.raises(AssertionError, match=r"general\.nmae is not a key"):
        written(read_config(nano()), about={"nmae": "N"})


def test_sampling_parameters_that_are_there_are_written():
    given_ = {"top_k": None, "repetition_penalty": 1.1, "temperature": 1, "do_sample": True}
    pairs = written(read_config(nano()), generation=given_)[2:4]
    assert pairs == [
        Kv("general.sampling.temp", "float32", 1),
        Kv("general.sampling.penalty_repeat", "float32", 1.1),
    ]
    both = written(read_config(nano()), generation={"penalty_repeat": 2.0, **given_})
    assert Kv("general.sampling.penalty_repeat", "float32", 2.0) in both


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2.5),
        ("top_k", True),
        ("top_k", 1 << 31),
        ("top_p", "0.9"),
        ("min_p", [0.1]),
        ("temperature", 1e39),
        ("top_p", 10**400),
        ("temperature", True),
        ("sequence", 3),
        ("mirostat", {}),
    ],
)
def test_a_sampling_parameter_of_another_kind_is_refused(field, value):
    with pytest.raises(FormatError, match=rf"generation_config.json: {field} is .*, expected"):
        written(read_config(nano()), generation={field: value})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"linear_value_head_dim": 64},
            r"linear_value_head_dim is 64, expected .*_key_head_dim 128",
        ),
        ({"max_position_embeddings": 2.5}, r"max_position_embeddings is 2.5, expected an integer"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"linear_num_value_heads": 1 << 30}, "does not fit uint32"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [1] * 5}},
            "expected 1 to 4 sizes",
        ),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": [0]}}, "expected 1 to 4 sizes"),
        ({"head_dim": 4}, "partial_rotary_factor 0.25 of .*head_dim 4 is 1, expected an even"),
    ],
)
def test_what_llama_cpp_has_no_place_for_is_refused(changes, reason):
    with pytest.raises(FormatError, match=reason):
        written(read_config(alike(nano(), **changes)))


def test_a_config_without_a_context_has_the_default_of_transformers():
    pairs = pairs_of(alike(nano(), max_position_embeddings=None))
    assert pairs["qwen35.context_length"].value == 32768


@pytest.mark.parametrize("experts", [0, 3, 256])
def test_the_size_label_is_that_of_ggmls_package(experts):
    infos = [
        TensorInfo("token_embd.weight", "F32", (999, 64)),
        TensorInfo("output_norm.weight", "F32", (64,)),
    ]
    if experts:
        infos += [
            TensorInfo(f"blk.0.ffn_{part}_exps.weight", "F32", (experts, 7, 64))
            for part in ("gate", "up")
        ]
    writer = gguf.GGUFWriter(None, "qwen35")
    for info in infos:
        writer.add_tensor_info(info.name, info.shape, np.dtype(np.float32), info.nbytes)
    assert size_label(infos) == gguf.size_label(*writer.get_total_parameter_count())


# Round trips

PUBLISHED = {
    #        H,    layers, heads, kv, nv, feed-forward or (experts, top k, width, shared width)
    "0.8B": (1024, 24, 8, 2, 16, 3584),
    "4B": (2560, 32, 16, 4, 32, 9216),
    "27B": (5120, 64, 24, 4, 48, 17408),
    "35B-A3B": (2048, 40, 16, 2, 32, (256, 8, 512, 512)),
    "397B-A17B": (4096, 60, 32, 2, 64, (512, 10, 1024, 1024)),
    "2.4T-A95B": (8192, 92, 64, 4, 128, (512, 10, 2048, 2048)),
}


def published(name: str) -> Raw:
    """Return the flat config of a release."""
    width, layers, heads, kv, values, feed = PUBLISHED[name]
    experts = isinstance(feed, tuple)
    names = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    return text_config(
        moe=experts,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=256,
        linear_num_key_heads=16,
        vocab_size=248320,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=[F if i % 4 == 3 else L for i in range(layers)],
        full_attention_interval=4,
        **(dict(zip(names, feed, strict=True)) if experts else {"intermediate_size": feed}),
    )


CONFIGS = {"nano": nano(), "dense": dense(), "moe": moe()} | {n: published(n) for n in PUBLISHED}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_that_comes_back_says_the_same(tmp_path, name, tied):
    config = read_config(CONFIGS[name])
    again = back(stored(written(config), tmp_path), config, tied=tied)
    assert again.sizes == {k: v for k, v in config.sizes.items() if not k.startswith("v")}
    for field in ("layer_types", "rope", "eps", "mtp_layers", "moe"):
        assert getattr(again, field) == getattr(config, field), field
    assert (again.nested, again.vision) == (False, None)
    assert again.tie_flags == {"tie_word_embeddings": tied}
    assert "absent" not in " ".join(again.fields.values())


def test_the_metadata_of_the_config_that_comes_back_are_the_same(tmp_path):
    for name, raw in CONFIGS.items():
        config = read_config(raw)
        kv = stored(written(config), tmp_path)
        assert stored(written(back(kv, config)), tmp_path) == kv, name


def test_the_config_is_that_of_the_text_only_class(tmp_path):
    pairs = [*NANO_PAIRS, Kv("tokenizer.ggml.eos_token_id", "uint32", 1986)]
    config = read_config(nano())
    raw = config_from_metadata(stored(pairs, tmp_path), tensors_of(config, tied=True))
    text = nano()["text_config"]
    changed = {"eos_token_id": 1986, "architectures": ["Qwen3_5ForCausalLM"]}
    assert raw == {k: v for k, v in text.items() if k != "full_attention_interval"} | changed
    assert json.loads(json.dumps(raw)) == raw
    mixture = config_from_metadata(pairs_of(moe()), tensors_of(read_config(moe())))
    assert (mixture["architectures"], mixture["model_type"]) == (
        ["Qwen3_5MoeForCausalLM"],
        "qwen3_5_moe_text",
    )
    assert mixture["output_router_logits"] is False


def test_transformers_takes_the_config():
    transformers = pytest.importorskip("transformers")
    for raw, kind in ((dense(), "Qwen3_5TextConfig"), (moe(), "Qwen3_5MoeTextConfig")):
        given_ = config_from_metadata(pairs_of(raw), tensors_of(read_config(raw)))
        config = getattr(transformers, kind)(**given_)
        assert config.layer_types == [L, L, L, F]
        assert config.rope_parameters["rope_theta"] == 10_000_000


@given(theta=st.floats(2, 2**40, width=32), eps=st.floats(2**-40, 0.5, width=32))
def test_floats_come_back_as_the_shortest_decimal_that_is_stored_alike(theta, eps):
    pairs = pairs_of(nano())
    pairs["qwen35.rope.freq_base"] = Kv("", "float32", theta)
    pairs["qwen35.attention.layer_norm_rms_epsilon"] = Kv("", "float32", eps)
    raw = config_from_metadata(pairs, tensors_of(read_config(nano())))
    for value, given_ in (
        (float(raw["rope_parameters"]["rope_theta"]), theta),
        (raw["rms_norm_eps"], eps),
    ):
        assert struct.pack("<f", value) == struct.pack("<f", given_)
        assert value == float(str(np.float32(given_)))


@given(width=st.integers(2, 1024), half=st.data())
def test_no_rotated_dimension_is_lost_to_rounding(width, half):
    turned = 2 * half.draw(st.integers(1, width // 2))
    pairs = pairs_of(nano())
    for key, value in (
        ("rope.dimension_count", turned),
        ("attention.key_length", width),
        ("attention.value_length", width),
    ):
        pairs[f"qwen35.{key}"] = Kv("", "uint32", value)
    rope = back(pairs, read_config(nano())).rope
    assert int(width * rope.partial) == turned
    assert rope.partial <= 1


# Files of other writers


def changed(raw: Raw, **values: Any) -> dict[str, Kv]:
    """Return the pairs of a config with some values replaced (`__` for a dot), or None: gone."""
    pairs = pairs_of(raw)
    arch = pairs["general.architecture"].value
    for key, value in values.items():
        name = f"{arch}.{key.replace('__', '.')}"
        kind = "array[int32]" if isinstance(value, list) else "uint32"
        pairs[name] = Kv(name, kind, value)
        if value is None:
            del pairs[name]
    return pairs


def test_an_older_file_says_its_layers_by_the_interval_alone():
    old = changed(nano(), attention__recurrent_layers=None, full_attention_interval=3)
    assert back(old, read_config(nano())).layer_types == (L, L, F, L)


def test_a_file_without_either_key_shows_its_layers_by_their_tensors():
    """Some converters write no interval, and llama.cpp then takes 4."""
    raw = alike(nano(), layer_types=[L, F, L, L])
    bare = changed(raw, attention__recurrent_layers=None, full_attention_interval=None)
    names = ("ssm_a", "attn_q.weight", "ssm_a", "ssm_a")
    blocks = [f"blk.{i}.{name}" for i, name in enumerate(names)]
    infos = tensors_of(read_config(raw)) | {n: TensorInfo(n, "F32", (2,)) for n in blocks}
    assert read_config(config_from_metadata(bare, infos)).layer_types == (L, F, L, L)


@pytest.mark.parametrize("key", ["rope__dimension_sections", "rope__mrope_section"])
@pytest.mark.parametrize("sections", [[11, 11, 10], [11, 11, 10, 0]])
def test_sections_may_be_three_under_another_key(key, sections):
    pairs = changed(nano(), **{"rope__dimension_sections": None, key: sections})
    assert back(pairs, read_config(nano())).rope.sections == (11, 11, 10)


def test_a_file_without_sections_is_read_and_llama_cpp_s_are_written_again():
    pairs = changed(nano(), rope__dimension_sections=None)
    config = back(pairs, read_config(nano()))
    assert config.rope.sections == ()
    again = text_metadata(config, about={}, file_type=0, mtp_layers=1)
    assert next(kv.value for kv in again if kv.key.endswith("sections")) == [11, 11, 10, 0]


def test_recurrent_layers_win_over_the_interval():
    raw = alike(nano(), layer_types=[F, L, L, F])
    assert back(pairs_of(raw), read_config(raw)).layer_types == (F, L, L, F)
    numbers = changed(nano(), attention__recurrent_layers=[0, 1, 0, 1, 0])
    assert back(numbers, read_config(nano())).layer_types == (F, L, F, L)


def test_a_size_may_stand_once_per_block():
    per_block = changed(
        nano(), attention__head_count=[2] * 5, attention__head_count_kv=[0, 0, 0, 1, 1]
    )
    sizes = back(per_block, read_config(nano())).sizes
    assert (sizes["NH"], sizes["NKV"]) == (2, 1)


def test_a_file_without_mtp_layers_may_say_so_or_not():
    for pairs in (
        pairs_of(nano(), mtp_layers=0),
        changed(
            nano(), nextn_predict_layers=0, block_count=4, attention__recurrent_layers=[1, 1, 1, 0]
        ),
    ):
        config = back(pairs, read_config(nano()))
        assert (config.mtp_layers, config.layer_types) == (0, (L, L, L, F))


REQUIRED = [
    key
    for key in pairs_of(moe())
    if key.startswith("qwen35moe.")
    and not key.endswith(("nextn_predict_layers", "recurrent_layers", "full_attention_interval"))
    and not key.endswith("dimension_sections")
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    pairs = pairs_of(moe())
    del pairs[key]
    with pytest.raises(FormatError, match=rf"{key} is missing"):
        config_from_metadata(pairs, tensors_of(read_config(moe())))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"attention__recurrent_layers": None, "full_attention_interval": None},
            "full_attention_interval is missing, and blk.0 does not have ssm_a or attn_q.weight",
        ),
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 1 << 30}, "block_count is 1073741824 .uint32., expected .* to 1024"),
        ({"block_count": "4"}, "block_count is '4'"),
        ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5 .uint32., expected .* 0 to 4"),
        ({"embedding_length": True}, "embedding_length is True"),
        ({"embedding_length": 1 << 31}, "embedding_length is 2147483648"),
        ({"embedding_length": 64}, r"token_embd.weight has shape .* expected \[vocabulary, 64\]"),
        ({"vocab_size": 7}, r"vocab_size is 7, expected 2048 .token_embd.weight."),
        (
            {"attention__head_count": 3, "attention__head_count_kv": 2},
            "head_count is 3, expected a multiple of attention.head_count_kv 2",
        ),
        ({"attention__head_count_kv": [1, 1]}, r"head_count_kv is \[1, 1\], expected the same"),
        ({"attention__head_count_kv": [1, 1, 1, 2, 2]}, "head_count_kv is .*, expected the same"),
        ({"attention__head_count_kv": [0] * 5}, "head_count_kv is .*, expected the same"),
        ({"attention__value_length": 128}, "value_length is 128, expected key_length 256"),
        ({"attention__layer_norm_rms_epsilon": 1}, "epsilon is 1 .uint32., expected a positive"),
        ({"rope__freq_base": float("nan")}, "freq_base is nan"),
        ({"rope__freq_base": float("inf")}, "freq_base is inf"),
        ({"rope__freq_base": -1.0}, "freq_base is -1.0"),
        ({"rope__dimension_count": 65}, "dimension_count is 65, expected an even number"),
        ({"rope__dimension_count": 512}, "dimension_count is 512, expected .* up to 256"),
        ({"rope__dimension_sections": [1, 2]}, "dimension_sections is .* expected 3 or 4 sizes"),
        ({"rope__dimension_sections": [0] * 4}, "dimension_sections is .* expected 3 or 4 sizes"),
        ({"rope__dimension_sections": [-1, 1, 1, 0]}, "expected 3 or 4 sizes"),
        ({"rope__dimension_sections": 11}, "dimension_sections is 11"),
        ({"rope__scaling__type": "su"}, "rope.scaling.type is 'su', expected 'none'"),
        ({"ssm__inner_size": 257}, "inner_size is 257, expected a multiple of .*time_step_rank 2"),
        ({"ssm__group_count": 3}, "time_step_rank is 2, expected a multiple of .*group_count 3"),
        ({"ssm__state_size": 0}, "state_size is 0"),
        ({"attention__recurrent_layers": [1, 1, 1, 0]}, "expected 5 booleans"),
        ({"attention__recurrent_layers": [1, 1, 1, 2, 0]}, "expected 5 booleans"),
        ({"attention__recurrent_layers": [1, 1, 1, 0, 1]}, "expected none from block 4 on"),
        ({"attention__recurrent_layers": 1}, "recurrent_layers is 1, expected 5 booleans"),
        ({"attention__recurrent_layers": [0] * 5000}, r"\[0, 0, .*\]\.\.\. of 5000, expected 5"),
    ],
)
def test_keys_that_are_wrong_or_disagree_are_named(values, reason):
    with pytest.raises(FormatError, match=rf"{reason}"):
        config_from_metadata(changed(nano(), **values), tensors_of(read_config(nano())))


def test_more_experts_used_than_there_are_is_refused():
    with pytest.raises(FormatError, match=r"expert_used_count is 6, expected at most .* 5"):
        config_from_metadata(changed(moe(), expert_used_count=6), tensors_of(read_config(moe())))


@pytest.mark.parametrize("arch", ["llama", "qwen3next", "", 3, ["qwen35"], None])
def test_another_architecture_is_refused(arch):
    pairs = pairs_of(nano()) | {"general.architecture": Kv("", "", arch)}
    with pytest.raises(FormatError, match=r"general.architecture is .*, expected qwen35 or"):
        config_from_metadata(pairs, {})
    with pytest.raises(FormatError, match=r"general.architecture is missing"):
        config_from_metadata({}, {})


def test_embeddings_that_are_missing_or_no_matrix_are_refused():
    for infos, reason in (
        ({}, "token_embd.weight is missing"),
        ({"token_embd.weight": TensorInfo("t", "F32", (128,))}, "token_embd.weight has shape"),
    ):
        with pytest.raises(FormatError, match=reason):
            config_from_metadata(pairs_of(nano()), infos)


def test_an_end_of_text_that_is_no_number_is_refused():
    pairs = pairs_of(nano()) | {"tokenizer.ggml.eos_token_id": Kv("eos", "string", "</s>")}
    with pytest.raises(FormatError, match=r"eos is '</s>' .string., expected an integer"):
        config_from_metadata(pairs, tensors_of(read_config(nano())))


scalars = st.one_of(
    st.integers(-3, 300),
    st.integers(-1 << 63, (1 << 64) - 1),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
)


@given(
    mixture=st.booleans(),
    changes=st.lists(
        st.tuples(st.integers(0, 30), st.none() | scalars | st.lists(scalars, max_size=6)),
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_the_values_are_the_config_is_read_or_refused(mixture, changes):
    raw = moe() if mixture else dense()
    pairs = pairs_of(raw)
    keys = list(pairs)
    for i, value in changes:
        key = keys[i % len(keys)]
        pairs[key] = Kv(key, "float32" if isinstance(value, float) else "int64", value)
        if value is None:
            del pairs[key]
    try:
        config = back(pairs, read_config(raw))
    except FormatError:
        return
    assert config.sizes["H"] == read_config(raw).sizes["H"]
