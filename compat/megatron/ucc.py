"""What the UCC backend asks of the environment."""

import os

# Variable: the value it needs, and whether the user's own wins.
ENVIRONMENT = {
    "TORCH_UCC_BLOCKING_WAIT": ("none", True),
    "UCC_EC_CUDA_STREAM_TASK_MODE": ("driver", True),
    "UCX_TLS": ("ib,cuda_copy", True),
    "NSYS_UCP_COMM_PARAMS": ("1", False),
    "UCX_RNDV_THRESH": ("0", False),
    "UCX_NET_DEVICES": ("all", False),
    "UCC_CL_BASIC_TLS": ("^sharp,nccl", False),
}


def check() -> None:
    """Refuse the one setting under which UCC cannot overlap: AssertionError, as upstream."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise AssertionError(
            "the UCC backend needs CUDA_DEVICE_MAX_CONNECTIONS larger than 1, it is 1: with one "
            "connection its communication cannot overlap. Unset it or raise it."
        )


def prepare() -> None:
    """Set the environment that UCC needs."""
    for name, (value, users_wins) in ENVIRONMENT.items():
        os.environ[name] = os.environ.get(name, value) if users_wins else value
