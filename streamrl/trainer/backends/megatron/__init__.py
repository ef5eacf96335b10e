"""Tensor, pipeline and data parallel training with Megatron Core, on GPUs and, over gloo, on CPUs.

The only package that imports megatron; what megatron needs where there is no CUDA is installed
before any of its modules is imported.
"""

from streamrl.trainer.backends.megatron import cpu

cpu.install()
