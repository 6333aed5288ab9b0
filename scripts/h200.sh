#!/usr/bin/env bash
# Everything that needs a Hopper GPU, from a checkout and without installing it.
#
#   scripts/h200.sh OUT [STEP[:SECONDS]]...        (default: build test sanitize replay)
#
#   build sanitize test
#   ceilings    what this GPU can do at most: ceilings-*.json, also into results/, where replay looks
#   record      tables of SUITES from MODEL and PROMPTS, in captures.tar; the captures of `six` whole, in FULL
#   full        FULL on its own and on seeded tensors in one session, both L2 states and precisions
#   replay      CAPTURES through all competitors, and a report
#   peers       `six` through every kernel of other libraries
#   windows     regroup windows of 64 and 128 on `five-64k` and `six`
#   page-union  `six` through the page-major designs; affinity: the sweep for their break-even
#   shapes      tiny chunks, 64 requests, random selections
#
# Logs and Parquet (h200-STEP.parquet) land in OUT. A failed step does not stop the later ones; the exit code
# says that one failed. A step with SECONDS is interrupted then: it keeps what it has finished and starts
# nothing more. Settings, by environment:
#   MODEL=DIR PROMPTS=DIR              of record   (default: unpacked from .peers/m)
#   SUITES="six six-2k"                of record   (default: all that come from a model on a GPU)
#   FULL=DIR                           whole captures, larger than is worth keeping (default: below /tmp)
#   STORE=captures                     the folder of suites
#   CAPTURES="captures/real-64k ..."   of replay   (default: everything in STORE)
#   VARIANTS="union8 flashinfer ..."   competitors (default: what each step is about; of replay: all)
#   PRECISIONS="fast accurate"         of replay and full
#   SAMPLES=50  REPLAY="--l2 both"     samples, further options of replay
#   TESTS="tests/gpu -k union8"        what test runs, in one process (default: tests/gpu, a process for each
#                                      variant, so that a lost CUDA context takes no other variant's tests along)
#   TESTS_AT_ONCE=8                    processes of test that share the card
#   PACK=1                             one logs.tar in the place of many logs
#   DEVICE=cpu MODE=eager              a rehearsal without a GPU, DEFINITIONS=FILE one with small suites
set -uo pipefail
out=$(mkdir -p "${1:?usage: h200.sh OUT [STEP[:SECONDS]]...}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
known="build test sanitize ceilings record full replay peers windows page-union affinity shapes"
steps=${*:-build test sanitize replay}
for name in $steps; do
    [[ " $known " == *" ${name%%:*} "* && "$name" =~ ^[a-z-]+(:[0-9]+)?$ ]] && continue
    echo "h200.sh knows ${known// /, }, each with :SECONDS or without, not '$name'." >&2
    exit 2
done
device=${DEVICE:-cuda}
store=${STORE:-captures}
scratch=${TMPDIR:-/tmp}
full=${FULL:-$scratch/pwbench-full}

if [ "$device" = cuda ] && [ "$steps" != build ] &&
    ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA GPU here; only 'build' runs without one." >&2
    exit 3
fi

# FlashInfer and its kernel library, where a bundle of them lies beside the checkout.
for part in .peers/*/enter.sh; do
    [ "$device" = cuda ] && [ -f "$part" ] && . "$part"
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
TESTS_AT_ONCE=${TESTS_AT_ONCE:-8}
failed=0
deadline=0

step() { # name, log, command...: runs it, keeps the log, says how it went
    local name=$1 log=$out/$2 begin=$SECONDS
    shift 2
    "$@" 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || failed=1
    printf -- '---- %-10s exit code %d, %d s\n' "$name" "$code" $((SECONDS - begin)) | tee -a "$out/steps.log"
}

bounded() { # command...: runs it in what is left of the step's time
    local left=$((deadline - SECONDS))
    if [ "$deadline" -eq 0 ]; then
        "$@"
    elif [ "$left" -le 0 ]; then
        echo "Out of time, not started: $*"
        return 124
    else
        # Interrupted, a replay keeps its finished captures; what does not listen is killed.
        timeout --signal=INT --kill-after=20 "$left" "$@"
    fi
}

pwbench() { bounded python3 -m pwbench.cli.main "$@"; }

pytest_to() { # name, arguments...: one pytest process with its log and report
    local name=$1
    shift
    bounded python3 -m pytest "$@" -p no:cacheprovider --junitxml="$out/gpu-tests-$name.xml" --durations=10 \
        >"$out/test-$name.log" 2>&1
}

gpu_tests() {
    local alone=(tests/gpu/test_launching.py tests/gpu/test_peers.py) processes=() names=() code=0
    export OMP_NUM_THREADS=2
    if [ -n "${TESTS:-}" ]; then
        # shellcheck disable=SC2086
        bounded python3 -m pytest $TESTS -p no:cacheprovider --junitxml="$out/gpu-tests.xml" --durations=10
        return
    fi
    pytest_to launching-and-peers "${alone[@]}" &
    processes+=($!) names+=(launching-and-peers)
    for name in $(python3 -c 'from tests.gpu.harness import tested; print(*tested())'); do
        # Each comes to 15 GB of the card; with all of them at once the last ones find none left.
        while [ "$(jobs -rp | wc -l)" -ge "$TESTS_AT_ONCE" ]; do wait -n; done
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

ceilings() {
    pwbench ceilings --device "$device" && cp results/ceilings-*.json "$out/"
}

record() {
    local options=() model=${MODEL:-} prompts=${PROMPTS:-.peers/m} made=$scratch/pwbench-recorded
    if [ -z "$model" ]; then
        model=$scratch/pwbench-model
        mkdir -p "$model"
        [ -f "$model/msa-30m/config.json" ] || tar -xJf .peers/m/msa-30m.tar.xz -C "$model" || return
        model=$model/msa-30m
    fi
    for name in ${SUITES:-six six-2k five-64k batch tuning}; do options+=(--suite "$name"); done
    pwbench suites make --definitions "${DEFINITIONS:-captures/suites.toml}" --model "$model" \
        --prompts "$prompts" --device "$device" "${options[@]}" --kind tables --out "$made" --overwrite \
        --full-out "$full" --full-suite six --against "$store" || return
    tar -C "$made" -cf "$out/captures.tar" . || return
    pwbench suites compare "$full/six" --against "$store"
}

measure() { # step, captures and options of replay...
    local name=$1
    shift
    # shellcheck disable=SC2086
    pwbench replay "$@" --device "$device" --samples "${SAMPLES:-50}" --out "$out/h200-$name.parquet" ${REPLAY:-}
}

of() { # variants...: as options; VARIANTS in their place where it is set
    for name in ${VARIANTS:-$*}; do printf -- '--variant %s ' "$name"; done
}

replay() { # precision
    # shellcheck disable=SC2046,SC2086
    measure "$1" ${CAPTURES:-$store} $(of) --precision "$1"
}

full() {
    local code=0
    pwbench suites compare "$full/six" --against "$store" || code=1
    for precision in ${PRECISIONS:-fast accurate}; do
        # shellcheck disable=SC2046
        measure full "$full/six" --tensors both --l2 both --precision "$precision" \
            $(of flashinfer union8 union8-regroup pageweaver pageweaver-regroup triton page-union page-union-stream) ||
            code=1
    done
    return $code
}

windows() {
    local code=0
    for window in 64 128; do
        # shellcheck disable=SC2046
        # A file each: rows in one file would not be measured again, and each window needs the original
        # order of its own session beside it.
        measure "windows-$window" "$store/five-64k" "$store/six" --window "$window" \
            $(of union8 union8-regroup union8-precomputed) || code=1
    done
    return $code
}

about() { # step: `six` or a suite of its own through what the step compares
    # shellcheck disable=SC2046
    case $1 in
    peers)
        # The paged wrappers plan on the host and cannot be captured into a graph.
        measure peers "$store/six" --mode "${MODE:-both}" \
            $(of flashinfer flashinfer-cake flashinfer-paged triton union8 pageweaver)
        ;;
    page-union) measure page-union "$store/six" $(of page-union page-union-stream union8 pageweaver) ;;
    affinity) measure affinity "$store/affinity" $(of page-union page-union-stream union8 pageweaver) ;;
    shapes) measure shapes "$store/shapes" $(of flashinfer triton union8 union8-regroup pageweaver) ;;
    esac
}

{
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader
    python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
    nvcc --version | tail -2 | head -1
} 2>&1 | tee "$out/steps.log"

for name in $steps; do
    deadline=0
    [[ "$name" == *:* ]] && deadline=$((SECONDS + ${name#*:}))
    name=${name%%:*}
    case $name in
    build) step build build.log bounded python3 scripts/build_kernels.py ;;
    test) step test test.log gpu_tests ;;
    sanitize) step sanitize sanitize.log bounded bash scripts/sanitize.sh "$out/sanitize" ;;
    replay)
        for precision in ${PRECISIONS:-fast accurate}; do
            step "$precision" "replay-$precision.log" replay "$precision"
        done
        measured=()
        for precision in ${PRECISIONS:-fast accurate}; do measured+=("$out/h200-$precision.parquet"); done
        step report report.log python3 -m pwbench.cli.main report "${measured[@]}"
        ;;
    ceilings | record | full | windows) step "$name" "$name.log" "$name" ;;
    *) step "$name" "$name.log" about "$name" ;;
    esac
done
if [ -n "${PACK:-}" ]; then
    (cd "$out" && find . -name '*.log' -o -name '*.xml' | tar -cf logs.tar --remove-files -T -)
fi
exit $failed
