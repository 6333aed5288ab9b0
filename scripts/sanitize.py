"""Small hostile calls through every GPU variant, for compute-sanitizer to watch (see sanitize.sh).

Each output is also compared with the reference, so that a run that silently did nothing is no pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from pwbench import reference, variants
from pwbench.errors import VariantUnavailable
from pwbench.variants import Options
from tests.calls import make_call

CALLS = {
    "one key": {"q_lens": (1,), "prefix_lens": (0,)},
    "tails": {"q_lens": (37, 5), "prefix_lens": (300, 1000), "kv_heads": 2},
    "ragged": {"q_lens": (1, 0, 17, 8, 3), "prefix_lens": (5, 9, 260, 128, 127), "selection": "dirty"},
    "regrouped": {"q_lens": (130,), "prefix_lens": (2200,), "selection": "local"},
    "apart": {"q_lens": (20,), "prefix_lens": (700,), "separate": True},
    "empty": {"q_lens": (9,), "selection": "empty"},
}
PEERS = ("flashinfer", "flashinfer-cake", "flashinfer-paged", "reference")


def main(chosen: list[str]) -> int:
    """Run the variants named, or all of ours; exit code 1 when an output is wrong."""
    wrong = 0
    for name in chosen or [name for name in variants.names() if name not in PEERS]:
        variant = variants.get(name)
        reason = variant.unavailable(torch.device("cuda"))
        if reason:
            print(f"{name:<20} unavailable: {reason}")
            continue
        for precision in variant.precisions:
            for title, arguments in CALLS.items():
                call = make_call(seed=1, query_gain=1.0, **arguments)
                # On the CPU: the sanitizer is to watch our kernels, not torch's.
                ref = reference.attend(call)
                try:
                    prepared = variant.prepare(call.to("cuda"), Options(precision=precision))
                except VariantUnavailable as error:
                    print(f"{name:<20} {precision:<9} {title:<10} unavailable: {error}")
                    continue
                prepared.out.fill_(torch.nan)
                for _ in range(2):
                    prepared.run()
                torch.cuda.synchronize()
                accuracy = reference.compare(prepared.out.cpu(), ref)
                good = accuracy.rel_l2 <= (6e-2 if precision == "fast" else 3e-3)
                wrong += not good
                print(f"{name:<20} {precision:<9} {title:<10} rel-L2 {accuracy.rel_l2:.1e}"
                      f"{'' if good else '  WRONG'}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
