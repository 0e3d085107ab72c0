# Read by scripts beside it.
export PET_NNODES=${PET_NNODES:-2}
GPUS=8
TP=4 PP=2
COMMON=(--bf16 --title "of env")
launch() { torchrun --nproc-per-node "$GPUS" "$@"; }
