"""Groups of counters: msprof's names, and the counters of an NVIDIA GPU that answer the same question.

The NPU's counters are few, so its tools take one group a run; `groups` keeps the order asked for.
"""

from __future__ import annotations

from wyfast_lib.profile.request import ProfileError

DEFAULT = "PipeUtilization"

# group -> ncu's counters of that question; () where a GPU has none. The NPU's own are the columns of its csv.
GROUPS = {
    # Which unit is busy?
    "PipeUtilization": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
    ),
    # What does it compute?
    "ArithmeticUtilization": (
        "sm__inst_executed_pipe_tensor.sum",
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    ),
    # What crosses global memory?
    "Memory": (
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    ),
    # Buffers beside the matrix unit: registers there, uncounted.
    "MemoryL0": (),
    # The local memory of the vector unit: shared memory there.
    "MemoryUB": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    ),
    # Bank conflicts.
    "ResourceConflictRatio": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    "L2Cache": ("lts__t_bytes.sum", "lts__t_sector_hit_rate.pct"),
}


def groups(text: str | None) -> tuple[str, ...]:
    """The groups of "--metrics A,B", without repeats; the default for None."""
    names = tuple(dict.fromkeys(part.strip() for part in (text or DEFAULT).split(",")))
    for name in names:
        if name not in GROUPS:
            raise ProfileError(f"--metrics: expected some of {', '.join(GROUPS)}, got {name!r}")
    return names


def of_gpu(names: tuple[str, ...]) -> tuple[str, ...]:
    """The counters of these groups on a GPU."""
    return tuple(dict.fromkeys(counter for name in names for counter in GROUPS[name]))
