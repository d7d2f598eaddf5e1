#!/usr/bin/env bash
# One training run on several Slurm nodes: sbatch --nodes=4 deploy/slurm.sh run.toml runs/big
#
# The first node runs the head of a Ray cluster and the driver of the run, the others join it. Every node needs the same
# Python environment with `pip install 'toolwise[ray]'`; RUN must be on a disk that the learners share.
#SBATCH --job-name=toolwise
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

config=${1:?usage: sbatch deploy/slurm.sh CONFIG RUN}
run=${2:?usage: sbatch deploy/slurm.sh CONFIG RUN}
port=6379
umask 077

# All processes must show this token; it is in the environment of this job alone.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 -w "$head" --overlap \
  ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=true --dashboard-host=127.0.0.1 &
sleep 20
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" --overlap ray start --block --address="$address:$port" &
done
sleep 20

options=(--cluster "$address:$port" --out "$run")
[[ -f "$run/config.toml" ]] && options+=(--resume) # a job that Slurm starts again goes on
srun --nodes=1 --ntasks=1 -w "$head" --overlap toolwise doctor --cluster "$address:$port"
srun --nodes=1 --ntasks=1 -w "$head" --overlap toolwise train "$config" "${options[@]}"
