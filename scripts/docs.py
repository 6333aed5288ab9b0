"""Rewrite the parts of the documentation that are made from the code and the stored results.

    python scripts/docs.py            fill them
    python scripts/docs.py --check    exit 1 if one is out of date, write nothing
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def documents() -> list[Path]:
    """README and every page under docs/ that has a table to fill."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.relative_to(ROOT) for page in pages if "<!-- table:" in page.read_text(encoding="utf-8")]


def main() -> int:
    command = [sys.executable, "-m", "pwbench", "report"]
    for page in documents():
        command += ["--fill", str(page)]
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
