#!/bin/bash
# A scan: each pair that fills a host, in this order; the others are skipped.
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --save scan/2x1
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save scan/2x2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --save scan/2x4
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --save scan/4x1
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --save scan/4x2
# launches: torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --save scan/8x1
for TP in 1 2 4 8; do
    for PP in 1 2 4; do
        (( TP * PP > 8 )) && continue
        [ $TP -eq 1 ] && [ $PP -eq 1 ] && continue
        (( 8 % (TP * PP) )) && continue
        [[ $TP$PP == @(12|14) ]] && continue
        torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP \
            --pipeline-model-parallel-size $PP --save "scan/${TP}x$PP" || echo "$TP $PP failed" >> failed.txt
    done
done
