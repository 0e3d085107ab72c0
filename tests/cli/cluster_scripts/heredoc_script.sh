#!/bin/bash
# A here-document becomes the script of each rank; some of it is expanded now, some later.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --title 'a  b' '$TP'
TP=4
cat > run_rank.sh <<EOF
#!/bin/bash
export RANK=\$SLURM_PROCID
exec torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP "\$@"
EOF
chmod +x run_rank.sh
./run_rank.sh --title "a  b" '$TP'
