"""What a denoiser call costs on GPUs, found without one: launches, messages, waits, memory, and host time.

fake_cuda     a CUDA device that is not there: torch's fake tensors, and what a build without CUDA lacks for them
fake_launch   fused operators as on a GPU, without their kernels
fake_nccl     a process group that sends nothing and reports itself as NCCL's
recorder      what a call does on both: kernel launches, messages, synchronisations, memory
denoisers     SDXL and FLUX, without weights, and a call of each
strategies    one rank of a strategy, step by step
quiet         a process without logs and warnings
paired        two steps timed in pairs, so that phases of a machine change no ratio
host_time     seconds of Python on tiny tensors, beside the plain model
count         the tables
"""
