"""Triton's interpreter without what it does again and again for nothing: two thirds of its time.

Without `debug` it looks for overflows of integers and then does not say so; it makes its types, and
the shapes of all values, anew for every value; it patches its language at every call of a function
within a kernel; it reduces element by element what blocks reduce at once, and takes floats of a
byte or two apart bit by bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from runtime.kernels.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence


@contextmanager
def quicker(interpreter: Any, tl: Any) -> Iterator[None]:
    """Leave out what the interpreter does for nothing, while the context lasts.

    interpreter  Triton's module of that name
    tl           Triton's language
    """
    with replaced(_changes(interpreter, tl)):
        yield


@cache
def _changes(interpreter: Any, tl: Any) -> dict[tuple[Any, str], Any]:
    """Return what takes the place of which attribute of Triton's; once, for what is remembered."""
    builder, semantic = interpreter.interpreter_builder, type(interpreter.interpreter_semantic)
    block, reduction = tl.block_type, interpreter.ReduceOps
    check = "binary_op_type_checking_impl"
    return {
        (interpreter, "_patch_lang"): _patching_once(interpreter._patch_lang, tl),
        (interpreter, "_patch_attr"): _calling(interpreter.interpreter_semantic),
        (interpreter, "_get_np_dtype"): _remembering(interpreter._get_np_dtype, _scalar),
        (interpreter, "_convert_float"): _by_tables(interpreter._convert_float),
        (reduction, "generic_reduce"): _reducing_slices(reduction.generic_reduce),
        (builder, "options"): replace(builder.options, sanitize_overflow=False),
        (builder, "get_block_ty"): _remembering(builder.get_block_ty, _block),
        (block, "with_element_ty"): _remembering(block.with_element_ty, _other_block),
        (block, "__init__"): _sharing_sizes(block.__init__),
        (tl.tensor, "__init__"): _sharing_shapes(tl.tensor.__init__),
        (tl.dtype, "__eq__"): _itself_or(tl.dtype.__eq__),
        (semantic, check): _where_types_differ(getattr(semantic, check)),
        (semantic, "broadcast_impl_value"): _where_shapes_differ(semantic.broadcast_impl_value),
    }


def _scalar(dtype: Any) -> Hashable:
    return str(dtype.scalar.name)


def _block(dtype: Any, shape: Sequence[int]) -> Hashable:
    return dtype.name, *shape


def _other_block(block: Any, dtype: Any) -> Hashable:
    return dtype.name, *block.shape.values


def _remembering(function: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
    """Return a function that is called once for all arguments of one key."""
    known: dict[Hashable, Any] = {}

    def remembered(*args: Any) -> Any:
        known_by = key(*args)
        if known_by not in known:
            known[known_by] = function(*args)
        return known[known_by]

    return remembered


def _sharing_sizes(make: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of types of blocks: those of one shape share what follows from it."""
    known: dict[Hashable, tuple[Any, int, str]] = {}

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *getattr(shape, "values", shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return make_once


def _sharing_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of tensors: those of one shape share it and its product."""
    known: dict[Hashable, tuple[Any, Any]] = {}

    def make_once(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape.values,) if type.is_block() else ()
        if key not in known:
            make(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return make_once


def _itself_or(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a comparison of types that sees at once where both are one."""
    return lambda self, other: self is other or equal(self, other)


def _where_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return a broadcast that leaves tensors of one shape, which they share, as they are."""
    return lambda self, a, b: (a, b) if a.shape is b.shape else broadcast(self, a, b)


def _where_types_differ(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check of two operands that leaves numbers of one type and shape as they are.

    Divisions, which have a fourth option, give other types.
    """

    def checked(self: Any, a: Any, b: Any, *options: Any, **named: Any) -> Any:
        alike = len(options) < 4 and not named and _alike(a, b)
        return (a, b) if alike else check(self, a, b, *options, **named)

    return checked


def _alike(a: Any, b: Any) -> bool:
    """Whether two operands are tensors of one type, none of pointers, and of one shape."""
    one_shape = getattr(a, "shape", 0) is getattr(b, "shape", 1)
    return one_shape and a.dtype is b.dtype and not a.dtype.is_ptr()


def _calling(semantic: Any) -> Callable[..., None]:
    """Return Triton's patch of one of its language's functions: past what checks who calls it."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, interpreted)

    return patch


def _by_tables(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion of floats which looks up those of one or two bytes."""
    import numpy as np

    tables: dict[Hashable, Any] = {}

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        if bits > 16:
            return convert(values, source, target, rounding)
        unsigned, key = np.dtype(f"u{bits // 8}"), (source.name, target.name, rounding)
        if key not in tables:
            every = np.arange(1 << bits, dtype=unsigned)
            tables[key] = convert(every, source, target, rounding)
        return tables[key][values.view(unsigned)]

    return converted


def _reducing_slices(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction by a function of elements which takes all elements of a slice at once."""
    import numpy as np

    def reduced(self: Any, values: tuple[Any, ...]) -> Any:
        if self.axis is None or self.keep_dims:
            return one_by_one(self, values)
        types = [value.dtype for value in values]
        slices = [np.moveaxis(value.handle.data, self.axis, 0) for value in values]

        def tensors(arrays: Iterable[Any]) -> list[Any]:
            return [self.to_tensor(*of) for of in zip(arrays, types, strict=True)]

        total = tensors(of[0] for of in slices)
        for i in range(1, len(slices[0])):
            sums = self.combine_fn.fn(*total, *tensors(of[i] for of in slices))
            sums = sums if isinstance(sums, tuple) else (sums,)
            total = tensors(x.handle.data.reshape(slices[0].shape[1:]) for x in sums)
        return total

    return reduced


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
