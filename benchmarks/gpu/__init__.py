"""What `scripts/gpu.sh` runs on a machine with a CUDA device; `run.py` has the stages in order."""
