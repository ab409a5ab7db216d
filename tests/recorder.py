"""`pytest --record FILE`: the outcome of every test as a row of data/gpu_tests.csv, with its provenance."""

from __future__ import annotations

import csv

import torch

from wyfast_lib import records

COLUMNS = ("test", "outcome", "seconds", *records.PROVENANCE)
WORST_FIRST = ("failed", "skipped", "passed")


class Recorder:
    """A pytest plugin that keeps the worst outcome and the time of all phases of each test."""

    def __init__(self, path: str) -> None:
        self.path, self.tests = path, {}

    def pytest_runtest_logreport(self, report) -> None:
        outcome, seconds = self.tests.get(report.nodeid, ("passed", 0.0))
        self.tests[report.nodeid] = (
            min(outcome, report.outcome, key=WORST_FIRST.index), seconds + report.duration
        )  # fmt: skip

    def pytest_sessionfinish(self) -> None:
        origin = records.provenance(device="cuda")
        if torch.cuda.is_available() and torch.cuda.device_count() > 1:
            origin["device"] = f"{torch.cuda.device_count()} x {origin['device']}"
        with open(self.path, "w", newline="", encoding="utf-8") as f:
            out = csv.writer(f, lineterminator="\n")
            out.writerow(COLUMNS)
            for nodeid, (outcome, seconds) in self.tests.items():
                test = nodeid.partition("::")[2]
                out.writerow([test, outcome, f"{seconds:.3f}", *(origin[n] for n in records.PROVENANCE)])
