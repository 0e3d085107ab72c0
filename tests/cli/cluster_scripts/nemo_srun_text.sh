#!/bin/bash
# srun with a quoted multi-line command for bash in a container: one word of it.
#SBATCH -p batch -A llm_team -t 4:00:00 --nodes=16 --exclusive --mem=0 --overcommit
#SBATCH --ntasks-per-node=8 --dependency=singleton
#SBATCH --job-name=team-llama:70b
# sbatch: SLURM_NNODES=16 SLURM_JOB_NUM_NODES=16 SLURM_NTASKS_PER_NODE=8
# launches: srun -l --container-image nvcr.io/nvidia/nemo:25.07 --container-mounts=HOME/scripts:/results,/lustre --output=HOME/scripts/logs/%x_%j_date_26-11-28.log python -u examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.num_nodes=16 model.tensor_model_parallel_size=8 model.pipeline_model_parallel_size=4 'exp_manager.name=llama 70b'
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d'`
mkdir -p $DIR/logs
read -r -d '' cmd <<EOF
echo "*******STARTING********" \
&& export HYDRA_FULL_ERROR=1 \
&& cd /opt/NeMo \
&& python -u examples/nlp/language_modeling/megatron_gpt_pretraining.py \
    trainer.num_nodes=$SLURM_JOB_NUM_NODES model.tensor_model_parallel_size=8 \
    model.pipeline_model_parallel_size=4 exp_manager.name="llama 70b"
EOF
srun -l --container-image "nvcr.io/nvidia/nemo:25.07" --container-mounts="$DIR:/results,/lustre" \
    --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${cmd}"
set +x
