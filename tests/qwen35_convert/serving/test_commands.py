"""Command lines: only those of engines that load an artifact, right to paste, from one table."""

from __future__ import annotations

import ast
import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

import qwen35_convert as q
from qwen35_convert.inspection.screen import start_lines
from qwen35_convert.serving.artifact import Served
from qwen35_convert.serving.commands import Load, short_name, starts
from qwen35_convert.serving.engines import ENGINES, ROWS, VERSIONS
from tests.checkpoints import dense, moe

FAST = q.RunOptions(verify=False)
FOLDER_ENGINES = ["vllm", "sglang", "transformers"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, nano_path: Path):
    """Return what inspects an artifact of a recipe; each is made once."""
    root = tmp_path_factory.mktemp("made")
    sources = {"dense": nano_path, "moe": moe(root / "moe", sizes="blocky")}

    def inspect(recipe: str, source: str = "dense", *overrides: str, name: str = "out"):
        out = root / f"{name}-{source}-{recipe}-{len(overrides)}"
        if recipe.startswith("gguf"):
            out = out.with_name(f"{out.name}.gguf")
        if not out.exists():
            q.convert(sources[source], out, recipe, FAST, overrides=overrides)
        return q.inspect(out)

    return inspect


def of(inspection, name: str):
    return next((e for e in inspection.serving["engines"] if e["engine"] == name), None)


def loading(inspection) -> dict[str, str]:
    """Return the oldest version of each engine that loads it."""
    return {e["engine"]: e["least"] for e in inspection.serving["engines"] if e["loads"]}


VLLM_26, TRANSFORMERS_24 = "vLLM 0.26", "transformers 5.24"
LOADS = {
    ("dense", "fp8-block"): ("vLLM 0.27", "SGLang 0.5.23", "transformers 5.2"),
    ("dense", "fp8-block-hub"): ("vLLM 0.17", "SGLang 0.5.9", "transformers 5.2"),
    ("dense", "fp8-channel"): ("vLLM 0.27", None, TRANSFORMERS_24),
    ("dense", "int4"): (VLLM_26, "SGLang 0.5.23", TRANSFORMERS_24),
    ("dense", "int8"): (VLLM_26, "SGLang 0.5.23", TRANSFORMERS_24),
    ("dense", "nvfp4a16"): (VLLM_26, "SGLang 0.5.23", TRANSFORMERS_24),
    ("dense", "mxfp4a16"): (VLLM_26, None, TRANSFORMERS_24),
    ("dense", "nvfp4-mixed"): (VLLM_26, None, None),
    ("moe", "int4"): (None, "SGLang 0.5.23", TRANSFORMERS_24),
    ("moe", "int4-g32"): (VLLM_26, "SGLang 0.5.23", None),
    ("moe", "int8"): (VLLM_26, None, None),
    ("moe", "nvfp4a16"): (VLLM_26, "SGLang 0.5.23", None),
}


@pytest.mark.parametrize(("source", "recipe"), LOADS)
def test_the_engines_that_load_a_folder_and_since_when(made, source, recipe):
    expected = zip(FOLDER_ENGINES, LOADS[source, recipe], strict=True)
    assert loading(made(recipe, source)) == {e: v for e, v in expected if v}


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        ("gguf-q8_0", {"llama.cpp": "llama.cpp b9180", "ollama": "Ollama 0.30"}),
        ("gguf-nvfp4", {"llama.cpp": "llama.cpp b9180"}),
    ],
)
def test_the_engines_that_load_a_gguf_file(made, recipe, least):
    inspection = made(recipe)
    assert loading(inspection) == least
    assert inspection.serving["vllm"] is inspection.serving["lmcache"] is None


def test_without_mtp_an_older_llama_cpp_will_do(made):
    least = loading(made("gguf-nvfp4", "dense", "mtp=drop"))
    assert least == {"llama.cpp": "llama.cpp with PR 20506"}


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama"])
def test_a_folder_is_not_for_readers_of_gguf(made, engine):
    said = of(made("fp8-block"), engine)
    assert not said["loads"]
    assert "reads GGUF files; qwen35 convert" in said["cannot"]


def test_a_reason_is_given(made):
    assert "one group" in of(made("int4", "moe"), "vllm")["cannot"]
    assert "MXFP4 in experts only" in of(made("mxfp4a16"), "sglang")["cannot"]
    assert "global scale" in of(made("nvfp4a16", "moe"), "transformers")["cannot"]


def test_a_dialect_counts(made):
    modelopt = made("nvfp4a16", "dense", "quantize.dialect=modelopt", name="modelopt")
    assert loading(modelopt) == {"vllm": VLLM_26, "sglang": "SGLang 0.5.23"}
    assert "on Hopper add --fp4-gemm-backend marlin" in of(modelopt, "sglang")["notes"]
    gptq = made("int4", "dense", "quantize.dialect=gptq", name="gptq")
    assert "it needs gptqmodel" in of(gptq, "transformers")["notes"]


def test_drafts_only_where_mtp_is_kept(made):
    kept, dropped = made("fp8-block-hub"), made("fp8-block-hub", "dense", "mtp=drop")
    option = dict(pairwise(shlex.split(of(kept, "vllm")["draft"][0])))
    assert json.loads(option["--speculative-config"])["method"] == "mtp"
    assert "--speculative-algorithm" in shlex.split(of(kept, "sglang")["draft"][0])
    assert not any(engine["draft"] for engine in dropped.serving["engines"])
    assert not any("MTP" in note for e in dropped.serving["engines"] for note in e["notes"])


def test_sglang_takes_no_drafts_beside_compressed_tensors(made):
    assert of(made("int4"), "sglang")["draft"] == ()
    assert "35797" in " ".join(of(made("int4"), "sglang")["notes"])


def test_the_tower_beside_a_file_is_given_where_it_is(made):
    without, beside = made("gguf-q8_0"), made("gguf-q8_0", "dense", "vision=keep", name="seen")
    assert "--mmproj" not in of(without, "llama.cpp")["line"]
    words = shlex.split(of(beside, "llama.cpp")["line"])
    assert Path(words[words.index("--mmproj") + 1]).is_file()


def test_lmcache_is_an_addition(made):
    serving = made("fp8-block-hub").serving
    assert "LMCache" not in serving["vllm"]
    vllm, lmcache = shlex.split(serving["vllm_with_lmcache"]), shlex.split(serving["lmcache"])
    option = dict(pairwise(vllm)) | dict(pairwise(lmcache))
    block = serving["attention_block_size"]["bf16"]
    assert vllm[:2] == ["vllm", "serve"]
    assert option["--chunk-size"] == str(block)
    assert option["--max-num-batched-tokens"] == str(2 * block - 1)
    assert option["--mamba-cache-mode"] == "align"
    assert json.loads(option["--kv-transfer-config"])["kv_connector"] == "LMCacheMPConnector"


@pytest.mark.parametrize("path", ["out/27B fp8", "it's", "-o", "a$(b)c`d`", 'q"uote\\'])
def test_every_line_names_the_path_whatever_is_in_it(path):
    traits = frozenset({"text", "plain numbers"})
    for start in starts(Served(path, traits, traits)):
        if start.engine == "transformers":
            (call,) = (n for n in ast.walk(ast.parse(start.pasted)) if isinstance(n, ast.Call))
            assert ast.literal_eval(call.args[0]) == (f"./{path}" if path[0] == "-" else path)
        elif start.serve:
            assert path in [word.removeprefix("./") for word in shlex.split(start.pasted)]
    file = frozenset({"a GGUF file", "types of ggml"})
    llama, ollama = starts(Served(f"{path}.gguf", file, file))
    assert f"{path}.gguf" in [word.removeprefix("./") for word in shlex.split(llama.pasted)]
    said = next(word for word in shlex.split(ollama.serve[0]) if word.startswith("FROM"))
    assert said.removeprefix("FROM ").removeprefix("./") == f"{path}.gguf"


def test_what_a_path_begins_with_means_nothing_to_an_engine():
    file = frozenset({"a GGUF file", "types of ggml"})
    for path in ("~x.gguf", '"x".gguf', " x.gguf", "-x.gguf"):
        llama, ollama = starts(Served(path, file, file))
        assert f"./{path}" in shlex.split(llama.pasted)
        assert f"FROM ./{path}" in shlex.split(ollama.serve[0])


def test_a_note_says_which_version_drafts(made):
    assert "drafts of text-only artifacts need vLLM 0.28" in of(made("fp8-block"), "vllm")["notes"]
    hub = made("fp8-block-hub")
    assert of(hub, "vllm")["notes"] == ()
    assert "--mamba-scheduler-strategy" not in of(hub, "sglang")["draft"][0]
    assert any("before 0.5.16" in note for note in of(hub, "sglang")["notes"])


def test_names_are_such_that_ollama_takes_them():
    assert len(short_name("x" * 200)) == 80
    assert short_name("models/Qwen 3.5 (27B)_Q4.gguf") == "Qwen-3.5-27B-_Q4"
    assert short_name("...") == "model"


def test_a_repository_s_revision_is_an_option_of_its_own():
    traits = frozenset({"text", "plain numbers"})
    found = {s.engine: s.pasted for s in starts(Served("a/b", traits, traits, revision="v 1"))}
    assert found["vllm"] == "vllm serve a/b --revision 'v 1'"
    assert "from_pretrained('a/b', dtype='auto', revision='v 1')" in found["transformers"]


def test_a_load_is_in_every_line():
    traits = frozenset({"a GGUF file", "types of ggml"})
    llama, ollama = starts(Served("x.gguf", traits, traits), Load(8192, 4))
    assert llama.pasted == "llama-server -m x.gguf -c 32768 -np 4"
    assert "PARAMETER num_ctx 8192" in ollama.pasted
    folder = frozenset({"text", "plain numbers"})
    vllm = starts(Served("x", folder, folder), Load(8192, 4))[0]
    assert vllm.pasted == "vllm serve x --max-model-len 8192 --max-num-seqs 4"


def test_of_what_is_not_known_nothing_is_said():
    traits = frozenset({"hub", "some new form"})
    assert [s.engine for s in starts(Served("x", traits, traits)) if not s.cannot] == []


def test_names_and_classes_that_no_engine_knows_are_told(tmp_path):
    config_of = dense(tmp_path / "in") / "config.json"
    config = json.loads(config_of.read_text())
    config["architectures"] = ["Qwen3_5ForCausalLM"]
    config_of.write_text(json.dumps(config))
    assert "another class" in of(q.inspect(tmp_path / "in"), "vllm")["cannot"]


def test_what_an_adapter_makes_of_its_model_is_served_nowhere(nano, tmp_path):
    from tests.adapters import lora, write_adapter

    config = json.loads((nano / "config.json").read_text())["text_config"]
    tensors = lora("model.layers.0.mlp.up_proj", config["intermediate_size"], config["hidden_size"])
    adapter = write_adapter(tmp_path / "tuned", tensors)
    assert q.inspect(q.Merge(adapter, nano)).serving["engines"] == []


def test_one_engine_is_told_in_full(made):
    shown = "\n".join(start_lines(made("fp8-block-hub").serving, "vllm"))
    for key in ("vllm ", "serve ", "draft ", "lmcache "):
        assert f"\n{key}" in f"\n{shown}"
    nothing = "\n".join(start_lines(made("gguf-q8_0").serving, "vllm"))
    assert nothing.startswith("vllm        nothing is known")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.engine}: {', '.join(row.traits)}")
def test_the_table_says_what_code_reads(row):
    assert row.engine in ENGINES
    assert row.least in ("", *VERSIONS[row.engine])
    assert not (row.cannot and (row.least or row.flags or row.drafts or row.note))
