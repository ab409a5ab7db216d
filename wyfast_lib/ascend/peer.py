"""The peer: fla-core 0.6.0's own Ascend kernels through the same compiler and the same audit.

flash-linear-attention ships wy_fast for triton-ascend as one forward and six backward kernels with three
float32 scratch tensors between them. Nothing of it is copied here: the package is imported from its
installation (extra `bench`), and only by the worker process. Signatures and tile sizes are what its
launchers pass; tile sizes are computed by its own UB model with the UB size of the chip. Its kernels take
a gate in base 2, which changes no byte.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from wyfast_lib.ascend.audit import Audit, audit
from wyfast_lib.ascend.compile import compile_kernel
from wyfast_lib.ascend.errors import MemoryOverflowError

VERSION = "0.6.0"
INSTALL_COMMAND = f'pip install "fla-core=={VERSION}"'
WY_FAST = "fla.ops.gated_delta_rule.backends.triton_ascend.wy_fast"
CHUNK_O = "fla.ops.common.backends.triton_ascend.chunk_o"
SCRATCH = ("dA_scr", "dA_mid", "dA_out")
UB_BITS = 192 * 1024 * 8
FORWARD = "recompute_w_u_fwd_kernel_npu"
BACKWARD = (
    "prepare_wy_repr_bwd_kv_npu",
    "prepare_wy_repr_bwd_da_mask_dot1_npu",
    "prepare_wy_repr_bwd_da_dot2_npu",
    "prepare_wy_repr_bwd_da_gate_npu",
    "prepare_wy_repr_bwd_finalize_k_npu",
    "prepare_wy_repr_bwd_finalize_a2_dg_npu",
)


@dataclass(frozen=True)
class PeerKernel:
    """A kernel of the peer as `compile_kernel` takes it. `stage` is forward, backward or dv_local."""

    name: str
    stage: str
    kernel: str  # "module:name"
    signature: dict
    constexprs: dict

    def compile(self, target: str = "Ascend910B2"):
        """Compile it; raises what `compile_kernel` raises."""
        return compile_kernel(self.kernel, self.signature, self.constexprs, target)


def require() -> Path:
    """Directory of the installed fla package. Raises ModuleNotFoundError with the pip command otherwise."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        version = None
    spec = importlib.machinery.PathFinder.find_spec("fla")
    if spec is None or version is None:
        raise ModuleNotFoundError(f"the peer's kernels are not installed: {INSTALL_COMMAND}")
    if version != VERSION:
        raise ModuleNotFoundError(
            f"fla-core {version} is installed, these comparisons are with {VERSION}: {INSTALL_COMMAND}"
        )
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=1)
def _ub_model():
    """The peer's UB model as a module, set to the chip's UB size; its file needs torch and triton only."""
    path = require() / "utils" / "ascend_ub_manager.py"
    spec = importlib.util.spec_from_file_location("wyfast_peer_ub_manager", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module._ub_manager = module.UBManager(UB_BITS)
    return module


@cache
def _constants(module: str) -> dict:
    """The numbers that a module of the peer assigns at its top level."""
    path = require().parent / (module.replace(".", "/") + ".py")
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


def _parameters(module: str) -> dict:
    """Parameter names of every function of a module of the peer, without importing it."""
    path = require().parent / (module.replace(".", "/") + ".py")
    return {
        n.name: [a.arg for a in n.args.args]
        for n in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(n, ast.FunctionDef)
    }


def _tile(BT: int, dim: int, multiplier: str, largest: str) -> int:
    """Column tile that its launcher would take for a [BT, dim] tile."""
    constants = _constants(WY_FAST)
    power = 1 << max(0, dim - 1).bit_length()
    return _ub_model().compute_row_tile_block_size(
        BT,
        dim,
        constants[multiplier],
        tiling_row=False,
        safety_margin=constants["_SAFETY_MARGIN"],
        fallback=constants["_FALLBACK_TILE"],
        min_block=8,
        max_block=min(constants[largest], power),
    )


def peer_kernels(
    *,
    K: int = 128,
    V: int = 128,
    BT: int = 64,
    H: int = 32,
    HV: int | None = None,
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    t_contig: bool = True,
    varlen: bool = False,
) -> list:
    """The seven wy_fast kernels of the peer as PeerKernel, in the order of their launches (forward first).

    K, V, BT: head and chunk sizes. H key heads, HV value heads (default H). dtype: bf16, fp16 or fp32;
    gate_dtype: of g (default dtype). t_contig: beta, g and their gradients with time innermost, as its
    launchers pass them when HV > 1; False for the strided form that the same kernels keep. varlen: with
    cu_seqlens.
    """
    HV = HV or H
    half, gate, single = f"*{dtype}", f"*{gate_dtype or dtype}", "*fp32"
    types = dict.fromkeys(("k", "v", "beta", "w", "u", "A", "dw", "du", "dk", "dv", "db"), half)
    types |= dict.fromkeys(("g", "dg"), gate) | dict.fromkeys(SCRATCH, single)
    types |= dict.fromkeys(("T", "B", "task_num", "num_core"), "i32")
    if varlen:
        types |= dict.fromkeys(("cu_seqlens", "chunk_indices"), "*i64")
    shared = {
        "H": H,
        "HV": HV,
        "K": K,
        "V": V,
        "BT": BT,
        "USE_G": True,
        "IS_VARLEN": varlen,
        "G_EXP_PRECOMP": not varlen,
        "NT_OFFSET": 0,
        "BH_OFFSET": 0,
    }
    shared |= dict.fromkeys(("G_T_CONTIG", "BETA_T_CONTIG", "DG_T_CONTIG", "DB_T_CONTIG"), t_contig)
    tiles = {
        FORWARD: ("_RECOMPUTE_FWD_MEM_MULT", "_MAX_TILE_FWD"),
        BACKWARD[0]: ("_PREPARE_BWD_KV_MEM_MULT", "_MAX_TILE_BWD_KV"),
        BACKWARD[4]: ("_PREPARE_BWD_K_MEM_MULT", "_MAX_TILE_BWD"),
        BACKWARD[5]: ("_PREPARE_BWD_K_MEM_MULT", "_MAX_TILE_BWD"),
    }
    parameters = _parameters(WY_FAST)
    kernels = []
    for name in (FORWARD, *BACKWARD):
        constants = dict(shared)
        if name in tiles:
            constants |= {"BK": _tile(BT, K, *tiles[name]), "BV": _tile(BT, V, *tiles[name])}
        kernels.append(
            _kernel(
                WY_FAST,
                name,
                "forward" if name == FORWARD else "backward",
                parameters[name],
                types,
                constants,
            )
        )
    return kernels


def _kernel(module: str, name: str, stage: str, parameters, types: dict, constants: dict) -> PeerKernel:
    """Sort parameters into typed and constant ones; a pointer that is not passed is the constant None."""
    constexprs = {p: constants.get(p) for p in parameters if p not in types}
    signature = {p: types.get(p, "constexpr") for p in parameters}
    return PeerKernel(name, stage, f"{module}:{name}", signature, constexprs)


def peer_dv_local(
    *,
    K: int = 64,
    V: int = 64,
    BT: int = 64,
    H: int = 4,
    HV: int = 8,
    BC: int = 32,
    dtype: str = "bf16",
    gate_dtype: str = "fp32",
    t_contig: bool = True,
    varlen: bool = False,
) -> PeerKernel:
    """The peer's `chunk_dv_local_bwd_kernel` (sub-blocks of BC rows), by default at the shape of its
    published 6.5 -> 0.18 ms: B = 2, T = 2048, H = 4, HV = 8, K = V = 64.
    """
    name = "chunk_dv_local_bwd_kernel"
    types = dict.fromkeys(("q", "k", "do", "dv"), f"*{dtype}") | {
        "g": f"*{gate_dtype}",
        "scale": "fp32",
        "T": "i32",
    }
    if varlen:
        types |= dict.fromkeys(("cu_seqlens", "chunk_indices"), "*i64")
    constants = {
        "H": H,
        "HV": HV,
        "K": K,
        "V": V,
        "BT": BT,
        "BC": BC,
        "BK": min(64, K),
        "BV": min(64, V),
        "USE_G": True,
        "USE_G_GAMMA": False,
        "G_T_CONTIG": t_contig,
        "IS_VARLEN": varlen,
        "NT_OFFSET": 0,
        "BH_OFFSET": 0,
    }
    return _kernel(CHUNK_O, name, "dv_local", _parameters(CHUNK_O)[name], types, constants)


# ---- one table
# --------------------------------------------------------------------------------------------------


def backward_minimum(K: int = 128, V: int = 128, BT: int = 64, bytes_each: int = 2) -> int:
    """Least bytes a chunk and head of a backward: k, v, dw, du, A, beta, g in; dk, dv, dbeta, dg out."""
    return bytes_each * BT * (K + V + K + V + BT + 2 + K + V + 2)


def forward_minimum(K: int = 128, V: int = 128, BT: int = 64, bytes_each: int = 2) -> int:
    """The same for the forward: k, v, A, beta, g in; w, u out."""
    return bytes_each * BT * (K + V + BT + 2 + K + V)


@dataclass(frozen=True)
class PeerRow:
    """Bytes a chunk and head of one kernel of the peer; `audit` is None and `error` set where it does not
    compile.
    """

    kernel: str
    stage: str
    layout: str  # contiguous or strided
    arguments: int = 0
    scratch: int = 0
    workspace: int = 0
    bursts: int = 0
    discrete: float = 0
    scalar_elements: int = 0
    vector_instructions: int = 0
    sync: float = 0
    inner_flags: int = 0
    ub_peak: int = 0
    split: bool | None = None
    retries: int = 0
    error: str = ""
    audit: Audit | None = field(default=None, repr=False, compare=False)

    @property
    def total(self) -> int:
        """Argument, scratch and workspace bytes."""
        return self.arguments + self.scratch + self.workspace

    def to_dict(self) -> dict:
        """Plain values, for CSV."""
        plain = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "audit"}
        return plain | {"total": self.total}


@dataclass
class PeerTable:
    """Rows of both layouts and their sums beside the minimum. Prints as a table."""

    rows: list
    minimum: dict  # stage -> bytes

    def sums(self, stage: str, layout: str) -> dict:
        """Summed arguments, scratch, workspace and total of a stage; kernels that do not compile count
        nothing.
        """
        rows = [r for r in self.rows if r.stage == stage and r.layout == layout]
        return {
            n: sum(getattr(r, n) for r in rows) for n in ("arguments", "scratch", "workspace", "total")
        } | {"kernels": len(rows), "failed": sum(bool(r.error) for r in rows)}

    HEADERS = (
        "kernel",
        "layout",
        "arguments",
        "scratch",
        "workspace",
        "total",
        "bursts",
        "discrete",
        "scalar",
        "vector",
        "sync",
        "inner",
        "UB peak",
        "split",
        "retries",
    )

    def table(self) -> list:
        """Text cells for HEADERS."""
        cells = []
        for r in self.rows:
            if r.error:
                cells.append((r.kernel, r.layout, r.error, *[""] * (len(self.HEADERS) - 3)))
                continue
            split = {None: "one unit", True: "yes", False: "no"}[r.split]
            cells.append(
                (
                    r.kernel,
                    r.layout,
                    *(f"{n / 1024:.1f}" for n in (r.arguments, r.scratch, r.workspace, r.total)),
                    str(r.bursts),
                    f"{r.discrete:g}",
                    str(r.scalar_elements),
                    str(r.vector_instructions),
                    f"{r.sync:g}",
                    str(r.inner_flags),
                    f"{r.ub_peak / 1024:.1f}",
                    split,
                    str(r.retries),
                )
            )
        return cells

    def summary(self) -> list:
        """One line a stage and layout, against the minimum."""
        lines = []
        for stage, minimum in self.minimum.items():
            for layout in dict.fromkeys(r.layout for r in self.rows):
                s = self.sums(stage, layout)
                lost = (
                    f", {s['failed']} of {s['kernels']} do not compile and are not counted"
                    if s["failed"]
                    else ""
                )
                total, arguments, scratch, workspace, least = (
                    f"{n / 1024:.1f}"
                    for n in (s["total"], s["arguments"], s["scratch"], s["workspace"], minimum)
                )
                lines.append(
                    f"{stage}, {layout}: {total} KB = {s['total'] / minimum:.1f}x the minimum of {least} KB "
                    f"(arguments {arguments}, scratch {scratch}, workspace {workspace}) in {s['kernels']} "
                    f"launches{lost}"
                )
        return lines

    def __str__(self) -> str:
        rows = [self.HEADERS, *self.table()]
        widths = [
            max(len(row[i]) for row in rows if len(row[2]) < 20 or i < 2) for i in range(len(self.HEADERS))
        ]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in rows]
        return "KB a chunk and head, both vector units counted\n" + "\n".join([*lines, *self.summary()])

    def _repr_html_(self) -> str:
        from html import escape

        head = "".join(f"<th>{h}</th>" for h in self.HEADERS)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.table()
        )
        lines = "<br>".join(escape(line) for line in self.summary())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{lines}</p>"


def peer_row(kernel: PeerKernel, layout: str, target: str = "Ascend910B2") -> PeerRow:
    """Compile and audit one kernel of the peer; a kernel that does not fit gives a row with `error`."""
    try:
        compiled = kernel.compile(target)
    except MemoryOverflowError as error:
        needed, there = error.required / 1024, error.available / 1024
        return PeerRow(
            kernel.name,
            kernel.stage,
            layout,
            error=f"does not fit: needs {needed:.0f} KB of {there:.0f} KB {error.space.upper()}",
        )
    seen = audit(compiled)
    scratch = sum(seen.argument_bytes(name=s) for s in SCRATCH)
    totals = seen.totals
    return PeerRow(
        kernel.name,
        kernel.stage,
        layout,
        seen.argument_bytes() - scratch,
        scratch,
        seen.workspace_bytes,
        totals["bursts"],
        totals["discrete_calls"],
        totals["scalar_elements"],
        totals["vector_instructions"],
        totals["sync_instructions"],
        totals["flags_inside_templates"],
        seen.ub_peak,
        seen.split,
        compiled.retries,
        audit=seen,
    )


def peer_table(
    target: str = "Ascend910B2",
    *,
    K: int = 128,
    V: int = 128,
    BT: int = 64,
    H: int = 32,
    HV: int | None = None,
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    layouts: tuple = (True, False),
) -> PeerTable:
    """Audit of the peer's seven wy_fast kernels in the given gate layouts (True: time innermost), a chunk and
    head.
    """
    rows = []
    for t_contig in layouts:
        for kernel in peer_kernels(
            K=K, V=V, BT=BT, H=H, HV=HV, dtype=dtype, gate_dtype=gate_dtype, t_contig=t_contig
        ):
            rows.append(peer_row(kernel, "contiguous" if t_contig else "strided", target))
    size = 4 if dtype == "fp32" else 2
    minimum = {"forward": forward_minimum(K, V, BT, size), "backward": backward_minimum(K, V, BT, size)}
    return PeerTable(rows, minimum)
