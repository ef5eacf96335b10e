"""Tensor, pipeline and data parallel training with Megatron Core, on GPUs and, over gloo, on CPUs.

The only package that imports megatron. Without CUDA, replacements for the functions that megatron needs are installed
before any of its modules is imported.
"""

import warnings

from streamrl.trainer.backends.megatron import groups

# with each model, megatron warns about optional packages that are not installed and not needed here
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
groups.install()
