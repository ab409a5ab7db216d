"""Row 47: machines that are shared, full or locked down."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wyfast_lib.ascend import audit, compile_kernel, device_code, run, toolchain, worker
from wyfast_lib.kernels import teaching

ROOT = Path(__file__).parents[2]
COPY = teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64}
WHOLE_WAY = """
import torch
from wyfast_lib.ascend import audit, compile_kernel, run
from wyfast_lib.kernels import teaching
c = compile_kernel(teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64})
x, y = torch.randn(64), torch.zeros(64)
run(c, (x, y, 64), (1,))
assert torch.equal(x, y) and audit(c).rows
print("right")
"""


def whole_way() -> None:
    worker.close()  # a new one knows what the cache holds and nothing else
    compiled = compile_kernel(*COPY)
    x, y = torch.randn(64), torch.zeros(64)
    run(compiled, (x, y, 64), (1,))
    assert torch.equal(x, y) and audit(compiled).rows


def in_a_process(code=WHOLE_WAY, drop=(), **variables) -> subprocess.CompletedProcess:
    environment = {n: v for n, v in os.environ.items() if n not in drop}
    environment |= {"PYTHONPATH": str(ROOT), "WYFAST_ASCEND_TOOLCHAIN": str(toolchain.locate())} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_47_a_cache_that_cannot_be_written_costs_one_line_and_no_result(tmp_path, monkeypatch):
    monkeypatch.setenv("WYFAST_ASCEND_TOOLCHAIN", str(toolchain.locate()))
    (tmp_path / "file").write_text("in the way")  # root may write everywhere, but not into a file
    monkeypatch.setenv("WYFAST_CACHE", str(tmp_path / "file" / "cache"))
    worker.close()
    toolchain._say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be written .*going on without a cache") as said:
        whole_way()
    assert len(said) == 1
    whole_way()


def test_47_a_disk_that_is_full_costs_one_line_and_leaves_no_half_entry(fresh_cache, monkeypatch):
    def full(self, data):
        Path.touch(self)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    toolchain._say_once.cache_clear()
    worker.close()
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        whole_way()
    assert not [p for p in fresh_cache.rglob("*") if p.is_file() and p.suffix not in (".py", ".sqlite")]


def test_47_nothing_is_run_from_the_directory_of_temporary_files():
    """A stand-in program there would not start where TMPDIR is mounted noexec."""
    scripts = []

    def looked_at(path):
        for entry in Path(path).rglob("*"):
            if entry.is_file() and not entry.is_symlink() and entry.stat().st_mode & stat.S_IXUSR:
                scripts.append(entry)

    code = (
        "import os, sys\nfrom pathlib import Path\nfrom wyfast_lib.ascend import inside\n"
        "e = inside._compiler_environment(Path(sys.argv[1]), 'bishengir-compile')\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, folder], env=environment, check=True)
        looked_at(folder)
        (stand_in,) = Path(folder).rglob("hivmc")
        assert stand_in.is_symlink() and subprocess.run([stand_in]).returncode == 0
    assert not scripts


def test_47_a_user_without_home_and_name_has_a_cache_among_temporary_files(tmp_path):
    code = "import os\nfrom wyfast_lib.ascend import toolchain\n"
    code += "os.setuid(54321)\n" if os.getuid() == 0 else ""
    code += "print(toolchain.cache_root())\n"
    done = in_a_process(code, drop=("HOME", "XDG_CACHE_HOME", "WYFAST_CACHE"), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    if os.getuid() == 0:
        assert Path(done.stdout.strip()).name == "wyfast-54321"


@pytest.mark.parametrize("length", [0, 10, 40, 1000])
def test_47_a_truncated_object_is_built_anew(fresh_cache, length):
    whole_way()
    (path,) = (fresh_cache / "native").rglob("*.o")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:length])
    worker.close()
    whole_way()
    assert path.stat().st_size == size


def test_47_a_changed_byte_of_an_object_is_noticed(fresh_cache):
    whole_way()
    (path,) = (fresh_cache / "native").rglob("*.o")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    worker.close()
    whole_way()
    assert path.read_bytes() != bytes(data)


@pytest.mark.parametrize("length", [0, 50, 5000])
def test_47_a_truncated_index_of_the_templates_is_built_anew(fresh_cache, length):
    whole_way()
    for path in (fresh_cache / "templates").rglob("*.json"):
        path.unlink()
    (index,) = (fresh_cache / "templates").glob("*.sqlite")
    index.write_bytes(index.read_bytes()[:length])
    assert not device_code.whole(str(index))
    whole_way()
    assert device_code.whole(str(index))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null"])
def test_47_an_entry_that_is_no_entry_is_compiled_anew(fresh_cache, content):
    import gzip

    whole_way()
    (entry,) = fresh_cache.rglob("*.json.gz")
    entry.write_bytes(gzip.compress(content))
    assert not compile_kernel(*COPY).from_cache
    assert compile_kernel(*COPY).from_cache


def test_47_a_locale_without_utf_8_changes_nothing(fresh_cache, tmp_path):
    path = tmp_path / "umlaut.py"
    path.write_text(
        "import triton, triton.language as tl\n@triton.jit\ndef k(x):\n    # größer als π, 你好\n"
        "    tl.store(x, 1.0)\n",
        encoding="utf-8",
    )
    code = WHOLE_WAY + (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport umlaut\n"
        "x = torch.zeros(1)\nrun(compile_kernel(umlaut.k, {'x': '*fp32'}, {}), (x,), (1,))\n"
        f"run(compile_kernel({str(path)!r} + ':k', {{'x': '*fp32'}}, {{}}), (x,), (1,))\n"
        "assert x.item() == 1\n"
    )
    done = in_a_process(code, LC_ALL="POSIX", LANG="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr
