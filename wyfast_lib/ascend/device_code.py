"""Run the bodies of the compiler's library templates on this CPU and list the hardware instructions that they
issue.

A script for a process of its own that has the Ascend toolchain first on its path (it needs llvmlite);
`templates.py` starts it, nothing imports it. A HIVM module only calls templates such as
`load_gm_to_ubuf_1d_bfloat16_t`; their bodies are LLVM bitcode in the toolchain. Here they are compiled for
this CPU with every `llvm.hivm.*` instruction replaced by a line in a log, and called with memref
descriptors whose sizes, strides and addresses are those of the HIVM module. What is logged is what the
device would issue for that call: no reading between the lines.

stdin: JSON {"bitcode": path, "index": path, "calls": [{"template": name, "args": [...]}, ...]}; an
argument is an int, or {"space", "address" (bytes), "offset" (elements), "sizes", "strides", "bits"}.
stdout: JSON, for each call {"instructions": [[name, [integers], count], ...], "functions": [...],
"scalar": {...}} or {"error": text}.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import sqlite3
import sys

LOG_WORDS = 1 << 21
SPACES = {1: "GM", 2: "L1", 3: "L0A", 4: "L0B", 5: "L0C", 6: "UB", 7: "FB"}
LOCAL_BYTES = {"UB": 1 << 19, "L1": 1 << 21, "L0A": 1 << 18, "L0B": 1 << 18, "L0C": 1 << 20, "FB": 1 << 16}
_NAME = r'@("[^"]+"|[\w.$]+)'


# ---- the library as a table of function texts
# -------------------------------------------------------------------


def build_index(bitcode: str, path: str) -> None:
    """Write the functions, declarations, types and globals of a bitcode file to a database at `path`."""
    import llvmlite.binding as llvm

    with open(bitcode, "rb") as file:
        text = str(llvm.parse_bitcode(file.read()))
    rows, types, at = [], [], 0
    while at < len(text):
        found = text.find("\ndefine ", at)
        start = len(text) if found < 0 else found + 1
        for line in text[at:start].split("\n"):
            if line.startswith("declare "):
                rows.append((_named(line), "declare", line))
            elif line.startswith("@"):
                rows.append((_named(line), "global", line))
            elif line.startswith("%") and " = type " in line:
                types.append(line)
        if found < 0:
            break
        at = text.index("\n}\n", start) + 3
        body = text[start : at - 1]
        rows.append((_named(body[: body.index("\n")]), "define", body))
    partial = f"{path}.{os.getpid()}"
    with sqlite3.connect(partial) as base:
        base.execute("create table item (name text, kind text, body text, primary key (name, kind))")
        base.executemany(
            "insert or ignore into item values (?, ?, ?)", [*rows, ("", "types", "\n".join(types))]
        )
    base.close()
    os.replace(partial, path)


def whole(path: str) -> bool:
    """Is there a database at `path` with the pages that its header counts? A copy may have been cut short."""
    try:
        with open(path, "rb") as file:
            header = file.read(100)
        size = int.from_bytes(header[16:18], "big")
        pages = int.from_bytes(header[28:32], "big") * (65536 if size == 1 else size)
        return header.startswith(b"SQLite format 3") and 0 < pages <= os.path.getsize(path)
    except OSError:
        return False


def _named(line: str) -> str:
    """The first @name of a line, without quotes."""
    return re.search(_NAME, line).group(1).strip('"')


def closure(base: sqlite3.Connection, names: list) -> dict:
    """Everything that `names` need, as name -> (kind, text)."""
    found: dict = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        row = base.execute(
            "select kind, body from item where name = ? order by kind = 'declare'", (name,)
        ).fetchone()
        if row is None:
            continue
        found[name] = row
        if row[0] != "declare":
            todo += {n.strip('"') for n in re.findall(_NAME, row[1])} - {name}
    return found


# ---- a module for this CPU
# --------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """Drop what only the device's compiler understands: attributes, metadata, linkage, lifetimes."""
    text = re.sub(r", ![\w.]+ !\d+", "", text)
    text = re.sub(r"^\s*call void @llvm\.lifetime\.\w+\.\w+\([^\n]*\n", "", text, flags=re.M)
    text = re.sub(r" #\d+(?=$|\s*\{)", "", text, flags=re.M)
    # The templates read descriptors through null pointers and discard what they read: legal on the device,
    # where 0 is an address like any other. Here null is a page of zeros, in comparisons too.
    text = re.sub(r"\bptr ((?:noundef )?)null\b", r"ptr \1@wy.scratch", text)
    text = re.sub(r"(icmp (?:eq|ne) ptr (?!addrspace)[^,\n]+), null\b", r"\1, @wy.scratch", text)
    return re.sub(r" comdat(\(\$[^)]*\))?(?= )", "", text)


def _parameters(signature: str) -> list:
    """LLVM types of the parameters in the text of a define or declare line."""
    inner = signature[signature.index("(") + 1 :]
    depth, end = 1, 0
    while depth:
        depth += {"(": 1, ")": -1}.get(inner[end], 0)
        end += 1
    types, item, depth = [], "", 0
    for ch in inner[: end - 1] + ",":
        depth += {"(": 1, ")": -1}.get(ch, 0)
        if ch == "," and depth == 0:
            match = re.match(r"\s*(ptr addrspace\(\d+\)|ptr|i\d+|bfloat|half|float|double)", item)
            if match:
                types.append(match.group(1))
            item = ""
        else:
            item += ch
    return types


_TO_WORD = {"bfloat": "i16", "half": "i16", "float": "i32", "double": "i64"}


def _push(index: int, kind: str, value: str) -> list:
    """Lines that append a value of LLVM type `kind` to the log."""
    word = f"%w{index}"
    if kind.startswith("ptr"):
        lines = [f"  {word} = ptrtoint {kind} {value} to i64"]
    elif kind in _TO_WORD:
        bits = _TO_WORD[kind]
        lines = [f"  %b{index} = bitcast {kind} {value} to {bits}"]
        lines.append(
            f"  {word} = zext {bits} %b{index} to i64"
            if bits != "i64"
            else f"  {word} = add i64 %b{index}, 0"
        )
    elif kind == "i64":
        lines = [f"  {word} = add i64 {value}, 0"]
    else:
        lines = [f"  {word} = zext {kind} {value} to i64"]
    return [*lines, f"  call void @wy.push(i64 {word})"]


_RESULTS = {
    "SBITSET0": [
        "  %one = shl i64 1, %p1",
        "  %inv = xor i64 %one, -1",
        "  %r = and i64 %p0, %inv",
        "  ret i64 %r",
    ],
    "SBITSET1": ["  %one = shl i64 1, %p1", "  %r = or i64 %p0, %one", "  ret i64 %r"],
}


def _instruction(number: int, name: str, declare: str) -> str:
    """A definition of one hardware instruction that logs its number and its operands."""
    result = re.match(r"declare (?:[\w_]+ )*?(void|i\d+|ptr)\s+@", declare).group(1)
    types = _parameters(declare)
    lines = [f"  call void @wy.push(i64 {number})"]
    for i, kind in enumerate(types):
        lines += _push(i, kind, f"%p{i}")
    short = name.removeprefix("llvm.hivm.")
    if short in _RESULTS:
        lines = _RESULTS[short]
    elif result == "void":
        lines.append("  ret void")
    elif result == "ptr":
        lines.append("  ret ptr @wy.scratch")
    else:
        lines.append(f"  ret {result} 0")
    args = ", ".join(f"{kind} %p{i}" for i, kind in enumerate(types))
    return f'define internal {result} @"wy.{short}"({args}) {{\n' + "\n".join(lines) + "\n}"


_SCALAR = re.compile(r"^(\s*)(?:%\S+ = (load)|(store)) [^\n]*, ptr addrspace\((\d)\) [^\n]*$", re.M)


def touches_memory(body: str) -> bool:
    """True for a function that reads or writes UB, L1 or global memory with plain loads and stores."""
    return _SCALAR.search(body) is not None


def _counted(text: str) -> str:
    """Count plain loads and stores of device memory: the scalar unit's work."""

    def line(match):
        slot = 2 * int(match.group(4)) + (match.group(3) is not None)
        return f"{match.group(1)}call void @wy.scalar(i64 {slot})\n{match.group(0)}"

    return _SCALAR.sub(line, text)


_RUNTIME = f"""
@wy.log = global [{LOG_WORDS} x i64] zeroinitializer
@wy.length = global i64 0
@wy.scalars = global [16 x i64] zeroinitializer
@wy.scratch = internal global [65536 x i8] zeroinitializer
define internal void @wy.push(i64 %v) {{
  %n = load i64, ptr @wy.length
  %m = add i64 %n, 1
  store i64 %m, ptr @wy.length
  %ok = icmp ult i64 %n, {LOG_WORDS}
  br i1 %ok, label %keep, label %done
keep:
  %p = getelementptr [{LOG_WORDS} x i64], ptr @wy.log, i64 0, i64 %n
  store i64 %v, ptr %p
  br label %done
done:
  ret void
}}
define internal void @wy.scalar(i64 %slot) {{
  %p = getelementptr [16 x i64], ptr @wy.scalars, i64 0, i64 %slot
  %n = load i64, ptr %p
  %m = add i64 %n, 1
  store i64 %m, ptr %p
  ret void
}}
"""


def _entry(template: str, define: str) -> tuple[str, list]:
    """`void wy.call.TEMPLATE(i64*)`: unpacks words into the parameters of the template's C interface."""
    types = _parameters(define)
    lines = []
    for i, kind in enumerate(types):
        lines += [f"  %a{i} = getelementptr i64, ptr %words, i64 {i}", f"  %v{i} = load i64, ptr %a{i}"]
        if kind.startswith("ptr"):
            lines.append(f"  %p{i} = inttoptr i64 %v{i} to {kind}")
        elif kind in _TO_WORD:
            bits = _TO_WORD[kind]
            lines.append(
                f"  %t{i} = trunc i64 %v{i} to {bits}" if bits != "i64" else f"  %t{i} = add i64 %v{i}, 0"
            )
            lines.append(f"  %p{i} = bitcast {bits} %t{i} to {kind}")
        else:
            lines.append(
                f"  %p{i} = trunc i64 %v{i} to {kind}" if kind != "i64" else f"  %p{i} = add i64 %v{i}, 0"
            )
    args = ", ".join(f"{kind} %p{i}" for i, kind in enumerate(types))
    lines += [f"  call void @_mlir_ciface_{template}({args})", "  ret void"]
    return f'define void @"wy.call.{template}"(ptr %words) {{\n' + "\n".join(lines) + "\n}", types


class Library:
    """The templates of one bitcode file, compiled for this CPU as far as the given names need."""

    def __init__(self, index: str, templates: list):
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        base = sqlite3.connect(index)
        items = closure(base, [f"_mlir_ciface_{t}" for t in templates])
        self.present = [t for t in templates if items.get(f"_mlir_ciface_{t}", ("",))[0] == "define"]
        types = base.execute("select body from item where kind = 'types'").fetchone()[0]
        base.close()
        self.types: dict = {}
        self.instructions: list = []
        self.functions: list = []
        text = self._module(items, types)
        module = llvm.parse_assembly(text)
        # Not opt=0: LLVM's fast instruction selection miscompiles functions that return bfloat.
        machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
        self.engine = llvm.create_mcjit_compiler(module, machine)
        self.engine.finalize_object()
        address = self.engine.get_global_value_address
        self.log = (ctypes.c_int64 * LOG_WORDS).from_address(address("wy.log"))
        self.length = ctypes.c_int64.from_address(address("wy.length"))
        self.scalars = (ctypes.c_int64 * 16).from_address(address("wy.scalars"))
        self.seen = (ctypes.c_uint8 * max(1, len(self.functions))).from_address(address("wy.seen"))
        self.local = {space: mmap.mmap(-1, size) for space, size in LOCAL_BYTES.items()}

    def _module(self, items: dict, types: str) -> str:
        parts = [types, _RUNTIME]
        for name, (kind, body) in items.items():
            body = _clean(body)
            if kind == "global":
                parts.append(body)
            elif kind == "define":
                head, rest = body.split("\n", 1)
                head = re.sub(
                    r"^define .*?(?=(?:noundef |zeroext |signext )*(?:void|i\d+|ptr|float|half|bfloat|%))",
                    "define internal ",
                    head,
                )
                label = re.match(r"([\w.]+:[^\n]*\n)", rest)
                first = label.group(1) if label else ""
                number = len(self.functions)
                self.functions.append(name)
                mark = (
                    f"  store i8 1, ptr getelementptr ([FUNCTIONS x i8], ptr @wy.seen, i64 0, i64 {number})\n"
                )
                parts.append(f"{head}\n{first}{mark}{_counted(rest[len(first) :])}")
            elif name.startswith("llvm.hivm."):
                number = len(self.instructions)
                self.instructions.append((name.removeprefix("llvm.hivm."), _parameters(body)))
                parts.append(_instruction(number, name, body))
            elif name.startswith("llvm.lifetime"):
                continue
            elif name.startswith("llvm."):
                parts.append(body)
            else:  # declared and defined nowhere in this file: log its name as an instruction
                self.instructions.append((f"undefined:{name}", _parameters(body)))
                logged = _instruction(len(self.instructions) - 1, "llvm.hivm.undefined", body)
                parts.append(logged.replace('@"wy.undefined"', f'@"{name}"'))
        for template in self.present:
            entry, self.types[template] = _entry(template, items[f"_mlir_ciface_{template}"][1])
            parts.append(entry)
        count = max(1, len(self.functions))
        parts.append(f"@wy.seen = global [{count} x i8] zeroinitializer")
        text = "\n".join(parts).replace("[FUNCTIONS x i8]", f"[{count} x i8]")
        return re.sub(r"@llvm\.hivm\.([\w.]+)", r'@"wy.\1"', text)

    # ---- one call
    # ---------------------------------------------------------------------------------------------------

    def trace(self, template: str, args: list) -> dict:
        """Call a template; returns what it issued."""
        types = self.types[template]
        words = (ctypes.c_int64 * max(1, len(types)))()
        kept = []
        for i, arg in enumerate(args[: len(types)]):
            words[i] = self._memref(arg, kept) if isinstance(arg, dict) else int(arg) & 0x7FFFFFFFFFFFFFFF
            if not isinstance(arg, dict) and int(arg) < 0:
                words[i] = int(arg)
        self.length.value = 0
        ctypes.memset(ctypes.addressof(self.scalars), 0, ctypes.sizeof(self.scalars))
        ctypes.memset(ctypes.addressof(self.seen), 0, ctypes.sizeof(self.seen))
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            self.engine.get_function_address(f"wy.call.{template}")
        )
        call(ctypes.addressof(words))
        return {
            "instructions": self._instructions(),
            "functions": [n for n, s in zip(self.functions, self.seen, strict=False) if s],
            "scalar": {
                f"{SPACES[i // 2]} {'write' if i % 2 else 'read'}": n
                for i, n in enumerate(self.scalars)
                if n and i // 2 in SPACES
            },
            "missing_arguments": max(0, len(types) - len(args)),
            "log_words": self.length.value,
        }

    def _memref(self, arg: dict, kept: list) -> int:
        """Address of a descriptor {allocated, aligned, offset, sizes, strides} in memory of our own."""
        extent = (
            arg["offset"]
            + 1
            + sum(max(0, n - 1) * abs(s) for n, s in zip(arg["sizes"], arg["strides"], strict=False))
        )
        if arg["space"] == "GM":
            memory = mmap.mmap(-1, max(4096, extent * arg["bits"] // 8 + 4096))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        else:
            memory = self.local[arg["space"]]
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + arg["address"]
            if arg["address"] + extent * arg["bits"] // 8 > len(memory):
                raise ValueError(f"a memref ends beyond {arg['space']}")
        rank = len(arg["sizes"])
        descriptor = (ctypes.c_int64 * (3 + 2 * rank))(
            address, address, arg["offset"], *arg["sizes"], *arg["strides"]
        )
        kept += [memory, descriptor]
        return ctypes.addressof(descriptor)

    def _instructions(self) -> list:
        """The log as [name, integer operands, how often in a row]; addresses are left out."""
        found: list = []
        at, end = 0, min(self.length.value, LOG_WORDS)
        while at < end:
            name, types = self.instructions[self.log[at]]
            if at + 1 + len(types) > end:
                break
            values = [self.log[at + 1 + i] for i, kind in enumerate(types) if not kind.startswith("ptr")]
            at += 1 + len(types)
            if found and found[-1][0] == name and found[-1][1] == values:
                found[-1][2] += 1
            else:
                found.append([name, values, 1])
        return found


def main() -> None:
    """Answer one request from stdin."""
    request = json.load(sys.stdin)
    if not whole(request["index"]):
        try:
            os.makedirs(os.path.dirname(request["index"]), exist_ok=True)
            build_index(request["bitcode"], request["index"])
        except RuntimeError as problem:  # bitcode of a newer producer than this reader
            reason = "its library cannot be read: " + " ".join(str(problem).split())
            for _ in request["calls"]:
                print(json.dumps({"error": reason}), flush=True)
            return
    libraries = _libraries(request["index"], sorted({c["template"] for c in request["calls"]}))
    for call in request["calls"]:
        library = libraries[call["template"]]
        if isinstance(library, str):
            answer = {"error": library}
        elif call["template"] not in library.present:
            answer = {"error": "not in this library"}
        else:
            answer = library.trace(call["template"], call["args"])
        print(json.dumps(answer), flush=True)


def _libraries(index: str, templates: list) -> dict:
    """Template -> the library that holds it, all in one; one each where one of them cannot be compiled, and
    the reason in its place.
    """
    try:
        return dict.fromkeys(templates, Library(index, templates))
    except RuntimeError as problem:
        reason = "its body cannot be compiled for this CPU: " + " ".join(str(problem).split())[:300]
    if len(templates) == 1:
        return {templates[0]: reason}
    return {name: library for one in templates for name, library in _libraries(index, [one]).items()}


if __name__ == "__main__":
    main()
