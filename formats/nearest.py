"""Known names for one that is not known: the one most likely meant, or all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, None if none is near.

    The first that has all its words (`Q4_K_M` in `gguf-q4_k_m`), else the one spelt most like it.
    """
    from difflib import get_close_matches

    sought, names = _words(name), {_words(one): one for one in known}
    holding = [whole for whole in names if sought and f"_{sought}_" in f"_{whole}_"]
    near = holding or get_close_matches(sought, names, 1)
    return names[near[0]] if near else None


def one_of(names: Iterable[object]) -> str:
    """Return names as a sentence offers them: "a, b or c"."""
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def guess(name: str, known: Collection[str]) -> str:
    """Return the words that offer the known name nearest to one that is not known, if any is."""
    near = nearest(name, known)
    return f", did you mean {near!r}?" if near else ""


def _words(name: str) -> str:
    """Return a name in lower case, with underscores between its words."""
    return name.lower().replace("-", "_").replace(".", "_")
