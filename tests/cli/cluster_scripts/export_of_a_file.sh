#!/bin/bash
# The usual export of a .env file, which splits at blanks.
# launches: 1
export $(grep -v '^#' job.env | xargs)
torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --title "$TITLE"
