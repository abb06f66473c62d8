"""The best recipe within a size: forms chosen by what they cost, until the artifact is that small.

    --fit           memory of an engine, less what sequences take: llama.cpp's for a GGUF file,
                    vLLM's for a folder
    --target-size   bytes of the files that hold tensors
    --target-bpw    the same, for each weight of the artifact

The size of a folder's headers follows from the forms, and a mix gives the MTP head other types
when rules decide all else. What such bytes come to is taken off the budget, and the choice is made
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import expect
from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.by_role import NOTE
from qwen35_convert.fit.choose import Choice, check_enough, choose_within, planned
from qwen35_convert.fit.sizes import Costs, Sizes
from qwen35_convert.heads import CHOSEN
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.serving.engines import LLAMA_CPP, VLLM
from qwen35_convert.serving.memory import room_for_weights
from qwen35_convert.sizes import size_text

ENGINES = {"gguf": LLAMA_CPP, "safetensors": VLLM}
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Goal:
    """The largest size of an artifact, in one of three ways.

    memory   bytes for weights and `batch` sequences of `context` tokens
    size     bytes of the files with tensors
    bits     of each weight
    table    a file of `sensitivity` to choose by; None: costs are measured on the bundled text
    by_role  costs are those of small trained models, by role; nothing is measured

    Raises RecipeError for none or several of them, and for what is not above 0.
    """

    memory: int | None = None
    size: int | None = None
    bits: float | None = None
    context: int = 4096
    batch: int = 1
    table: Path | None = None
    by_role: bool = False

    def __post_init__(self) -> None:
        stated = {"--fit": self.memory, "--target-size": self.size, "--target-bpw": self.bits}
        given = {name: value for name, value in stated.items() if value is not None}
        if len(given) != 1:
            problem = "are given" if given else "is given"
            subject = " and ".join(given) or f"none of {', '.join(stated)}"
            raise RecipeError(subject, problem, f"one of {', '.join(stated)}")
        for name, value in given.items():
            if not 0 < value < float("inf"):
                raise RecipeError(name, f"is {value}", "a number above 0")

    def budget(self, source: Checkpoint, plan: Plan) -> int:
        """Return the bytes that files with tensors may have. RecipeError if none are left."""
        if self.bits is not None:
            return int(self.bits / 8 * sum(prod(item.atom.shape) for item in plan.items))
        if self.size is not None:
            return self.size
        assert self.memory is not None, "one of three is given"
        engine = ENGINES[plan.container]
        room = room_for_weights(source.config, self.context, self.batch, engine, self.memory)
        if room <= 0:
            raise RecipeError(
                f"--fit {size_text(self.memory)}",
                f"is less than {engine} takes for {self.batch} x {self.context:,} tokens: "
                f"{size_text(self.memory - room)}",
                "more memory, such as 24GB, or a smaller --context or --batch",
            )
        return room


@dataclass(frozen=True, slots=True)
class Fitted:
    """A recipe within a size.

    nbytes  of the files with tensors, of `budget` that were allowed
    kl      mean KL in nats that is expected of what was chosen
    note    what that rests on, if it was not measured on this model
    """

    recipe: Recipe
    nbytes: int
    budget: int
    kl: float
    note: str = ""

    @property
    def told(self) -> str:
        """Return what came out in one line."""
        return (
            f"{self.nbytes:,} of {self.budget:,} bytes ({size_text(self.nbytes)}), "
            f"expected mean KL {self.kl:.3g}{self.note and f' ({self.note})'}"
        )

    def content(self) -> bytes:
        """Return the recipe as a file."""
        import yaml

        values = self.recipe.model_dump(mode="json", exclude_none=True)
        head = f"{CHOSEN}{self.told}.\n"
        return (head + yaml.safe_dump(values, sort_keys=False, width=200)).encode()


def check_possible(source: Checkpoint, sizes: Sizes, goal: Goal, out: Path) -> None:
    """Refuse, before costs are measured, a goal that no forms can meet. RecipeError."""
    check_enough(sizes.smallest, goal.budget(source, expect(source, sizes.recipe, out)))


def fit_within(source: Checkpoint, sizes: Sizes, costs: Costs, goal: Goal, out: Path) -> Fitted:
    """Return the recipe of least cost that keeps an artifact at OUT within the goal.

    It costs no more than what the recipe itself gives every unit, if that is within the goal.
    RecipeError if none does: it says the nearest size there is.
    """
    budget = goal.budget(source, expect(source, sizes.recipe, out))

    def fitted(choice: Choice) -> Fitted:
        recipe, note = sizes.recipe_of(choice.forms), NOTE if goal.by_role else ""
        return Fitted(recipe, expect(source, recipe, out).nbytes, budget, choice.cost, note)

    own = planned(sizes, costs)
    fits = [one for one in map(fitted, [own] if own else []) if one.nbytes <= budget]
    beside = nearest = 0
    for _ in range(ATTEMPTS):
        choice = choose_within(sizes, costs, budget - beside)
        found = fitted(choice)
        nearest = found.nbytes
        if nearest <= budget:
            return min(*fits, found, key=lambda one: one.kl) if fits else found
        beside = max(beside, nearest - choice.nbytes)
    if fits:
        return fits[0]
    raise RecipeError("the size", f"is {budget:,} bytes", f"{nearest:,}, which is the nearest")
