"""How text is cut before it is merged into tokens: one regex, to which llama.cpp gives a name.

Spellings of one regex are the same: escapes or characters, long names of classes, the order of a
class's members, the seven contractions. llama.cpp's converter compares a hash of token ids instead,
and so refuses every vocabulary that it has not seen.

Source: the published tokenizer.json; llama.cpp's `llama-vocab.cpp` at b11434. Trap: Qwen2's regex
lacks the class of combining marks alone, so only text that has some tells the two apart.
"""

from __future__ import annotations

import re

from formats.errors import FormatError
from formats.side_names import TOKENIZER

FROM_ORIGINAL = "take tokenizer.json from the original repository"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# What llama.cpp calls a way to cut text -> the regex in tokenizer.json.
REGEXES = {
    "qwen35": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# The same seven, as other writers spell them.
_SPELLINGS = (
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    "'(?i:[sdmt]|ll|ve|re)",
)
_ESCAPES = {"\r": r"\r", "\n": r"\n", "\t": r"\t"}
_LONG_NAMES = {"Letter": "L", "Mark": "M", "Number": "N"}
_CLASS = re.compile(r"\[(\^?)((?:\\p\{\w+\}|\\.|[^\]\\])+)\]")
_MEMBER = re.compile(r"\\p\{\w+\}|\\.|.")


def pre_type(pre_tokenizer: object) -> str:
    """Return llama.cpp's name of a pre-tokenizer. FormatError names the regex if it has none."""
    regex = _split_regex(pre_tokenizer)
    names = [name for name, known in REGEXES.items() if regex and same_regex(regex, known)]
    if names:
        return names[0]
    known = "\n".join(f"  known {name}: {text}" for name, text in REGEXES.items())
    raise FormatError(
        f"{TOKENIZER}: text is cut by {regex or repr(pre_tokenizer)}, expected a known regex and "
        f"ByteLevel\n{known}\n"
        f"  fix   {FROM_ORIGINAL}; a library may have rewritten it"
    )


def _split_regex(pre_tokenizer: object) -> str | None:
    """Return the regex of Split and then ByteLevel, which must do nothing but encode bytes."""
    steps = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    objects = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if [step.get("type") for step in objects] != ["Split", "ByteLevel"] or steps != objects:
        return None
    split, byte_level = objects
    cuts = (split.get("behavior"), split.get("invert"))
    if cuts not in (("Isolated", False), ("Removed", True)):
        return None
    plain = [byte_level.get(field) for field in ("add_prefix_space", "use_regex")]
    pattern = split.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return regex if plain == [False, False] and isinstance(regex, str) else None


def same_regex(one: str, other: str) -> bool:
    """Whether two regexes differ in their spelling only."""
    return _plain(one) == _plain(other)


def _plain(regex: str) -> str:
    """Spell a regex in one way: escapes, short names, contractions, members of classes sorted."""
    for spelling in _SPELLINGS:
        regex = regex.replace(spelling, _CONTRACTIONS)
    for raw, escaped in _ESCAPES.items():
        regex = regex.replace(raw, escaped)
    regex = re.sub(r"\\p(\w)", r"\\p{\1}", regex)
    for long, short in _LONG_NAMES.items():
        regex = regex.replace(f"{{{long}}}", f"{{{short}}}")
    return _CLASS.sub(_sorted_class, regex)


def _sorted_class(match: re.Match[str]) -> str:
    members: list[str] = sorted(set(_MEMBER.findall(match[2])))
    if "-" in members:
        return str(match[0])
    if len(members) == 1 and not match[1]:
        return members[0]
    return f"[{match[1]}{''.join(members)}]"
