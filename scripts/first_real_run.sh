#!/usr/bin/env bash
# Align HunyuanVideo 1.5 with VideoAlign on one node: from nothing to a LoRA with its scores and its card
# (docs/tutorials/first-real-run.md).
#
#   scripts/first_real_run.sh FOLDER [STEP ...] [--SETTING VALUE ...]
#
# FOLDER gets every file but the downloads, which go into the cache of Hugging Face (HF_HOME). Without a STEP all are
# done, in this order:
#
#   cost     print what the run takes by the plan, and check that the disks have room
#   fetch    download the model, the reward and the judge
#   doctor   check the installation, and the GPUs of this node
#   embed    encode the prompts
#   base     score the base model on the held-out prompts
#   signal   measure signal and noise of the gradient
#   train    train, with evaluations and checkpoints
#   compare  compare base and trained model on the held-out prompts
#   export   write the LoRA for other programs, with its card
#
# The same command again skips what is done, repeats a step that was interrupted, and resumes training from its last
# checkpoint. A --SETTING is one of `sage-fast train`. Those of the first call are kept in FOLDER/settings.
#
# Environment:
#   GPUS=8         number of GPUs; 0 rehearses on the CPU
#   RANKS          number of processes: one for each GPU, and 1 without GPUs
#   GPU_MEMORY=80  memory of a GPU in GB, for the plan
#   SIGNAL=32      iterations of the step signal
#   USED_AT=6      guidance scale at which the base model is used; the base is scored at it too
#   CONFIG         configuration (configs/hunyuanvideo15-480p.yaml)
#   PYTHON         Python that has sage-fast (that of .venv, else python3)
# shellcheck disable=SC2329 # traps and steps are called by their names
set -euo pipefail

root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
STEPS=(cost fetch doctor embed base signal train compare export)
TOO_NOISY=3 # as in first_real_run.py
# What this run does differently from the configuration: short, saved and scored often, and with a judge.
RUN_SETTINGS=(
    --train.iterations 60
    --train.checkpoint_interval 5
    --eval.interval 10
    --eval.judge pickscore
)

say() { printf '%s\n' "first_real_run.sh: $*"; }

refuse() {
    say "$*" >&2
    exit 2
}

# -- arguments -----------------------------------------------------------------------------------------------------

[[ ${1:--} != -* ]] || refuse "expected FOLDER [STEP ...] [--SETTING VALUE ...]; steps: ${STEPS[*]}"
folder=$(realpath -m -- "$1")
shift
asked=()
while (($#)) && [[ $1 != --* ]]; do
    [[ " ${STEPS[*]} " == *" $1 "* ]] || refuse "no step '$1'; expected some of: ${STEPS[*]}"
    asked+=("$1")
    shift
done
steps_are_named=${#asked[@]}
((steps_are_named)) || asked=("${STEPS[@]}")
given=("$@")
[[ " ${given[*]}" != *" --output"* ]] || refuse "--output: FOLDER is where everything goes"

gpus=${GPUS:-8} gpu_memory=${GPU_MEMORY:-80} signal_iterations=${SIGNAL:-32} used_at=${USED_AT:-6}
[[ $gpus =~ ^[0-9]+$ ]] || refuse "GPUS=$gpus: expected a number of GPUs"
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "RANKS=$ranks: expected a number of processes"
((gpus == 0 || ranks == gpus)) || refuse "RANKS=$ranks: with GPUS=$gpus there is one process for each GPU"
[[ $signal_iterations =~ ^[0-9]+$ ]] || refuse "SIGNAL=$signal_iterations: expected a number of iterations"
((signal_iterations >= 3)) || refuse "SIGNAL=$signal_iterations: expected 3 or more iterations"
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
[[ $python != */* ]] || python=$(cd -- "$(dirname -- "$python")" && pwd)/$(basename -- "$python") # its link is kept
"$python" -c 'import sage_fast' 2> /dev/null || refuse "$python has no sage-fast: run \`make install\`, or set PYTHON"

# -- the folder, with the settings of its first call ---------------------------------------------------------------

kept=$folder/settings # the configuration, the folder of the first call, then each word of the settings on a line

if [[ -f $kept ]]; then
    mapfile -t words < "$kept"
    config=${words[0]} home=${words[1]} settings=("${words[@]:2}")
    [[ -z ${CONFIG:-} || $(realpath -m -- "$CONFIG") == "$config" ]] ||
        refuse "CONFIG=$CONFIG: $folder was begun with $config; choose another folder"
elif [[ -e $folder && -n $(ls -A -- "$folder") ]]; then
    refuse "$folder holds other files: expected a new or empty folder"
else
    config=$(realpath -m -- "${CONFIG:-$root/configs/hunyuanvideo15-480p.yaml}")
    home=$PWD settings=()
fi
[[ -f $config ]] || refuse "CONFIG=$config: no such file"

name=$(basename -- "$config" .yaml)
run=$folder/$name
base_as_used=$folder/base-at-guidance-$used_at
if ((${#given[@]})) && [[ "${given[*]}" != "${settings[*]}" ]]; then
    for scored in base signal "$name"; do
        [[ ! -e $folder/$scored ]] || refuse "$folder/$scored was made with the settings '${settings[*]}':" \
            "leave the settings out, or choose another folder"
    done
    settings=("${given[@]}") home=$PWD
    rm -f -- "$folder"/done/{fetch,embed}
fi
mkdir -p -- "$folder/done"
exec 9> "$folder/lock"
flock --nonblock 9 || refuse "$folder is in use by another call, or by a command that outlived one"
now=$(printf '%s\n' "$config" "$home" "${settings[@]}")
if [[ ! -f $kept || $now != "$(< "$kept")" ]]; then
    printf '%s\n' "$now" > "$kept.partial" || refuse "cannot write $kept, for the reason above"
    mv -- "$kept.partial" "$kept"
fi
cd -- "$home" # to which the paths in the settings are relative
of_train=("${RUN_SETTINGS[@]}" --data.embedding_cache "$folder/embeddings" "${settings[@]}")

# -- running commands ----------------------------------------------------------------------------------------------

# Each command has a process group of its own (set -m), and this script hands it the signals that it gets: a terminal's
# Ctrl-C and the `kill` of this script then do the same, and reach the command once.
set -m
child='' stopped='' step=''

pass_on() {
    stopped=$1
    [[ -z $child ]] || kill -s "$1" "$child" 2> /dev/null || true
}
for name_of_signal in INT TERM HUP; do
    # shellcheck disable=SC2064 # the name of this turn
    trap "pass_on $name_of_signal" "$name_of_signal"
done

at_exit() {
    local status=$?
    ((status == 0)) || [[ -z $step ]] ||
        say "$step ended with status $status, for the reason above; the same command again goes on from here" >&2
}
trap at_exit EXIT

end_if_stopped() { [[ -z $stopped ]] || exit $((128 + $(kill -l "$stopped"))); }

call() {
    local status=0
    end_if_stopped
    "$@" < /dev/null &
    child=$!
    [[ -z $stopped ]] || kill -s "$stopped" "$child"
    wait "$child" || status=$?
    while kill -0 "$child" 2> /dev/null; do # a signal interrupts `wait`
        status=0
        wait "$child" || status=$?
    done
    child=''
    end_if_stopped
    return "$status"
}

sage_fast() { call "$python" -m sage_fast "$@"; }

# Without `--`, torchrun takes the option --signal for one of its own.
on_all_ranks() {
    call "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m -- sage_fast "$@"
}

helper() { call "$python" "$root/scripts/first_real_run.py" "$@"; }

mark_done() { touch -- "$folder/done/$1"; }

# -- steps ---------------------------------------------------------------------------------------------------------

is_finished() {
    case $1 in
        fetch | embed | train) [[ -e $folder/done/$1 ]] ;;
        doctor) [[ -e $folder/done/doctor-$(hostname) ]] ;;
        base) [[ -e $folder/base/evaluation.html && -e $base_as_used/evaluation.html ]] ;;
        signal) [[ -e $folder/signal/signal.json ]] ;;
        export) [[ -e $folder/lora/README.md ]] ;;
        *) false ;;
    esac
}

step_cost() {
    sage_fast train "$config" "${of_train[@]}" --output "$run" --resume \
        --dry-run --gpus "$ranks" --gpu-memory "$gpu_memory"
    helper cost "$config" "${of_train[@]}" --folder "$folder" --gpus "$ranks" --gpu-memory "$gpu_memory" \
        --signal "$signal_iterations" --used-at "$used_at"
}

step_fetch() {
    local program repository
    program=$(command -v hf || echo "$(dirname -- "$python")/hf")
    helper downloads "$config" "${of_train[@]}" > "$folder/done/downloads"
    while read -ra repository; do
        say "hf download ${repository[*]}"
        call "$program" download "${repository[@]}" > "$folder/done/downloaded"
    done < "$folder/done/downloads"
    mark_done fetch
}

step_doctor() {
    sage_fast doctor --json "$folder/doctor.json"
    sage_fast doctor --node
    mark_done "doctor-$(hostname)"
}

step_embed() {
    on_all_ranks embed "$config" "${of_train[@]}"
    mark_done embed
}

score_base() { # FOLDER [--SETTING VALUE ...]
    [[ ! -e $1/evaluation.html ]] || return 0
    rm -rf -- "$1" # of an evaluation that was interrupted
    on_all_ranks eval "base=$config" --folder "$1" "${of_train[@]}" "${@:2}"
}

step_base() {
    score_base "$folder/base"
    score_base "$base_as_used" --eval.guidance_scale "$used_at"
}

step_signal() {
    on_all_ranks profile "$config" --signal "$signal_iterations" --folder "$folder/signal" "${of_train[@]}"
}

# Print what the signal means. A call that names no steps ends here if that is not to train: it takes most of the hours.
judge_signal() {
    local status=0
    helper signal "$config" "${of_train[@]}" --folder "$folder" || status=$?
    if ((status != TOO_NOISY)); then
        return "$status"
    fi
    if ((!steps_are_named)) && [[ ! -e $run ]]; then
        step=''
        refuse "stopped before training. To train all the same, name the steps:" \
            "scripts/first_real_run.sh $folder train compare export"
    fi
}

step_train() {
    on_all_ranks train "$config" "${of_train[@]}" --output "$run" --resume
    mark_done train
}

step_compare() {
    sage_fast compare "base=$folder/base/videos/base" "trained=$run" \
        "base at guidance $used_at=$base_as_used/videos/base" --folder "$folder/comparison"
}

step_export() {
    sage_fast export "$run" "$folder/lora"
}

# -- all of it -----------------------------------------------------------------------------------------------------

# Find missing GPUs before anything is downloaded.
find_gpus() {
    local wanted
    for wanted in "${asked[@]}"; do
        if ((gpus)) && [[ $wanted =~ ^(doctor|embed|base|signal|train)$ ]] && ! is_finished "$wanted"; then
            helper gpus "$config" --gpus "$gpus"
            return
        fi
    done
}

main() {
    find_gpus
    for step in "${asked[@]}"; do
        # A run needs no network.
        [[ $step == fetch || ! -e $folder/done/fetch ]] || export HF_HUB_OFFLINE=1
        if is_finished "$step"; then
            say "$step: done before"
        else
            say "$step"
            "step_$step"
        fi
        [[ $step != signal ]] || judge_signal
    done
    say "done: $folder"
    exit # in a function: bash reads no more of this file, which may change in the hours of a run
}

main
