"""Faults of the receipt itself: it says another recipe, source or output than there was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.fault import AS_IT_IS, FORGED, TENSORS, Fault, Names, Where, in_bases

FOLDERS = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-bf16-split", "wide-mixed"
)
FILES = in_bases("nano-q8_0", "wide-q4_k_m", "moe-mxfp4_moe", "wide-split", "nano-mmproj")
HOMES: Where = lambda base: FOLDERS(base) or FILES(base)  # noqa: E731
Receipt = dict[str, Any]
OTHER = {"text": "hub", "hub": "text"}


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, change in EVERYWHERE.items():
        yield _fault(name, change, HOMES)
    for name, change in OF_FOLDERS.items():
        yield _fault(name, change, FOLDERS)
    for name, change in OF_FILES.items():
        yield _fault(name, change, FILES)
    yield _fault(
        "scale-mode",
        recipe("quantize.scale", "float32"),
        in_bases("nano-fp8-block", "nano-fp8-block-hub"),
    )
    yield _fault("experts-fused", recipe("experts", "fused"), in_bases("moe-bf16-split"))
    yield _fault("rules-lost", recipe("quantize.rules", []), in_bases("wide-mixed"))
    yield _fault("vision-kept", recipe("vision", "keep"), in_bases("nano-q8_0"))
    yield _fault("vision-dropped", recipe("vision", "drop"), in_bases("nano-mmproj"))
    yield _fault("not-split", recipe("export.max_shard_size", 10**9), in_bases("wide-split"))
    one = {"match": "layers.0.mlp.down_proj", "scheme": "fp8-channel"}
    yield _fault("a-rule-more", recipe("quantize.rules", [one]), in_bases("nano-fp8-block"))
    for name, content in BROKEN.items():
        plant = partial(_write, content=content)
        yield Fault("receipt", name, plant, HOMES, TENSORS, receipts=(AS_IT_IS,))
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        plant = partial(_lose_file, name=name)
        yield Fault(
            "receipt", f"a-file-lost-{name}", plant, FOLDERS, TENSORS, receipts=(AS_IT_IS, FORGED)
        )
    yield Fault("receipt", "a-file-changed", _change_file, FOLDERS, TENSORS, receipts=(AS_IT_IS,))
    yield Fault("receipt", "weights-changed", _change_weights, HOMES, TENSORS, receipts=(AS_IT_IS,))


def _fault(name: str, change: Callable[[Receipt], Names], where: Where) -> Fault:
    def plant(artifact: Artifact) -> Names:
        receipt = json.loads(artifact.receipt.read_bytes())
        names = change(receipt)
        artifact.receipt.unlink()
        artifact.receipt.write_text(json.dumps(receipt, indent=2, ensure_ascii=False) + "\n")
        return names

    return Fault("receipt", name, plant, where, TENSORS, receipts=(AS_IT_IS,))


def recipe(key: str, value: Any) -> Callable[[Receipt], Names]:
    """Return a change of the recipe: what lies there is then not what it makes."""

    def change(receipt: Receipt) -> Names:
        part, *path = receipt["recipe"], *key.split(".")
        for segment in path[:-1]:
            part = part[segment]
        assert part[path[-1]] != value, f"{key} is {value} already"
        part[path[-1]] = value
        return "receipt|recipe|weight|quantization_config|mmproj"

    return change


def source(change: Callable[[dict[str, Any]], object]) -> Callable[[Receipt], Names]:
    """Return a change of the list of the source's files."""

    def apply(receipt: Receipt) -> Names:
        change(receipt["source"]["files"])
        return "receipt|source"

    return apply


def _scheme(receipt: Receipt) -> Names:
    folder = receipt["recipe"]["export"]["format"] == "safetensors"
    asked = receipt["recipe"]["quantize"]["scheme"]
    other = (
        ("fp8-channel" if asked != "fp8-channel" else "fp8-block")
        if folder
        else ("q5_k_m" if asked != "q5_k_m" else "q4_k_m")
    )
    return recipe("quantize.scheme", other)(receipt)


def _output(change: Callable[[dict[str, Any], str], object]) -> Callable[[Receipt], Names]:
    """Return a change of one entry of the output; its file is to be named."""

    def apply(receipt: Receipt) -> Names:
        files = receipt["output"]["files"]
        name = next(n for n in files if n.endswith((".gguf", ".safetensors")))
        change(files, name)
        return name

    return apply


def _weights_of(files: dict[str, Any]) -> dict[str, Any]:
    return next(said for name, said in files.items() if name.endswith(".safetensors"))


def _config_of(files: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = files["config.json"]
    return said


def _lose_weights(files: dict[str, Any]) -> None:
    for name in [name for name in files if name.endswith(".safetensors")]:
        del files[name]


def _said(change: Callable[[Receipt], object]) -> Callable[[Receipt], Names]:
    """Return a change of what the receipt says of the artifact."""

    def apply(receipt: Receipt) -> Names:
        change(receipt)
        return "receipt"

    return apply


def _errors(receipt: Receipt) -> Names:
    """Let the artifact look better than it is."""
    for measured in receipt["errors"].values():
        if "relative_rms" in measured:
            measured["relative_rms"] /= 2
            return "receipt|errors|relative_rms"
    receipt["errors"] = {"fp8-block": {"tensors": 1, "relative_rms": 0.001}}
    return "receipt|errors|relative_rms"


def _dropped(receipt: Receipt) -> Names:
    receipt["dropped"] = {"mtp": 15}
    return "receipt|dropped"


EVERYWHERE: dict[str, Callable[[Receipt], Names]] = {
    "scheme": _scheme,
    "mtp-dropped": recipe("mtp", "drop"),
    "source-weights": source(lambda files: _weights_of(files).update(sha256="0" * 64)),
    "source-config": source(lambda files: _config_of(files).update(sha256="1" * 64)),
    "source-size": source(lambda files: _weights_of(files).update(size=17)),
    "source-file-lost": source(lambda files: files.pop("config.json")),
    "source-file-more": source(
        lambda files: files.update({"model-extra.safetensors": {"size": 1, "sha256": "0" * 64}})
    ),
    "source-empty": source(lambda files: files.clear()),
    "output-lost": _output(lambda files, name: files.pop(name)),
    "output-hash": _output(lambda files, name: files[name].update(sha256="0" * 64)),
    "output-size": _output(lambda files, name: files[name].update(size=17)),
    "output-more": _output(lambda files, name: files.update({f"more-{name}": files[name]})),
    "errors": _errors,
    "errors-lost": _said(lambda receipt: receipt.update(errors=None)),
    "verdict-lost": _said(lambda receipt: receipt.update(verdict=None)),
    "version-empty": _said(lambda receipt: receipt.update(qwen35="")),
    "source-from-a-number": _said(lambda receipt: receipt["source"].update(repo=7)),
    "source-of-a-list": _said(lambda receipt: receipt["source"].update(revision=["main"])),
    "source-size-below-zero": source(lambda files: _config_of(files).update(size=-1)),
    "verdict-failed": _said(lambda receipt: receipt["verdict"].update(passed=False)),
    "level-raised": recipe("verify.level", "logits"),
    "a-threshold-claimed": recipe("verify.max_kl", 0.5),
    "source-without-weights": source(lambda files: _lose_weights(files)),
    "dropped-lost": _said(lambda receipt: receipt.pop("dropped")),
    "dropped": _dropped,
}
OF_FOLDERS: dict[str, Callable[[Receipt], Names]] = {
    "shard-size": recipe("export.max_shard_size", 10**5),
    "only-a-slice": recipe("only", "layers.0.*"),
    "layout": lambda receipt: recipe("layout", OTHER[receipt["recipe"]["layout"]])(receipt),
    "a-format-of-files": recipe("export.format", "gguf"),
}
OF_FILES: dict[str, Callable[[Receipt], Names]] = {
    "mix-of-llama-cpp": recipe("quantize.mix", "llama.cpp"),
    "only-a-slice": recipe("only", "layers.0.*"),
    "imatrix": recipe("quantize.imatrix", "/nowhere/imatrix.gguf"),
}
BROKEN = {
    "empty": "",
    "a-list": "[]",
    "without-output": '{"recipe": {}}',
    "without-recipe": '{"output": {"files": {}}}',
    "of-an-unknown-recipe": '{"recipe": {"magic": 1}, "output": {"files": {}}, "source": {}}',
}


def _write(artifact: Artifact, content: str) -> str:
    artifact.receipt.unlink()
    artifact.receipt.write_text(content)
    return artifact.receipt.name


def _lose_file(artifact: Artifact, name: str) -> str:
    artifact.file(name).unlink()
    return name


def _change_file(artifact: Artifact) -> str:
    with artifact.json("generation_config.json") as generation:
        generation["temperature"] = 2.0
    return "generation_config.json"


def _change_weights(artifact: Artifact) -> str:
    path = artifact.tensor_files()[0]
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    artifact.write(path.name, bytes(content))
    return path.name
