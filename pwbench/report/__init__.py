"""Reports: what is fastest, by how much, how sure, why, and at what accuracy.

report = build(pwbench.load_results("results"))
print(markdown(report))
"""

from __future__ import annotations

from pwbench.report.build import build
from pwbench.report.contenders import Contender, Gain
from pwbench.report.formats import csv, data, markdown
from pwbench.report.model import Report, Scope

__all__ = ["Contender", "Gain", "Report", "Scope", "build", "csv", "data", "markdown"]
