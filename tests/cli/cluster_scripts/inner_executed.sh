#!/bin/sh
# An executable script beside this one, by its own first line.
# launches: 1
cd "$(dirname "$0")"
./inner.sh 4 1 29401
