#!/bin/bash
# The run {{name}}, written by `streamrl launch slurm`. You may edit it and submit it again with sbatch: it continues
# from the run's latest checkpoint.
{{header}}

streamrl=({{streamrl}})
config={{config}}
logs={{logs}}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
port={{port}}
case $address in *:*) manager=http://[$address]:$port ;; *) manager=http://$address:$port ;; esac  # IPv6

# A node that goes away takes its own processes with it, and nothing else.
step() { srun --overlap --no-kill --kill-on-bad-exit=0 --open-mode=append "$@"; }

# A pool restarts its dead processes. The run cannot continue without one of the pools. A pool that lost a node during
# the run ends with an error at the end of the run, too, shortly before the controller.
lost() {
    for _ in {1..20}; do kill -0 "$controller" 2> /dev/null || return; sleep 1; done
    echo "streamrl: nothing is left of the pool $1" >&2
    kill "$controller"
}

begin_again() {
    echo "streamrl: $1; the job starts again" >&2
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script
}
trap 'begin_again "its time is nearly up"' USR1

step {{trainer_where}} --nodes=1 --ntasks=1 --output="$logs/controller-%N.log" \
    "${streamrl[@]}" controller "$config" --host "$address" --port "$port" --resume &
controller=$!
{ step {{trainer_where}} --nodes={{trainer_nodes}} --ntasks={{trainer_nodes}} --output="$logs/trainer-%N.log" \
    bash -c '"$@" --nodes {{trainer_nodes}} --node $SLURM_PROCID' _ \
    "${streamrl[@]}" trainer "$config" --manager "$manager" --resume \
    || lost trainer; } &
{ step {{gserver_where}} --nodes={{gserver_nodes}} --ntasks={{gserver_nodes}} --output="$logs/gserver-%N.log" \
    "${streamrl[@]}" gserver "$config" --manager "$manager" --count {{gserver_count}} --resume \
    || lost gserver; } &
{ step {{rollout_where}} --nodes={{rollout_nodes}} --ntasks={{rollout_nodes}} --output="$logs/rollout-%N.log" \
    "${streamrl[@]}" rollout "$config" --manager "$manager" --count {{rollout_count}} --resume \
    || lost rollout; } &

# The end of the controller is the end of the run; the other processes leave by themselves then.
wait "$controller"
code=$?
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T | head -n 1)
# Slurm's own count of restarts includes those at the end of the job's time, which are no failures.
failures="$logs/failures-$SLURM_JOB_ID"
if [ "$code" != 0 ] && [ "$state" = RUNNING ] && [ "$(cat "$failures" 2> /dev/null | wc -l)" -lt {{restarts}} ]; then
    echo "the controller ended with code $code" >> "$failures"
    begin_again "the controller ended with code $code"
fi
for _ in {1..30}; do
    [ -n "$(jobs -r)" ] || break
    sleep 1
done
exit "$code"
