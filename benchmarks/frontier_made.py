"""The artifacts that `benchmarks.frontier` measures: what makes each, and where it then lies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.convert import ENVIRONMENT, ROOT
from benchmarks.outside import quantiser

if TYPE_CHECKING:
    from qwen35_convert import Recipe

MIXES = (
    "q4_k_m", "iq3_xxs", "q6_k", "q3_k_m", "q5_k_m", "iq4_xs", "iq2_xxs", "iq3_s", "iq2_m", "q2_k",
)  # fmt: skip
TOKENS = 32768  # of the calibration text, at most
UNIFORM = ("int4", "int4-g32", "nvfp4a16", "mxfp4a16", "fp8-channel", "fp8-block", "int8")


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
