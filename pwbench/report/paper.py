"""The PageWeaver paper's headline numbers beside ours."""

from __future__ import annotations

from pwbench import stats
from pwbench.report.cells import Table, interval, times
from pwbench.report.contenders import Contender, compare
from pwbench.report.model import Report, Scope

UNION8 = 1.70
"""Union8 over the FlashInfer path the paper measured, geomean of six captures."""
REGROUP = (0.0326, 0.0766)
"""Net gain of online regrouping on five 64K captures, smallest and largest."""
KERNELS = ("union8", "union8-regroup", "pageweaver", "pageweaver-original", "pageweaver-regroup")
PEERS = (("flashinfer", "graph"), ("flashinfer-paged", "eager"))
"""Today's FlashInfer, and its paged wrappers: what there was when the paper measured. Those plan on the host,
so no graph can hold them, and everything is launched eagerly beside them."""


def paper(report: Report) -> Table:
    """The paper's numbers and ours: GPU rows, cold L2, CUDA graph where the peer has one."""
    table = Table(
        "The paper's numbers and ours",
        ["claim", "the paper", "ours", "kernel", "precision", "95 % interval", "machine"],
        text=(0, 3, 4, 6),
    )
    for peer, mode in PEERS:
        table.breaks.add(len(table.rows))
        for scope in _scopes(report, "six", mode):
            _speedups(table, scope, peer)
    table.breaks.add(len(table.rows))
    for scope in _scopes(report, "five-64k", "graph"):
        _gains(table, scope)
    return table


def _scopes(report: Report, suite: str, mode: str) -> list[Scope]:
    wanted = (suite, "cuda", mode, "cold")
    return [s for s in report.scopes if (s.suite, s.device, s.mode, s.l2) == wanted]


def _speedups(table: Table, scope: Scope, peer: str) -> None:
    peers = [item for item in scope.cells.items() if item[0][0].variant == peer]
    contenders = [c for c in scope.contenders if c.variant in KERNELS]
    for contender in sorted(
        contenders, key=lambda c: (KERNELS.index(c.variant), c.precision != "fast", c.label)
    ):
        ratios = []
        for capture in scope.captures:
            if peer == scope.baseline and (contender, capture) in scope.speedups:
                ratios.append(scope.speedups[contender, capture])
                continue
            row = scope.cells.get((contender, capture))
            bases = [base for (_, where), base in peers if where == capture]
            if row is not None and bases:
                same = [base for base in bases if base["session"] == row["session"]]
                ratios.append(compare((same or bases)[0], row))
        if not ratios:
            continue
        mean = stats.geomean(ratios)
        claim = f"over {peer}, geomean of suite six" + (", eager launches" if scope.mode == "eager" else "")
        as_published = (contender.variant, contender.precision) == ("union8", "fast")  # Q and P in FP8
        theirs = times(UNION8) if as_published else ""
        ours = times(mean.value)
        table.rows.append(
            [claim, theirs, ours, contender.label, contender.precision, interval(mean), scope.gpu]
        )


def _gains(table: Table, scope: Scope) -> None:
    kernels: dict[Contender, list[float]] = {}
    for gain in scope.gains:
        kernels.setdefault(gain.contender, []).append(1 - 1 / gain.online_ratio.value)
    published = f"{100 * REGROUP[0]:.2f} to {100 * REGROUP[1]:.2f} %"
    for contender, shares in kernels.items():
        claim = "net gain of online regrouping, suite five-64k"
        theirs = published if contender.variant == "union8-regroup" else ""
        ours = f"{100 * min(shares):+.2f} to {100 * max(shares):+.2f} %"
        table.rows.append([claim, theirs, ours, contender.label, contender.precision, "", scope.gpu])
