"""Rows 43, 44 and 46: what a kernel depends on decides what is compiled, with and without the cache."""

import importlib
import linecache
import os
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from wyfast_lib.ascend import CompileError, compile, compile_kernel, run, sources, toolchain, worker
from wyfast_lib.kernels import teaching

HEAD = "import triton\nimport triton.language as tl\n"
STORE = "@triton.jit\ndef k(x):\n    tl.store(x, {})\n"
COPY = teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of modules on the import path, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in repr(sys.modules[name]):
            del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000 * write.count))
    write.count += 1
    linecache.clearcache()
    return path


write.count = 1


def stored(kernel, cache=True) -> float:
    """What a kernel that stores one number stores."""
    x = torch.zeros(1)
    run(compile_kernel(kernel, {"x": "*fp32"}, {}, cache=cache), (x,), (1,))
    return x.item()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "where, how",
    [
        ("sub/consts.py", "from sub.consts import N"),
        ("sub/deep/consts.py", "from sub.deep.consts import N"),
        ("sub/__init__.py", "from sub import N"),
        ("sub/consts.py", "import sub.consts\nN = sub.consts.N"),
        ("sub/consts.py", "import sub.consts as c\nN = c.N"),
        ("beside.py", "from beside import N"),
        ("beside.py", "from beside import *"),
    ],
)
def test_43_a_constant_of_an_imported_module_changes(fresh_cache, tmp_path, where, how, cache):
    path = write(tmp_path, "kernels.py", f"{HEAD}{how}\n{STORE.format('N')}")
    for value in (3.0, 5.0, 3.0):
        write(tmp_path, where, f"{HEAD}N = tl.constexpr({value})\n")
        assert stored(f"{path}:k", cache) == value


def test_43_a_module_edited_within_a_second_is_not_read_from_its_bytecode(fresh_cache, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    worker.close()
    path = write(tmp_path, "kernels.py", f"{HEAD}from quick import N\n{STORE.format('N')}")
    for value in (3.0, 5.0):  # one length, one second
        quick = write(tmp_path, "quick.py", f"{HEAD}N = tl.constexpr({value})\n")
        os.utime(quick, ns=(10**18, 10**18 + int(value)))
        assert stored(f"{path}:k", cache=False) == value


def test_43_a_helper_of_a_helper_changes(fresh_cache, tmp_path):
    path = write(tmp_path, "kernels.py", f"{HEAD}from a.one import f\n{STORE.format('f(2.0)')}")
    write(tmp_path, "a/one.py", f"{HEAD}from b import g\n@triton.jit\ndef f(x):\n    return g(x)\n")
    for value in (3.0, 4.0):
        write(tmp_path, "b.py", f"{HEAD}@triton.jit\ndef g(x):\n    return x * {value}\n")
        assert stored(f"{path}:k") == 2 * value


def test_43_two_kernels_of_one_worker_share_no_stale_module(fresh_cache, tmp_path):
    first = write(tmp_path, "first.py", f"{HEAD}from shared import N\n{STORE.format('N')}")
    second = write(tmp_path, "second.py", f"{HEAD}from shared import N\n{STORE.format('N + 1')}")
    write(tmp_path, "shared.py", f"{HEAD}N = tl.constexpr(1.0)\n")
    assert stored(f"{first}:k") == 1
    live = worker.current()
    write(tmp_path, "shared.py", f"{HEAD}N = tl.constexpr(7.0)\n")
    assert stored(f"{second}:k") == 8
    assert worker.current() is live


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "read", ["os.environ['{}']", "os.environ.get('{}')", "os.getenv('{}', '0')", "os.environ[PREFIX + 'N']"]
)
def test_43_a_constant_from_the_environment_changes(fresh_cache, tmp_path, monkeypatch, read, cache):
    constant = f"import os\nPREFIX = 'MY_'\nN = tl.constexpr(float({read.format('MY_N')}))\n"
    path = write(tmp_path, "kernels.py", HEAD + constant + STORE.format("N"))
    for value in (3.0, 5.0):
        monkeypatch.setenv("MY_N", str(value))
        assert stored(f"{path}:k", cache) == value


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_43_a_patched_module_global_counts(fresh_cache, project, monkeypatch, cache, by_name):
    write(project, "patched_consts.py", f"{HEAD}N = tl.constexpr(1.0)\n@triton.jit\ndef f():\n    return N\n")
    write(
        project, "patched_kernels.py",
        f"{HEAD}import patched_consts\nfrom patched_consts import f\nM: tl.constexpr = 1.0\n"
        + STORE.format("M + 10 * patched_consts.N + 100 * f()"),
    )  # fmt: skip
    module = importlib.import_module("patched_kernels")
    kernel = "patched_kernels:k" if by_name else module.k
    assert stored(kernel, cache) == 111
    monkeypatch.setattr(module, "M", 2.0)
    assert stored(kernel, cache) == 112
    import triton.language as tl

    monkeypatch.setattr(module.patched_consts, "N", tl.constexpr(3.0))
    assert stored(kernel, cache) == 332


def test_43_a_patched_toolchain_is_another_one(fresh_cache, tmp_path, monkeypatch):
    real = toolchain.locate()
    other = tmp_path / "toolchain"
    other.mkdir()
    for entry in real.iterdir():
        if entry.name != "triton":
            (other / entry.name).symlink_to(entry)
    import shutil

    shutil.copytree(real / "triton", other / "triton", symlinks=True, copy_function=os.link)
    monkeypatch.setenv("WYFAST_ASCEND_TOOLCHAIN", str(other))
    before = toolchain.fingerprint()
    patched = other / "triton" / "language" / "core.py"
    text = patched.read_text()
    patched.unlink()
    patched.write_text(text + "\n# patched\n")
    assert toolchain.fingerprint() != before


def test_43_target_compiler_and_arch35_are_in_the_key(monkeypatch):
    source = sources.find(teaching.copy_kernel)
    request = {"name": "k", "signature": {}, "target": "a", "compiler": "c", "arch35": False,
               "options": {}, "flags": (), "explicit": (), "constexprs": {}}  # fmt: skip
    paths = {compile._cache_path(source, request)}
    for change in ({"target": "b"}, {"compiler": "d"}, {"arch35": True}, {"options": {"multibuffer": False}},
                   {"explicit": ("--x",)}, {"constexprs": {"N": 1}}):  # fmt: skip
        paths.add(compile._cache_path(source, request | change))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    paths.add(compile._cache_path(source, request))
    assert len(paths) == 8


# ---- row 44 ----


def test_44_multibuffer_off_takes_effect_as_the_flag_does():
    tile = teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 2048}
    twice = compile_kernel(*tile)
    once = compile_kernel(*tile, options={"multibuffer": False})
    flag = compile_kernel(*tile, flags=("--enable-auto-multi-buffer=False",))
    assert once.ub_peak == flag.ub_peak < twice.ub_peak
    assert compile_kernel(*tile, options={"multibuffer": True}).hivm == twice.hivm
    both = compile_kernel(*tile, options={"multibuffer": True}, flags=("--enable-auto-multi-buffer=False",))
    assert both.ub_peak == once.ub_peak  # a flag is the last word


def test_44_an_option_that_the_compiler_gets_as_a_flag_changes_its_output():
    constants = {"BT": 64, "K": 64}
    product = teaching.running_product_kernel, {"x": "*bf16", "y": "*fp32", "T": "i32"}, constants
    plain = compile_kernel(*product)
    barriers = compile_kernel(*product, options={"inject_barrier_all": True})
    assert barriers.hivm.count("pipe_barrier") > plain.hivm.count("pipe_barrier")


@pytest.mark.parametrize("name", ["multibufer", "num_warp", "", "enable_auto_multi_buffer"])
def test_44_an_option_that_triton_ascend_has_not_is_refused_before_anything_runs(name, monkeypatch):
    monkeypatch.setattr(worker, "call", None)
    with pytest.raises(ValueError, match=f"no option {name!r}.*multibuffer"):
        compile_kernel(*COPY, options={name: 1})


def test_44_every_option_named_is_one_of_triton_ascends():
    assert {"multibuffer", "unit_flag", "num_warps", "tile_mix_vector_loop"} <= set(toolchain.options())


# ---- row 46 ----


def test_46_a_kernel_defined_again_leaves_the_first_one_as_it_was(fresh_cache, project):
    write(project, "twice.py", f"{HEAD}{STORE.format('1.0')}first = k\n\n{STORE.format('2.0')}")
    module = importlib.import_module("twice")
    assert stored(module.first) == 1 and stored(module.k) == 2 and stored(module.first, cache=False) == 1


def test_46_kernels_made_inside_functions_are_compiled_with_what_they_close_over(fresh_cache, project):
    text = f"{HEAD}def make(value):\n    N = tl.constexpr(value)\n" + textwrap.indent(
        STORE.format("N"), "    "
    )
    write(project, "factory.py", text + "    return k\n")
    module = importlib.import_module("factory")
    one, two = module.make(1.0), module.make(2.0)
    assert (stored(one), stored(two), stored(one)) == (1, 2, 1)


def test_46_helpers_of_one_name_in_two_modules_stay_apart(fresh_cache, project):
    for name, value in (("left", 1.0), ("right", 2.0)):
        helper = f"{HEAD}N = tl.constexpr({value})\n@triton.jit\ndef f():\n    return N\n"
        write(project, f"{name}_helper.py", helper)
    both = "import left_helper\nfrom right_helper import f\n"
    write(project, "both.py", HEAD + both + STORE.format("f() * 10 + left_helper.f()"))
    assert stored(importlib.import_module("both").k) == 21


def test_46_a_source_that_changed_under_the_object_is_an_error(fresh_cache, project):
    path = write(project, "moved.py", HEAD + STORE.format("1.0"))
    kernel = importlib.import_module("moved").k
    write(project, "moved.py", HEAD + "def other():\n    pass\n\n" + STORE.format("2.0"))
    with pytest.raises(CompileError, match="changed after it was imported") as caught:
        compile_kernel(kernel, {"x": "*fp32"}, {})
    assert caught.value.stage == "kernel" and path.exists()


def test_46_messages_and_locations_name_the_kernels_own_file_and_line(project):
    write(project, "located.py", "# a line\n" + HEAD + STORE.format("1.0"))
    compiled = compile_kernel(importlib.import_module("located").k, {"x": "*fp32"}, {}, cache=False)
    assert 'loc("located.py":6:' in compiled.ttir


# ---- what an error carries ----


def test_an_overflow_crosses_to_another_process_whole():
    import pickle

    with pytest.raises(CompileError) as caught:
        compile_kernel(teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 32768})
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)
    assert again.required == caught.value.required and again.ttir == caught.value.ttir != ""


def test_an_error_says_its_stage_and_carries_the_texts_of_the_stages_before_it(tmp_path, monkeypatch):
    def caught(kernel, signature, **options):
        with pytest.raises(CompileError) as error:
            compile_kernel(kernel, signature, {}, cache=False, **options)
        return error.value

    rejected = write(tmp_path, "rejected.py", HEAD + STORE.format("tl.unheard_of(x)"))
    error = caught(f"{rejected}:k", {"x": "*fp32"})
    assert (error.stage, error.ttir, error.linalg) == ("ttir", "", "")
    missing = write(tmp_path, "missing.py", "import no_such_module_anywhere\n" + HEAD + STORE.format("1.0"))
    assert caught(f"{missing}:k", {"x": "*fp32"}).stage == "kernel"
    good = write(tmp_path, "good.py", HEAD + STORE.format("1.0"))
    error = caught(f"{good}:k", {"x": "*fp32"}, flags=("--no-such-flag",))
    assert error.stage == "hivm" and "tt.func" in error.ttir and "func.func" in error.linalg
    compiled = compile_kernel(f"{good}:k", {"x": "*fp32"}, {})
    strange = SimpleNamespace(**vars(compiled), arguments=compiled.arguments)
    strange.linalg = compiled.linalg.replace("return", "call @nobody() : () -> ()\n    return", 1)
    with pytest.raises(CompileError) as problem:
        run(strange, (torch.zeros(1),), (1,))
    assert problem.value.stage == "native" and problem.value.linalg == strange.linalg and problem.value.ttir
