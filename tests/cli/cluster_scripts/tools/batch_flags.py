"""Prints the flags of a batch: run by the script itself, for real."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", type=int)
parser.add_argument("--batch", type=int)
asked = parser.parse_args()
print(f"--global-batch-size {asked.batch} --micro-batch-size {asked.batch // asked.gpus // 8}")
