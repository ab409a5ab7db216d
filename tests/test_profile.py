"""`python -m wyfast_lib profile`: its readers of the tools' files, its report, and a run on the model.

In `profile_files/` the headers are verbatim: op_summary of two generations of msprof, kernel_details of
torch_npu with one real row (CANN's own test data), ncu's table. The other rows are made up, their oddities
(tabs, N/A, empty cells, DSA_SQE) as seen in real files.
"""

import ast
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from wyfast_lib import __main__ as cli
from wyfast_lib.profile import (
    Report,
    Request,
    Row,
    figure,
    files,
    gpu,
    launch,
    metrics,
    model,
    ncu,
    npu,
    op_summary,
    ours,
    own,
    published,
    run,
    targets,
)
from wyfast_lib.profile.case import Case
from wyfast_lib.profile.expressions import evaluate, evaluate_list
from wyfast_lib.profile.request import ProfileError, loads, parse_flags, parse_lengths, parse_shape

HERE = Path(__file__).parent
FILES = HERE / "profile_files"
DECAY = f"{FILES / 'gate_kernels.py'}:decay_kernel"
COPY = f"{FILES / 'gate_kernels.py'}:copy_kernel"
DV_LOCAL = "chunk_bwd_dv_local_kernel"
PUBLISHED_SHAPE = {"B": 2, "T": 2048, "H": 8, "Hg": 4, "K": 64, "V": 64}


# ---- op_summary and kernel_details ----


def by_quantity(rows):
    return {row.quantity: row for row in rows}


def test_an_op_summary_with_block_dim_gives_launches_in_order_of_time():
    launches = op_summary.read(FILES / "op_summary_block_dim.csv")
    assert [each.core for each in launches] == ["DSA_SQE", *["AI_VECTOR_CORE"] * 4]
    first = launches[1]
    assert (first.name, first.duration, first.blocks, first.mix_blocks) == ("vector_add_kernel", 300, 8192, 0)
    assert first.start == pytest.approx(1736413971560588.764)  # the cell ends in a tab
    assert first.counters["aiv_vec_ratio"] == 0.07 and first.counters["cube_utilization(%)"] == 0


def test_rows_of_other_engines_have_no_counters_and_no_wait():
    random = op_summary.read(FILES / "op_summary_block_dim.csv")[0]
    assert (random.core, random.blocks, random.wait, random.counters) == ("DSA_SQE", 0, None, {})


def test_a_mixed_kernel_has_the_blocks_of_both_halves_under_the_newer_names():
    launches = op_summary.read(FILES / "op_summary_block_num.csv")
    chosen = op_summary.of_kernel(launches, "chunk_kda_bwd_kernel")
    assert [(each.core, each.blocks, each.mix_blocks) for each in chosen] == [("MIX_AIC", 4096, 8192)] * 3
    found = by_quantity(op_summary.rows(chosen, "msprof op_summary"))
    assert found["blocks"].value == 4096 and found["blocks of the vector half"].value == 8192
    time = found["time"]
    assert (time.value, time.unit, time.source) == (104290.1, "us", "measured")
    assert time.low == pytest.approx(104284.04) and time.high == pytest.approx(104296.04)
    assert found["wait before a launch"].value == 1.5  # the first launch's is N/A
    assert (found["aiv_scalar_ratio"].value, found["aiv_scalar_ratio"].unit) == (0.846, "1")
    assert (found["aic_mac_time"].unit, found["aic_total_cycles"].unit) == ("us", "cycles")
    assert found["cube_utilization"].unit == "%"


def test_counters_of_another_group_empty_cells_and_na_are_read():
    (only,) = op_summary.read(FILES / "op_summary_memory.csv")
    assert only.counters["aic_main_mem_read_bw(GB/s)"] == 12.25
    assert not {"aiv_main_mem_write_bw(GB/s)", "aiv_l2_write_bw(GB/s)"} & set(only.counters)
    assert by_quantity(op_summary.rows([only], "x"))["aiv_l2_read_bw"].unit == "GB/s"


def test_kernel_details_of_torch_npu_has_names_of_its_own():
    (matmul,) = op_summary.read(FILES / "kernel_details.csv")
    assert (matmul.name, matmul.kind, matmul.core) == (
        "aclnnMatmul_MatMulV3Common_MatMulV3", "MatMulV3", "AI_CORE",
    )  # fmt: skip
    assert (matmul.duration, matmul.wait, matmul.blocks) == (501.17, 2.2, 20)
    found = by_quantity(op_summary.rows([matmul], "torch_npu.profiler"))
    assert found["aic_mac_ratio"].value == 0.744 and found["cube_utilization"].value == 95.517
    assert "aiv_vec_ratio" not in found  # zero everywhere: that unit was not used


def test_warm_up_launches_are_dropped_and_a_kernel_that_is_not_there_is_named():
    launches = op_summary.read(FILES / "op_summary_block_dim.csv")
    assert len(op_summary.of_kernel(launches, "vector_add_kernel", skip=1)) == 3
    assert op_summary.of_kernel(launches, "vector_add")  # a mixed kernel's halves have a suffix
    with pytest.raises(ProfileError, match="no launch of softmax.*vector_add_kernel"):
        op_summary.of_kernel(launches, "softmax")
    with pytest.raises(ProfileError, match="4 launches of vector_add_kernel, 4 of them for warm-up"):
        op_summary.of_kernel(launches, "vector_add_kernel", skip=4)


def test_a_file_without_the_columns_says_which(tmp_path):
    (tmp_path / "a.csv").write_text("Op Name,Block Dim\nx,1\n")
    with pytest.raises(ProfileError, match="Task Type, Task Start Time.us., Task Duration.us. missing"):
        op_summary.read(tmp_path / "a.csv")


# ---- ncu ----


def test_the_table_of_ncu_is_found_behind_what_it_prints_and_its_separators_read():
    launches = ncu.read((FILES / "ncu.csv").read_text().splitlines())
    assert [launch.name for launch in launches] == ["prepare_wy_repr_bwd_hopper_kernel"] * 2
    found = by_quantity(ncu.rows(launches, "ncu"))
    assert found["dram__bytes_read.sum"].value == 33554944 and found["dram__bytes_read.sum"].unit == "byte"
    assert found["sm__throughput.avg.pct_of_peak_sustained_elapsed"].high == pytest.approx(61.15)
    assert len(found) == 2  # one counter is n/a on this GPU


def test_output_without_a_table_is_refused():
    with pytest.raises(ProfileError, match="no table of ncu --csv"):
        ncu.read(["==ERROR== ERR_NVGPUCTRPERM", "nothing, here"])


def test_the_commands_of_the_tools_name_group_kernel_and_request(tmp_path):
    request = Request(DV_LOCAL, PUBLISHED_SHAPE, {"G_T_CONTIG": 0})
    msprof = npu.msprof_command(request, "Memory", 10, tmp_path / "a")
    assert msprof[0] == "msprof" and "--aic-metrics=Memory" in msprof and "--aic-mode=task-based" in msprof
    assert msprof[-2:] == ["npu", "15"] and msprof[-4] == "wyfast_lib.profile.launch"
    assert loads(Path(msprof[-3]).read_text()) == request
    command = gpu.commands(request, metrics.of_gpu(("Memory",)), 10, tmp_path / "b")
    assert command[:2] == ["ncu", "--csv"] and "regex:chunk_bwd_dv_local" in command
    assert "dram__bytes_read.sum" in command[command.index("--metrics") + 1]


# ---- the NPU's tools, with a stand-in ----


class StandIn(types.ModuleType):
    """What `with_torch_npu` asks of torch_npu; it writes the file that the real one would."""

    def __init__(self):
        super().__init__("torch_npu")
        self.profiler = self
        self.AiCMetrics = types.SimpleNamespace(PipeUtilization="pipes", Memory="memory")
        self.ProfilerLevel = types.SimpleNamespace(Level1=1)
        self.ProfilerActivity = types.SimpleNamespace(CPU="cpu", NPU="npu")
        self.settings, self.folder = [], None

    def tensorboard_trace_handler(self, folder):
        self.folder = Path(folder) / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"

    def _ExperimentalConfig(self, **settings):
        self.settings.append(settings)

    def profile(self, **_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.mkdir(parents=True)
        source = "op_summary_memory" if self.settings[-1]["aic_metrics"] == "memory" else "op_summary_block_num"  # noqa: E501
        shutil.copy(FILES / f"{source}.csv", self.folder / "kernel_details.csv")


@pytest.fixture
def npu_stand_in(monkeypatch):
    stand_in, calls = StandIn(), []
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(synchronize=lambda: None), raising=False)
    monkeypatch.setattr(targets, "call", lambda request, device, seed=0: lambda: calls.append(device))
    return stand_in, calls


def test_torch_npu_runs_once_a_group_and_joins_what_they_say(npu_stand_in, tmp_path):
    stand_in, calls = npu_stand_in
    request = Request("x.py:chunk_kda_bwd_kernel", {})
    (rows,), notes = npu.profile([request], ("PipeUtilization", "Memory"), 10, tmp_path)
    assert calls == ["npu"] * 2 * (npu.WARM_UP + 10)
    assert [each["aic_metrics"] for each in stand_in.settings] == ["pipes", "memory"]
    found = by_quantity(rows)
    assert found["time"].value == 104290.1  # of the first run
    assert found["aiv_scalar_ratio"].value == 0.846 and found["aic_l2_read_bw"].value == 14
    assert len(rows) == len(found) and notes == [npu.UNTESTED]


def test_a_group_that_this_torch_npu_lacks_and_a_missing_tool_are_errors(npu_stand_in, tmp_path, monkeypatch):
    request = Request("x.py:chunk_kda_bwd_kernel", {})
    with pytest.raises(ProfileError, match="no group L2Cache"):
        npu.profile([request], ("L2Cache",), 10, tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProfileError, match="msprof is not on the PATH"):
        npu.profile([request], ("Memory",), 10, tmp_path, tool="msprof")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ProfileError, match="install torch_npu"):
        npu.profile([request], ("Memory",), 10, tmp_path)


def test_msprof_is_run_and_its_newest_file_read_without_the_warm_up(tmp_path, monkeypatch):
    output = tmp_path / "msprof-0-PipeUtilization"
    fake = tmp_path / "msprof"
    fake.write_text(
        f"#!/bin/sh\nd={output}/PROF_1/mindstudio_profiler_output\nPATH=/bin:/usr/bin mkdir -p $d\n"
        f"PATH=/bin:/usr/bin cp {FILES}/op_summary_block_dim.csv $d/op_summary_1.csv\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(npu, "WARM_UP", 1)
    request = Request("x.py:vector_add_kernel", {})
    (rows,), _ = npu.profile([request], ("PipeUtilization",), 3, tmp_path, tool="msprof")
    assert by_quantity(rows)["time"].value == 309.4  # 300 us was the warm-up's


def test_without_an_npu_or_a_gpu_asking_for_one_is_an_error(monkeypatch):
    monkeypatch.setattr(npu, "available", lambda: False)
    monkeypatch.setattr(gpu, "available", lambda: False)
    assert run.default_places() == ("model",)
    for place, words in (("npu", "sees no NPU"), ("gpu", "sees no CUDA"), ("tpu", "expected some of npu")):
        with pytest.raises(ProfileError, match=words):
            run.profile(Request(DV_LOCAL, PUBLISHED_SHAPE), on=(place,))


def test_the_launcher_builds_the_request_and_launches_as_often_as_asked(tmp_path, npu_stand_in):
    command = launch.application(Request(DV_LOCAL, PUBLISHED_SHAPE), "npu", 4, tmp_path)
    assert launch.main(command[3:]) == 0
    assert npu_stand_in[1] == ["npu"] * 4


# ---- requests ----


def test_flags_with_two_values_are_two_variants_the_first_first():
    assert parse_flags(["G_T_CONTIG=0,1"]) == [{"G_T_CONTIG": 0}, {"G_T_CONTIG": 1}]
    assert parse_flags([]) == [{}]
    assert [each.variant for each in Request(DV_LOCAL, {}).variants(parse_flags(["BC=16,32", "USE_G=True"]))] == [  # noqa: E501
        "BC=16 USE_G=True", "BC=32 USE_G=True",
    ]  # fmt: skip
    for bad in (["G_T_CONTIG"], ["=1"], ["A=1,"], ["A=1", "A=2"], ["A=1,1"]):
        with pytest.raises(ProfileError, match="--flag"):
            parse_flags(bad)


def test_shapes_are_sizes_or_a_known_name():
    assert parse_shape("T=4096, H=8") == {"T": 4096, "H": 8}
    assert parse_shape("train-32k-gqa")["Hg"] == 8
    for bad in ("train-3k", "T=", "T=-1", "T=0", "T=a", "1=2"):
        with pytest.raises(ProfileError, match="--shape"):
            parse_shape(bad)
    assert parse_lengths("100, 0,28") == (100, 0, 28)
    with pytest.raises(ProfileError, match="--lengths"):
        parse_lengths("1,x")


def test_expressions_are_arithmetic_over_sizes_and_nothing_else():
    names = {"T": 100, "BT": 64}
    assert evaluate("cdiv(T, BT) * 2 + max(T, 3) // 7", names) == 18
    assert evaluate_list("cdiv(T, BT), min(T, 2)", names) == (2, 2)
    assert evaluate_list("T", names) == (100,) and evaluate_list("", names) == ()
    for bad in ("__import__('os')", "T.real", "[1]", "T +", "S", "T // 0", "T if T else 1"):
        with pytest.raises(ProfileError):
            evaluate(bad, names)


# ---- our kernels ----


@pytest.mark.parametrize("kernel", ours.PHASES)
def test_our_kernels_are_launched_as_the_planner_says(kernel):
    shape = {"T": 256, "H": 4, "Hg": 2, "K": 64, "V": 64}
    before, after = (targets.plan(Request(kernel, shape, {"G_T_CONTIG": flag})) for flag in (0, 1))
    assert (before.constexprs["G_T_CONTIG"], after.constexprs["G_T_CONTIG"]) == (False, True)
    assert before.args["g"].shape == (1, 256, 4) and after.args["g"].shape == (1, 4, 256)
    assert all(x.device.type == "meta" for x in after.args.values() if isinstance(x, torch.Tensor))
    assert after.grid == (min(after.args["n_tasks"], 24),)


def test_packed_sequences_keep_the_values_that_addresses_are_read_from():
    case = targets.plan(Request("recompute_w_u_fwd_kernel", {"H": 2}, lengths=(100, 0, 28)))
    assert case.args["cu_seqlens"].tolist() == [0, 100, 100, 128]
    assert case.args["chunk_indices"].tolist() == [[0, 0], [0, 1], [2, 0]]
    with pytest.raises(ProfileError, match="add up to 128"):
        targets.plan(Request("recompute_w_u_fwd_kernel", {"T": 64}, lengths=(100, 28)))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("recompute_kernel", {}), "no kernel 'recompute_kernel': expected recompute_w_u_fwd_kernel"),
        (Request(DV_LOCAL, {"S": 3}), "takes B, T, H, Hg, K, V, BT, got S"),
        (Request(DV_LOCAL, {"H": 3, "Hg": 2}), "H=3 is no multiple of Hg=2"),
        (Request(DV_LOCAL, {}, {"DG_T_CONTIG": 1}), "has G_T_CONTIG, USE_G, BC"),
        (Request(DV_LOCAL, {}, {}, arguments=("T=1",)), "for a kernel of your own"),
        (Request("prepare_wy_repr_bwd_kernel", {"BT": 128}), "BT <= 64"),
        (Request("nowhere.py:kernel", {}), "there is no file nowhere.py"),
        (Request(f"{FILES / 'gate_kernels.py'}:missing", {}), "defines no function missing"),
    ],
)
def test_what_cannot_be_profiled_is_refused_by_name(request_, words):
    with pytest.raises(ProfileError, match=words):
        targets.plan(request_)


# ---- a kernel of the user's ----


def test_a_file_may_say_what_its_kernel_is_launched_with():
    case = targets.plan(Request(DECAY, {"T": 100, "H": 2}, {"G_T_CONTIG": 0}))
    assert case.signature == {"g": "*fp32", "y": "*fp32", "T": "i32", "scale": "fp32"}
    assert case.constexprs == {"H": 2, "BT": 64, "G_T_CONTIG": 0} and case.grid == (2, 2)
    with pytest.raises(ProfileError, match="reads 'H', which is not in it"):
        targets.plan(Request(DECAY, {"T": 100}))
    with pytest.raises(ProfileError, match="unexpected keyword argument 'NO_FLAG'"):
        targets.plan(Request(DECAY, {"T": 100, "H": 2}, {"NO_FLAG": 0}))


def test_options_say_it_too_without_importing_the_file():
    arguments = ("g=dtype[T, H]", "y=fp32[H * T]", "scale=0.5")
    request = Request(DECAY, {"T": 100, "H": 2, "BT": 16}, arguments=arguments, grid="cdiv(T, BT), H")
    case = targets.plan(request)
    assert list(case.args) == ["g", "y", "T", "scale"] and case.grid == (7, 2)
    assert case.args["g"].shape == (100, 2) and case.args["g"].dtype == torch.bfloat16
    assert case.args["g"].device.type == "meta" and case.args["y"].shape == (200,)
    assert case.constexprs == {"H": 2, "BT": 16, "G_T_CONTIG": 1}  # the last is its default
    values = own._argument("i64(0, T // 2, T)", {"T": 100}, request, "meta")
    assert values.tolist() == [0, 50, 100] and values.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "grid", "flags", "words"),
    [
        ((), "1", {}, "--arg is missing for x, y of copy_kernel"),
        (("x=bf16[T]", "y=bf16[T]"), "", {}, "--grid is missing"),
        (("x=bf16[T]", "y=bf16[T]"), "0", {}, "program counts"),
        (("x=bf17[T]", "y=bf16[T]"), "1", {}, "expected one of bf16"),
        (("x=bf16[S]", "y=bf16[T]"), "1", {}, "'S' is not known; there are T, BT"),
        (("z=bf16[T]",), "1", {}, "expected NAME=... with a parameter of copy_kernel"),
        (("x=bf16[T]", "y=bf16[T]"), "1", {"G_T_CONTIG": 0}, "--flag: copy_kernel has x, y, T, BT"),
    ],
)
def test_a_bad_option_is_named(arguments, grid, flags, words):
    with pytest.raises(ProfileError, match=words):
        targets.plan(Request(COPY, {"T": 64, "BT": 64}, flags, arguments=arguments, grid=grid))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {'args': {}}", "must return a dict with args, constexprs and grid"),
        ("return {'args': {'q': 1}, 'constexprs': {}, 'grid': 1}", "k has no q; it has x"),
        ("return {'args': {}, 'constexprs': {}, 'grid': 1}", "nothing is said of x of k"),
        ("import nothing_of_this_name", "--arg and --grid in place"),
    ],
)
def test_a_bad_profile_case_is_named(tmp_path, body, words):
    if body.startswith("import"):
        text = f"{body}\ndef k(x): pass\ndef profile_case(shape, device): pass\n"
    else:
        text = f"def k(x): pass\ndef profile_case(shape, device):\n    {body}\n"
    (tmp_path / "bad_case.py").write_text(text)
    with pytest.raises(ProfileError, match=words):
        targets.plan(Request(f"{tmp_path / 'bad_case.py'}:k", {}))


def test_types_are_spelled_as_triton_does_and_others_refused():
    case = Case("m:k", {"a": 3, "b": 2**40, "c": True, "d": torch.empty(1, dtype=torch.int64)}, {}, (1,))
    assert case.signature == {"a": "i32", "b": "i64", "c": "i1", "d": "*i64"}
    with pytest.raises(TypeError, match="x: expected a tensor or a number, got str"):
        _ = Case("m:k", {"x": "text"}, {}, (1,)).signature


# ---- the report ----


def sample_report():
    def rows(variant, time, share, bursts):
        return [
            Row("time", time, "us", "modelled", "timeline", 0.5 * time, 2 * time, variant=variant),
            Row("aiv_mte2_ratio", share, "1", "modelled", "timeline", variant=variant),
            Row("DMA bursts a task", bursts, "1", "modelled", "count", variant=variant),
            Row("time", 10 * time, "us", "measured", "msprof", 9 * time, 11 * time, variant=variant),
        ]

    values = {"F=0": (400.0, 0.31, 516.0), "F=1": (100.0, 0.12, 0.0)}
    found = [row for name, each in values.items() for row in rows(name, *each)]
    found.append(Row("time", 6500.0, "us", "published", "somebody", link="https://x", variant="F=0"))
    return Report("k", "T=1", "bfloat16", list(values), found, ["a note"], {"device": "d"})


def test_a_row_must_say_its_source():
    with pytest.raises(ValueError, match="measured, modelled, published"):
        Row("time", 1.0, "us", "guessed", "x")


def test_factors_stay_inside_one_source_and_carry_the_ranges():
    found = {(each.quantity, each.source): each for each in sample_report().factors()}
    assert set(found) == {("time", "modelled"), ("aiv_mte2_ratio", "modelled"),
                          ("DMA bursts a task", "modelled"), ("time", "measured")}  # fmt: skip
    time = found["time", "modelled"]
    assert (time.before, time.after, time.factor, time.low, time.high) == ("F=0", "F=1", 4.0, 1.0, 16.0)
    assert found["DMA bursts a task", "modelled"].factor is None  # over nothing
    assert found["aiv_mte2_ratio", "modelled"].low is None


def test_the_table_has_a_column_a_variant_and_a_source_in_every_line():
    table = sample_report().table()
    assert table[0] == ["quantity", "unit", "F=0", "F=1", "factor", "source", "how"]
    assert all(line[5] in ("measured", "modelled", "published") for line in table[1:])
    assert table[1] == ["time", "us", "400 [200, 800]", "100 [50, 200]", "4x", "modelled", "timeline"]
    assert table[-1][2:5] == ["6500", "-", "-"]
    text = str(sample_report())
    assert "somebody: https://x" in text and text.endswith("note: a note")
    three = Report("k", "T=1", "bfloat16", ["a", "b", "c"], [])
    assert three.table()[0][5:7] == ["factor b", "factor c"]


ROW_FIELDS = {"quantity": str, "value": float, "unit": str, "source": str, "how": str, "variant": str,
              "low": (float, type(None)), "high": (float, type(None)), "link": str}  # fmt: skip


def check_schema(plain):
    assert set(plain) == {"schema", "kernel", "sizes", "dtype", "variants", "rows", "factors", "notes",
                          "provenance"}  # fmt: skip
    assert plain["schema"] == 1 and plain["rows"]
    for row in plain["rows"]:
        assert set(row) == set(ROW_FIELDS) and row["variant"] in plain["variants"]
        assert all(isinstance(row[name], kind) for name, kind in ROW_FIELDS.items())
        assert row["source"] in ("measured", "modelled", "published")
    for each in plain["factors"]:
        assert {each["before"], each["after"]} <= set(plain["variants"])
        assert set(each) == {"quantity", "before", "after", "factor", "low", "high", "unit", "source", "how"}


def test_the_report_is_plain_json():
    check_schema(json.loads(json.dumps(sample_report().to_dict())))


def test_the_figure_is_written_and_its_title_is_the_finding_of_our_own_rows(tmp_path):
    report = sample_report()
    assert figure.finding(report) == "k: 4 times less time with F=1 (modelled)"
    assert figure.shares(report)["modelled", "F=0"] == {"aiv_mte2": 0.31}
    paths = figure.save(report, tmp_path)
    assert [path.name for path in paths] == ["profile.svg", "profile.png"]
    assert all(path.stat().st_size > 1000 for path in paths)
    only_published = [row for row in report.rows if row.source == "published"]
    assert figure.finding(Report("k", "T=1", "bfloat16", ["F=0"], only_published)) == "k, T=1, bfloat16"


def test_what_is_published_appears_at_exactly_its_sizes_with_a_link():
    def at(kernel=DV_LOCAL, shape=PUBLISHED_SHAPE, flags=None, **others):
        return published.rows(Request(kernel, shape, flags or {}, **others))

    assert [row.value for flag in (0, 1) for row in at(flags={"G_T_CONTIG": flag})] == [6500, 180]
    assert at(flags={"G_T_CONTIG": 0})[0].link.startswith("https://")
    assert not at() and not at(shape={"T": 2048}, flags={"G_T_CONTIG": 0}) and not at(kernel=DECAY)
    backward = "prepare_wy_repr_bwd_kernel"
    assert at(backward, {"T": 32768, "Hg": 8}, dtype="float32")[0].value == 14570
    assert not at(backward, {"T": 32768, "Hg": 8})  # in bfloat16


def test_metrics_are_groups_by_msprofs_names():
    assert metrics.groups(None) == ("PipeUtilization",)
    assert metrics.groups("Memory, L2Cache,Memory") == ("Memory", "L2Cache")
    assert metrics.of_gpu(("MemoryL0",)) == ()
    with pytest.raises(ProfileError, match="expected some of PipeUtilization.*got 'Pipes'"):
        metrics.groups("Pipes")


# ---- whole runs on the model ----


def profile(*arguments, capsys):
    status = cli.main(["profile", *map(str, arguments)])
    return status, capsys.readouterr()


def test_a_users_kernel_end_to_end_before_and_after(tmp_path, capsys):
    status, said = profile(DECAY, "--shape", "T=4096,H=32", "--flag", "G_T_CONTIG=0,1", "--on", "model",
                           "--out", tmp_path / "out", capsys=capsys)  # fmt: skip
    assert status == 0, said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "report.txt", "report.json", "profile.svg", "profile.png",
    }  # fmt: skip
    plain = json.loads((tmp_path / "out" / "report.json").read_text())
    check_schema(plain)
    assert plain["variants"] == ["G_T_CONTIG=0", "G_T_CONTIG=1"]
    bursts = {each["quantity"]: each for each in plain["factors"]}["DMA bursts a task"]
    assert bursts["factor"] == 32.5 and bursts["source"] == "modelled"  # 64 and a store against 1 and a store
    assert "32.5x" in said.out and said.out == (tmp_path / "out" / "report.txt").read_text()


def test_files_measured_elsewhere_stand_beside_the_model(capsys, tmp_path):
    renamed = tmp_path / "op_summary_1.csv"
    text = (FILES / "op_summary_block_num.csv").read_text()
    renamed.write_text(text.replace("chunk_kda_bwd_kernel", "decay_kernel"))
    status, said = profile(DECAY, "--shape", "T=4096,H=32", "--csv", renamed, "--on", "model", "--json",
                           capsys=capsys)  # fmt: skip
    assert status == 0, said.err
    rows = json.loads(said.out)["rows"]
    measured = {row["quantity"]: row for row in rows if row["source"] == "measured"}
    assert measured["time"]["value"] == 104290.1 and measured["time"]["how"] == "msprof op_summary"
    assert any(row["source"] == "modelled" for row in rows)


def test_a_file_of_ncu_or_of_nobody_is_told_apart(tmp_path):
    found = files.rows([str(FILES / "ncu.csv")], "prepare_wy_repr_bwd_kernel")
    assert {row.how for row in found} == {"ncu"}
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    for name, kernel, words in (
        (tmp_path / "x.csv", "k", "is no op_summary"),
        (tmp_path / "y.csv", "k", "there is no file"),
        (FILES / "ncu.csv", "other_kernel", "has no launch of other_kernel; it has prepare"),
    ):
        with pytest.raises(ProfileError, match=words):
            files.rows([str(name)], kernel)
    with pytest.raises(ProfileError, match="2 files for 1 variants"):
        run.profile(Request(DECAY, {}), measured=("a", "b"))


def test_the_adapter_is_where_a_timeline_comes_in(monkeypatch):
    times = {0: 400.0, 1: 100.0}

    def timeline_rows(compiled, args, grid):
        assert args["T"] == 4096 and grid == (64, 32)
        value = times[compiled.constexprs["G_T_CONTIG"]]
        return [Row("time", value, "us", "modelled", "timeline", 0.9 * value, 1.1 * value)]

    monkeypatch.setattr(model, "timeline_rows", timeline_rows)
    report = run.profile(Request(DECAY, {"T": 4096, "H": 32}), parse_flags(["G_T_CONTIG=0,1"]), on=("model",))
    assert report.factors()[0].factor == 4.0 and model.NO_TIME not in report.notes


def test_commands_are_printed_without_running_anything(tmp_path, capsys):
    status, said = profile(DV_LOCAL, "--flag", "G_T_CONTIG=0,1", "--metrics", "PipeUtilization,Memory",
                           "--commands", "--out", tmp_path, capsys=capsys)  # fmt: skip
    lines = said.out.splitlines()
    assert status == 0 and [line.split()[0] for line in lines] == ["msprof", "msprof", "ncu"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_kernel"], "no kernel 'no_such_kernel'"),
        (["nowhere.py:k"], "there is no file nowhere.py"),
        ([DV_LOCAL, "--flag", "G_T_CONTIG"], "expected NAME=VALUE"),
        ([DV_LOCAL, "--flag", "BETA_T_CONTIG=0"], "has G_T_CONTIG"),
        ([DV_LOCAL, "--dtype", "int8"], "expected one of float32"),
        ([DV_LOCAL, "--metrics", "All"], "--metrics"),
        ([DV_LOCAL, "--launches", "0"], "--launches"),
        ([DV_LOCAL, "--commands"], "--commands needs --out"),
        ([DV_LOCAL, "--target", "Ascend310"], "target: expected one of"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments, words, capsys):
    status, said = profile(*arguments, "--on", "model", capsys=capsys)
    assert status == 1 and words in said.err and said.err.count("\n") == 1 and not said.out


def test_nothing_below_imports_the_profile():
    package = HERE.parent / "wyfast_lib"
    for path in package.rglob("*.py"):
        if path.parent.name == "profile":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not any(name.startswith("wyfast_lib.profile") for name in names), path
