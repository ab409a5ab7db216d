"""The compilers as programs: run, run again when they crash, and the failure that the worker reports."""

from __future__ import annotations

import subprocess

#: The compilers are ended by a signal now and then, on a text that they take the next moment: 11 of 800 runs
#: of triton-adapter-opt on the backward of a group, single-threaded or not. The others wrote the same bytes.
CRASH_TRIES = 4


class Failure(Exception):
    """An expected failure: its text goes to the caller as it is, and the texts of the stages before it."""

    def __init__(self, stage: str, message: str, ttir: str = "", linalg: str = "") -> None:
        super().__init__(message)
        self.stage, self.ttir, self.linalg = stage, ttir, linalg


def again_after_a_crash(run):
    """(run(), the runs before it that a signal ended); CalledProcessError when the last try is one too."""
    for crashes in range(CRASH_TRIES):
        try:
            return run(), crashes
        except subprocess.CalledProcessError as problem:
            if problem.returncode >= 0 or crashes == CRASH_TRIES - 1:
                raise


def run_program(command: list[str], **settings) -> tuple[subprocess.CompletedProcess, int]:
    """subprocess.run with its texts captured, again after a crash -> (the last run, crashes before it)."""

    def once():
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", **settings)
        if done.returncode < 0:
            done.check_returncode()
        return done

    try:
        return again_after_a_crash(once)
    except subprocess.CalledProcessError as last:
        done = subprocess.CompletedProcess(command, last.returncode, last.stdout, last.stderr)
        return done, CRASH_TRIES - 1
