"""The gate's verdicts for people and for CI systems: Markdown, JUnit XML and plain data."""

from __future__ import annotations

from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from pwbench.gate import Finding, Outcome

_ERRORS = ("MISSING", "FAILED")


def markdown(outcome: Outcome) -> str:
    """A summary: the answer, how many of each verdict, and every row that is not SAME."""
    counts = (
        ", ".join(f"{number} {verdict}" for verdict, number in outcome.counts.items()) or "nothing compared"
    )
    lines = [f"## pwbench gate: {'passed' if outcome.passed else 'FAILED'}", "", counts + "."]
    lines += ["", *outcome.notes] if outcome.notes else []
    order = {id(f): index for index, f in enumerate(outcome.failures)}
    notable = sorted((f for f in outcome.findings if f.verdict != "SAME"),
                     key=lambda f: (order.get(id(f), len(order)), f.verdict))  # fmt: skip
    if notable:
        lines += ["", "| verdict | capture | what | ratio | 95 % interval | floor | detail |",
                  "| --- | --- | --- | ---: | ---: | ---: | --- |"]  # fmt: skip
        lines += [_markdown_row(finding, finding in outcome.failures) for finding in notable]
    return "\n".join(lines) + "\n"


def _markdown_row(finding: Finding, fails: bool) -> str:
    change = finding.change
    cells = [
        f"**{finding.verdict}**" if fails else finding.verdict,
        f"{finding.suite}/{finding.capture}",
        finding.what,
        f"{change.value:.4f}" if change else "",
        f"{change.low:.4f} to {change.high:.4f}" if change and change.known else "",
        "" if finding.floor is None else f"{finding.floor:.2%}",
        finding.message,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def junit(outcome: Outcome) -> str:
    """JUnit XML: one suite per capture suite, one case per comparison. UNSURE is a skipped case."""
    document = JUnitXml("pwbench gate")
    for name in dict.fromkeys(f.suite for f in outcome.findings):
        suite = TestSuite(name or "captures")
        for finding in (f for f in outcome.findings if f.suite == name):
            case = TestCase(finding.what, classname=f"{finding.suite}.{finding.capture}")
            if finding in outcome.failures:
                kind = Error if finding.verdict in _ERRORS else Failure
                case.result = [kind(finding.message, finding.verdict)]
            elif finding.verdict == "UNSURE":
                case.result = [Skipped(f"UNSURE: {finding.message}")]
            else:
                case.system_out = f"{finding.verdict}: {finding.message}"
            suite.add_testcase(case)
        document.add_testsuite(suite)
    text: bytes = document.tostring()
    return text.decode()


def data(outcome: Outcome) -> dict[str, Any]:
    """Plain data, ready for JSON."""
    return {
        "passed": outcome.passed,
        "counts": outcome.counts,
        "notes": outcome.notes,
        "findings": [
            {
                "tier": f.tier,
                "suite": f.suite,
                "capture": f.capture,
                "what": f.what,
                "verdict": f.verdict,
                "message": f.message,
                "ratio": None if f.change is None else f.change.value,
                "ci": [f.change.low, f.change.high] if f.change is not None and f.change.known else None,
                "floor": f.floor,
            }
            for f in outcome.findings
        ],
    }
