"""Trains a GPT with ``megatron.training``, as the wheels of megatron-core 0.19 bring it."""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def model_provider(pre_process=True, post_process=True, config=None, **_):
    args = get_args()
    return GPTModel(
        config or core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
    )


def loss_func(mask, losses):
    loss = torch.sum(losses * mask)
    count = mask.sum().int()
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(numbers_of_samples, **_):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset, numbers_of_samples, lambda: True, config
    )
    return builder.build()


if __name__ == "__main__":
    # All ranks load data, not only the first of each tensor parallel group.
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
