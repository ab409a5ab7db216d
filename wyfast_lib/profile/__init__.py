"""Where the time of a kernel goes: measured on an NPU or a GPU, modelled from the compiled code without one.

`profile(Request(...), flags)` gives a `Report`; `python -m wyfast_lib profile` prints it. This package stands
above the compiler, the backends and the benchmark, and none of them knows it.
"""

from wyfast_lib.profile.report import Factor, Report, Row
from wyfast_lib.profile.request import ProfileError, Request
from wyfast_lib.profile.run import profile

__all__ = ["Factor", "ProfileError", "Report", "Request", "Row", "profile"]
