"""Tensor, pipeline and data parallel training with Megatron Core, on GPUs and, over gloo, on CPUs.

The only package that imports megatron; what megatron needs where there is no CUDA is installed
before any of its modules is imported.
"""

import warnings

from streamrl.trainer.backends.megatron import groups

# megatron warns, with each model, of optional packages that are not installed and not needed here
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
groups.install()
