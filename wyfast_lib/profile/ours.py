"""Our kernels by name: what the planner launches on Ascend, and the same operator's kernel on a GPU.

Values are random: they do not change the time of these kernels, and the factor A of a long sequence would
take longer to make than the profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

from wyfast_lib.profile.case import Case
from wyfast_lib.profile.request import ProfileError, Request

PHASES = {
    "recompute_w_u_fwd_kernel": "forward",
    "prepare_wy_repr_bwd_kernel": "backward",
    "chunk_bwd_dv_local_kernel": "dv_local",
}
LAYOUTS = {
    "forward": {"G_T_CONTIG": "g", "BETA_T_CONTIG": "beta"},
    "backward": {"G_T_CONTIG": "g", "BETA_T_CONTIG": "beta", "DG_T_CONTIG": "dg", "DB_T_CONTIG": "db"},
    "dv_local": {"G_T_CONTIG": "g"},
}
OTHERS = {"forward": ("USE_G",), "backward": ("USE_G", "SUM_ON_CUBE"), "dv_local": ("USE_G", "BC")}
DEFAULTS = {"B": 1, "T": 4096, "H": 32, "Hg": None, "K": 128, "V": 128, "BT": 64}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call; Hg is H unless given."""

    B: int
    T: int
    H: int
    Hg: int
    K: int
    V: int
    BT: int


def sizes(request: Request) -> Sizes:
    """The sizes of a request with the defaults filled in; ProfileError names a bad one."""
    unknown = sorted(set(request.shape) - set(DEFAULTS))
    if unknown:
        raise ProfileError(f"--shape: {request.name} takes {', '.join(DEFAULTS)}, got {', '.join(unknown)}")
    found = {**DEFAULTS, **request.shape}
    found["Hg"] = found["Hg"] or found["H"]
    if request.lengths:
        if "T" in request.shape and request.shape["T"] != sum(request.lengths):
            raise ProfileError(f"--lengths: they add up to {sum(request.lengths)}, --shape says "
                               f"T={request.shape['T']}")  # fmt: skip
        found["T"] = sum(request.lengths)
        if found["B"] != 1:
            raise ProfileError(f"--shape: packed sequences (--lengths) need B=1, got B={found['B']}")
    if found["H"] % found["Hg"]:
        raise ProfileError(f"--shape: H={found['H']} is no multiple of Hg={found['Hg']}")
    return Sizes(**found)


def check_flags(request: Request) -> None:
    """ProfileError for a flag that this kernel does not have."""
    phase = PHASES[request.name]
    allowed = (*LAYOUTS[phase], *OTHERS[phase])
    for name in request.flags:
        if name not in allowed:
            raise ProfileError(
                f"--flag: {request.name} has {', '.join(allowed)} (the planner sets the rest), got {name}"
            )


def plan(request: Request, device: str = "meta", chip=None) -> Case:
    """The planner's launch of a request as a case.

    device: where its tensors live, "meta" for none. chip: the planner's `Device`; default: the request's
    target with the cores that the compiler knows of.
    """
    launch = _launch(request, device, chip)
    return Case(f"{launch.module}:{launch.kernel}", launch.args, launch.constexprs, launch.grid)


def npu_call(request: Request) -> Callable[[], None]:
    """A function that launches the kernel once on the current NPU."""
    from wyfast_lib.backends import ascend

    launch = _launch(request, "npu", ascend.device())
    return lambda: ascend.execute(launch)


def gpu_call(request: Request, seed: int = 0) -> Callable[[], object]:
    """A function that runs the kernel of the CUDA backend for this operator once."""
    from wyfast_lib import backends

    check_flags(request)
    x, phase = _tensors(request, "cuda", seed), PHASES[request.name]
    layout = set(request.flags) - {"USE_G"}
    if layout:
        return _gpu_layout_call(request, x, phase, layout)
    module = backends.pick("cuda", "cuda")
    if phase == "forward":
        return lambda: module.forward(x.k, x.v, x.beta, x.A, x.g, None, x.chunks)
    if phase == "backward":
        return lambda: module.backward(x.k, x.v, x.beta, x.A, x.g, x.dw, x.du, x.chunks)
    return lambda: module.dv_local(x.q, x.k, x.v, x.g, 1.0, x.chunks, x.BT)


def _gpu_layout_call(request: Request, x, phase: str, layout: set):
    """The Hopper kernels are the only ones on a GPU with a layout flag, one for beta, g and gradients."""
    from wyfast_lib.bench_gates import WIDTH, layout_calls

    s = sizes(request)
    fits = phase != "dv_local" and layout == {"G_T_CONTIG"} and x.g is not None and not request.lengths
    if not fits or (s.B, s.Hg, s.K, s.V, s.BT) != (1, s.H, WIDTH, WIDTH, 64) or request.dtype == "float32":
        raise ProfileError(
            "--flag: on a GPU G_T_CONTIG alone, of recompute_w_u_fwd_kernel and prepare_wy_repr_bwd_kernel, "
            f"at B=1, Hg=H, K=V={WIDTH}, BT=64, dense, gated, in half precision (the Hopper kernels); got "
            f"{request.variant} at {request.sizes} {request.dtype}"
        )
    case = SimpleNamespace(inputs=(x.k, x.v, x.beta, x.A, x.g), dw=x.dw, du=x.du)
    return layout_calls(case, bool(request.flags["G_T_CONTIG"]))["wy_fast", phase]


def _launch(request: Request, device: str, chip=None):
    from wyfast_lib.backends import ascend_plan, lowered
    from wyfast_lib.backends.ascend_plan_dv_local import check, plan_dv_local

    check_flags(request)
    phase, flags = PHASES[request.name], request.flags
    chip = chip or lowered.device(request.target)
    x = _tensors(request, device)
    layout = ascend_plan.Layout(
        **{name: bool(flags[flag]) for flag, name in LAYOUTS[phase].items() if flag in flags}
    )
    try:
        if phase == "dv_local":
            check(x.q, x.k, x.v, x.g, x.chunks, x.BT)
            BC = flags.get("BC")
            return plan_dv_local(x.q, x.k, x.v, x.g, 1.0, x.chunks, x.BT, chip, layout.g, BC)[0]
        ascend_plan.check(x.k, x.v, x.beta, x.A, x.g, None, x.chunks, phase == "backward", chip.arch35)
    except NotImplementedError as limit:
        raise ProfileError(f"--shape: {limit}") from None
    call = (x.k, x.v, x.beta, x.A, x.g)
    if phase == "forward":
        return ascend_plan.plan_forward(*call, None, x.chunks, chip, layout)[0]
    launch = ascend_plan.plan_backward(*call, x.dw, x.du, x.chunks, chip, layout)[0]
    given = {name: bool(flags[name]) for name in ("SUM_ON_CUBE",) if name in flags}
    return replace(launch, constexprs={**launch.constexprs, **given})


def _tensors(request: Request, device: str, seed: int = 0):
    """q, k, v, beta, A, g, dw, du, chunks, BT on a device."""
    import torch

    from wyfast_lib.varlen import prepare_chunks

    s, dtype = sizes(request), getattr(torch, request.dtype)
    if device != "meta":
        torch.manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, device=device)

    chunks = None
    if request.lengths:
        ends = torch.tensor([0, *request.lengths], dtype=torch.int64).cumsum(0)
        chunks = prepare_chunks(ends if device == "meta" else ends.to(device), s.BT)
    gate = (s.B, s.T, s.H)
    return SimpleNamespace(
        q=draw(s.B, s.T, s.Hg, s.K), k=draw(s.B, s.T, s.Hg, s.K), v=draw(*gate, s.V), A=draw(*gate, s.BT),
        beta=draw(*gate, dtype=torch.float32).sigmoid(), dw=draw(*gate, s.K), du=draw(*gate, s.V),
        g=-draw(*gate, dtype=torch.float32).abs() if request.flags.get("USE_G", True) else None,
        chunks=chunks, BT=s.BT,
    )  # fmt: skip
