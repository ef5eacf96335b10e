"""Stands for SGLang in tests of how it is started, watched and ended."""
