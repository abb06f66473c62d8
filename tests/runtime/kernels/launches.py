"""Kernels as wrappers launch them, caught on the way, and compiled as far as Triton's dialect.

Without TRITON_INTERPRET, and without a GPU: tensors are on torch's device "meta".
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import ir
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import Autotuner, JITFunction

from runtime.kernels import launch

HOPPER = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@contextmanager
def caught():
    """Yield a list that launches are appended to: (kernel, arguments by name, options)."""
    launches = []

    def catch(kernel, *args, grid, warmup, **named):
        options = {name: named.pop(name) for name in _OPTIONS if name in named}
        launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | named, options))

    run, tuned = JITFunction.run, Autotuner.run
    token = launch._interpreting.set(True)
    JITFunction.run, Autotuner.run = catch, lambda *_, **__: None
    try:
        yield launches
    finally:
        JITFunction.run, Autotuner.run = run, tuned
        launch._interpreting.reset(token)


def source(kernel, arguments):
    """Return what Triton compiles: numbers that are 1 and things that are None are constants."""
    kinds, fixed, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kinds[parameter.name] = kind = _kind(parameter, value)
        if kind == "constexpr":
            fixed[parameter.name] = value
        elif kind.startswith("*") or (kind == "i32" and value % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, kinds, constexprs=fixed, attrs=aligned)


def _kind(parameter, value):
    if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if hasattr(value, "block_shape"):  # a descriptor; one of Gluon's has a layout, too
        kind = _TYPES[value.base.dtype].removeprefix("*")
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{kind}{value.block_shape}{layout}>"
    return "fp32" if isinstance(value, float) else "i32"


def dialect(source, options):
    """Return a kernel's text in Triton's GPU dialect."""
    backend = make_backend(HOPPER)
    parsed, stages, context = backend.parse_options(options), {}, ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, parsed, source.language)
    made = backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    module, metadata = source.make_ir(HOPPER, parsed, *made), {}
    for stage in ("ttir", "ttgir"):
        if stage in stages:  # Gluon begins with the second
            module = stages[stage](module, metadata)
    return str(module)
