#!/usr/bin/env bash
# A TPU slice of Google Cloud from nothing to results.
#   bash launch/tpu_pod.sh create                       makes the slice and mounts the bucket on every host
#   bash launch/tpu_pod.sh install                      copies this checkout and installs it on every host
#   bash launch/tpu_pod.sh run --config=configs/opd.py --config.model.checkpoint=/mnt/runs/DIR
#                                                       trains on all hosts; the workdir is the bucket's RUN
#   bash launch/tpu_pod.sh fetch DIRECTORY              copies the run's results here
#   bash launch/tpu_pod.sh delete                       gives the slice back: it costs until then
# Settings, from the environment: NAME, ZONE, TYPE (such as v5p-32), BUCKET (without gs://), RUN, and
# VERSION of the TPU software. DRY_RUN=1 prints the commands and runs none.
# The hosts need Python 3.11 or newer and gcsfuse, as the TPU VM images of Ubuntu 24.04 have.
# Tokens (HF_TOKEN) are read from the environment of the hosts, never passed on a command line.
set -euo pipefail
SELF="$(realpath "$0")"
cd "$(dirname "$SELF")/.."

NAME="${NAME:-mas-jax}" ZONE="${ZONE:-us-east5-a}" TYPE="${TYPE:-v5p-32}" RUN="${RUN:-opd}"
VERSION="${VERSION:-v2-alpha-tpuv5}" MOUNT=/mnt/runs

need_bucket() {
  if [ -z "${BUCKET:-}" ]; then
    echo "BUCKET is not set; name the storage bucket that all hosts share, without gs://" >&2
    exit 2
  fi
}

do_run() {
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on_all() {
  do_run gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

usage() {
  sed -n '2,12s/^# \{0,1\}//p' "$SELF" >&2
  exit 2
}

case "${1:-}" in
  create)
    need_bucket
    do_run gcloud compute tpus tpu-vm create "$NAME" --zone="$ZONE" --accelerator-type="$TYPE" \
      --version="$VERSION"
    on_all "sudo mkdir -p $MOUNT && sudo chmod 777 $MOUNT && gcsfuse --implicit-dirs --rename-dir-limit=100000 $BUCKET $MOUNT"
    ;;
  install)
    archive="$(mktemp -d)/mas_jax.tar.gz"
    do_run git archive --format=tar.gz --output="$archive" HEAD
    do_run gcloud compute tpus tpu-vm scp "$archive" "$NAME:mas_jax.tar.gz" --zone="$ZONE" --worker=all
    on_all "mkdir -p mas_jax && tar -xzf mas_jax.tar.gz -C mas_jax && cd mas_jax && \
python3 -m venv .venv && .venv/bin/pip install --quiet --constraint launch/constraints.txt '.[tpu]'"
    ;;
  run)
    need_bucket
    shift
    arguments="$(printf '%q ' "$@" "--workdir=$MOUNT/$RUN")"
    on_all "cd mas_jax && .venv/bin/python launch/train.py $arguments"
    ;;
  fetch)
    need_bucket
    [ $# -eq 2 ] || usage
    do_run gcloud storage rsync --recursive "gs://$BUCKET/$RUN" "$2"
    ;;
  delete)
    do_run gcloud compute tpus tpu-vm delete "$NAME" --zone="$ZONE"
    ;;
  *) usage ;;
esac
