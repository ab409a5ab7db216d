"""What to profile: a kernel, its sizes, the flags of one variant; and how the command line spells them."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

DTYPES = ("float32", "float16", "bfloat16")


class ProfileError(ValueError):
    """A request that cannot be profiled; the message names what was given and what is allowed."""


@dataclass(frozen=True)
class Request:
    """One variant of one kernel. It can be written as JSON, for the process that a device tool starts.

    kernel: a name of ours, or FILE.py:KERNEL. shape: sizes by name. lengths: of packed sequences, () for
    dense. arguments, grid: as typed, for a kernel of the user's without `profile_case`. target: the chip of
    the model.
    """

    kernel: str
    shape: dict[str, int]
    flags: dict = field(default_factory=dict)
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    grid: str = ""
    target: str = "Ascend910B2"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ProfileError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return self.kernel.rpartition(":")[2]

    @property
    def variant(self) -> str:
        """The flags as text; "default" without any."""
        return " ".join(f"{name}={value}" for name, value in self.flags.items()) or "default"

    @property
    def sizes(self) -> str:
        """The shape as text."""
        packed = [f"lengths={':'.join(map(str, self.lengths))}"] if self.lengths else []
        return " ".join([*(f"{name}={value}" for name, value in self.shape.items()), *packed])

    def variants(self, flags: Sequence[dict]) -> list[Request]:
        """This request with each of these sets of flags."""
        return [replace(self, flags=each) for each in flags]

    def dumps(self) -> str:
        """The request as JSON; `loads` reads it."""
        return json.dumps(asdict(self))


def loads(text: str) -> Request:
    """The request that `Request.dumps` wrote."""
    plain = json.loads(text)
    return Request(**{**plain, "lengths": tuple(plain["lengths"]), "arguments": tuple(plain["arguments"])})


def parse_shape(text: str) -> dict[str, int]:
    """{"T": 4096, "H": 8} from "T=4096,H=8"; a name of `wyfast_lib.inputs.SHAPES` gives that shape."""
    if text and "=" not in text:
        from dataclasses import asdict as fields_of

        from wyfast_lib.inputs import SHAPES

        if text not in SHAPES:
            raise ProfileError(f"--shape: expected NAME=SIZE,... or one of {', '.join(SHAPES)}; got {text!r}")
        return fields_of(SHAPES[text])
    sizes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, sign, value = part.partition("=")
        if not sign or not name.isidentifier() or not value.isdigit() or int(value) < 1:
            raise ProfileError(f"--shape: expected NAME=SIZE with a size of at least 1, got {part!r}")
        sizes[name] = int(value)
    return sizes


def parse_flags(texts: Sequence[str]) -> list[dict]:
    """Every variant of flags such as ["G_T_CONTIG=0,1", "BC=32"], the first values first; [{}] for none."""
    choices = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not name.strip().isidentifier() or not all(v.strip() for v in values.split(",")):
            raise ProfileError(f"--flag: expected NAME=VALUE or NAME=BEFORE,AFTER, got {text!r}")
        if name.strip() in choices:
            raise ProfileError(f"--flag: {name.strip()} is given twice; write {name.strip()}=BEFORE,AFTER")
        found = [literal(value) for value in values.split(",")]
        if len({repr(value) for value in found}) < len(found):
            raise ProfileError(f"--flag: {text!r} names a value twice")
        choices[name.strip()] = found
    return [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]


def literal(text: str):
    """A Python literal, or the word itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def parse_lengths(text: str) -> tuple[int, ...]:
    """(100, 0, 28) from "100,0,28"."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts):
        raise ProfileError(f"--lengths: expected token counts such as 100,28, got {text!r}")
    return tuple(int(part) for part in parts)
