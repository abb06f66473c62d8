"""An artifact against its source: by bytes where it is kept, by value where it is quantised.

Both sides are opened by their own headers and cut into atoms independently of any plan. An element
of a quantised weight must lie within half a step of its code (`quant.measure` derives the bound);
what is kept must be equal bit for bit. A tensor that fails is examined for the usual faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.ops import Tile
from formats.gguf.file import GgufFile
from formats.tensor import DTYPE_BYTES
from quant.ggml.scheme import compare_decoded
from quant.measure import Error, measure
from quant.scheme import FP8_SCHEMES, KEEP, get_scheme
from quant.stored import BLOCK, Value, open_value, read_cost
from qwen35_convert.containers.gguf.importance import USED
from qwen35_convert.containers.safetensors.census import scheme_of
from qwen35_convert.verification.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = ("f32", "f16", "bf16")
# What float32 loses of w in 1 + w, and of A_log in -exp(A_log): absolute, relative to the value.
MAX_DIAGNOSED = 1 << 27
ROUNDED = {"norm": (2.0**-23, 2.0**-22), "A_log": (2.0**-21, 2.0**-23)}
MEASURED = 64  # bytes that `measure` takes for an element: both sides in float64, their products
SAME = 0.1  # relative RMS below which two weights are the same one, whatever its scheme


@dataclass(frozen=True, slots=True)
class Compared:
    """One atom: how it is stored and how far it is from its source."""

    name: str
    stored: str
    role: str
    scheme: str
    error: Error
    failures: tuple[Failure, ...]


def missing_atoms(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what one side has and the other lacks; vision and MTP may be dropped as a whole."""
    ours, theirs = artifact.layout.atoms, source.layout.atoms
    for name, atom in theirs.items():
        head = name.split(".", 1)[0]
        whole = head in ("visual", "mtp") and not any(n.split(".", 1)[0] == head for n in ours)
        if name not in ours and not whole:
            yield Failure(atom.stored, "is in the source, but not in the artifact")
    for name, atom in ours.items():
        if name not in theirs:
            yield Failure(atom.stored, "is in the artifact, but not in the source")


def compare_atom(
    artifact: Checkpoint, source: Checkpoint, name: str, weights: Tensor | None = None
) -> Compared:
    """Compare one atom that both sides have; `weights` is the importance it was encoded with."""
    atom, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    scheme = scheme_of(artifact, atom)
    ours, theirs = open_value(artifact, atom), open_value(source, origin)
    if atom.shape != origin.shape:
        problem = f"has shape {list(atom.shape)}, the source has {list(origin.shape)}"
        return Compared(
            name, atom.stored, atom.role, scheme, Error(), (Failure(atom.stored, problem),)
        )
    equal, error = True, Error()
    multiple = 1 if artifact.gguf else BLOCK
    for start, stop in theirs.chunks(multiple, held=_held(ours, scheme)):
        if scheme == KEEP or scheme in PLAIN:
            equal = equal and _same(ours, theirs, start, stop)
        elif artifact.gguf:
            error += _block_error(ours, theirs, (start, stop), weights)
        else:
            error += _chunk_error(ours, theirs, start, stop, scheme)
        ours.release(start, stop)
        theirs.release(start, stop)
    failures: tuple[Failure, ...] = ()
    if not equal or error.outside:
        failures = (Failure(atom.stored, diagnose(artifact, source, name)),)
    return Compared(name, atom.stored, atom.role, scheme, error, failures)


def _held(ours: Value, scheme: str) -> int:
    """Return the bytes of an element beside what is read of the source.

    It follows from the artifact alone, so the ranges and with them the sums are the same whatever
    memory there is.
    """
    loops = scheme in FP8_SCHEMES and (scheme == "fp8-channel" or _on_edges(ours))
    own = DTYPE_BYTES["F64"] if scheme == KEEP or scheme in PLAIN else MEASURED
    return read_cost(ours.info, moved=True) + (2 if loops else own)


def _same(ours: Value, theirs: Value, start: int, stop: int) -> bool:
    """Whether rows are equal bit for bit; from or to a GGUF, after the cast and what it rounds."""
    left, right = ours.rows(start, stop), theirs.rows(start, stop)
    if ours.source.gguf and ours.atom.role in ROUNDED:
        absolute, relative = ROUNDED[ours.atom.role]
        gap, size = (left.double() - right.double()).abs(), right.double().abs()
        return bool((gap <= absolute + relative * size).all())
    if ours.source.gguf or theirs.source.gguf:
        right = right.to(left.dtype)
    return same_bits(left, right)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape have the same type and the same bytes."""
    import torch

    same = left.dtype == right.dtype
    return same and torch.equal(*(t.contiguous().view(torch.uint8) for t in (left, right)))


def _block_error(
    ours: Value, theirs: Value, rows: tuple[int, int], weights: Tensor | None
) -> Error:
    """Measure ggml's blocks against the source's rows, both in the order in which they are stored.

    Blocks are runs of columns, and the columns of out_proj were tiled before they were encoded.
    """
    assert ours.blocks is not None, "only blocks are measured so"
    w, decoded = theirs.exact(*rows), ours.exact(*rows)
    for op in reversed(ours.late):
        assert isinstance(op, Tile), "weights in blocks are only reordered"
        w, decoded = op.inverse().apply(w), op.inverse().apply(decoded)
    weighed = weighed_by_imatrix(ours.source)
    return compare_decoded(ours.blocks.dtype, w, decoded, weights, weighed=weighed)


def weighed_by_imatrix(artifact: Checkpoint) -> bool:
    """Whether a GGUF file says that an importance matrix was used."""
    first = next(iter(artifact.files.values()))
    return isinstance(first, GgufFile) and USED in first.kv


def _chunk_error(ours: Value, theirs: Value, start: int, stop: int, scheme: str) -> Error:
    """Measure the artifact's own codes and scales against the source's rows."""
    assert ours.scale is not None, "a quantised atom has a scale"
    codes, scale = ours.codes(start, stop), ours.scales(start, stop)
    w = theirs.rows(start, stop)
    if scheme == "fp8-channel" or (scheme == "fp8-block" and _on_edges(ours)):
        known = get_scheme(scheme)
        suffix = known.stored(tuple(codes.shape))[1].suffix
        return known.compare(w, {"": codes, suffix: scale[:: known.row_multiple]})
    steps = scale.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]] if scale.shape[1] > 1 else scale
    return measure(w, codes.float() * steps, scale=steps, codes=codes)


def _on_edges(value: Value) -> bool:
    """Whether the atom begins on a block's edge of the stored tensor."""
    assert value.scale is not None, "only a quantised atom has blocks"
    first = value.scales(0, min(BLOCK, value.shape[0]))
    return bool((first == first[:1]).all())


def diagnose(artifact: Checkpoint, source: Checkpoint, name: str) -> str:
    """Say what is wrong with an atom whose values are not the source's."""
    mine, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    gguf = artifact.gguf or source.gguf
    if not gguf and mine.dtype != origin.dtype:
        return f"is {mine.dtype}, but the source has {origin.dtype}"
    if prod(mine.shape) > MAX_DIAGNOSED:
        return "differs from the source; it is too large to be held whole and examined"
    ours, theirs = open_value(artifact, mine).all().float(), open_value(source, origin).all()
    found = _as_transposed(ours, theirs) or _as_shifted(ours, theirs)
    found = found or _as_sibling(ours, source, name) or _as_reordered(ours, theirs)
    return found or f"differs from the source by {relative(ours, theirs):.3g} (relative RMS)"


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative RMS distance of two tensors of one shape."""
    theirs = theirs.float()
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm else float(ours.norm())


def _as_transposed(ours: Tensor, theirs: Tensor) -> str | None:
    square = ours.dim() == 2 and ours.shape[0] == ours.shape[1]
    same = square and relative(ours.T, theirs) < SAME
    return "holds the transpose of the source" if same else None


def _as_shifted(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.dim() != 1:
        return None
    for shift in (1, -1):
        if relative(ours - shift, theirs) < 0.02:
            return f"is the source shifted by {shift:+d}: a norm's 1 + w counted twice or lost"
    return None


def _as_sibling(ours: Tensor, source: Checkpoint, name: str) -> str | None:
    """Look for another tensor of the same layer with these values: a swap."""
    layer = name.rsplit(".", 2)[0] if ".experts." in name else ".".join(name.split(".")[:2])
    shape = tuple(ours.shape)
    for other, atom in source.layout.atoms.items():
        near = other != name and other.startswith(layer + ".") and atom.shape == shape
        if near and relative(ours, open_value(source, atom).all()) < SAME:
            return f"holds the values of {other}"
    return None


def _as_reordered(ours: Tensor, theirs: Tensor) -> str | None:
    """Rows of the same lengths in another order: heads tiled, or a wrong split."""
    if ours.dim() < 2 or relative(ours, theirs) < SAME:
        return None
    left, right = (t.float().flatten(1).norm(dim=1).sort().values for t in (ours, theirs))
    same = relative(left, right) < 0.01
    return "holds the source's rows in another order (heads?)" if same else None
