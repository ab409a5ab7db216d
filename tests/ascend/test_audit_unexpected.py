"""The audit on kernels it did not expect (row 49): a result, or a refusal that names the operation."""

import re
from dataclasses import replace

import kernels_unexpected as kernels
import pytest

from wyfast_lib.ascend import audit, compile_kernel, templates, walk
from wyfast_lib.ascend.hivm import HivmError

X = {"x": "*fp32", "y": "*fp32"}
KINDS = {
    "max_and_index": X | {"z": "*i32"},
    "row_max_and_index": X | {"z": "*i32"},
    "index_of_min": {"x": "*fp32", "z": "*i32"},
    "printing": X,
    "mask_between": X | {"low": "i32", "high": "i32"},
    "sorting": X,
    "running_sum": X,
    "gathering": {"x": "*fp32", "idx": "*i32", "y": "*fp32"},
    "indirect": {"x": "*fp32", "idx": "*i32", "y": "*fp32"},
    "adding_atomically": X,
    "while_loop": X | {"n": "i32"},
    "early_return": {"x": "*u8", "y": "*u8", "n": "i32"},
    "three_dimensions": X,
    "random_numbers": {"y": "*fp32"},
    "count_from_memory": {"x": "*fp32", "n_ptr": "*i32", "y": "*fp32"},
}
SIZES = {"three_dimensions": 8}


def compiled(name: str, **options):
    return compile_kernel(getattr(kernels, name), KINDS[name], {"N": SIZES.get(name, 64)}, **options)


@pytest.mark.parametrize("name", KINDS)
def test_49_every_kind_of_kernel_is_audited_and_no_count_is_negative(name):
    kernel = compiled(name)
    for values in ({}, {n: v for n, v in {"low": 3, "high": 50, "n": 2}.items() if n in KINDS[name]}):
        found = audit(kernel, values=values)
        assert found.rows and str(found)
        numbers = [x for r in found.rows for x in (r.bytes, r.moved, r.bursts, r.scalar, r.repeats, r.times)]
        assert min(numbers) >= 0
        assert not found.unwritten, found.unwritten  # a buffer that was lost on the way would show here
        outputs = [r for r in found.rows if r.argument in ("y", "z") and r.direction == "out"]
        assert sum(r.bytes * r.times for r in outputs) > 0 or name == "adding_atomically"


@pytest.mark.parametrize("low, high", [(40, 20), (63, 0), (64, 1)])
def test_49_a_mask_with_low_above_high_is_reported_and_not_counted(low, high):
    found = audit(compiled("mask_between"), values={"low": low, "high": high})
    notes = [n for n in found.notes if n.startswith("NEGATIVE EXTENT")]
    assert [re.search(r" of (\w) is asked for (-\d+) elements", n).groups() for n in notes] == [
        ("x", str(high - low)), ("y", str(high - low)),
    ]  # fmt: skip
    moved = [r for r in found.rows if r.argument in ("x", "y")]
    assert len(moved) == 2 and all(r.bytes == r.moved == r.bursts == 0 for r in moved)
    assert not any(n.startswith("NEGATIVE") for n in audit(compiled("mask_between")).notes)


def test_49_a_trace_that_was_cut_is_an_error_and_never_a_smaller_count(monkeypatch):
    whole = templates.trace

    def cut(calls, target, core):
        return [replace(t, truncated=t.template.startswith("store_")) for t in whole(calls, target, core)]

    monkeypatch.setattr(templates, "trace", cut)
    with pytest.raises(HivmError, match=r"store_ubuf_to_gm_1d_float on HIVM line \d+ issues more"):
        audit(compiled("running_sum"))


def test_49_a_log_longer_than_its_room_is_a_cut_trace():
    answer = {"instructions": [], "scalar": {}, "functions": [], "missing_arguments": 0}
    room = templates.device_code.LOG_WORDS
    assert templates._as_trace("t", {**answer, "log_words": room + 1}).truncated
    assert not templates._as_trace("t", {**answer, "log_words": room}).truncated


def test_49_a_walk_that_is_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(walk, "MAX_STEPS", 10)
    with pytest.raises(HivmError, match="exceeds 10 operations"):
        audit(compiled("running_sum"))


def test_49_an_operation_that_makes_a_buffer_and_is_not_known_is_refused_by_name():
    kernel = compiled("running_sum")
    line = next(x for x in kernel.hivm.splitlines() if "hivm.hir.pointer_cast" in x)
    strange = kernel.hivm.replace(line, re.sub(r"hivm\.hir\.pointer_cast", "hivm.hir.made_up", line))
    with pytest.raises(HivmError, match="hivm.hir.made_up makes a buffer and is not known"):
        audit(replace(kernel, hivm=strange))


def test_49_a_form_of_an_operation_that_cannot_be_followed_is_refused_with_its_line():
    kernel = compiled("max_and_index")
    line = next(x for x in kernel.hivm.splitlines() if "memref.load" in x)
    strange = kernel.hivm.replace(line, re.sub(r"memref\.load %[\w#]+", "memref.load %nobody", line))
    with pytest.raises(HivmError, match=r"HIVM line \d+: cannot follow memref.load"):
        audit(replace(kernel, hivm=strange))


def test_49_templates_that_one_library_cannot_hold_are_read_one_by_one():
    found = audit(compiled("printing"))
    loads = [r for r in found.rows if r.argument == "x"]
    assert loads and all(r.bursts == 1 and not r.note for r in loads)
    assert any("print_1d_float_ubuf" in n for n in found.notes)
