"""What a kernel in Triton's GPU dialect does before it waits for the kernels before it.

The text is structured: a line after another is run after it, in the same turn of a loop.
"""

from __future__ import annotations

import re

_NAME = r"%[\w.$-]+"
_READS = re.compile(
    r"(?:tt\.load|ttg\.async_copy_global_to_local|tt\.ptr_to_int|tt\.atomic_\w+"
    r"|tt\.descriptor_load|ttng\.async_tma_copy_global_to_local) "
    rf"({_NAME})"
)
_STORE = re.compile(
    rf"(?:tt\.store|tt\.descriptor_store|ttng\.async_tma_copy_local_to_global) ({_NAME})"
)
_ARGUMENT = re.compile(rf"({_NAME}): !tt\.(?:ptr|tensordesc)<")
_EQUAL = re.compile(rf"({_NAME}) = arith.cmpi eq, ({_NAME}), ({_NAME})")
_IF = re.compile(rf"scf.if ({_NAME})")
_FOR = re.compile(rf"scf.for ({_NAME}) = ({_NAME}) to")
_CARRIED = re.compile(rf"({_NAME}) = ({_NAME})")


class Order:
    """A walk through a kernel.

    early  what it does before it has waited on every path: the names of the pointers that it reads,
           "start_next", and "store" with a name
    waits  whether it waits on every path
    """

    def __init__(self, text: str) -> None:
        self.early: set[str] = set()
        self.waits = False
        self.roots: dict[str, frozenset[str]] = {}
        self.entry = True
        # number and first number of loops, what says that they are equal, if a wait hangs on it
        self.turns: list[set[str]] = []
        self.first: set[str] = set()
        self.in_first_turn = False
        # of each region that is open: its kind, whether it had waited at its start, its results,
        # whether the branch before it waits
        self.open: list[tuple[str, bool, str, bool]] = []
        # of warps with parts of their own: what they are given, and of each part if it waits
        self.given: list[str] = []
        self.parts: list[bool] = []
        self.outside: dict[str, frozenset[str]] = {}
        for line in text.splitlines():
            self._line(line.strip())
        self.waits = self.waits or (self.parts != [] and all(self.parts))

    def _line(self, line: str) -> None:
        if line.startswith("tt.func"):
            self.roots |= {name: frozenset([name[1:]]) for name in _ARGUMENT.findall(line)}
        elif line.startswith("^bb") and not self.open:
            self.entry = False  # a wait in a block that may be left out does not count
        elif line.startswith("} else"):
            kind, before, results, _ = self.open.pop()
            self.open.append((kind, before, results, self.waits))
            self.waits = before
        elif line.startswith("}") and self.open:
            self._close()
        elif line.startswith("scf.yield") and self.open:
            self._hand_on(self.open[-1][2], line)
        elif equal := _EQUAL.search(line):
            if {equal[2], equal[3]} in self.turns:
                self.first.add(equal[1])
        else:
            self._step(line)

    def _step(self, line: str) -> None:
        result = re.match(rf"({_NAME})(?::\d+)? = ", line)
        read, store = _READS.search(line), _STORE.search(line)
        if line.startswith("ttg.warp_specialize("):
            self.given = re.findall(_NAME, line.split(")", 1)[0])
        elif "griddepcontrol.wait" in line:
            self._wait()
        elif "griddepcontrol.launch_dependents" in line:
            self._note(["start_next"])
        elif read:
            self._note(self.roots[read[1]])
        elif store:
            self._note(f"store {name}" for name in self.roots[store[1]])
        elif result and "!tt.ptr<" in line:
            self._hand_on(result[1], line.split(" = ", 1)[1])
        if line.endswith("{") and not line.startswith("module"):
            self._enter(line, result[1] if result else "")

    def _enter(self, line: str, results: str) -> None:
        first = line.split("iter_args", 1)[-1]
        for carried, value in _CARRIED.findall(first):
            self._hand_on(carried, value)
        self._hand_on(results, first)
        kind, condition, loop = "other", _IF.search(line), _FOR.search(line)
        if line.startswith(("default", "partition")):
            kind = "part"
            self._hand_to_part(re.findall(rf"({_NAME}):", line))
        elif loop:
            kind = "for"
            self.turns.append({loop[1], loop[2]})
        elif condition:
            kind = "first turn" if condition[1] in self.first else "if"
        self.open.append((kind, self.waits, results, False))

    def _close(self) -> None:
        kind, before, _, other = self.open.pop()
        if kind == "part":
            self.parts.append(self.waits)
            self.waits, self.roots = before, self.outside
        if kind in ("if", "first turn"):
            # a wait in the first turn is one for all turns
            now = other or self.waits if self.in_first_turn else other and self.waits
            self.waits = before or now
            self.in_first_turn &= any(outer == "for" for outer, *_ in self.open)

    def _wait(self) -> None:
        self.waits = self.waits or self.entry
        self.in_first_turn |= any(kind == "first turn" for kind, *_ in self.open)

    def _note(self, names) -> None:
        if not self.waits:
            self.early |= set(names)

    def _hand_to_part(self, names: list[str]) -> None:
        """Begin a part of the warps: what it calls by a name another part may call so, too."""
        self.outside = dict(self.roots)
        for name, given in zip(names, self.given, strict=False):
            if given in self.roots:
                self.roots[name] = self.roots[given]

    def _hand_on(self, result: str, operands: str) -> None:
        if result:
            found = [self.roots[n] for n in re.findall(_NAME, operands) if n in self.roots]
            self.roots[result] = frozenset().union(self.roots.get(result, frozenset()), *found)
