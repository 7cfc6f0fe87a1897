#!/usr/bin/env bash
# Verify and measure everything that needs a GPU, on a bare machine without network (docs/how-to/first-gpu.md).
#
#   scripts/gpu.sh [--tiny] [--seconds N] [--print] WHEELS OUT [PART...]
#
# WHEELS     folder with wheels of the packages that this machine lacks; may be empty
# OUT        folder for logs, JSON and the table; later calls add to it
# PART       number or name, all by default; `install` runs first if it has not been done
# --tiny     sizes that a CPU can handle, for a rehearsal
# --seconds  end the call after N seconds: parts that do not fit are shortened or skipped
# --print    show the commands and run nothing
#
# PYTHON (python3) has torch. The script makes a virtual environment in GPU_VENV that sees PYTHON's packages, so nothing
# is installed into PYTHON itself. COMMIT names the commit of a copy without .git. Each part has a time limit, and a
# failed part does not stop the next. What no GPU has run yet comes first. All results are packed into
# OUT/results.tar.gz.
set -u

PARTS=(install tests doctor sanitizer memcheck racecheck ncu-block rollout operators rollout-480p full nft iteration engines testbed nft-zero3 testbed-bf16 decode-480p variables ncu-step)
LIMITS=(90 150 100 200 170 170 200 300 180 300 100 80 330 130 60 90 100 90 50 50)
PACKED_BYTES=$((16 * 2**20))
GPU_VENV=${GPU_VENV:-${TMPDIR:-/tmp}/sage-fast-gpu}

fail() { echo "scripts/gpu.sh: $*" >&2; exit 2; }

tiny=false seconds=100000 print=false
while [[ ${1-} == --* ]]; do
    case $1 in
        --tiny) tiny=true ;;
        --print) print=true ;;
        --seconds) seconds=${2-}; [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds '$seconds': expected a whole number"; shift ;;
        *) fail "unknown option $1; expected --tiny, --seconds N or --print" ;;
    esac
    shift
done
(($# >= 2)) || fail "expected WHEELS OUT [PART...]; the parts are ${PARTS[*]}"
[[ -d $1 ]] || fail "WHEELS '$1': no such folder; give an empty one if nothing is missing"
[[ ${COMMIT-} =~ ^([0-9a-f]{7,40})?$ ]] || fail "COMMIT '$COMMIT': expected a hash, as git rev-parse HEAD prints it"
wheels=$(realpath "$1") out=$(realpath -m "$2")  # relative to the caller's directory
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
shift 2
$print || [[ -e .git || -n ${COMMIT-} ]] || echo "no .git and no COMMIT: the results will not name their commit" >&2

chosen=()
(($#)) || set -- "${PARTS[@]}"
for part; do
    [[ $part =~ ^[1-9][0-9]*$ ]] && name=${PARTS[part - 1]-} || name=$part
    printf '%s\n' "${PARTS[@]}" | grep -qxF -e "$name" || fail "part '$part': expected a number to ${#PARTS[@]} or one of ${PARTS[*]}"
    chosen+=("$name")
done
py=$GPU_VENV/bin/python
# Whether the environment has this checkout installed, from this path.
installed() {
    local where='import os, sage_fast; print(os.path.realpath(sage_fast.__file__))'
    [[ -x $py ]] && [[ $(cd / && "$py" -c "$where" 2> /dev/null | tail -n 1) == "$(realpath sage_fast/__init__.py)" ]]
}
if ! $print && [[ " ${chosen[*]} " != *" install "* ]] && ! installed; then chosen=(install "${chosen[@]}"); fi

# -- the parts ---------------------------------------------------------------------------------------------------------

# Make a virtual environment that sees all packages of $PYTHON, even if $PYTHON is in a virtual environment itself.
install_part() {
    local python=${PYTHON:-python3} pip=("$py" -m pip --disable-pip-version-check install --no-index --no-deps)
    "$python" -m venv --without-pip --clear "$GPU_VENV" || return
    "$python" -c 'import site, sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        > "$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-machine.pth" || return
    shopt -s nullglob
    local found=("$wheels"/*.whl)
    if ((${#found[@]})); then "${pip[@]}" "${found[@]}" || return; fi
    "${pip[@]}" --no-build-isolation --editable . || return
    installed && "$py" -c 'import torch, diffusers, sage_fast, sage_fast.kernels; print("torch", torch.__version__, "sees", torch.cuda.device_count(), "GPUs")'
}

# Run kernels under Nsight Compute if it is installed, else without.
ncu_part() {
    local name=$1 options code=${!3} ncu=()
    read -ra options <<< "$2"
    if command -v ncu > /dev/null; then
        ncu=(ncu --force-overwrite --export "$out/$name" --clock-control none "${options[@]}")
    else
        echo "ncu is not on the PATH: the code runs without"
    fi
    "${ncu[@]}" "$py" -c "$code" || return
    ((${#ncu[@]} == 0)) || ncu --import "$out/$name.ncu-rep" --page details > "$out/$name.txt"
}

# Run tests under a tool of compute-sanitizer. Every tensor gets its own allocation, so accesses past its end are seen.
sanitizer_part() {
    local tool=$1
    shift
    command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on the PATH: skipped"; return; }
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 --report-api-errors no \
        --padding 4096 --target-processes application-only --kernel-name 'regex=^_[a-z_]+_kernel$' "$py" "$@"
}

# Time attention at new prompt lengths, forward and backward, without and with each of two PyTorch variables.
variables_part() {
    local variable
    for variable in "" TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 PYTORCH_ALLOC_CONF=expandable_segments:True; do
        echo "with ${variable:-neither}"
        env ${variable:+"$variable"} "$py" -c "$LENGTHS_CODE" || return
    done
}

# Train all weights of the testbed by each engine; their metrics agree.
engines_part() {
    local engine
    for engine in plain zero2 zero3; do
        "$py" -m sage_fast train "$@" --train.engine "$engine" --output "$GPU_VENV/engines/$engine" || return
    done
    "$py" -c "$ENGINES_CODE" "$GPU_VENV/engines"
}

ENGINES_CODE='
import sys
from pathlib import Path
from sage_fast.util.files import read_metrics
plain, *others = (read_metrics(Path(sys.argv[1], engine, "metrics.jsonl")) for engine in ("plain", "zero2", "zero3"))
differences = []
for iteration, rows in enumerate(zip(plain, *others, strict=True)):
    for name in ("reward/mean", "grad_norm"):
        print(f"iteration {iteration}, {name} of plain, zero2, zero3:", *(f"{row[name]:.6g}" for row in rows))
        differences += [abs(row[name] / rows[0][name] - 1) for row in rows]
print(f"zero2 and zero3 differ from plain by at most {max(differences):.1e} of a value")
sys.exit(not all(difference < 0.01 for difference in differences))'
LENGTHS_CODE='
import torch
from sage_fast.tools import harness
from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.util.ranks import local_device
device = local_device()
gpu, dtype = device.type == "cuda", harness.usual_dtype(device)
name = "cudnn" if "cudnn" in usable(device, dtype) else "sdpa"
def attend(tokens):
    q, k, v = (torch.randn(1, tokens, 16, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ATTENTION[name](q, k, v, None).sum().backward()
for tokens in range(32760, 32960, 25) if gpu else (60, 67):
    timer = harness.host_timer(lambda: attend(tokens), device)
    print(f"{name}, {tokens} tokens: first {1e3 * timer():.0f} ms, again {1e3 * timer():.0f} ms")
if gpu:
    print(f"peak: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated, {torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")'
STEP_CODE='
import torch
from sage_fast.benchmarks.nsight import OPERATORS, large_inputs
from sage_fast.util.ranks import local_device
arguments = large_inputs("transition_step", local_device())
for _ in range(3):
    x_next, _ = OPERATORS["transition_step"].function(*arguments)
print("transition_step of", list(x_next.shape))'
BLOCK_CODE='
import torch
from sage_fast.benchmarks.nsight import transformer_forward
from sage_fast.util.ranks import local_device
device = local_device()
gpu = device.type == "cuda"
run, tokens = transformer_forward(device)
run()
if gpu:
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("block")
run()
if gpu:
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
print("two blocks of", tokens, "tokens")'

# Print the command that profiles one iteration. Prompts and reward are made up: neither is measured. The log-prob gate,
# which could stop the run that is timed, is checked by `testbed`.
profile_of() {
    local part=$1
    shift
    printf '%s\n' "$py" -m sage_fast profile "$@" --train.prompts_per_iteration 1 --train.group_size 2 \
        --train.parity_gate false --data.prompts testbed:train --data.eval_prompts testbed:heldout \
        --reward.name sage_fast.configs.my_rewards:MyReward --reward.args "{}" \
        --reward.weights "{color: 1, steady: 1}" --objective.drop_equal_groups false \
        --data.embedding_cache "$GPU_VENV/embeddings" --folder "$out/$part"
}

# Print the command of a part, one word per line; bench and profile write their JSON into $out.
command_of() {
    local sage=("$py" -m sage_fast) kernels=(-m pytest -p no:cacheprovider -k "not C++"
        tests/ops/test_operators.py tests/ops/test_triton.py tests/ops/test_norms.py) size=()
    local few=(--model.path random:hunyuanvideo15-480p-4-blocks --sampling.num_frames 33 --sampling.steps 4)
    $tiny && few=(--sampling.steps 3 --train.optimizer_steps 1)
    $tiny && kernels=(-m pytest -p no:cacheprovider tests/ops/test_operators.py -k "triton and element")
    case $1 in
        install) printf '%s\n' install_part ;;
        doctor) printf '%s\n' "${sage[@]}" doctor --json "$out/doctor.json" ;;
        tests)
            size=(-n 8 -m gpu tests/ops tests/test_graphs.py tests/test_decode.py tests/test_attention.py tests/test_trainer.py)
            $tiny && size=(tests/ops/test_operators.py -k fake)
            printf '%s\n' "$py" -m pytest -p no:cacheprovider "${size[@]}"
            ;;
        testbed | testbed-bf16)
            size=(--train.iterations 3 --eval.num_prompts 8)
            $tiny && size=(--train.iterations 1 --eval.num_prompts 1 --eval.steps 2 --sampling.steps 3 --train.optimizer_steps 1
                --train.prompts_per_iteration 1 --train.group_size 2 --eval.seeds_per_prompt 1)
            # In bfloat16 another batch size rounds differently, so the log-prob gate needs the same batch size in
            # rollout and training. With more updates per iteration it would warn.
            [[ $1 == testbed-bf16 ]] && size+=(--model.dtype bfloat16 --train.optimizer_steps 1 --sampling.batch_size 1
                --train.batch_size 1)
            printf '%s\n' "${sage[@]}" train configs/recipes/paper.yaml --output "$GPU_VENV/$1" "${size[@]}"
            ;;
        engines)  # one update per iteration: later ones amplify what rounding changed in the first
            size=(--train.iterations 2 --train.optimizer_steps 1 --eval.num_prompts 1 --eval.steps 2 --eval.seeds_per_prompt 1)
            $tiny && size+=(--sampling.steps 3 --train.prompts_per_iteration 1 --train.group_size 2)
            printf '%s\n' engines_part configs/recipes/paper_full.yaml "${size[@]}"
            ;;
        operators)
            size=(--size "720p batch 4" --size large --size "480p batch 4" --size "480p batch 1" --size "8192 tokens")
            $tiny && size=(--size tiny --repetitions 1)
            printf '%s\n' "${sage[@]}" bench "${size[@]}" --json "$out/operators.json"
            ;;
        rollout)
            size=(--size 5x16x16 --size 9x30x52 --repetitions 3 --budget 260)
            $tiny && size=(--size tiny --repetitions 1)
            printf '%s\n' "${sage[@]}" bench rollout "${size[@]}" --json "$out/rollout.json"
            ;;
        rollout-480p)  # the padded forward is measured on the smaller rungs
            size=(--size "480p 81 frames" --repetitions 1 --part forward --part step --part train --budget 270
                --path stock --path eager --path graphed)
            $tiny && size=(--size tiny --repetitions 1 --part forward --part step --part train)
            printf '%s\n' "${sage[@]}" bench rollout "${size[@]}" --json "$out/rollout-480p.json"
            ;;
        decode-480p)
            # Without the stock decode: its tensors have more than 2^31 elements here, and it may end in an error after
            # which nothing runs.
            size=(--size "480p 81 frames" --budget 80)
            $tiny && size=(--size tiny)
            printf '%s\n' "${sage[@]}" bench rollout "${size[@]}" --repetitions 1 --part decode --path contiguous \
                --path "channels last" --json "$out/decode-480p.json"
            ;;
        iteration)
            size=(configs/hunyuanvideo15-480p.yaml --model.path random:hunyuanvideo15-480p --sampling.steps 3)
            $tiny && size=(configs/recipes/paper.yaml "${few[@]}")
            profile_of "$1" "${size[@]}"
            ;;
        full)
            size=(configs/hunyuanvideo15-480p-full.yaml --train.engine plain)
            $tiny && size=(configs/recipes/paper_full.yaml --model.dtype bfloat16)
            profile_of "$1" "${size[@]}" "${few[@]}"
            ;;
        nft | nft-zero3)
            size=(configs/hunyuanvideo15-480p-nft.yaml)
            $tiny && size=(configs/recipes/nft_full.yaml --model.dtype bfloat16)
            [[ $1 == nft ]] && size+=(--train.engine plain) || size+=(--train.engine zero3)
            profile_of "$1" "${size[@]}" "${few[@]}"
            ;;
        variables) printf '%s\n' variables_part ;;
        # ConSan is the Triton sanitizer available in 3.6; it also makes integer overflow an error. It compiles all
        # kernels anew, hence in eight processes.
        sanitizer)
            $tiny || size=(-n 8)
            printf '%s\n' env TRITON_INSTRUMENTATION_MODE=consan "$py" "${kernels[@]}" "${size[@]}"
            ;;
        memcheck | racecheck) printf '%s\n' sanitizer_part "$1" "${kernels[@]}" ;;
        ncu-step)
            printf '%s\n' ncu_part ncu-step "--kernel-name regex:transition_step --launch-skip 1 --launch-count 1 --set full" STEP_CODE
            ;;
        ncu-block)
            printf '%s\n' ncu_part ncu-block "--nvtx --nvtx-include block/ --section SpeedOfLight --section MemoryWorkloadAnalysis" BLOCK_CODE
            ;;
    esac
}

# -- running them ------------------------------------------------------------------------------------------------------

if $print; then
    for part in "${chosen[@]}"; do
        mapfile -t words < <(command_of "$part")
        printf '%s\t' "$part" "${words[@]}"
        echo
    done
    exit
fi

mkdir -p "$out" || exit 2
status=$out/status.tsv  # part, verdict, seconds; the last line of a part counts
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 wheels out py ENGINES_CODE LENGTHS_CODE STEP_CODE BLOCK_CODE
export -f install_part engines_part ncu_part sanitizer_part variables_part installed
limit_of() { for i in "${!PARTS[@]}"; do if [[ ${PARTS[i]} == "$1" ]]; then echo "${LIMITS[i]}"; fi; done; }

for part in "${chosen[@]}"; do
    limit=$(limit_of "$part") left=$((seconds - SECONDS)) log=$out/$part.log start=$SECONDS
    $tiny && limit=600
    if ((left < 15)); then
        echo "no time left in this call" > "$log"
        printf '%s\tskipped\t0\n' "$part" >> "$status"
        continue
    fi
    ((limit > left)) && limit=$left
    mapfile -t words < <(command_of "$part")
    rm -rf "${GPU_VENV:?}/$part" "${out:?}/$part"  # an earlier run or profile is not overwritten
    [[ ${words[0]} == *_part ]] && words=(bash -c '"$@"' _ "${words[@]}")
    echo "$part, at most $limit s: $log"
    # Each part has its own time limit, and a killed part leaves no process behind.
    GPU_VENV=$GPU_VENV timeout --kill-after=10 "$limit" "${words[@]}" > "$log" 2>&1
    case $? in
        0) verdict=ok ;;
        124 | 137) verdict="timed out" ;;
        *) verdict=failed ;;
    esac
    if [[ $part == testbed* ]]; then
        for file in "$GPU_VENV/$part"/{run.json,metrics.jsonl}; do
            [[ -f $file ]] && mkdir -p "$out/$part" && cp "$file" "$out/$part"
        done
    fi
    printf '%s\t%s\t%s\n' "$part" "$verdict" "$((SECONDS - start))" >> "$status"
done

bad=0
{
    printf '%-14s%-11s%8s  %s\n' part verdict seconds "last line of its log"
    for part in "${PARTS[@]}"; do
        row=$(grep -P "^$part\t" "$status" | tail -n 1)
        [[ -n $row ]] || { printf '%-14s%s\n' "$part" "not run"; continue; }
        IFS=$'\t' read -r _ verdict took <<< "$row"
        printf '%-14s%-11s%8s  %s\n' "$part" "$verdict" "$took" "$(grep -v '^\s*$' "$out/$part.log" | tail -n 1 | cut -c -120)"
    done
} | tee "$out/table.txt"
# Pack one file to take home, including the table.
mapfile -t files < <(cd "$out" && find . -type f ! -name results.tar.gz -printf '%s\t%P\n' | sort -rn | cut -f 2)
while tar -C "$out" -czf "$out/results.tar.gz" "${files[@]}" && (($(stat -c %s "$out/results.tar.gz") >= PACKED_BYTES)); do
    echo "left out of results.tar.gz, which has room for $((PACKED_BYTES / 2**20)) MiB: ${files[0]}"
    files=("${files[@]:1}")
done
for part in "${chosen[@]}"; do
    [[ $(grep -P "^$part\t" "$status" | tail -n 1 | cut -f 2) == ok ]] || bad=1
done
exit $bad
