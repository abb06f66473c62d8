"""Mean KL against size: our fits and mixes, llama.cpp's mixes, and the artifacts of other tools.

    python -m benchmarks.frontier SOURCE --calibration FILE --text FILE [--work FOLDER]
                                  [--tools NAME ...] [--llama-lib FOLDER] [--peers FILE ...]
    python -m benchmarks.frontier --table
    python -m benchmarks.frontier --picture FILE

    fit        types chosen for each target of bits a weight, by one `qwen35 sensitivity`, for GGUF
    fit-folder the same of compressed-tensors' schemes
    recipe     the bundled recipes of one compressed-tensors scheme
    mix        the bundled gguf-* recipes
    gptq       the same by `quantize.method: gptq`, codes fitted to the calibration text
    fit-gptq   fits for GGUF by that method, types chosen as without it
    llama.cpp  llama_model_quantize of the libraries in a folder (see `outside`)
    --peers    lines of `frontier_peers`, whose artifacts are there

Folders keep the embedding in BF16, which is much of a small model: targets of fit-folder are bits
of the weights that have a choice.

Sensitivities, the importance matrix and all peers see the calibration text alone. Every artifact is
opened by qwen35 and run over the other text beside the source, in float32, by one evaluator. Bytes
are those of the language model's tensors, without vision and MTP. An artifact that is made here
is removed once it is measured. One JSON line each goes to benchmarks/results/frontier.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.convert import ENVIRONMENT, ROOT, remove
from benchmarks.lines import commit, record
from benchmarks.outside import quantiser

if TYPE_CHECKING:
    from qwen35_convert import Recipe

RESULTS = Path(__file__).parent / "results" / "frontier.jsonl"
TARGETS = (4.5, 3.5, 6.0, 2.75, 5.25, 8.0)
MIXES = (
    "q4_k_m", "iq3_xxs", "q6_k", "q3_k_m", "q5_k_m", "iq4_xs", "iq2_xxs", "iq3_s", "iq2_m", "q2_k",
)  # fmt: skip
TOKENS = 32768  # of the calibration text, at most
UNIFORM = ("int4", "int4-g32", "nvfp4a16", "mxfp4a16", "fp8-channel", "fp8-block", "int8")
PACKAGES = ("torch", "gguf")
Line = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """An artifact to be measured.

    make    writes it to a path; None: it is at `path`
    nbytes  what its tool stores, if that is not what is at `path`
    """

    tool: str
    name: str
    path: Path
    make: Callable[[Path], object] | None = None
    nbytes: int | None = None
    versions: dict[str, str] | None = None


@dataclass
class Bench:
    """A source, the text to be measured on, and a folder to work in.

    question  of sensitivities: the text that calibrates, its chunks, the forms
    names     of mixes
    """

    source: Path
    text: Path
    work: Path
    question: tuple[str, int, tuple[str, ...]]
    names: Sequence[str] = MIXES

    def imatrix(self) -> Path:
        """Return the importance matrix of the calibration text, made once."""
        import qwen35_convert as q

        out = self.work / f"{self.source.name}.imatrix.gguf"
        if not out.exists():
            q.imatrix(self.source, out, text=self.question[0])
        return out

    def settings(self) -> list[str]:
        """Return what every GGUF file of ours is made with."""
        return ["mtp=drop", "vision=drop", f"quantize.imatrix={self.imatrix()}"]

    def by_gptq(self, recipe: Recipe) -> Recipe:
        """Return the recipe with codes fitted to the calibration text."""
        import qwen35_convert as q

        told = recipe.model_dump()
        choices = {"method": "gptq", "calibrate": {"text": self.question[0], "tokens": TOKENS}}
        return q.Recipe.model_validate(told | {"quantize": told["quantize"] | choices})

    def fits(self, tool: str, recipe: str, targets: Sequence[float]) -> Iterator[Made]:
        """Yield what fits each target, by one measurement of costs."""
        import qwen35_convert as q

        is_file = tool != "fit-folder"
        ending = ".gguf" if is_file else ""
        chosen = q.read_recipe(recipe, self.settings() if is_file else ["mtp=drop", "vision=drop"])
        costs = self.work / f"{self.source.name}-costs{ending}.json"
        if not costs.exists():
            q.sensitivity(self.source, costs, chosen, q.Question(*self.question))
        for bits in targets:
            out = self.work / f"fit-{bits:g}{ending}"
            whole = {"bits": bits} if is_file else {"size": self.room(chosen, bits)}
            goal = q.Goal(**whole, table=costs)
            try:
                fitted = q.fit_recipe(self.source, out, goal, chosen).recipe
            except q.RecipeError as error:
                print(f"{self.source.name} {recipe} {bits:g} bits: {error}", flush=True)
                continue
            fitted = self.by_gptq(fitted) if tool == "fit-gptq" else fitted
            yield Made(tool, f"{bits:g} bits", out, partial(self.convert, fitted))

    def room(self, recipe: Recipe, bits: float) -> int:
        """Return the bytes of a folder whose weights that have a choice have these bits."""
        from qwen35_convert.containers.registry import open_checkpoint
        from qwen35_convert.fit.make import sizes_for
        from qwen35_convert.fit.question import USUAL

        sizes = sizes_for(open_checkpoint(self.source), recipe, USUAL)
        return sizes.rest + int(bits / 8 * sum(unit.elements for unit in sizes.units))

    def uniform(self) -> Iterator[Made]:
        """Yield folders of one scheme."""
        import qwen35_convert as q

        for name in UNIFORM:
            recipe = q.read_recipe(name, ["mtp=drop"])
            yield Made("recipe", name, self.work / f"recipe-{name}", partial(self.convert, recipe))

    def mixes(self) -> Iterator[Made]:
        """Yield the bundled mixes."""
        import qwen35_convert as q

        for mix in self.names:
            recipe = q.read_recipe(f"gguf-{mix}", self.settings())
            yield Made("mix", mix, self.work / f"mix-{mix}.gguf", partial(self.convert, recipe))

    def mixes_by_gptq(self) -> Iterator[Made]:
        """Yield the bundled mixes by GPTQ."""
        import qwen35_convert as q

        for mix in self.names:
            recipe = self.by_gptq(q.read_recipe(f"gguf-{mix}", self.settings()))
            yield Made("gptq", mix, self.work / f"gptq-{mix}.gguf", partial(self.convert, recipe))

    def convert(self, recipe: Recipe, out: Path) -> None:
        """Convert by a recipe; predictions are measured afterwards."""
        import qwen35_convert as q

        q.convert(self.source, out, recipe, q.RunOptions(overwrite=True, verify=False))

    def theirs(self, libraries: Path) -> Iterator[Made]:
        """Yield llama.cpp's mixes, each quantised from one BF16 file."""
        import qwen35_convert as q

        between = self.work / f"{self.source.name}.bf16.gguf"
        if not between.exists():
            self.convert(q.read_recipe("gguf-bf16", ["mtp=drop", "vision=drop"]), between)
        about = {"llama.cpp": next(libraries.glob("libllama.*so")).name}
        for mix in self.names:
            command = partial(quantiser, libraries, between, mix=mix, threads=1,
                              imatrix=self.imatrix())  # fmt: skip
            make = lambda out, command=command: _run(command(out=out))  # noqa: E731
            yield Made("llama.cpp", mix, self.work / f"theirs-{mix}.gguf", make, versions=about)


def _run(command: tuple[str, ...]) -> None:
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)


def peers(file: Path, model: str) -> Iterator[Made]:
    """Yield the artifacts of a model that lines of `frontier_peers` tell of."""
    for line in map(json.loads, file.read_text().splitlines()):
        if line["model"] == model:
            path, nbytes = Path(line["path"]), line.get("bytes")
            yield Made(line["tool"], line["name"], path, None, nbytes, line["versions"])


def measured(bench: Bench, made: Made) -> Line:
    """Return the line of an artifact, which is removed if it was made here."""
    from qwen35_convert.containers.registry import open_checkpoint
    from qwen35_convert.verification.figures import Size
    from qwen35_convert.verification.logits import token_rows
    from qwen35_convert.verification.logits_cache import LogitsCache
    from runtime.compare import compare_logits

    if made.make:
        made.make(made.path)
    source, artifact = open_checkpoint(bench.source), open_checkpoint(made.path)
    rows = token_rows(source, str(bench.text))
    with LogitsCache.of(bench.work / "logits", source, rows, "cpu").opened() as kept:
        report = compare_logits(source, artifact, rows, device="cpu", kept=kept)
    nbytes = made.nbytes or Size.of(artifact).model
    weights = Size.of(source).weights
    if made.make:
        remove(made.path, Path(f"{made.path}.receipt.json"))
    return {
        "what": "frontier", "model": bench.source.name, "tool": made.tool, "name": made.name,
        "bytes": nbytes, "bits": round(8 * nbytes / weights, 3),
        "kl": float(f"{report.kl_mean:.4g}"), "kl_se": float(f"{report.kl_stderr or 0:.2g}"),
        "kl_p999": float(f"{report.kl_p999:.4g}"), "top1": round(report.top1, 4),
        "tokens": report.tokens,
        "versions": {name: metadata.version(name) for name in PACKAGES} | (made.versions or {}),
        "commit": commit(),
    }  # fmt: skip


def every(bench: Bench, options: argparse.Namespace) -> Iterator[Made]:
    """Yield what is asked for."""
    ours = {
        "fit": partial(bench.fits, "fit", "gguf-q8_0", options.targets),
        "fit-folder": partial(bench.fits, "fit-folder", "fp8-block", options.targets),
        "recipe": bench.uniform,
        "mix": bench.mixes,
        "gptq": bench.mixes_by_gptq,
        "fit-gptq": partial(bench.fits, "fit-gptq", "gguf-q8_0", options.targets),
    }
    for tool in options.tools:
        yield from ours[tool]()
    if options.llama_lib:
        yield from bench.theirs(options.llama_lib)
    for file in options.peers:
        yield from peers(file, options.source.name)


def main() -> None:
    """Measure what is asked for, or show what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--work", type=Path, help="keeps costs, imatrix and logits for later runs")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="of fits")
    parser.add_argument("--forms", nargs="*", default=(), help="of fits; none: the usual ones")
    parser.add_argument("--chunks", type=int, default=2, help="of 512 tokens, for sensitivities")
    parser.add_argument("--tools", nargs="*", default=["fit", "mix"], help="as above")
    parser.add_argument("--mixes", nargs="+", default=MIXES)
    parser.add_argument("--llama-lib", type=Path, help="folder with libllama.so and libggml.so")
    parser.add_argument("--peers", type=Path, nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.table or options.picture:
        show(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        question = str(options.calibration), options.chunks, tuple(options.forms)
        bench = Bench(options.source, options.text, work, question, options.mixes)
        for made in every(bench, options):
            line = measured(bench, made)
            record(options.results, line)


def show(options: argparse.Namespace) -> None:
    """Print the table, or write the picture, of the last line of each artifact."""
    from benchmarks.frontier_picture import picture_of
    from benchmarks.frontier_table import table

    lines = map(json.loads, options.results.read_text().splitlines())
    own = [one for one in lines if one["what"] == "frontier"]  # and not of a second text
    last = list({(one["model"], one["tool"], one["name"]): one for one in own}.values())
    if options.picture:
        options.picture.write_text(picture_of(last), encoding="utf-8")
    else:
        print(table(last))


if __name__ == "__main__":
    main()
