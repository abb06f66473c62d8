"""Triton's interpreter without what it does again and again for nothing: half of its time.

Without `debug` it looks for overflows of integers and then does not say so; it makes its types anew
for every value, and patches its language at every call of a function within a kernel.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from runtime.kernels.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence


@contextmanager
def quicker(interpreter: Any, tl: Any) -> Iterator[None]:
    """Leave out what the interpreter does for nothing, while the context lasts.

    interpreter  Triton's module of that name
    tl           Triton's language
    """
    builder, block = interpreter.interpreter_builder, tl.block_type
    changes = {
        (interpreter, "_patch_lang"): _patching_once(interpreter._patch_lang, tl),
        (interpreter, "_get_np_dtype"): _remembering(interpreter._get_np_dtype, _scalar),
        (builder, "options"): replace(builder.options, sanitize_overflow=False),
        (builder, "get_block_ty"): _remembering(builder.get_block_ty, _block),
        (block, "with_element_ty"): _remembering(block.with_element_ty, _other_block),
    }
    with replaced(changes):
        yield


def _scalar(dtype: Any) -> Hashable:
    return str(dtype.scalar.name)


def _block(dtype: Any, shape: Sequence[int]) -> Hashable:
    return dtype.name, *shape


def _other_block(block: Any, dtype: Any) -> Hashable:
    return dtype.name, *block.shape


def _remembering(function: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
    """Return a function that is called once for all arguments of one key."""
    known: dict[Hashable, Any] = {}

    def remembered(*args: Any) -> Any:
        known_by = key(*args)
        if known_by not in known:
            known[known_by] = function(*args)
        return known[known_by]

    return remembered


def _patching_once(patch: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    """Return Triton's patch of its language for one that a launch does once.

    Triton's own is repeated by every call of a function within a kernel, for as long as the call
    takes again.
    """

    @cache
    def languages(kernel: Any) -> list[Any]:
        return [value for value in kernel.__globals__.values() if value is tl or value is tl.core]

    def once(kernel: Any) -> Any:
        done = not any(tl.core.is_builtin(language.load) for language in languages(kernel))
        return None if done else patch(kernel)

    return once
