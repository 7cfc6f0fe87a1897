#!/usr/bin/env bash
# Verify and measure everything that needs a GPU, on a bare machine without network (docs/how-to/first-gpu.md).
#
#   scripts/gpu.sh [--tiny] [--seconds N] [--gpus N] [--print] WHEELS OUT [PART...]
#
# WHEELS     folder with wheels of the packages that this machine lacks; may be empty
# OUT        folder for logs, JSON and the table; later calls add to it, with --tiny or all without
# PART       number or name, all by default; `install` runs first if it has not been done
# --tiny     sizes that a CPU can handle, for a rehearsal
# --seconds  end the call after N seconds: parts that do not fit are shortened or skipped
# --gpus     the parts for N GPUs of one machine, instead of those for one
# --print    show the commands and run nothing
#
# PYTHON (python3) has torch. The script makes a virtual environment in GPU_VENV that sees PYTHON's packages, so nothing
# is installed into PYTHON itself. COMMIT names the commit of a copy without .git. Each part has a time limit, and a
# failed part does not stop the next. What is least known comes first. All results are packed into OUT/results.tar.gz,
# with what was expected of them (scripts/gpu_predictions.py).
set -u

PARTS=(install rollout-480p tests ceiling attention adapter-rows doctor rollout decode-480p iteration sanitizer memcheck racecheck rollout-9x30x52 ncu-adapter-rows ncu-block operators full nft nft-zero3 video-121 engines testbed testbed-bf16 variables ncu-step)
LIMITS=(80 410 110 30 110 50 90 100 90 330 200 170 170 180 110 150 180 100 80 90 400 130 60 100 50 50)
PARTS_OF_SEVERAL=(install collectives lora-alone lora zero3 zero3-no-prefetch zero2 sequence resume killed hybrid)
LIMITS_OF_SEVERAL=(80 100 200 260 300 300 300 300 400 400 300)
PACKED_BYTES=$((16 * 2**20))
GPU_VENV=${GPU_VENV:-${TMPDIR:-/tmp}/sage-fast-gpu}

fail() { echo "scripts/gpu.sh: $*" >&2; exit 2; }

tiny=false seconds=100000 print=false gpus=1
while [[ ${1-} == --* ]]; do
    case $1 in
        --tiny) tiny=true ;;
        --print) print=true ;;
        --seconds) seconds=${2-}; [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds '$seconds': expected a whole number"; shift ;;
        --gpus) gpus=${2-}; [[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "--gpus '$gpus': expected a whole number"; shift ;;
        *) fail "unknown option $1; expected --tiny, --seconds N, --gpus N or --print" ;;
    esac
    shift
done
((gpus == 1)) || { PARTS=("${PARTS_OF_SEVERAL[@]}") LIMITS=("${LIMITS_OF_SEVERAL[@]}"); }
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
    "$py" -m scripts.flash4_kit --check || echo "the part attention goes on without flash4"
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

# Run the kernels' tests under a tool of compute-sanitizer. Every tensor gets its own allocation, so accesses past its end
# are seen.
sanitizer_part() {
    command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on the PATH: skipped"; return; }
    kernels_part 0 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 \
        --report-api-errors no --padding 4096 --target-processes application-only \
        --kernel-name 'regex=^_[a-z_]+_kernel$' "$py"
}

# Run one case a kernel, then all of them: a tool that is slow has said something of each before its time is over.
kernels_part() {
    local workers=$1 tool=("${@:2}") all=(tests/ops/test_operators.py tests/ops/test_triton.py tests/ops/test_norms.py)
    "${tool[@]}" -m pytest -p no:cacheprovider tests/ops/test_operators.py -k "triton and element" || return
    [[ -n ${TINY-} ]] || "${tool[@]}" -m pytest -p no:cacheprovider -n "$workers" -k "not C++" "${all[@]}"
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
    ATTENTION[name](q, k, v).sum().backward()
for tokens in range(32760, 32960, 25) if gpu else (60, 67):
    timer = harness.host_timer(lambda: attend(tokens), device)
    print(f"{name}, {tokens} tokens: first {1e3 * timer():.0f} ms, again {1e3 * timer():.0f} ms")
if gpu:
    print(f"peak: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated, {torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")'
ADAPTER_CODE='
import torch
from sage_fast.benchmarks.limits import RANK, SIZES
from sage_fast.ops import implementation
from sage_fast.tools import harness
from sage_fast.util.ranks import local_device
device = local_device()
dtype = harness.usual_dtype(device)
batch, tokens, width = SIZES["480p 81 frames" if device.type == "cuda" else "tiny"]["adapter_rows"]
x, grad = (torch.randn(batch, tokens, width, device=device, dtype=dtype) for _ in range(2))
down = torch.randn(RANK, width, device=device, dtype=dtype)
inner, up = (torch.randn(tokens, RANK, device=device, dtype=dtype) for _ in range(2))
for _ in range(2):
    torch.ops.sage_fast.adapter_rows(x, down, True)
    torch.ops.sage_fast.adapter_rows_backward(grad[0], inner, x[0], up)
print("adapter_rows of", list(x.shape), "by", implementation(device))'
COLLECTIVES_CODE='
import time
import torch
import torch.distributed as dist
from sage_fast.util.environment import synchronize
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, world_size
device = initialize(10)
ranks, tiny = world_size(), device.type != "cuda"
lora, block = (10_000, 10_000) if tiny else (184_000_000, 151_000_000)  # elements
def seconds(function):
    function()
    times = []
    for _ in range(1 if tiny else 10):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
def show(name, sent, function):
    took = seconds(function)
    if rank() == 0:
        print(f"{name}: {1e3 * took:.2f} ms, {sent / took / 1e9:.1f} GB/s sent a GPU", flush=True)
share = (ranks - 1) / ranks
flat = torch.ones(lora, device=device)
parts = [part.clone() for part in flat.chunk(1300)]
show("all-reduce of a LoRA in one buffer", 2 * share * flat.nbytes, lambda: dist.all_reduce(flat))
show("the same in 1,300 all-reduces", 2 * share * flat.nbytes, lambda: [dist.all_reduce(part) for part in parts])
whole = torch.ones(block // ranks * ranks, device=device, dtype=torch.bfloat16)
shard = whole.chunk(ranks)[rank()].clone()
show("all-gather of a block", share * whole.nbytes, lambda: dist.all_gather_into_tensor(whole, shard))
dist.destroy_process_group()'
NO_PREFETCH_CODE='
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_modules_to_forward_prefetch = lambda *_: None
import sys
from sage_fast.cli import main
sys.exit(main(sys.argv[1:]))'
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

# Start training on every GPU of the machine.
launch() { "$py" -m torch.distributed.run --nnodes 1 --nproc-per-node "$GPUS" --master-port 29511 "$@"; }

collectives_part() { launch --no-python "$py" -c "$COLLECTIVES_CODE"; }

# Train on all GPUs, or on the first with its share of the samples.
train_part() {
    local run=$GPU_VENV/$1
    shift
    launch -m sage_fast train "$@" --output "$run" || return
    tail -n 1 "$run/metrics.jsonl"
}

alone_part() { GPUS=1 train_part "$@"; }

no_prefetch_part() {
    local run=$GPU_VENV/$1
    shift
    launch --no-python "$py" -c "$NO_PREFETCH_CODE" train "$@" --output "$run" && tail -n 1 "$run/metrics.jsonl"
}

# Continue run $1 up to iteration $2; fails if it finds no checkpoint and begins anew.
continued() {
    (set -o pipefail; launch -m sage_fast train "$1" --resume --train.iterations "$2" 2>&1 | tee "$1/continued.log") || return
    grep -q '^resumed after' "$1/continued.log"
}

# Stop after an iteration, and continue from its checkpoint.
resume_part() {
    local run=$GPU_VENV/$1
    shift
    launch -m sage_fast train "$@" --output "$run" --train.iterations 1 || return
    continued "$run" 2 && [[ $(wc -l < "$run/metrics.jsonl") == 2 ]] && echo "resumed after one of two iterations"
}

# Kill a rank after the second iteration, when the first has its checkpoint: all others must end, and a resume go on.
killed_part() {
    local run=$GPU_VENV/$1 job ranks
    shift
    launch -m sage_fast train "$@" --output "$run" --train.iterations 50 &
    job=$!
    until (($(wc -l 2> /dev/null < "$run/metrics.jsonl" || echo 0) > 1)); do
        kill -0 "$job" 2> /dev/null || { echo "the run ended before its second iteration"; return 1; }
        sleep 1
    done
    mapfile -t ranks < <(pgrep -P "$(pgrep -P "$job")")  # of torchrun, which is the child of a shell
    kill -KILL "${ranks[-1]}"
    wait "$job" && { echo "the run ended well without one of its ranks"; return 1; }
    continued "$run" $(($(wc -l < "$run/metrics.jsonl") + 1)) && echo "resumed after a killed rank"
}

# Two groups of half the GPUs each, as two nodes: ZeRO-3 within each, gradients between them.
hybrid_part() {
    local run=$GPU_VENV/$1 half=$((GPUS / 2)) node jobs=()
    shift
    for node in 0 1; do
        CUDA_VISIBLE_DEVICES=$(seq -s , $((node * half)) $((node * half + half - 1))) "$py" -m torch.distributed.run \
            --nnodes 2 --node-rank "$node" --nproc-per-node "$half" --master-addr 127.0.0.1 --master-port 29512 \
            -m sage_fast train "$@" --output "$run" &
        jobs+=($!)
    done
    wait "${jobs[0]}" && wait "${jobs[1]}" && tail -n 1 "$run/metrics.jsonl"
}

# Settings of runs whose prompts and rewards are made up: neither is measured. The log-prob gate, which could stop a run
# that is timed, is checked by `testbed`.
MADE_UP=(--train.group_size 2 --train.parity_gate false --data.prompts testbed:train --data.eval_prompts testbed:heldout
    --reward.name sage_fast.configs.my_rewards:MyReward --reward.args "{}" --reward.weights "{color: 1, steady: 1}"
    --objective.drop_equal_groups false --data.embedding_cache "$GPU_VENV/embeddings")

# Print the command that profiles one iteration.
profile_of() {
    local part=$1
    shift
    printf '%s\n' "$py" -m sage_fast profile "$@" --train.prompts_per_iteration 1 "${MADE_UP[@]}" --folder "$out/$part"
}

# Print the command that times the rollout's parts, with its JSON.
rollout_of() {
    local part=$1
    shift
    printf '%s\n' "$py" -m sage_fast bench rollout "$@" --json "$out/$part.json"
}

# Print the command that trains on all GPUs, two samples each.
several_of() {
    local part=$1 function=$2 few=(--sampling.num_frames 33 --sampling.steps 4)
    shift 2
    $tiny && few=(--sampling.steps 2)
    printf '%s\n' "$function" "$part" "$@" "${MADE_UP[@]}" "${few[@]}" --train.iterations 2 --train.optimizer_steps 1 \
        --eval.num_prompts 1 --eval.steps 2 --eval.seeds_per_prompt 1 --train.checkpoint_interval 1
}

# Print the command of a part, one word per line; bench and profile write their JSON into $out.
command_of() {
    local sage=("$py" -m sage_fast) size=() lora=() full=()
    local few=(--model.path random:hunyuanvideo15-480p-4-blocks --sampling.num_frames 33 --sampling.steps 4)
    $tiny && few=(--sampling.steps 3 --train.optimizer_steps 1)
    case $1 in
        install) printf '%s\n' install_part ;;
        doctor) printf '%s\n' "${sage[@]}" doctor --json "$out/doctor.json" ;;
        tests)  # what has changed since the last card; the sanitizers run the tests of all kernels
            size=(-n 8 -m gpu tests/ops/test_operators.py tests/test_graphs.py tests/test_attention.py)
            $tiny && size=(tests/ops/test_operators.py -k fake)
            printf '%s\n' "$py" -m pytest -p no:cacheprovider "${size[@]}"
            ;;
        ceiling | attention | adapter-rows)
            $tiny && size=(--size tiny --repetitions 1)
            $tiny && [[ $1 == adapter-rows ]] && printf '%s\n' env TRITON_INTERPRET=1 SAGE_FAST_OPS=triton
            printf '%s\n' "${sage[@]}" bench limits --part "${1/-/_}" "${size[@]}" --json "$out/$1.json"
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
            size=(--size "720p batch 4" --size large --size "480p batch 4" --size "480p batch 1" --size "8192 tokens"
                --size "480p frame")
            $tiny && size=(--size tiny --size "tiny tokens" --size "tiny pixels" --repetitions 1)
            printf '%s\n' "${sage[@]}" bench "${size[@]}" --json "$out/operators.json"
            ;;
        rollout | rollout-9x30x52)
            size=(--size 5x16x16 --repetitions 7 --budget 90)
            [[ $1 == rollout ]] || size=(--size 9x30x52 --repetitions 3 --budget 170)
            $tiny && size=(--size tiny --repetitions 1)
            rollout_of "$1" "${size[@]}" --part forward --part step --part rollout --path stock --path tuned --path eager \
                --path graphed
            ;;
        rollout-480p)
            size=(--size "480p 81 frames" --repetitions 3 --budget 390)
            $tiny && size=(--size tiny --repetitions 1)
            rollout_of "$1" "${size[@]}" --part forward --part "train auto" --part "train full" --path stock \
                --path tuned --path "tuned compiled" --path "tuned flash4 compiled" --path "stock flash3 compiled" \
                --path eager --path "eager cudnn" --path "eager flash4"
            ;;
        decode-480p)
            # Without the stock decode: its tensors have more than 2^31 elements here, and it may end in an error after
            # which nothing runs.
            size=(--size "480p 81 frames" --repetitions 3 --budget 80)
            $tiny && size=(--size tiny --repetitions 1)
            rollout_of "$1" "${size[@]}" --part decode --path contiguous --path "channels last"
            ;;
        video-121)  # what others time: 121 frames, 50 steps, guidance 6, with the decode
            size=(--size "480p 121 frames")
            $tiny && size=(--size tiny)
            rollout_of "$1" "${size[@]}" --repetitions 1 --part rollout --part decode --path eager \
                --path "channels last"
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
        sanitizer) printf '%s\n' kernels_part 8 env TRITON_INSTRUMENTATION_MODE=consan "$py" ;;
        memcheck | racecheck) printf '%s\n' sanitizer_part "$1" ;;
        ncu-step)
            printf '%s\n' ncu_part ncu-step "--kernel-name regex:transition_step --launch-skip 1 --launch-count 1 --set full" STEP_CODE
            ;;
        ncu-adapter-rows)
            printf '%s\n' ncu_part ncu-adapter-rows "--kernel-name regex:_adapter_rows --launch-skip 2 --launch-count 2 --set full" ADAPTER_CODE
            ;;
        ncu-block)
            printf '%s\n' ncu_part ncu-block "--nvtx --nvtx-include block/ --section SpeedOfLight --section MemoryWorkloadAnalysis" BLOCK_CODE
            ;;
        *)  # on several GPUs
            lora=(configs/hunyuanvideo15-480p.yaml --model.path random:hunyuanvideo15-480p)
            full=(configs/hunyuanvideo15-480p-full.yaml --model.path random:hunyuanvideo15-480p)
            $tiny && lora=(configs/recipes/paper.yaml) full=(configs/recipes/paper_full.yaml)
            size=(--train.prompts_per_iteration "$gpus")
            case $1 in
                collectives) printf '%s\n' collectives_part ;;
                lora-alone) several_of "$1" alone_part "${lora[@]}" --train.prompts_per_iteration 1 ;;
                lora) several_of "$1" train_part "${lora[@]}" "${size[@]}" ;;
                zero3) several_of "$1" train_part "${full[@]}" --train.engine zero3 "${size[@]}" ;;
                zero3-no-prefetch) several_of "$1" no_prefetch_part "${full[@]}" --train.engine zero3 "${size[@]}" ;;
                zero2) several_of "$1" train_part "${full[@]}" --train.engine zero2 "${size[@]}" ;;
                sequence) several_of "$1" train_part "${lora[@]}" --model.sequence_parallel "$gpus" "${size[@]}" ;;
                resume | killed) several_of "$1" "$1_part" "${full[@]}" --train.engine zero3 "${size[@]}" ;;
                hybrid) several_of "$1" hybrid_part "${full[@]}" --train.engine zero3 --train.hybrid_shard true "${size[@]}" ;;
            esac
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

$tiny && sizes=tiny || sizes=full
mkdir -p "$out" || exit 2
[[ -e $out/sizes ]] || echo $sizes > "$out/sizes"
[[ $(< "$out/sizes") == "$sizes" ]] || fail "OUT '$out' holds $(< "$out/sizes") sizes, this call has $sizes ones"
status=$out/status.tsv  # part, verdict, seconds; the last line of a part counts
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 wheels out py ENGINES_CODE LENGTHS_CODE STEP_CODE ADAPTER_CODE BLOCK_CODE \
    COLLECTIVES_CODE NO_PREFETCH_CODE GPUS=$gpus
if $tiny; then export TINY=1; fi
export -f install_part engines_part ncu_part sanitizer_part kernels_part variables_part installed launch collectives_part train_part \
    alone_part no_prefetch_part continued resume_part killed_part hybrid_part
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
    printf '%-19s%-11s%8s  %s\n' part verdict seconds "last line of its log"
    for part in "${PARTS[@]}"; do
        row=$(grep -P "^$part\t" "$status" | tail -n 1)
        [[ -n $row ]] || { printf '%-19s%s\n' "$part" "not run"; continue; }
        IFS=$'\t' read -r _ verdict took <<< "$row"
        printf '%-19s%-11s%8s  %s\n' "$part" "$verdict" "$took" "$(grep -v '^\s*$' "$out/$part.log" | tail -n 1 | cut -c -120)"
    done
    [[ ! -x $py ]] || "$py" -m scripts.gpu_predictions "$out" ${TINY:+--tiny}
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
