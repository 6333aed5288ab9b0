#!/usr/bin/env bash
# Everything that needs a Hopper GPU, from a checkout and without installing it.
#
#   scripts/h200.sh OUT [build] [test] [sanitize] [record] [replay]   all but `record` when none is named
#
# Logs and Parquet land in OUT. A failed step does not stop the later ones; the exit code says that one
# failed. Settings, by environment:
#   MODEL=DIR PROMPTS=DIR              what record makes full captures from, into FULL (default: OUT/full);
#   SUITES="six six-2k"                of these suites, comparing tables with the stored ones
#   CAPTURES="captures/real-64k ..."   what replay runs             (default: everything below captures/)
#   VARIANTS="union8 flashinfer ..."   competitors                  (default: all that can run)
#   PRECISIONS="fast accurate"         one Parquet file for each    (default: both)
#   SAMPLES=50  REPLAY="--l2 both"     samples, further options of replay
#   TESTS="tests/gpu -k union8"        what test runs, in one process (default: tests/gpu, a process for each
#                                      variant, so that a lost CUDA context takes no other variant's tests along)
set -uo pipefail
out=$(mkdir -p "${1:?usage: h200.sh OUT [build] [test] [sanitize] [record] [replay]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
steps=${*:-build test sanitize replay}
for name in $steps; do
    [[ " build test sanitize record replay " == *" $name "* ]] && continue
    echo "h200.sh knows build, test, sanitize, record and replay, not '$name'." >&2
    exit 2
done

if [ "$steps" != build ] && ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA GPU here; only 'build' runs without one." >&2
    exit 3
fi

# FlashInfer and its kernel library, where a bundle of them lies beside the checkout.
for part in .peers/*/enter.sh; do
    [ -f "$part" ] && . "$part"
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
failed=0

step() { # name, log, command...: runs it, keeps the log, says how it went
    local name=$1 log=$out/$2 begin=$SECONDS
    shift 2
    "$@" 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || failed=1
    printf -- '---- %-10s exit code %d, %d s\n' "$name" "$code" $((SECONDS - begin)) | tee -a "$out/steps.log"
}

pytest_to() { # name, arguments...: one pytest process with its log and report
    local name=$1
    shift
    python3 -m pytest "$@" -p no:cacheprovider --junitxml="$out/gpu-tests-$name.xml" --durations=10 \
        >"$out/test-$name.log" 2>&1
}

gpu_tests() {
    local alone=(tests/gpu/test_launching.py tests/gpu/test_peers.py) processes=() names=() code=0
    export OMP_NUM_THREADS=2
    if [ -n "${TESTS:-}" ]; then
        # shellcheck disable=SC2086
        python3 -m pytest $TESTS -p no:cacheprovider --junitxml="$out/gpu-tests.xml" --durations=10
        return
    fi
    pytest_to launching-and-peers "${alone[@]}" &
    processes+=($!) names+=(launching-and-peers)
    for name in $(python3 -c 'from tests.gpu.harness import tested; print(*tested())'); do
        PWBENCH_TEST_VARIANTS=$name pytest_to "$name" tests/gpu "${alone[@]/#/--ignore=}" &
        processes+=($!) names+=("$name")
    done
    for i in "${!processes[@]}"; do
        wait "${processes[$i]}" || code=1
        grep -E '^(FAILED|ERROR)' "$out/test-${names[$i]}.log" | head -40
        printf '%-22s %s\n' "${names[$i]}" "$(tail -1 "$out/test-${names[$i]}.log")"
    done
    return $code
}

record() {
    local suites=()
    for name in ${SUITES:-six six-2k}; do suites+=(--suite "$name"); done
    python3 -m pwbench.cli.main suites make --model "${MODEL:?is the model directory}" \
        --prompts "${PROMPTS:?is the folder of prompts}" "${suites[@]}" --kind full \
        --out "${FULL:-$out/full}" --against captures
}

replay() { # precision
    local options=()
    for name in ${VARIANTS:-}; do options+=(--variant "$name"); done
    # shellcheck disable=SC2086
    python3 -m pwbench.cli.main replay ${CAPTURES:-} "${options[@]}" --device cuda --precision "$1" \
        --samples "${SAMPLES:-50}" --out "$out/h200-$1.parquet" ${REPLAY:-}
}

{
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader
    python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
    nvcc --version | tail -2 | head -1
} 2>&1 | tee "$out/machine.log"

for name in $steps; do
    case $name in
    build) step build build.log python3 scripts/build_kernels.py ;;
    test) step test test.log gpu_tests ;;
    sanitize) step sanitize sanitize.log bash scripts/sanitize.sh "$out/sanitize" ;;
    record) step record record.log record ;;
    replay)
        for precision in ${PRECISIONS:-fast accurate}; do
            step "$precision" "replay-$precision.log" replay "$precision"
        done
        step report report.log python3 -m pwbench.cli.main report "$out"/h200-*.parquet
        ;;
    esac
done
exit $failed
