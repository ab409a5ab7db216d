"""Inside the worker: linalg -> LLVM -> machine code of this CPU, and its launch over a grid.

The linalg text that triton-ascend makes consists of upstream dialects. bishengir-opt holds the upstream
passes that lower it to the LLVM dialect, triton's bindings turn that into LLVM IR, llvmlite compiles it.
What the lowered code calls and nobody provides is defined in the same module (`RUNTIME`), so that the
calling conventions agree; any other undefined symbol is an error before the code runs, not a crash in it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import struct
import tempfile
from pathlib import Path

from wyfast_lib.ascend.errors import last_lines
from wyfast_lib.ascend.programs import Failure, run_program

#: Tensors to buffers, every one of which is freed where its last owner ends: no growth over many launches.
BUFFER_PASSES = (
    "canonicalize",
    "convert-elementwise-to-linalg",
    "linalg-fuse-elementwise-ops",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize{allow-return-allocs-from-loops=true}",
    "canonicalize",
    "ownership-based-buffer-deallocation",
    "canonicalize",
    "buffer-deallocation-simplification",
    "bufferization-lower-deallocations",
    "canonicalize",
)

#: Buffers and named operations to the LLVM dialect.
LLVM_PASSES = (
    "convert-linalg-to-loops",
    "arith-expand{include-bf16=true}",
    "memref-expand",
    "expand-strided-metadata",
    "lower-affine",
    "convert-scf-to-cf",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "convert-complex-to-llvm",
    "convert-arith-to-llvm",
    "finalize-memref-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "convert-arith-to-llvm",
    "reconcile-unrealized-casts",
)

#: malloc and free that keep a list (what a program leaves is freed after it), memref copies, the bf16
#: conversion.
RUNTIME = """
@wyfast_live = internal global ptr null

declare ptr @malloc(i64)
declare void @free(ptr)
declare void @abort()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define ptr @wyfast_malloc(i64 %bytes) {
  %total = add i64 %bytes, 16
  %block = call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %full, label %link
full:
  call void @abort()
  unreachable
link:
  %head = load ptr, ptr @wyfast_live
  store ptr null, ptr %block
  %next = getelementptr i8, ptr %block, i64 8
  store ptr %head, ptr %next
  %first = icmp eq ptr %head, null
  br i1 %first, label %done, label %back
back:
  store ptr %block, ptr %head
  br label %done
done:
  store ptr %block, ptr @wyfast_live
  %user = getelementptr i8, ptr %block, i64 16
  ret ptr %user
}

define void @wyfast_free(ptr %user) {
  %nothing = icmp eq ptr %user, null
  br i1 %nothing, label %done, label %unlink
unlink:
  %block = getelementptr i8, ptr %user, i64 -16
  %nextp = getelementptr i8, ptr %block, i64 8
  %prev = load ptr, ptr %block
  %next = load ptr, ptr %nextp
  %isfirst = icmp eq ptr %prev, null
  %prevnext = getelementptr i8, ptr %prev, i64 8
  %slot = select i1 %isfirst, ptr @wyfast_live, ptr %prevnext
  store ptr %next, ptr %slot
  %islast = icmp eq ptr %next, null
  br i1 %islast, label %release, label %back
back:
  store ptr %prev, ptr %next
  br label %release
release:
  call void @free(ptr %block)
  br label %done
done:
  ret void
}

define i64 @wyfast_release() {
entry:
  br label %loop
loop:
  %count = phi i64 [ 0, %entry ], [ %more, %one ]
  %head = load ptr, ptr @wyfast_live
  %empty = icmp eq ptr %head, null
  br i1 %empty, label %done, label %one
one:
  %user = getelementptr i8, ptr %head, i64 16
  call void @wyfast_free(ptr %user)
  %more = add i64 %count, 1
  br label %loop
done:
  ret i64 %count
}

define void @memrefCopy(i64 %size, ptr %from, ptr %to) {
  %rank = load i64, ptr %from
  %fromp = getelementptr i8, ptr %from, i64 8
  %top = getelementptr i8, ptr %to, i64 8
  %fd = load ptr, ptr %fromp
  %td = load ptr, ptr %top
  %fap = getelementptr i8, ptr %fd, i64 8
  %tap = getelementptr i8, ptr %td, i64 8
  %fa = load ptr, ptr %fap
  %ta = load ptr, ptr %tap
  %fop = getelementptr i8, ptr %fd, i64 16
  %top2 = getelementptr i8, ptr %td, i64 16
  %fo = load i64, ptr %fop
  %to2 = load i64, ptr %top2
  %fbytes = mul i64 %fo, %size
  %tbytes = mul i64 %to2, %size
  %f = getelementptr i8, ptr %fa, i64 %fbytes
  %t = getelementptr i8, ptr %ta, i64 %tbytes
  %sizes = getelementptr i8, ptr %fd, i64 24
  %tsizes = getelementptr i8, ptr %td, i64 24
  %fstrides = getelementptr i64, ptr %sizes, i64 %rank
  %tstrides = getelementptr i64, ptr %tsizes, i64 %rank
  call void @wyfast_copy(i64 %rank, i64 %size, ptr %f, ptr %t, ptr %sizes, ptr %fstrides, ptr %tstrides)
  ret void
}

define internal void @wyfast_copy(i64 %rank, i64 %size, ptr %f, ptr %t, ptr %sizes, ptr %fs, ptr %ts) {
entry:
  %scalar = icmp eq i64 %rank, 0
  br i1 %scalar, label %element, label %axis
element:
  call void @llvm.memcpy.p0.p0.i64(ptr %t, ptr %f, i64 %size, i1 false)
  ret void
axis:
  %n = load i64, ptr %sizes
  %fstride = load i64, ptr %fs
  %tstride = load i64, ptr %ts
  %last = icmp eq i64 %rank, 1
  %fdense = icmp eq i64 %fstride, 1
  %tdense = icmp eq i64 %tstride, 1
  %dense1 = and i1 %fdense, %tdense
  %dense = and i1 %dense1, %last
  br i1 %dense, label %row, label %prepare
row:
  %bytes = mul i64 %n, %size
  call void @llvm.memcpy.p0.p0.i64(ptr %t, ptr %f, i64 %bytes, i1 false)
  ret void
prepare:
  %fstep = mul i64 %fstride, %size
  %tstep = mul i64 %tstride, %size
  %rest = sub i64 %rank, 1
  %sizes1 = getelementptr i8, ptr %sizes, i64 8
  %fs1 = getelementptr i8, ptr %fs, i64 8
  %ts1 = getelementptr i8, ptr %ts, i64 8
  br label %test
test:
  %i = phi i64 [ 0, %prepare ], [ %i1, %body ]
  %fi = phi ptr [ %f, %prepare ], [ %fnext, %body ]
  %ti = phi ptr [ %t, %prepare ], [ %tnext, %body ]
  %in = icmp slt i64 %i, %n
  br i1 %in, label %body, label %done
body:
  call void @wyfast_copy(i64 %rest, i64 %size, ptr %fi, ptr %ti, ptr %sizes1, ptr %fs1, ptr %ts1)
  %fnext = getelementptr i8, ptr %fi, i64 %fstep
  %tnext = getelementptr i8, ptr %ti, i64 %tstep
  %i1 = add i64 %i, 1
  br label %test
done:
  ret void
}

define bfloat @__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %odd, 32767
  %up = add i32 %bits, %half
  %rounded = lshr i32 %up, 16
  %quiet = or i32 %high, 64
  %isnan = fcmp uno float %x, 0.0
  %chosen = select i1 %isnan, i32 %quiet, i32 %rounded
  %short = trunc i32 %chosen to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}
"""


def argument_types(linalg: str) -> tuple[str, list[str]]:
    """(function name, types of the kernel's own arguments: "ptr" or an LLVM scalar type) from the
    linalg text.
    """
    match = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, re.S)
    if match is None:
        raise Failure("native", "no function in the linalg text")
    kinds = []
    for kind in re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", match[2]):
        if kind.startswith("memref"):
            kinds.append("ptr")
        elif kind in ("f16", "bf16", "f32", "f64"):
            kinds.append({"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double"}[kind])
        else:
            kinds.append(kind)
    return match[1], kinds[2:-6]  # before: lock and workspace; behind: the grid and the program's place in it


def launcher(name: str, kinds: list[str]) -> str:
    """LLVM IR of `wyfast_launch(slots, x, y, z)`: loops over the grid; returns the buffers that
    programs left.
    """
    body, actual, types = [], ["ptr null, ptr null, i64 0, i64 0, i64 1"] * 2, ["ptr, ptr, i64, i64, i64"] * 2
    for i, kind in enumerate(kinds):
        body.append(f"  %p{i} = getelementptr i64, ptr %slots, i64 {2 * i}\n  %v{i} = load {kind}, ptr %p{i}")
        if kind == "ptr":
            body.append(
                f"  %q{i} = getelementptr i64, ptr %slots, i64 {2 * i + 1}\n  %n{i} = load i64, ptr %q{i}"
            )
            actual.append(f"ptr %v{i}, ptr %v{i}, i64 0, i64 %n{i}, i64 1")
            types.append("ptr, ptr, i64, i64, i64")
        else:
            actual.append(f"{kind} %v{i}")
            types.append(kind)
    actual += [f"i32 %{n}" for n in ("gx", "gy", "gz", "x", "y", "z")]
    return f"""
declare i64 @wyfast_release()
declare void @{name}({", ".join(types)}, i32, i32, i32, i32, i32, i32)
define i64 @wyfast_launch(ptr %slots, i32 %gx, i32 %gy, i32 %gz) {{
entry:
{chr(10).join(body)}
  %gxy = mul i32 %gx, %gy
  %all = mul i32 %gxy, %gz
  br label %test
test:
  %i = phi i32 [ 0, %entry ], [ %next, %program ]
  %left = phi i64 [ 0, %entry ], [ %sum, %program ]
  %more = icmp slt i32 %i, %all
  br i1 %more, label %program, label %done
program:
  %x = srem i32 %i, %gx
  %yz = sdiv i32 %i, %gx
  %y = srem i32 %yz, %gy
  %z = sdiv i32 %yz, %gy
  call void @{name}({", ".join(actual)})
  %kept = call i64 @wyfast_release()
  %sum = add i64 %left, %kept
  %next = add i32 %i, 1
  br label %test
done:
  ret i64 %left
}}
"""


def interchange_matmuls(text: str) -> str:
    """Write each float matmul on buffers as a loop nest (row, sum, column) in place of (row, column, sum).

    The inner loop then runs along rows of both buffers and vectorises, several times as fast; every element
    is still summed in the same order, so that the result is the same to the last bit.
    """
    pattern = re.compile(
        r"linalg\.matmul (?:\{[^}]*\} )?ins\((%[\w#]+), (%[\w#]+) : "
        r"(memref<\d+x\d+x(\w+).*?>), (memref<\d+x\d+x\w+.*?>)\) "
        r"outs\((%[\w#]+) : (memref<\d+x\d+xf32.*?>)\)"
    )

    def nest(match: re.Match) -> str:
        left, right, left_type, element, right_type, out, out_type = match.groups()
        if element not in ("f16", "bf16", "f32") or f"x{element}" not in right_type:
            return match[0]
        widen, factors = "", "%l, %r"
        if element != "f32":
            widen = f"%lw = arith.extf %l : {element} to f32\n%rw = arith.extf %r : {element} to f32\n"
            factors = "%lw, %rw"
        maps = ", ".join(f"affine_map<(i, k, j) -> ({axes})>" for axes in ("i, k", "k, j", "i, j"))
        return (
            f"linalg.generic {{indexing_maps = [{maps}], "
            f'iterator_types = ["parallel", "reduction", "parallel"]}} '
            f"ins({left}, {right} : {left_type}, {right_type}) outs({out} : {out_type}) {{\n"
            f"^bb0(%l: {element}, %r: {element}, %acc: f32):\n{widen}"
            f"%product = arith.mulf {factors} : f32\n%sum = arith.addf %acc, %product : f32\n"
            f"linalg.yield %sum : f32\n}}"
        )

    return pattern.sub(nest, text)


def _opt(toolchain: str, passes: tuple[str, ...], text: str) -> str:
    program = str(Path(toolchain) / "ascendnpuir/bin/bishengir-opt")
    pipeline = f"--pass-pipeline=builtin.module({','.join(passes)})"
    done, _ = run_program([program, pipeline, "--mlir-disable-threading", "-"], input=text)
    if done.returncode != 0:
        raise Failure(
            "native",
            f"the kernel cannot be lowered for this CPU (bishengir-opt, status {done.returncode}):\n"
            f"{last_lines(done.stderr)}",
        )
    return done.stdout


def _foreign(lowered: str) -> list[str]:
    """What is left of other dialects after the lowering: functions on tensors, operations of the device."""
    functions = re.findall(r"^ +func\.func private @(\w+)", lowered, re.M)
    operations = re.findall(r'^ +(?:%\S+ = )?"?((?!llvm\.|builtin\.|func\.)[a-z_]+\.[\w.]+)', lowered, re.M)
    if functions:  # the casts around their calls say nothing more
        operations = [name for name in operations if not name.startswith("bufferization.")]
    return sorted({*functions, *operations})


def to_llvm(linalg: str, toolchain: str) -> str:
    """LLVM IR text of the kernel, allocations renamed to the runtime's."""
    from triton._C.libtriton import ir, llvm

    plain = re.sub(r"^\s*annotation\.mark .*$", "", linalg, flags=re.M)  # hints for the device's compiler
    buffers = interchange_matmuls(_opt(toolchain, BUFFER_PASSES, plain))
    lowered = _opt(toolchain, LLVM_PASSES, buffers)
    if foreign := _foreign(lowered):
        raise Failure("native", f"the kernel uses {', '.join(foreign)}, which has no lowering for this CPU")
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(lowered)
        file.flush()
        context = ir.context()
        ir.load_dialects(context)
        module = ir.parse_mlir_module(file.name, context)
        llvm.init_targets()
        llvm_context = llvm.context()
        text = str(llvm.to_module(module, llvm_context))
    return re.sub(r"@(malloc|free)\b", r"@wyfast_\1", text)


def target_machine():
    """llvmlite's code generator for this CPU. bf16 instructions are off: they flush denormals, and
    results differ.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    for name in [name for name in features if "bf16" in name]:
        features[name] = False
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=features.flatten(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )


def to_object(linalg: str, toolchain: str) -> bytes:
    """The kernel, its launcher and the runtime as one relocatable object for this CPU."""
    import llvmlite.binding as llvm

    name, kinds = argument_types(linalg)
    machine = target_machine()
    modules = []
    for text in (to_llvm(linalg, toolchain), RUNTIME, launcher(name, kinds)):
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_default_triple()
        module.data_layout = str(machine.target_data)
        modules.append(module)
    whole = modules[0]
    for other in modules[1:]:
        whole.link_in(other)
    whole.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_interleaving = False  # half the compile time, and no slower
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    return machine.emit_object(whole)


def undefined_symbols(data: bytes) -> list[str]:
    """Names that an ELF64 little-endian object expects from outside, read from its symbol table."""
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    names = []
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, where, _, _ = struct.unpack_from("<IBBHQQ", data, at)
            if name and where == 0:
                names.append(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names


class Loaded:
    """Machine code in this process, ready to be launched."""

    def __init__(self, data: bytes, name: str) -> None:
        import llvmlite.binding as llvm

        self.machine = target_machine()
        process, libm = ctypes.CDLL(None), ctypes.CDLL("libm.so.6")
        missing = []
        for symbol in undefined_symbols(data):
            for library in (process, libm):
                if hasattr(library, symbol):
                    llvm.add_symbol(symbol, ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)
                    break
            else:
                if symbol != "_GLOBAL_OFFSET_TABLE_":
                    missing.append(symbol)
        if missing:
            raise Failure("native", f"{name} calls {', '.join(missing)}, which nothing here provides")
        empty = llvm.parse_assembly("")
        empty.triple = llvm.get_default_triple()
        self.engine = llvm.create_mcjit_compiler(empty, self.machine)
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self.engine.finalize_object()
        address = self.engine.get_function_address("wyfast_launch")
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int32] * 3)(address)


_loaded: dict[str, Loaded] = {}


def load(request: dict) -> dict:
    """Make a kernel ready: from the object cache, or by lowering its linalg text. Reply: {"cached"}."""
    machine = target_machine()
    mark = hashlib.sha256(f"{machine.triple}{_cpu()}".encode()).hexdigest()[:12]
    path = Path(request["cache"]) / request["key"][:2] / f"{request['key']}-{mark}.o"
    data = _kept(path)
    cached = data is not None
    if not cached:
        data = to_object(request["linalg"], request["toolchain"])
    _loaded[request["key"]] = Loaded(data, request["name"])
    keep = None if cached else (str(path), hashlib.sha256(data).digest() + data)
    return {"cached": cached, "keep": keep}


def _kept(path: Path) -> bytes | None:
    """An object from the cache; None when there is none or it is not whole: its hash stands before it."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    mark, data = stored[:32], stored[32:]
    return data if data and hashlib.sha256(data).digest() == mark else None


def _cpu() -> str:
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


# Addresses on either side of the arena that are closed to every access: whatever a 32-bit index can reach.
CLOSED = 16 << 30


class _Arena:
    """The memory that both processes share, alone in a wide stretch of closed addresses."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self.open = size, size
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self.libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = self._map(None, size + 2 * CLOSED, 0, private, -1)
        both = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = self._map(start + CLOSED, size, both, mmap.MAP_SHARED | _FIXED, descriptor)

    def _map(self, at: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
        address = self.libc.mmap(at, size, access, flags, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise Failure("run", f"no {size >> 20} MiB of addresses: {os.strerror(ctypes.get_errno())}")
        return address

    def allow(self, used: int) -> None:
        """Close what lies past the tensors of a call and their guards."""
        page = mmap.PAGESIZE
        used = -(-used // page) * page
        if used == self.open:
            return
        self._protect(0, used, mmap.PROT_READ | mmap.PROT_WRITE)
        self._protect(used, self.size - used, 0)
        self.open = used

    def _protect(self, at: int, size: int, access: int) -> None:
        if size and self.libc.mprotect(self.address + at, size, access):
            raise Failure("run", f"mprotect: {os.strerror(ctypes.get_errno())}")

    def close(self) -> None:
        self.libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.libc.munmap(self.address - CLOSED, self.size + 2 * CLOSED)


_FIXED, _NORESERVE = 0x10, 0x4000  # of mmap(2) on Linux; Python has no names for them before 3.13
_arena: _Arena | None = None


def run(request: dict) -> dict:
    """Launch a loaded kernel over a grid. Reply: {"missing": True} or {"kept": buffers the programs left}."""
    global _arena
    if request["key"] not in _loaded:
        return {"missing": True}
    if _arena is None or _arena.size != request["size"]:
        if _arena is not None:
            _arena.close()
        _arena = _Arena(request["memory"], request["size"])
    _arena.allow(request["used"])
    slots = bytearray(16 * max(1, len(request["arguments"])))
    for i, (kind, value, count) in enumerate(request["arguments"]):
        if kind == "ptr":
            struct.pack_into("<QQ", slots, 16 * i, _arena.address + value, count)
        else:
            struct.pack_into(f"<{kind}", slots, 16 * i, value)
    buffer = (ctypes.c_char * len(slots)).from_buffer(slots)
    return {"kept": _loaded[request["key"]].launch(ctypes.addressof(buffer), *request["grid"])}


def handle(request: dict) -> dict:
    """Dispatch of the worker's native requests."""
    return {"load": load, "run": run}[request["do"]](request)
