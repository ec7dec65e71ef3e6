#!/bin/bash
# Training on several nodes without a scheduler: run the same command on each of them. HEAD is one of the nodes.
#
#     NODES=2 HEAD=node0 bash torchrun.sh train config.py train.output_dir=/shared/run
#
# PROCESSES: on each node (default: one for each GPU). PORT: a free one of the head (29500). RUN_ID: nodes with the same
# one meet. After a failure all processes start again, at most three times; the run continues from its latest checkpoint.

exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "${PROCESSES:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-id "${RUN_ID:-trainwright}" \
    --max-restarts 3 \
    -m trainwright "$@"
