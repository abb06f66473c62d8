"""What may be done with a tensor, by its role: one row for each, asked by everybody.

linear      a linear layer: it gets the recipe's scheme unless a rule says otherwise
protected   kept byte for byte in the source's type, whatever a recipe asks for
fused       engines run it as one matrix with the roles of the same name: they share a scheme
listed      engines look it up in the list of modules that are not quantised
product     it multiplies the activations of every token of a step
vocabulary  its rows are tokens: the embedding and the head
gathered    its rows are looked up, not multiplied; no loader reads it in FP8
gguf        the types that a GGUF file may have it in; none: any
gguf_slack  what GGUF's float32 transform may change on the way there and back, absolute and
            relative to the value; none: not a bit
hub_f32     the hub stores it in float32, and all else in the model's type
f32         the runtime computes with float32 where the checkpoint has float32

Source: facts of the published checkpoints; llama.cpp b11434 for GGUF. The trap is `dt_bias`: the
hub stores it in BF16, but checkpoints that were trained further hold float32, which is then kept.
"""

from __future__ import annotations

from dataclasses import dataclass

F32_ONLY = ("F32",)
EXPERT, VISION = "expert", "vision"
# The delta rule compounds the error of these; llama.cpp reads any type, but few are good enough.
NEAR_EXACT = ("F32", "F16", "BF16", "Q8_0")


@dataclass(frozen=True, slots=True)
class Role:
    """One row of the table; the fields are explained in the module's head."""

    name: str
    linear: bool = False
    protected: bool = False
    fused: str = ""
    listed: bool = False
    product: bool = False
    vocabulary: bool = False
    gathered: bool = False
    gguf: tuple[str, ...] = ()
    gguf_slack: tuple[float, float] | None = None
    hub_f32: bool = False
    f32: bool = False

    @property
    def gguf_f32(self) -> bool:
        """Whether a GGUF file always has it in F32: llama.cpp computes it so, without looking."""
        return self.gguf == F32_ONLY

    def gguf_takes(self, dtype: str) -> bool:
        """Whether a GGUF file may have it in this type."""
        return not self.gguf or dtype in self.gguf


def _linear(name: str, fused: str = "") -> Role:
    return Role(name, linear=True, fused=fused, listed=True, product=True)


def _control(name: str, *, f32: bool = False) -> Role:
    return Role(name, protected=True, gguf=F32_ONLY, f32=f32)


def _gate(name: str, fused: str = "") -> Role:
    """Return a role of the delta rule's gates: small linears that nobody quantises."""
    return Role(name, protected=True, fused=fused, listed=True, product=True, gguf=NEAR_EXACT)


# The slack of a norm is what float32 loses of w in 1 + w; of A_log, in -exp(A_log).
NORM_SLACK, A_LOG_SLACK = (2.0**-23, 2.0**-22), (2.0**-21, 2.0**-23)
_ALL = (
    Role("embed", vocabulary=True, gathered=True),
    Role("lm_head", vocabulary=True),
    Role("norm", protected=True, gguf=F32_ONLY, gguf_slack=NORM_SLACK),
    Role("gdn_norm", protected=True, gguf=F32_ONLY, hub_f32=True, f32=True),
    Role("A_log", protected=True, gguf=F32_ONLY, gguf_slack=A_LOG_SLACK, hub_f32=True, f32=True),
    _control("dt_bias", f32=True),
    _control("conv1d"),
    _gate("in_proj_a", "ba"),
    _gate("in_proj_b", "ba"),
    _linear("in_proj_qkv", "qkvz"),
    _linear("in_proj_z", "qkvz"),
    _linear("out_proj"),
    _linear("q_proj", "qkv"),
    _linear("k_proj", "qkv"),
    _linear("v_proj", "qkv"),
    _linear("o_proj"),
    _linear("gate_proj", "gate_up"),
    _linear("up_proj", "gate_up"),
    _linear("down_proj"),
    _linear(EXPERT, "experts"),
    Role("router", protected=True, product=True, gguf=F32_ONLY),
    Role("shared_expert_gate", protected=True, product=True, gguf=F32_ONLY),
    Role("mtp_fc", protected=True, listed=True),
    Role(VISION, protected=True),
    # Stored together: never an atom, always cut into roles above.
    Role("in_proj_qkvz"),
    Role("in_proj_ba"),
    Role("experts_gate_up"),
    Role("experts_down"),
    Role("experts_gate"),
    Role("experts_up"),
)
ROLES = {role.name: role for role in _ALL}
