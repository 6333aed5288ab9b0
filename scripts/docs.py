"""Rewrite the parts of the documentation that are made from the code and the stored results.

    python scripts/docs.py            fill them
    python scripts/docs.py --check    write nothing, exit 1 if one is out of date
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pwbench.report.documents import fill_files, with_tables
from pwbench.results import stored

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)  # the documents name results files as seen from here
    check = "--check" in arguments
    changed = fill_files(with_tables(Path(".")), stored(), check)
    for page in changed:
        print(f"{page}: {'out of date; `make docs` fills it' if check else 'filled'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
