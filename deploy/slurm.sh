#!/usr/bin/env bash
# One training run on several Slurm nodes: sbatch --nodes=4 deploy/slurm.sh run.toml runs/big
#
# The first node runs the head of a Ray cluster and the driver of the run, the others join it. Every node needs the same
# Python environment with `pip install 'toolwise[ray]'`; RUN must be on a disk that the learners share. Nodes with GPUs:
# add sbatch's --gpus-per-node.
#SBATCH --job-name=toolwise
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

config=${1:?usage: sbatch deploy/slurm.sh CONFIG RUN}
run=${2:?usage: sbatch deploy/slurm.sh CONFIG RUN}
port=6379
JOIN_S=300
umask 077

# All processes must show this token; it is in the environment of this job alone.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN

# On one node, with all its CPUs: without the option a step may be bound to one core.
on() {
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none "$@"
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
# As Ray finds it: a host name may resolve to a loopback address.
host=$(on "$head" python -c 'import ray; print(ray.util.get_node_ip_address())')
address="$host:$port"

# Wait until so many nodes are there.
wait_for() {
  on "$head" timeout "$JOIN_S" python - "$address" "$1" <<'WAIT' && return
import sys, time, ray
address, expected, alive = sys.argv[1], int(sys.argv[2]), 0
while alive < expected:
    time.sleep(1)
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        alive = sum(node["Alive"] for node in ray.nodes())
    except Exception as fault:
        print(f"not yet: {fault}", file=sys.stderr)
WAIT
  echo "fewer than $1 nodes joined the Ray cluster at $address within $JOIN_S s" >&2
  exit 1
}

# These two run until the job ends, which ends them.
on "$head" ray start --head --block --disable-usage-stats --node-ip-address="$host" --port="$port" \
  --dashboard-host=127.0.0.1 &
wait_for 1
for node in "${nodes[@]:1}"; do
  on "$node" ray start --block --disable-usage-stats --address="$address" &
done
wait_for "${#nodes[@]}"

options=(--cluster "$address" --out "$run")
[[ -f "$run/config.toml" ]] && options+=(--resume) # a job that Slurm starts again goes on
on "$head" toolwise doctor --cluster "$address"
on "$head" toolwise train "$config" "${options[@]}"
