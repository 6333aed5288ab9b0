#!/usr/bin/env bash
# compute-sanitizer over every GPU variant on small calls; one verdict line per tool.
#
#   scripts/sanitize.sh OUT [VARIANT...]      TOOLS="memcheck racecheck synccheck" by default
#
# Logs land in OUT/<tool>.log. Exit code 1 when a tool finds anything or an output is wrong.
set -uo pipefail
out=$(mkdir -p "${1:?usage: sanitize.sh OUT [VARIANT...]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
tools=${TOOLS:-memcheck racecheck synccheck}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer \
    /usr/local/cuda/compute-sanitizer/compute-sanitizer 2>/dev/null | head -1)
[ -n "$sanitizer" ] || { echo 'compute-sanitizer is not installed; it comes with the CUDA toolkit.' >&2; exit 3; }

# Without torch's caching allocator every tensor is an allocation of its own, whose end memcheck knows.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONUNBUFFERED=1

# Everything is compiled beforehand: the tools need not watch that.
python3 scripts/sanitize.py "$@" >"$out/plain.log" 2>&1
plain=$?
[ $plain -eq 0 ] || { echo "plain run     failed with exit code $plain, see $out/plain.log"; tail -5 "$out/plain.log"; exit 1; }

for tool in $tools; do
    options=()
    # The searches have a barrier for every group of a window: more than synccheck follows by default.
    [ "$tool" = synccheck ] && options+=(--num-cuda-barriers 65536)
    "$sanitizer" --tool "$tool" "${options[@]}" --target-processes application-only --report-api-errors no \
        --error-exitcode 9 --print-limit 50 python3 scripts/sanitize.py "$@" >"$out/$tool.log" 2>&1 &
    printf '%s %s\n' "$tool" $! >>"$out/.started.$$"
done
failed=0
while read -r tool process; do
    wait "$process"
    code=$?
    summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool.log" | tail -1 | sed 's/^=* *//')
    ran=$(grep -c 'rel-L2' "$out/$tool.log")
    if [ $code -eq 0 ] && [ "$ran" -gt 0 ] && grep -qE 'SUMMARY: 0 (errors|hazards)' <<<"$summary"; then
        verdict=clean
    else
        verdict="FAILED (exit code $code)"
        failed=1
    fi
    printf '%-10s %-22s %3d calls  %s\n' "$tool" "$verdict" "$ran" "$summary"
done <"$out/.started.$$"
rm -f "$out/.started.$$"
exit $failed
